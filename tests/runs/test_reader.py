"""Test reading a run folder."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import run_folders as folders

from torchotel.runs import RecordLine, RequestLine, RunError, SpanLine, open_run, reader, summarise


def test_reads_what_was_written(tmp_path: Path) -> None:
    values: dict[str, Any] = {"s": "a", "i": 3, "b": True, "d": 0.5, "l": ["1x2", "3"]}
    lines = [folders.request([folders.span("torch.step", 1, 0, 5, 9, **values)])]
    unit = folders.step(4, 0.5, error={"type": "ValueError", "message": "no"}, phases={"data": 0.5})
    run = open_run(folders.write(tmp_path / "run", info={"run_id": "r"}, units=[unit], segments=[lines]))
    assert run.info == {"run_id": "r"}
    assert list(run.records()) == [
        RecordLine(
            kind="step",
            number=4,
            start_unix_ns=1_700_000_000_000_000_000,
            duration_s=0.5,
            phases={"data": 0.5},
            detailed=True,
            trace_id=folders.TRACE,
            error_type="ValueError",
            error_message="no",
        )
    ]
    assert list(run.spans()) == [
        SpanLine(
            trace_id=folders.TRACE,
            span_id="0000000000000001",
            parent_id="",
            name="torch.step",
            start_ns=5,
            end_ns=9,
            attributes={"s": "a", "i": 3, "b": True, "d": 0.5, "l": ("1x2", "3")},
            error=False,
        )
    ]


def test_reads_files_cut_short_up_to_their_last_whole_line(tmp_path: Path) -> None:
    folder = folders.net(tmp_path / "run")
    whole = open_run(folder)
    spans, units = list(whole.spans()), list(whole.records())
    for name in ("metrics.jsonl", "trace-00002.jsonl"):
        path = folder / name
        with path.open("a") as stream:
            stream.write(path.read_text().splitlines()[-1][:-7])
    (folder / "run.json").write_text('{"run_id": "ru')
    cut = open_run(folder)
    assert (list(cut.spans()), list(cut.records()), cut.info) == (spans, units, {})


def test_warns_of_missing_and_unreadable_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run without its settings or its steps is shown, with a line that names what is not shown."""
    folder = folders.net(tmp_path / "run")
    open_run(folder)
    assert caplog.messages == []
    (folder / "run.json").write_text("garbage")
    (folder / "metrics.jsonl").unlink()
    assert list(open_run(folder).records()) == []
    assert caplog.messages == [
        f"{folder / 'run.json'} is missing or holds no JSON object. Settings and model of the run are not shown.",
        f"{folder} has no file metrics.jsonl. Steps and evaluations are not shown.",
    ]


