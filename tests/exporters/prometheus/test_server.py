"""The scrape endpoint against those who mean no good: nobody holds it up, and nobody learns more than metrics."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.prometheus_server import until

from torchotel._limits import MAX_CONNECTIONS
from torchotel._utils.faults import Guard
from torchotel.exporters.prometheus import server as module
from torchotel.exporters.prometheus.endpoint import PrometheusMetricExporter
from torchotel.exporters.prometheus.server import THREAD_NAME, Listener
from torchotel.metrics.store import Metrics

BODY = b"torch_steps_total 1.0\n"


@pytest.fixture
def server() -> Iterator[Listener]:
    made = serve()
    yield made
    made.close()


def serve(host: str = "127.0.0.1", write: Callable[[bool], bytes] = lambda _: BODY) -> Listener:
    made = Listener.open(host, 0)
    made.serve(write)
    return made


def ask(server: Listener, request: bytes) -> bytes:
    """Send bytes as they are, and give the whole answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def get(path: str = "/metrics", *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", *headers, "", ""]).encode("latin-1")


REQUESTS = {
    b"200 OK": [
        get(),
        get("/"),
        get("/metrics?x=1"),
        get(method="HEAD"),
        get("/metrics", "Accept: " + "," * 60_000),
        get("/metrics", "Accept-Encoding: x" + ";q=0.5" * 10_000),
    ],
    b"404 Not Found": [
        get("/metrics/../../etc/passwd"),
        get("/%2e%2e/etc/passwd"),
        get("/favicon.ico"),
    ],
    b"405 Method Not Allowed": [get(method=method) for method in ("POST", "PUT", "DELETE", "TRACE", "X" * 999)],
    b"414 ": [get("/" + "x" * 70_000)],
    b"431 ": [get("/metrics", *["X: y"] * 200), get("/metrics", "X: " + "y" * 70_000)],
    b"400 ": [b"\x16\x03\x01 a b c\r\n\r\n", b"GET /metrics HTTP/x\r\n\r\n"],
}


@pytest.mark.parametrize(
    ("status", "request_"),
    [(status, request) for status, requests in REQUESTS.items() for request in requests],
    ids=lambda value: repr(value[:40]),
)
def test_answers_what_is_asked_for_properly(server: Listener, status: bytes, request_: bytes) -> None:
    """Other methods, other paths and what is too large are refused, without a word of it repeated as it was."""
    answer = ask(server, request_)
    assert status in (answer if status == b"400 " else answer.partition(b"\r\n")[0])  # HTTP/0.9 has no first line
    assert (BODY in answer) == (status == b"200 OK" and request_.startswith(b"GET"))


def test_no_request_puts_a_header_into_an_answer(server: Listener) -> None:
    """Line breaks in paths and headers, plain and encoded, stay where they are."""
    for text in ("/metrics%0d%0aX-Evil:%201", "/metrics\rX-Evil: 1", "/\x0bX-Evil: 1"):
        assert b"\nX-Evil" not in ask(server, get(text, "Accept: text/plain\rX-Evil: 1", "Host: a\x0bX-Evil"))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, b"200") for host in ("localhost:9464", "127.0.0.1:9464", "[::1]:9464", "localhost", "LOCALHOST.", "")),
        *((host, b"200") for host in ("trainer:9464", "host.docker.internal:9464", "node-1.local", "10.0.0.7")),
        *((host, b"403") for host in ("evil.example:9464", "127.0.0.1.evil.example", "localhost.evil.example:80")),
        *((host, b"403") for host in ("evil.example.", "a@evil.example", "x" * 10_000 + ".example")),
    ],
)
def test_a_web_page_cannot_read_metrics_by_its_own_name(server: Listener, host: str, status: bytes) -> None:
    """DNS rebinding: a name that can be registered, led to loopback, gets nothing."""
    answer = ask(server, get("/metrics", f"Host: {host}"))
    assert answer.split(b" ", 2)[1] == status
    assert (BODY in answer) == (status == b"200")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_every_address_is_both_kinds_of_address() -> None:
    """As `::` means to who sets it: whoever comes by IPv4 is answered as well."""
    server = serve("::")
    try:
        assert BODY in ask(server, get("/metrics", "Host: node-1.cluster.example"))
    finally:
        server.close()


