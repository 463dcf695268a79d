"""The ring and the connection between the training process and its companion."""

import fcntl
import os
import random
import resource
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchotel.worker.channel import _DATA, ChannelError, Connection, Receiver, Sender, socket_pair

CAPACITY = 1000


@pytest.fixture
def ring() -> tuple[Sender, Receiver]:
    sender = Sender(CAPACITY)
    return sender, Receiver(sender.fd)


def test_messages_arrive_whole_and_in_order(ring: tuple[Sender, Receiver]) -> None:
    """Also across the end of the ring, many times."""
    sender, receiver = ring
    sizes = random.Random(1)
    sent = [os.urandom(sizes.randrange(400)) for _ in range(200)]
    for message in sent:
        assert sender.send(message)
        assert receiver.receive() == message
    assert receiver.receive() is None


def test_a_full_ring_takes_no_part_of_a_message(ring: tuple[Sender, Receiver]) -> None:
    sender, receiver = ring
    assert sender.send(b"x" * 900)
    assert not sender.send(b"y" * 100)
    assert receiver.receive() == b"x" * 900
    assert receiver.receive() is None
    assert sender.send(b"y" * 100)
    assert receiver.receive() == b"y" * 100


def test_a_receiver_stops_at_the_message_that_was_the_last_when_it_began(ring: tuple[Sender, Receiver]) -> None:
    """Otherwise a receiver of records as fast as its sender would never answer a request."""
    sender, receiver = ring
    for number in range(3):
        sender.send(b"%d" % number)
    received = []
    for message in receiver.receive_waiting():
        received.append(message)
        sender.send(b"later")
        assert len(received) <= 3
    assert received == [b"0", b"1", b"2"]
    assert list(receiver.receive_waiting()) == [b"later"] * 3


def test_a_message_as_large_as_the_ring_fits(ring: tuple[Sender, Receiver]) -> None:
    sender, receiver = ring
    assert not sender.send(b"x" * (CAPACITY - 3))
    assert sender.send(b"x" * (CAPACITY - 4))
    assert receiver.receive() == b"x" * (CAPACITY - 4)


def test_a_length_that_cannot_be_right_is_an_error(ring: tuple[Sender, Receiver]) -> None:
    """A receiver never reads past what was sent."""
    sender, receiver = ring
    sender.send(b"abc")
    os.pwrite(sender.fd, struct.pack("<I", 4000), _DATA)
    with pytest.raises(ChannelError, match="4000 bytes"):
        receiver.receive()
    os.pwrite(sender.fd, struct.pack("<Q", 1 << 40), 64)
    with pytest.raises(ChannelError, match="wait in a ring of 1000"):
        receiver.receive()


def test_the_memory_of_a_ring_exists_and_stays(ring: tuple[Sender, Receiver]) -> None:
    """Else an access to it could kill the training."""
    sender, _ = ring
    size = os.fstat(sender.fd).st_size
    assert os.fstat(sender.fd).st_blocks * 512 >= size
    for other in (0, 2 * size):
        with pytest.raises(PermissionError):
            os.ftruncate(sender.fd, other)


def test_a_file_that_is_no_ring_is_an_error() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(ChannelError, match="no ring"):
        Receiver(fd)


def test_a_connection_never_blocks_the_sender() -> None:
    """The other process may be stopped: then a message is not sent."""
    ours, theirs = map(Connection, socket_pair())
    sent = 0
    while ours.send(text="x" * 1000):
        sent += 1
    received = 0
    while theirs.receive(0) == {"text": "x" * 1000}:
        received += 1
    assert received == sent > 0


def test_a_connection_waits_for_room_if_it_may() -> None:
    ours, theirs = map(Connection, socket_pair())
    while ours.send(text="x" * 1000):
        pass
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ours.send, 60.0, text="last")
        while theirs.receive(60) != {"text": "last"}:
            pass
        assert sent.result()


def test_a_connection_that_waits_for_room_ends_with_the_other_process() -> None:
    ours, theirs = map(Connection, socket_pair())
    while ours.send(text="x" * 1000):
        pass
    theirs.close()
    assert not ours.send(60.0, text="last")


def test_a_connection_may_have_a_descriptor_above_1023() -> None:
    """`select` refuses it, and a training may have that many files open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limit[1]))
    try:
        ours, theirs = socket_pair()
        with ours, theirs:
            above = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 1024) for one in (ours, theirs)]
        sender, receiver = (Connection(socket.socket(fileno=fd)) for fd in above)
        assert min(above) >= 1024
        while sender.send(text="x" * 1000):
            pass
        assert receiver.receive() == {"text": "x" * 1000}
        sender.close()
        receiver.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_connection_ends_with_the_other_process() -> None:
    ours, theirs = map(Connection, socket_pair())
    theirs.wake()
    assert ours.receive() == {}
    theirs.close()
    assert ours.receive() is None
    assert not ours.send(text="")
