"""Check the trace events of a run against the rules of the format."""

import json
import math
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_folders as folders
from torch import nn

import torchotel
from torchotel.runs import chrome_trace as tracks_module
from torchotel.runs import open_run
from torchotel.runs.chrome_trace import MAX_TEXT, ChromeTrace

NUMBERS = (int, float)


def _export(folder: Path) -> tuple[ChromeTrace, dict[str, Any]]:
    trace = ChromeTrace(open_run(folder))
    document = json.loads(b"".join(trace.chunks()), parse_constant=pytest.fail)
    _validate(document)
    return trace, document


def _validate(document: dict[str, Any]) -> None:
    """Check the rules of the trace event format for the event types that torchotel writes."""
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] in {"ms", "ns"}
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named = set()
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["ph"] in {"X", "C", "M"}
        assert all(type(event[name]) is int for name in ("pid", "tid"))
        assert isinstance(event["ts"], NUMBERS)
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            start_ns = round(event["ts"] * 1000)
            lanes[event["pid"], event["tid"]].append((start_ns, start_ns + round(event["dur"] * 1000)))
        elif event["ph"] == "C":
            assert all(isinstance(value, NUMBERS) for value in event["args"].values())
        else:
            kind, value = event["name"], {"thread_sort_index": int}.get(event["name"], str)
            assert kind in {"process_name", "thread_name", "thread_sort_index"}
            assert [type(part) for part in event["args"].values()] == [value]
            assert (kind, event["tid"]) not in named
            named.add((kind, event["tid"]))
    assert ("process_name", 0) in named
    for (_, tid), lane in lanes.items():
        assert ("thread_name", tid) in named
        _validate_nesting(lane)


def _validate_nesting(lane: list[tuple[int, int]]) -> None:
    """Complete events of a thread are consecutive or nested."""
    open_ends: list[int] = []
    for start_ns, end_ns in sorted(lane, key=lambda times: (times[0], -times[1])):
        while open_ends and open_ends[-1] <= start_ns:
            open_ends.pop()
        assert not open_ends or end_ns <= open_ends[-1]
        open_ends.append(end_ns)