@pytest.mark.parametrize("rest", ["\x00\x00\x00", "[1, 2]", '"text"', "\n\n"])
def test_takes_any_rest_of_a_crash(tmp_path: Path, rest: str) -> None:
    folder = folders.net(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(rest)
    assert len(list(open_run(folder).records())) == 3


def test_names_a_bad_line_before_the_last(tmp_path: Path) -> None:
    folder = folders.net(tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_text("{bad\n" + path.read_text())
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 1 is no JSON object"):
        list(open_run(folder).records())


def test_is_tolerant_of_absent_keys(tmp_path: Path) -> None:
    unit = {"kind": "step", "duration_s": None, "phases": {"data": None}}
    lines = ['{"resourceSpans":[{"scopeSpans":[{"spans":[{}]}]}]}', "{}"]
    run = open_run(folders.write(tmp_path / "run", units=[unit], segments=[lines]))
    (read,) = run.records()
    assert (read.duration_s, read.phases, read.error_type) == (0.0, {"data": 0.0}, None)
    assert [span.name for span in run.spans()] == [""]


def test_reads_segments_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "run")
    for number in (99999, 100000, 2):
        line = folders.request([folders.span(str(number), 1, 0, 0, 1)])
        (folder / f"trace-{number:05}.jsonl").write_text(line + "\n")
    assert [span.name for span in open_run(folder).spans()] == ["2", "99999", "100000"]


def test_says_why_a_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder; name a run folder"):
        open_run(tmp_path / "absent")
    with pytest.raises(RunError, match="no run in it"):
        open_run(tmp_path)
    with pytest.raises(RunError, match="is a file"):
        open_run(Path(__file__))


def test_says_how_far_it_has_read(tmp_path: Path) -> None:
    """`on_read` gets the bytes of each line, for progress displays."""
    read: list[int] = []
    run = replace(open_run(folders.net(tmp_path / "run")), on_read=read.append)
    assert run.size_bytes > 0
    assert (len(list(run.records())), len(list(run.spans()))) == (3, 7)
    assert sum(read) == run.size_bytes


TOLERATED_UNITS = [
    '{"kind": "step", "duration_s": "x", "phases": {"data": NaN}, "gradient_norms": {"M": {"a": -Infinity}}}',
    '{"kind": "step", "duration_s": 1e999, "gradient_norm": 1e999, "error": {"type": ["x"]}}',
]
REFUSED_UNITS = [
    '{"kind": "step", "phases": 3}',
    '{"kind": "step", "number": "x"}',
    '{"kind": "step", "number": [1]}',
    '{"kind": "step", "number": 1e999}',
    '{"kind": "step", "gradient_norms": [1]}',
    '{"kind": "step", "values": "x"}',
    '{"kind": ' + "[" * 100_000 + "]" * 100_000 + "}",
]
TOLERATED_SPANS = [
    '{"traceId": ["x"], "spanId": {"a": 1}, "name": 3, "endTimeUnixNano": "999999999999999999999999999999"}',
    '{"attributes": [{"key": "torch.module.path", "value": {"intValue": "9999999999999999999999"}}]}',
]
REFUSED_SPANS = [
    '{"startTimeUnixNano": "soon"}',
    '{"attributes": [{"key": "torch.module.path", "value": {"intValue": "x"}}]}',
    '{"attributes": [3]}',
    '{"attributes": 3}',
    '{"status": 3}',
]


@pytest.mark.parametrize("line", TOLERATED_UNITS, ids=range(len(TOLERATED_UNITS)))
def test_takes_only_finite_numbers_from_a_strangers_steps(tmp_path: Path, line: str) -> None:
    run = open_run(_with_unit(tmp_path, line))
    phases = summarise(run.records(), ()).phases
    assert phases
    assert all(map(math.isfinite, (phase.mean_s for phase in phases)))


@pytest.mark.parametrize("line", REFUSED_UNITS, ids=range(len(REFUSED_UNITS)))
def test_names_the_file_that_holds_steps_of_another_form(tmp_path: Path, line: str) -> None:
    with pytest.raises(RunError, match=r"metrics\.jsonl: "):
        list(open_run(_with_unit(tmp_path, line)).records())


@pytest.mark.parametrize("span", TOLERATED_SPANS, ids=range(len(TOLERATED_SPANS)))
def test_takes_only_bounded_numbers_from_a_strangers_spans(tmp_path: Path, span: str) -> None:
    run = open_run(_with_span(tmp_path, span))
    assert (summarise((), run.spans()).steps, len(list(run.spans()))) == (0, 2)


@pytest.mark.parametrize("span", REFUSED_SPANS, ids=range(len(REFUSED_SPANS)))
def test_names_the_file_that_holds_spans_of_another_form(tmp_path: Path, span: str) -> None:
    with pytest.raises(RunError, match=r"trace-00001\.jsonl: holds a line that torchotel does not write"):
        list(open_run(_with_span(tmp_path, span)).spans())


def _with_unit(folder: Path, line: str) -> Path:
    run = folders.net(folder / "run")
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(f"{line}\n{{}}\n")
    return run


def _with_span(folder: Path, span: str) -> Path:
    line = '{"resourceSpans":[{"scopeSpans":[{"spans":[' + span + "]}]}]}"
    return folders.write(folder / "run", segments=[[line, line]])


def test_skips_lines_that_would_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line that is too long is skipped with a warning that names the file; the rest of the run is read."""
    folder = folders.net(tmp_path / "run")
    before = list(open_run(folder).records())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"number": 7, "padding": "' + "x" * 5000 + '"}\n{"number": 8}\n')
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 4000)
    assert [unit.number for unit in open_run(folder).records()] == [*(unit.number for unit in before), 8]
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder / 'metrics.jsonl'}: skipped a line of more than 4,000 bytes"
    ]


def test_reads_regular_files_alone(tmp_path: Path) -> None:
    folder = folders.net(tmp_path / "run")
    spans = list(open_run(folder).spans())
    os.mkfifo(folder / "trace-00003.jsonl")  # opening it would block without a writer
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    run = open_run(folder)
    assert (list(run.spans()), list(run.records())) == (spans, [])


def test_gives_the_lines_of_traces_as_they_are(tmp_path: Path) -> None:
    spans = [folders.span("torch.step", 1, 0, 5, 9), folders.span("torch.data", 2, 1, 5, 6)]
    line = folders.request(spans)
    (found,) = open_run(folders.write(tmp_path / "run", segments=[[line]])).requests()
    assert found == RequestLine(json.loads(line), frozenset([folders.TRACE]), 2, 5)
