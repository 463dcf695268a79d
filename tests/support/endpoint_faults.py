"""Endpoints of every bad kind, over HTTP and gRPC, for traces and metrics alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from support.misbehaving_servers import closed_port, misbehaving, nonsense, reset, silence, trickle
from support.otlp_grpc_receiver import Refusal, grpc_receiver
from support.otlp_http_receiver import Answer, receiver, rejected

Protocol = Literal["http/protobuf", "grpc"]
HTTP: Protocol = "http/protobuf"
GRPC: Protocol = "grpc"


class Endpoint(NamedTuple):
    """Where telemetry goes, and how that goes on."""

    url: str
    amid: Callable[[], object] = lambda: None
    """Called amid the program."""
    after: Callable[[], object] = lambda: None
    """Called when the program has computed all."""


class Fault(NamedTuple):
    """A row of the table."""

    name: str
    protocol: Protocol
    make: Callable[[], Iterator[Endpoint]]
    arrives: bool | None
    """Whether all spans arrive in the end; False: none, None: some."""

    def __str__(self) -> str:
        return f"{self.name}-{self.protocol}"


def _at(url: str) -> Callable[[], Iterator[Endpoint]]:
    def make() -> Iterator[Endpoint]:
        yield Endpoint(url)

    return make


def _refusing() -> Iterator[Endpoint]:
    yield Endpoint(f"http://127.0.0.1:{closed_port()}")


def _socket(behave: Callable[..., None]) -> Callable[[], Iterator[Endpoint]]:
    def make() -> Iterator[Endpoint]:
        with misbehaving(behave) as port:
            yield Endpoint(f"http://127.0.0.1:{port}")

    return make


def _answers(*first: Answer, then: Answer = Answer(200)) -> Callable[[], Iterator[Endpoint]]:  # noqa: B008  # a constant
    def make() -> Iterator[Endpoint]:
        with receiver() as server:
            server.answers += first
            server.push_answers += first
            server.always = then
            yield Endpoint(f"http://127.0.0.1:{server.server_port}")

    return make


def _refuses(*first: Refusal, then: Refusal | ExportTraceServiceResponse | None) -> Callable[[], Iterator[Endpoint]]:
    def make() -> Iterator[Endpoint]:
        with grpc_receiver() as server:
            server.answers += first
            server.always = then
            yield Endpoint(server.endpoint)

    return make


def _slow_http() -> Iterator[Endpoint]:
    with receiver() as server:
        server.may_answer.clear()
        yield Endpoint(f"http://127.0.0.1:{server.server_port}", after=server.may_answer.set)


def _slow_grpc() -> Iterator[Endpoint]:
    with grpc_receiver() as server:
        server.may_answer.clear()
        yield Endpoint(server.endpoint, after=server.may_answer.set)


def _dies_http() -> Iterator[Endpoint]:
    with ExitStack() as first, ExitStack() as second:
        server = first.enter_context(receiver())

        def die() -> None:
            server.dead = True
            first.close()

        def come_back() -> None:
            second.enter_context(receiver(server.server_port))

        yield Endpoint(f"http://127.0.0.1:{server.server_port}", die, come_back)


def _dies_grpc() -> Iterator[Endpoint]:
    with ExitStack() as first, ExitStack() as second:
        server = first.enter_context(grpc_receiver())
        address = f"127.0.0.1:{server.port}"
        yield Endpoint(server.endpoint, first.close, lambda: second.enter_context(grpc_receiver(address)))


def _partial_grpc() -> ExportTraceServiceResponse:
    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = 3
    response.partial_success.error_message = "too old"
    return response


_code = grpc.StatusCode
FAULTS = (
    Fault("good", HTTP, _answers(), arrives=True),
    Fault("absent", HTTP, _refusing, arrives=False),
    Fault("absent", GRPC, _refusing, arrives=False),
    Fault("refusing", HTTP, _socket(reset), arrives=False),
    Fault("refusing", GRPC, _socket(reset), arrives=False),
    Fault("unresolvable name", HTTP, _at("http://nowhere.invalid:4318"), arrives=False),
    Fault("unresolvable name", GRPC, _at("http://nowhere.invalid:4317"), arrives=False),
    Fault("no response", HTTP, _socket(silence), arrives=False),
    Fault("no response", GRPC, _socket(silence), arrives=False),
    Fault("byte by byte", HTTP, _socket(trickle(b"503 Busy")), arrives=False),
    Fault("invalid response", HTTP, _socket(nonsense), arrives=False),
    Fault("invalid response", GRPC, _socket(nonsense), arrives=False),
    Fault("HTML response", HTTP, _answers(then=Answer(200, {}, b"<html>")), arrives=True),
    Fault("slow", HTTP, _slow_http, arrives=True),
    Fault("slow", GRPC, _slow_grpc, arrives=True),
    Fault("throttling", HTTP, _answers(Answer(429, {"Retry-After": "1"})), arrives=True),
    Fault("throttling", GRPC, _refuses(Refusal(_code.RESOURCE_EXHAUSTED, 1.0), then=None), arrives=True),
    Fault("unavailable", HTTP, _answers(then=Answer(503)), arrives=False),
    Fault("unavailable", GRPC, _refuses(then=Refusal(_code.UNAVAILABLE)), arrives=False),
    Fault("rejects all", HTTP, _answers(then=Answer(400)), arrives=False),
    Fault("rejects all", GRPC, _refuses(then=Refusal(_code.INVALID_ARGUMENT)), arrives=False),
    Fault("rejects some", HTTP, _answers(then=rejected(3, "too old")), arrives=None),
    Fault("rejects some", GRPC, _refuses(then=_partial_grpc()), arrives=None),
    Fault("stops and restarts", HTTP, _dies_http, arrives=True),
    Fault("stops and restarts", GRPC, _dies_grpc, arrives=True),
)


@contextmanager
def faulty(fault: Fault) -> Iterator[Endpoint]:
    """Run an endpoint of this kind."""
    yield from fault.make()
