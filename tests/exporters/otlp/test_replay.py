"""Sending later what was recorded."""

import json
import socket
from typing import Any

import pytest
from support import run_folders as folders
from support.otlp_http_receiver import Answer, Receiver, receiver, rejected
from support.senders import http

from torchotel.exporters.otlp import replay as resend_module
from torchotel.exporters.otlp.replay import Replay
from torchotel.exporters.otlp.sender import RetryPolicy


def _requests(count: int, spans: int = 1) -> list[dict[str, Any]]:
    made = []
    for number in range(count):
        own = [folders.span("a", number * spans + place + 1, 0, 0, 1) for place in range(spans)]
        made.append(json.loads(folders.request(own)))
    return made


def _resend(url: str, requests: list[dict[str, Any]], **more: Any) -> tuple[Replay, bool]:
    found = Replay(http(url), **more)
    try:
        return found, all(found.add(request) for request in requests) and found.push()
    finally:
        found.transport.close()


def test_sends_all_in_requests_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resend_module, "MAX_REQUEST_SPANS", 5)
    with receiver() as server:
        found, whole = _resend(server.url, _requests(4, spans=3) + _requests(1, spans=12))
        assert (whole, found.arrived, found.failure) == (True, 24, "")
        sizes = [len(request.spans()) for request in server.requests]
    assert sum(sizes) == 24
    assert max(sizes) <= 5


def _retried(server: Receiver, **more: Any) -> tuple[Replay, bool, list[float]]:
    pauses: list[float] = []
    found, whole = _resend(server.url, _requests(2), sleep=pauses.append, **more)
    return found, whole, pauses


def test_waits_as_it_is_asked_to_and_else_longer_each_time() -> None:
    with receiver() as server:
        server.answers.extend([Answer(503), Answer(429, {"Retry-After": "7"}), Answer(502)])
        found, whole, pauses = _retried(server)
        assert (whole, found.arrived, pauses) == (True, 2, [1.0, 7.0, 4.0])
        assert len(server.spans) == 2


def test_no_pause_asked_for_is_a_pause_of_our_own() -> None:
    with receiver() as server:
        server.answers.append(Answer(503, {"Retry-After": "0"}))
        _, _, pauses = _retried(server)
    assert pauses == [1.0]


def test_gives_up_in_time() -> None:
    with receiver() as server:
        server.answers.append(Answer(503))
        found, whole, pauses = _retried(server, retry=RetryPolicy(max_elapsed_s=0.0))
        assert (whole, found.arrived, found.failure) == (False, 0, "it answered 503 Service Unavailable")
        assert pauses == []


def test_stops_where_a_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resend_module, "MAX_REQUEST_SPANS", 2)
    with receiver() as server:
        server.answers.extend([Answer(200), Answer(400)])
        found, whole = _resend(server.url, _requests(3, spans=2))
        assert (whole, found.arrived, found.failure) == (False, 2, "it answered 400 Bad Request")
        assert len(server.requests) == 2


def test_counts_what_an_endpoint_does_not_want() -> None:
    with receiver() as server:
        server.answers.append(rejected(2, "too old"))
        found, whole = _resend(server.url, _requests(5))
    assert (whole, found.arrived, found.rejected, found.failure) == (True, 3, 2, "too old")


def test_does_not_wait_for_nobody() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nothing listens there
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1/traces"
        found, whole = _resend(url, _requests(1), sleep=pytest.fail)
    assert (whole, found.arrived) == (False, 0)
    assert "refused" in found.failure
