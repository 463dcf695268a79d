"""The channel between the training process and its companion: a ring of records, and a connection for requests.

The ring is in shared memory that is no file on disk, behind the status page. Sending never blocks: a message that does
not fit is not sent.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from torchotel.worker.status_page import PAGE_BYTES

_HEADER: Final = struct.Struct("<8sQ")
_MAGIC: Final = b"torchot2"
_HEAD, _TAIL = 8, 16
"""Where the counts of sent and received bytes are, in units of 8 bytes: each has its own cache line."""
_DROPPED: Final = 9
"""Where the count of dropped spans is."""
_PAGE: Final = 192
"""Where the status page is."""
_DATA: Final = _PAGE + PAGE_BYTES
_LENGTH: Final = struct.Struct("<I")


class ChannelError(Exception):
    """The ring does not hold what a sender of this version writes."""


class _Barrier:
    """Keep the order of the bytes of a message and the position that covers them, as the other process sees both.

    On x86 plain stores are enough: a processor's stores are seen in their order, and its loads are made in their order.
    ARM may reorder both. There, all accesses before the release of a lock stay before it, all accesses after its next
    acquisition stay after it, and the acquisition stays after the release.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Complete the preceding accesses to memory before the following ones."""
        with self._lock:
            pass
        with self._lock:
            pass


class Sender:
    """The end in the training process, which makes the ring; one thread may send at a time.

    Args:
        capacity: Bytes of the messages that wait.

    Raises:
        OSError: The system has no memory files, or too many files are open.
    """

    def __init__(self, capacity: int) -> None:
        self.fd = _fixed_memory(_DATA + capacity)
        self._ring = mmap.mmap(self.fd, _DATA + capacity)
        _HEADER.pack_into(self._ring, 0, _MAGIC, capacity)
        # Unlike `struct.pack_into`, which writes zeros first, this stores a position at once.
        self._positions = memoryview(self._ring)[:_PAGE].cast("Q")
        self.page = memoryview(self._ring)[_PAGE:_DATA].cast("Q")
        """The status page; released by `close`."""
        self._capacity, self._head = capacity, 0
        self._barrier = _Barrier()

    def send(self, message: bytes) -> bool:
        """Put a message into the ring; return False if it does not fit."""
        size = _LENGTH.size + len(message)
        tail = self._positions[_TAIL]
        if self._head + size - tail > self._capacity:
            return False
        _copy_in(self._ring, self._head, _LENGTH.pack(len(message)) + message)
        self._head += size
        self._barrier.wait()
        self._positions[_HEAD] = self._head
        return True

    def count_dropped(self, spans: int) -> None:
        """Add to the count of spans whose records were not sent, which the receiver reads."""
        self._positions[_DROPPED] += spans

    def clear(self) -> None:
        """Drop the messages that wait, and set the count of dropped spans to 0; only while no process receives."""
        self._positions[_TAIL], self._positions[_DROPPED] = self._head, 0

    @property
    def waiting(self) -> int:
        """How many bytes wait to be received."""
        return self._head - self._positions[_TAIL]

    def close(self) -> None:
        """Release the memory of this process."""
        self._positions.release()
        self.page.release()
        self._ring.close()
        os.close(self.fd)


class Receiver:
    """The end in the companion process.

    Args:
        fd: The memory file.

    Raises:
        ChannelError: It is no ring of this version.
    """

    def __init__(self, fd: int) -> None:
        self._ring = mmap.mmap(fd, 0)
        magic, self._capacity = _HEADER.unpack_from(self._ring, 0)
        if magic != _MAGIC or self._capacity != len(self._ring) - _DATA:
            raise ChannelError("no ring of this version")
        self._positions = memoryview(self._ring)[:_PAGE].cast("Q")
        self.page = memoryview(self._ring)[_PAGE:_DATA].cast("Q")
        """The status page."""
        self._tail = self._positions[_TAIL]
        self._barrier = _Barrier()

    def receive_waiting(self) -> Iterator[bytes]:
        """Take the messages that wait at the first step of the iteration; later messages wait for the next call.

        Raises:
            ChannelError: A length cannot be right.
        """
        head = self._positions[_HEAD]
        while self._tail < head and (message := self.receive()) is not None:
            yield message

    @property
    def dropped(self) -> int:
        """The count of spans whose records were not sent."""
        return self._positions[_DROPPED]

    def receive(self) -> bytes | None:
        """Take the oldest message; return None if none waits.

        Raises:
            ChannelError: A length cannot be right.
        """
        waiting = self._positions[_HEAD] - self._tail
        if not waiting:
            return None
        self._barrier.wait()
        if not _LENGTH.size <= waiting <= self._capacity:
            problem = f"{waiting} bytes wait in a ring of {self._capacity}"
            raise ChannelError(problem)
        (length,) = _LENGTH.unpack(_copy_out(self._ring, self._tail, _LENGTH.size))
        if _LENGTH.size + length > waiting:
            problem = f"a message of {length} bytes, and {waiting} wait"
            raise ChannelError(problem)
        message = _copy_out(self._ring, self._tail + _LENGTH.size, length)
        self._tail += _LENGTH.size + length
        self._barrier.wait()
        self._positions[_TAIL] = self._tail
        return message


MAX_PACKET = 1 << 20


class Connection:
    """One end of the connection: each packet is a JSON object.

    Args:
        connected: One socket of `socket_pair`.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, wait_s: float = 0.0, /, **message: object) -> bool:
        """Send a message; return False if the other process has ended, or the socket is full for `wait_s` seconds."""
        packet, deadline_s = json.dumps(message).encode(), time.monotonic() + wait_s
        try:
            while True:
                try:
                    self._socket.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    if not self._wait_for(select.POLLOUT, deadline_s - time.monotonic()):
                        return False
                else:
                    return True
        except (OSError, ValueError):  # ValueError: closed by this process
            return False

    def wake(self) -> None:
        """Send a packet without a request: records wait in the ring."""
        self.send()

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for a message; return an empty one after `timeout_s` seconds, None if the other process has ended."""
        try:
            if not self._wait_for(select.POLLIN, timeout_s):
                return {}
            packet = self._socket.recv(MAX_PACKET)
        except (OSError, ValueError):  # closed by this process
            return None
        return json.loads(packet) if packet else None

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def shut_down(self) -> None:
        """End a `receive` of another thread, and those of the other process."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _wait_for(self, event: int, timeout_s: float | None) -> bool:
        """Wait for room or a packet; return False on timeout."""
        poll = select.poll()  # `select` refuses descriptors from 1024 on
        poll.register(self._socket, event)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the bounds of packets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _fixed_memory(size: int) -> int:
    """Return the descriptor of memory that no process can shrink, and that exists: access to it never raises SIGBUS."""
    fd = os.memfd_create("torchotel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _copy_in(ring: mmap.mmap, position: int, data: bytes) -> None:
    capacity = len(ring) - _DATA
    start = position % capacity
    first = min(len(data), capacity - start)
    ring[_DATA + start : _DATA + start + first] = data[:first]
    ring[_DATA : _DATA + len(data) - first] = data[first:]


def _copy_out(ring: mmap.mmap, position: int, size: int) -> bytes:
    capacity = len(ring) - _DATA
    start = position % capacity
    first = min(size, capacity - start)
    return ring[_DATA + start : _DATA + start + first] + ring[_DATA : _DATA + size - first]
