"""Spans as Jaeger gives them back, set beside those of a run file: both say them in OTLP/JSON, ids and all."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

from torchotel.runs.reader import open_run

MANY = 1000
"""Traces in an answer; it is 100 where nothing is said."""

FOLLOWS = {"opentracing.ref_type": {"stringValue": "follows_from"}}


class Said(NamedTuple):
    """All that a span says; numbers are as OTLP/JSON writes them, attributes with their types."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: str
    end_ns: str
    attributes: dict[str, Any]
    events: list[Any]
    """Sorted: Jaeger has an order of its own."""
    links: list[Any]
    status: dict[str, Any]
    flags: int
    scope: dict[str, str]
    resource: dict[str, Any]


def recorded(run: Path) -> dict[str, Said]:
    """Give the spans of a run file by their ids."""
    return _by_id(said for line in open_run(run).requests() for said in _said(line.request))


def on_badger(spans: Mapping[str, Said]) -> dict[str, Said]:
    """Give spans as Badger keeps them: in Jaeger's older form, which has no lists, no flags and kinds of links."""
    return {
        id_: said._replace(
            attributes={key: _text_of_list(value) for key, value in said.attributes.items()},
            resource={key: _text_of_list(value) for key, value in said.resource.items()},
            links=[(trace, span, {**attributes, **FOLLOWS}) for trace, span, attributes in said.links],
            flags=0,
        )
        for id_, said in spans.items()
    }


STORES: dict[str, Callable[[Mapping[str, Said]], dict[str, Said]]] = {"Badger": on_badger, "memory": dict}
"""By their names, how each keeps spans."""


class JaegerApi:
    """What Jaeger answers.

    Args:
        port: Of its page.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api"

    def spans(self, traces: Iterable[str]) -> dict[str, Said]:
        """Give the spans of traces, in full and to the nanosecond; traces that are not there have none."""
        return _by_id(said for trace in set(traces) for said in self._trace(trace))

    def search(self, service: str, **tags: str) -> set[str]:
        """Give the ids of the traces that its search page finds."""
        asked = {"service": service, "tags": json.dumps(tags), "limit": MANY}
        return {trace["traceID"] for trace in self._get(f"/traces?{urlencode(asked)}")["data"]}

    def warnings(self, service: str) -> list[tuple[str, list[str]]]:
        """Give what it says against spans of a service, each with the span's name."""
        asked = {"service": service, "limit": MANY}
        found = self._get(f"/traces?{urlencode(asked)}")["data"]
        assert found
        return [
            (span["operationName"], span["warnings"])
            for trace in found
            for span in trace["spans"]
            if span["warnings"] or trace["warnings"]
        ]

    def _trace(self, trace: str) -> Iterator[Said]:
        try:
            yield from _said(self._get(f"/v3/traces/{trace}")["result"])
        except HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise

    def _get(self, path: str) -> Any:
        with urlopen(f"{self._url}{path}", timeout=30) as answer:  # noqa: S310  # http, to a server of the tests
            return json.load(answer)


def _by_id(spans: Iterable[Said]) -> dict[str, Said]:
    found: dict[str, Said] = {}
    for said in spans:
        assert said.span_id not in found
        found[said.span_id] = said
    return found


def _said(request: Mapping[str, Any]) -> Iterator[Said]:
    for resource in request["resourceSpans"]:
        about = _values(resource["resource"])
        for scope in resource["scopeSpans"]:
            yield from (_span(span, scope["scope"], about) for span in scope["spans"])


def _span(span: Mapping[str, Any], scope: dict[str, str], resource: dict[str, Any]) -> Said:
    return Said(
        span["traceId"],
        span["spanId"],
        span.get("parentSpanId", ""),
        span["name"],
        span["kind"],
        span["startTimeUnixNano"],
        span["endTimeUnixNano"],
        _values(span),
        sorted(map(_event, span.get("events", ())), key=lambda event: event[:2]),
        [(link["traceId"], link["spanId"], _values(link)) for link in span.get("links", ())],
        span.get("status", {}),
        span.get("flags", 0),
        scope,
        resource,
    )


def _event(event: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    return event["timeUnixNano"], event["name"], _values(event)


def _values(owner: Mapping[str, Any]) -> dict[str, Any]:
    return {pair["key"]: _list_or_value(pair["value"]) for pair in owner.get("attributes", ())}


def _list_or_value(value: dict[str, Any]) -> dict[str, Any]:
    """An empty list may be left out."""
    return {"arrayValue": value["arrayValue"].get("values", [])} if "arrayValue" in value else value


def _text_of_list(value: dict[str, Any]) -> dict[str, Any]:
    if "arrayValue" not in value:
        return value
    items = [item["stringValue"] for item in value["arrayValue"]]
    return {"stringValue": json.dumps(items, separators=(",", ":"), ensure_ascii=False)}