def test_who_comes_early_waits() -> None:
    """The port is bound before the server's thread runs."""
    listener = Listener.open("127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as connection:
            connection.sendall(get())
            listener.serve(lambda _: BODY)
            assert BODY in b"".join(iter(lambda: connection.recv(65536), b""))
    finally:
        listener.close()


def test_what_was_closed_serves_no_more() -> None:
    """A program may end while the worker opens the port."""
    listener = Listener.open("127.0.0.1", 0)
    listener.close()
    listener.serve(lambda _: BODY)
    assert not _server_threads()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port), timeout=10)


def test_a_port_that_nobody_can_answer_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else clients would wait for ever, and Prometheus would be told to be one of them."""

    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    guard = Guard("it")
    outlet = PrometheusMetricExporter("127.0.0.1", 0, Metrics(dict, dict), {}, tmp_path, guard, defer_start=False)
    assert guard.faults == 1
    assert outlet.port is None
    assert not list(tmp_path.iterdir())


def test_any_name_is_answered_where_others_may_read() -> None:
    """On an address that is not loopback's, machines have registered names."""
    server = serve("0.0.0.0")  # noqa: S104  # what is tested is listening on every address
    try:
        assert BODY in ask(server, get("/metrics", "Host: node-1.cluster.example"))
    finally:
        server.close()


def test_slow_clients_do_not_keep_prometheus_out(
    server: Listener, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The connection that has waited longest without a whole request is closed for a new one."""
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(MAX_CONNECTIONS + 4)]
    for connection in slow:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
    assert BODY in ask(server, get())
    assert [_is_closed(connection) for connection in slow[:4]] == [True] * 4
    until(_server_threads, lambda threads: threads <= 1 + MAX_CONNECTIONS)  # with the one that accepts
    monkeypatch.setattr(module, "REQUEST_S", 1.0)
    began_s = time.monotonic()
    assert all(_is_closed(connection, drip=b"x") for connection in slow[5:])
    assert time.monotonic() - began_s < 9
    assert capfd.readouterr() == ("", "")


def test_clients_beyond_the_limit_are_refused_while_answers_are_written() -> None:
    """A connection whose request was read is never closed for another one."""
    writing = threading.Event()

    def write(_: bool) -> bytes:  # noqa: FBT001  # the callback's form
        writing.wait(10)
        return BODY

    server = serve(write=write)
    try:
        scrapes = server._server
        assert scrapes is not None
        waiting = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(MAX_CONNECTIONS)]
        for connection in waiting:
            connection.sendall(get())
        while len(scrapes._server._since_s) < MAX_CONNECTIONS or scrapes._server._unread:
            assert scrapes._thread.is_alive()
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as late:
            assert _is_closed(late)
        writing.set()
        for connection in waiting:
            assert BODY in b"".join(iter(lambda: connection.recv(65536), b""))  # noqa: B023  # called at once
    finally:
        server.close()


@pytest.mark.parametrize("request_", [get(), get("/nothing"), get(method="POST"), get("/" + "x" * 70_000)])
def test_no_answer_names_the_version_of_python(server: Listener, request_: bytes) -> None:
    """The Server header is the product's name."""
    headers = ask(server, request_).partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert [line for line in headers if line.startswith(b"Server:")] == [b"Server: torchotel"]


def _server_threads() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def _is_closed(connection: socket.socket, drip: bytes = b"") -> bool:
    """Wait until the other side hangs up, and say something now and then meanwhile."""
    connection.settimeout(0.1)
    for _ in range(100):
        try:
            if not connection.recv(65536):
                return True
        except TimeoutError:
            try:
                connection.sendall(drip)
            except OSError:
                return True
        except OSError:
            return True
    return False


def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """An answer that nobody takes keeps a thread for a bounded time, and prints nothing."""
    monkeypatch.setattr(module, "REQUEST_S", 0.3)
    server = serve(write=lambda _: bytes(64 * 1024 * 1024))
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(get())
            scrapes = server._server
            assert scrapes is not None
            while not scrapes._server._connected:
                assert scrapes._thread.is_alive()
            answering = next(iter(scrapes._server._connected.values()))
            answering.join(10)
            assert not answering.is_alive()
    finally:
        server.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("quick_switches")
def test_many_clients_take_no_more_of_the_program_than_one() -> None:
    """Answers are written one after the other."""
    writing = threading.Lock()
    overlaps = []

    def write(_: bool) -> bytes:  # noqa: FBT001  # the callback's form
        alone = writing.acquire(blocking=False)
        overlaps.append(not alone)
        sum(range(200_000))
        if alone:
            writing.release()
        return BODY

    server = serve(write=write)
    try:
        clients = [threading.Thread(target=ask, args=(server, get())) for _ in range(8)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    finally:
        server.close()
    assert overlaps == [False] * 8