def _events(document: dict[str, Any], phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_writes_spans_counters_and_names(tmp_path: Path) -> None:
    spans = [
        folders.span("torch.step", 1, 0, 10_001_500, 10_009_000, **{"torch.loss": 0.5}),
        folders.module("conv", 2, 1, 10_002_000, 10_003_000),
    ]
    unit = folders.step(0, 2e-3, time_unix_nano="10001500", values={"loss": 0.5, "lr": 0.1}, gradient_norm=3.0)
    info = {
        "run_id": "r",
        "service_name": "train",
        "started_unix_nano": "10000000",
        "resource": {"process.pid": 77, "service.name": "train", "torch.rank": 3, "torch.world_size": 8},
    }
    trace, document = _export(
        folders.write(tmp_path / "run", info=info, units=[unit], segments=[[folders.request(spans)]])
    )
    assert (trace.spans, trace.left_out) == (2, 0)
    assert document["otherData"] == {"run_id": "r", "service_name": "train", "start_unix_nano": "10000000"}
    at = {"pid": 77, "tid": 0}
    step = {"torch.loss": 0.5, "trace_id": folders.TRACE}
    conv = {
        "torch.model": "Net",
        "torch.module.path": "conv",
        "torch.module.type": "Conv",
        "torch.direction": "forward",
        "torch.step.number": 0,
    }
    assert document["traceEvents"] == [
        {"ph": "M", "name": "process_name", "ts": 0, **at, "args": {"name": "train rank 3"}},
        {"ph": "M", "name": "thread_name", "ts": 0, **at, "args": {"name": "thread 1"}},
        {"ph": "M", "name": "thread_sort_index", "ts": 0, **at, "args": {"sort_index": 0}},
        {"ph": "X", "name": "torch.step", "cat": "step", "ts": 1.5, "dur": 7.5, **at, "args": step},
        {"ph": "X", "name": "forward conv", "cat": "module", "ts": 2.0, "dur": 1.0, **at, "args": conv},
        {"ph": "C", "name": "loss", "ts": 2001.5, **at, "args": {"loss": 0.5}},
        {"ph": "C", "name": "lr", "ts": 2001.5, **at, "args": {"lr": 0.1}},
        {"ph": "C", "name": "gradient norm", "ts": 2001.5, **at, "args": {"gradient norm": 3.0}},
    ]


def test_puts_threads_of_a_real_program_on_tracks_of_their_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    both = threading.Barrier(2)

    def serve() -> None:
        for _ in range(3):
            both.wait()
            with torch.no_grad():
                model(torch.ones(1, 4))

    folder = tmp_path / "run"
    with torchotel.instrument(record=folder, traces_exporter="none", metrics_exporter="none", detail="all") as handle:
        threads = [threading.Thread(target=serve) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        handle.flush()
    _, document = _export(folder)
    tracks = Counter((event["tid"], event["name"]) for event in _events(document))
    names = {event["tid"]: event["args"]["name"] for event in _events(document, "M") if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["thread 1", "thread 2"]
    assert {tracks[tid, "torch.evaluation"] for tid in names} == {3}


def test_puts_what_runs_at_once_in_a_step_on_further_tracks(tmp_path: Path) -> None:
    spans = [
        folders.span("torch.step", 1, 0, 0, 100, **{"thread.id": 5}),
        folders.module("Net", 2, 1, 10, 90),
        folders.module("replica", 3, 2, 20, 60),
        folders.module("replica", 4, 2, 30, 70),
        folders.module("replica.fc", 5, 4, 35, 40),
        folders.module("last", 6, 2, 80, 85),
    ]
    _, document = _export(folders.write(tmp_path / "run", segments=[[folders.request(spans)]]))
    assert [event["tid"] for event in _events(document)] == [0, 0, 0, 1, 1, 0]
    names = [event["args"]["name"] for event in _events(document, "M") if event["name"] == "thread_name"]
    assert names == ["thread 1", "thread 1, overlapping 1"]


def test_keeps_the_steps_of_a_thread_on_one_track(tmp_path: Path) -> None:
    def step(number: int, thread: int, start_ns: int) -> str:
        span = folders.span("torch.step", number, 0, start_ns, start_ns + 10, **{"thread.id": thread})
        return folders.request([{**span, "traceId": f"{number:032x}"}])

    # Records are written in the order of the steps' ends, or later if they wait for asynchronous reads.
    lines = [step(1, 8, 10), step(2, 9, 5), step(3, 9, 25), step(4, 8, 0), step(5, 8, 20), step(6, 9, 15)]
    info = {"started_unix_nano": "0"}
    _, document = _export(folders.write(tmp_path / "run", info=info, segments=[lines]))
    assert [event["tid"] for event in _events(document)] == [0, 1, 1, 0, 0, 1]


def test_exports_a_run_that_a_crash_cut_short(tmp_path: Path) -> None:
    folder = folders.net(tmp_path / "run")
    whole = len(_events(_export(folder)[1]))
    path = folder / "trace-00002.jsonl"
    path.write_text(path.read_text() + path.read_text()[:-40])
    (folder / "run.json").write_text('{"run_id": "r')
    assert len(_events(_export(folder)[1])) == whole


def test_makes_a_whole_file_of_a_run_without_spans(tmp_path: Path) -> None:
    trace, document = _export(folders.write(tmp_path / "run", info={}))
    assert (trace.spans, [event["name"] for event in document["traceEvents"]]) == (0, ["process_name"])


def test_stays_whole_whatever_a_stranger_wrote(tmp_path: Path) -> None:
    spans = [
        folders.span('"}]\n<script>\ud800', 1, 2, 50, 40, **{"\x00": "x" * 5000}),  # ends before it starts
        folders.span("circle", 2, 1, 0, 10**30),
        folders.span("itself", 3, 3, -5, 60, d=0.5),
    ]
    spans[2]["attributes"] = [
        {"key": "d", "value": {"doubleValue": "NaN"}},
        {"key": "e", "value": {"doubleValue": 1e999}},
    ]
    info = {
        "service_name": ["no"],
        "started_unix_nano": "0",
        "resource": {"process.pid": -1, "service.name": {"a": 1}, "torch.world_size": "x"},
    }
    unit = folders.step(0, 0.1, values={"loss": True, "lr": None}, gradient_norm=1e999)
    folder = folders.write(tmp_path / "run", info=info, units=[unit], segments=[[folders.request(spans)]])
    trace, document = _export(folder)
    assert (trace.spans, trace.left_out) == (2, 1)
    assert all(len(str(value)) <= MAX_TEXT + 1 for event in _events(document) for value in event["args"].values())
    assert _events(document, "C") == []


def test_has_no_more_tracks_than_a_page_can_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracks_module, "MAX_TRACKS", 3)
    spans = [folders.span("at once", number, 0, 0, 10) for number in range(1, 6)]
    trace, document = _export(folders.write(tmp_path / "run", segments=[[folders.request(spans)]]))
    assert (trace.spans, trace.left_out) == (3, 2)
    assert sorted(event["tid"] for event in _events(document)) == [0, 1, 2]
