"""A run on disk: whole, private, bounded, and never in the way."""

import errno
import json
import os
import resource
import shutil
import signal
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.otlp_traces import RESOURCE, flat, rich

from torchotel._limits import MAX_RUN_FILE_BYTES
from torchotel._types import ConfigError
from torchotel.exporters.base import ExportCounts
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.exporters.otlp.protobuf import FLAG_IS_REMOTE
from torchotel.exporters.run_file import MAX_LINE_SPANS, SEGMENT_BYTES, RunFile
from torchotel.exporters.run_folder import (
    ClaimedFolder,
    LineFile,
    check_folder,
    claim_folder,
    discard_folder,
    earlier_folders,
)
from torchotel.runs.reader import open_run


def record(folder: Path, segment_bytes: int = SEGMENT_BYTES, limit_bytes: int = MAX_RUN_FILE_BYTES) -> RunFile:
    return RunFile(
        claim_folder(folder), resource=RESOURCE, version="1.2", segment_bytes=segment_bytes, limit_bytes=limit_bytes
    )


def lines(path: Path) -> list[Any]:
    return [json.loads(line, parse_constant=_refuse) for line in path.read_bytes().splitlines()]


def _refuse(constant: str) -> None:
    msg = f"{constant} is not JSON"
    raise ValueError(msg)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".jsonl")


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_run(tmp_path: Path) -> None:
    """Traces, metrics and the description lie where they should, each line whole as soon as it is written."""
    before = open_files()
    folder = tmp_path / "runs" / "one"
    run = record(folder)
    run.describe({"model": "Net"})
    run.export(rich())
    run.step({"step": 0, "duration": 0.5})
    encode = JsonEncoder(RESOURCE, "1.2").encode
    assert (folder / "trace-00001.jsonl").read_bytes() == encode(rich()) + b"\n"
    run.export(flat(3))
    assert run.flush(0)
    run.shutdown(0)
    assert names(folder) == ["metrics.jsonl", "run.json", "trace-00001.jsonl"]
    assert len(lines(folder / "trace-00001.jsonl")) == 2
    assert lines(folder / "metrics.jsonl") == [{"step": 0, "duration": 0.5}]
    recording = {"segments_deleted": 0, "spans_deleted": 0, "steps_dropped": 0}
    assert json.loads((folder / "run.json").read_bytes()) == {"model": "Net", "recording": recording}
    assert run.stats.read() == ExportCounts(7, 0, {})
    assert open_files() == before


def test_only_the_owner_reads(tmp_path: Path) -> None:
    """The folder and all in it are closed to others, whatever the umask allows."""
    old = os.umask(0)
    try:
        run = record(tmp_path / "run")
        run.export(flat(3))
        run.describe({})
        run.shutdown(0)
    finally:
        os.umask(old)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()} == {0o600}


def test_segments(tmp_path: Path) -> None:
    """A segment ends before it grows too large; a trace is never cut."""
    run = record(tmp_path / "run", segment_bytes=100_000)
    for number in range(20):
        run.export(flat(30, number))
    run.export(flat(300, 20))
    run.shutdown(0)
    segments = sorted((tmp_path / "run").glob("trace-*"))
    sizes = [path.stat().st_size for path in segments]
    assert len(sizes) > 4
    assert max(sizes[:-1]) <= 100_000 < sizes[-1]
    assert sum(len(lines(path)) for path in segments) == 21


def test_bound(tmp_path: Path) -> None:
    """The oldest segments go first, whole, and the run says how many; the newest trace is always there."""
    folder = tmp_path / "run"
    run = record(folder, segment_bytes=50_000, limit_bytes=200_000)
    for number in range(60):
        run.export(flat(30, number))
        assert size(folder) <= 200_000
        assert lines(max(folder.glob("trace-*")))[-1] == json.loads(
            JsonEncoder(RESOURCE, "1.2").encode(flat(30, number))
        )
    run.shutdown(0)
    recording = json.loads((folder / "run.json").read_bytes())["recording"]
    left = sorted(folder.glob("trace-*"))
    assert recording["segments_deleted"] == int(left[0].stem[-5:]) - 1 > 0
    assert recording["spans_deleted"] == 30 * (60 - sum(len(lines(path)) for path in left))


def crashed(run: RunFile, segment_bytes: int, limit_bytes: int) -> RunFile:
    """Continue the run as another process does after a crash amid two lines, with the descriptor of both."""
    fd = os.dup(run._metrics.fileno())  # the training process keeps it open
    run.shutdown(0)
    os.write(fd, b'{"step": 1, "dura')
    with max(run.folder.glob("trace-*")).open("ab") as traces:
        traces.write(b'{"resourceSpans": [{"sco')
    metrics = LineFile(run.folder / "metrics.jsonl", fd)
    return RunFile(
        ClaimedFolder(run.folder, metrics),
        resource=RESOURCE,
        version="1.2",
        segment_bytes=segment_bytes,
        limit_bytes=limit_bytes,
    )


def test_a_crashed_writer_is_continued(tmp_path: Path) -> None:
    """Its segments are deleted like others, no number is used twice, and no line before the last is cut."""
    folder, limits = tmp_path / "run", (50_000, 200_000)
    first = record(folder, *limits)
    first.step({"step": 0})
    for number in range(60):
        first.export(flat(30, number))
    before = json.loads((folder / "run.json").read_bytes())["recording"]
    oldest, newest = min(folder.glob("trace-*")).name, max(folder.glob("trace-*")).name
    assert before["segments_deleted"] > 0
    second = crashed(first, *limits)
    second.step({"step": 2})
    for number in range(60, 64):
        second.export(flat(30, number))
        assert size(folder) <= 200_000
    second.shutdown(0)
    left = sorted(path.name for path in folder.glob("trace-*"))
    assert left[0] > oldest
    assert newest in left[:-1]
    assert lines(folder / "metrics.jsonl") == [{"step": 0}, {"step": 2}]
    assert second.stats.read() == ExportCounts(4 * 30, 0, {})
    recording = json.loads((folder / "run.json").read_bytes())["recording"]
    assert recording["segments_deleted"] == int(left[0][6:11]) - 1
    assert recording["spans_deleted"] == 30 * 64 - len(list(open_run(folder).spans())) > before["spans_deleted"]


def test_a_large_trace_goes_into_several_lines(tmp_path: Path) -> None:
    """No line is too long for a reader, every span is written once, and only the root has a remote parent."""
    folder = tmp_path / "run"
    run = record(folder)
    spans = 2 * MAX_LINE_SPANS + 5
    run.export(replace(flat(spans), remote_parent=True))
    run.shutdown(0)
    found = [
        [span for part in line["resourceSpans"] for scope in part["scopeSpans"] for span in scope["spans"]]
        for line in lines(folder / "trace-00001.jsonl")
    ]
    assert [len(line) for line in found] == [MAX_LINE_SPANS, MAX_LINE_SPANS, 5]
    written = [span for line in found for span in line]
    assert len({span["spanId"] for span in written}) == spans
    assert [index for index, span in enumerate(written) if span["flags"] & FLAG_IS_REMOTE] == [0]
    assert run.stats.read() == ExportCounts(spans, 0, {})


def test_too_large_for_the_bound(tmp_path: Path) -> None:
    """A trace that could never fit is dropped and counted; later ones are recorded."""
    run = record(tmp_path / "run", limit_bytes=50_000)
    run.export(flat(500))
    assert not run.flush(0)
    run.export(flat(3))
    assert run.flush(0)
    run.shutdown(0)
    assert run.stats.read() == ExportCounts(3, 500, {})


def test_metrics_leave_room(tmp_path: Path) -> None:
    """Metrics of a long run take half of the bound at most."""
    folder = tmp_path / "run"
    run = record(folder, limit_bytes=100_000)
    for number in range(3000):
        run.step({"step": number, "duration": 0.123456789})
    run.export(flat(30))
    run.shutdown(0)
    kept = lines(folder / "metrics.jsonl")
    assert (folder / "metrics.jsonl").stat().st_size <= 50_000
    assert json.loads((folder / "run.json").read_bytes())["recording"]["steps_dropped"] == 3000 - len(kept)
    assert run.stats.read() == ExportCounts(30, 0, {})


def test_bad_numbers(tmp_path: Path) -> None:
    """No NaN or infinity is written as a number, and odd values do no harm."""
    folder = tmp_path / "run"
    run = record(folder)
    bad: Mapping[str, object] = {
        "loss": float("nan"),
        "norms": {"a": float("inf"), "b": [1.5, float("-inf")]},
    }
    run.step(bad)
    run.describe({**bad, "path": Path("x"), "lone": "\ud800", "keys": {1: (True, None)}})
    run.shutdown(0)
    plain = {"loss": None, "norms": {"a": None, "b": [1.5, None]}}
    assert lines(folder / "metrics.jsonl") == [plain]
    described = json.loads((folder / "run.json").read_bytes(), parse_constant=_refuse)
    del described["recording"]
    assert described == {**plain, "path": "x", "lone": "?", "keys": {"1": [True, None]}}


def test_a_run_is_not_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a folder holds a run, also one that goes on, the next run takes a free name beside it, and says so."""
    (tmp_path / "run-3").touch()
    runs = [record(tmp_path / "run") for _ in range(3)]
    assert [run.folder.name for run in runs] == ["run", "run-2", "run-4"]
    assert [one.getMessage().partition(".")[0] for one in caplog.records] == [
        f"{tmp_path / 'run'} holds a run already, so this run is recorded in {tmp_path / name}"
        for name in ("run-2", "run-4")
    ]
    for run in runs:
        run.describe({"folder": run.folder.name})
        run.shutdown(0)
        assert json.loads((run.folder / "run.json").read_bytes())["folder"] == run.folder.name


def test_many_processes_want_one_folder(tmp_path: Path) -> None:
    """Each gets a folder of its own."""
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(record, [tmp_path / "run"] * 16))
    assert sorted(run.folder.name for run in runs) == sorted(["run", *(f"run-{number}" for number in range(2, 17))])
    for run in runs:
        run.shutdown(0)


def test_impossible_folder(tmp_path: Path) -> None:
    """A folder that cannot be made is refused with the system's reason."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="a file is there"):
            record(folder)
    with pytest.raises(ConfigError, match=r"a folder that can be written to \(File name too long\)"):
        record(tmp_path / ("x" * 300))


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    """A folder that is there already is used, and so is one with other things in it."""
    (tmp_path / "notes.txt").touch()
    record(tmp_path).shutdown(0)
    assert names(tmp_path) == ["metrics.jsonl", "notes.txt", "run.json"]


@contextmanager
def full_disk(file_bytes: int) -> Iterator[None]:
    """Let the system refuse to let any file grow beyond `file_bytes`."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def test_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the disk takes no more the recording ends, with one warning and whole lines."""
    before = open_files()
    folder = tmp_path / "run"
    run = record(folder)
    with full_disk(40_000):
        for number in range(10):
            run.export(flat(15, number))
        run.step({"step": 1})
        assert not run.flush(0)
        run.shutdown(0)
    written = len(lines(folder / "trace-00001.jsonl"))
    assert 0 < written < 10
    assert run.stats.read() == ExportCounts(15 * written, 15 * (10 - written), {"OSError": 1})
    (warning,) = caplog.records
    assert os.strerror(errno.EFBIG) in warning.getMessage()
    assert str(folder) in warning.getMessage()
    assert open_files() == before


def test_removed_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Spans that would go into removed files count as dropped, flush() is False, and one warning says so."""
    folder = tmp_path / "run"
    run = record(folder)
    run.export(flat(3))
    assert run.flush(0)
    shutil.rmtree(folder)
    run.export(flat(4, 1))
    assert not run.flush(0)
    run.shutdown(0)
    assert run.stats.read() == ExportCounts(3, 4, {"FileNotFoundError": 1})
    (warning,) = caplog.records
    assert str(folder) in warning.getMessage()
    assert not folder.exists()


def test_unwritable_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A trace that cannot be encoded costs its own spans; the recording goes on."""
    run = record(tmp_path / "run")
    bad = replace(flat(3), trace_id="not a number")  # type: ignore[arg-type]  # what is to be tried
    run.export(bad)
    run.export(bad)
    run.export(flat(4))
    run.shutdown(0)
    assert run.stats.read() == ExportCounts(4, 6, {"ValueError": 2})
    assert len(caplog.records) == 1


def test_a_check_of_the_folder_changes_nothing(tmp_path: Path) -> None:
    """The folder may be the user's own."""
    before = tmp_path.stat()
    for folder in (tmp_path, tmp_path / "new" / "run"):
        check_folder(folder)
    assert tmp_path.stat() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("inside", ["", "run", "deep/run"])
def test_a_check_of_the_folder_refuses_a_file(tmp_path: Path, inside: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is a file"):
        check_folder(file / inside)


def test_an_empty_rank_leaves_the_folder_of_the_run(tmp_path: Path) -> None:
    """Another rank may be about to record there."""
    rank = claim_folder(tmp_path / "run", "rank0")
    rank.metrics.close()
    discard_folder(rank.path)
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_ranks_and_runs_of_one_process_share_no_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The ranks of a launch are together. A process without records may only start the ranks, which use its folder."""

    def claim(rank: str = "", *, records: bool = True) -> str:
        folder, metrics = claim_folder(tmp_path / "run", rank)
        if records:
            metrics.append(b"{}")
        metrics.close()
        return str(folder.relative_to(tmp_path))

    assert claim(records=False) == "run"
    assert [claim(f"rank{rank}") for rank in (0, 1, 0, 1)] == ["run/rank0", "run/rank1", "run-2/rank0", "run-2/rank1"]
    assert [claim(), claim()] == ["run-3", "run-4"]
    assert claim("rank0") == "run-5/rank0"
    assert len(caplog.records) == 5
    assert (
        f"{tmp_path / 'run'} holds a run already, so this run is recorded in {tmp_path / 'run-2/rank0'}" in caplog.text
    )
    earlier = [*earlier_folders(Path("run"), tmp_path / "run-5/rank0")]
    assert earlier == [tmp_path / "run/rank0", tmp_path / "run-2/rank0"]
    assert [*earlier_folders(Path("run"), tmp_path / "run-3")] == [tmp_path / "run", tmp_path / "run-2"]


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ({"finished": False, "error": None, "resource": {"torch.run.generation": 1}}, "run"),
        ({"finished": True, "error": None, "resource": {"torch.run.generation": 1}}, "run-2"),
        ({"finished": False, "error": {"type": "ValueError"}, "resource": {"torch.run.generation": 1}}, "run-2"),
        ({"finished": False, "error": None, "resource": {"torch.run.generation": 0}}, "run-2"),
        ({"recording": {}}, "run"),  # its first step has not ended
        (["not ours"], "run"),
    ],
)
def test_a_rank_passes_over_the_ranks_of_an_earlier_launch(tmp_path: Path, described: object, name: str) -> None:
    """A rank of the earlier launch has left no folder, or that launch had fewer ranks."""
    rank = claim_folder(tmp_path / "run", "rank0", 1)
    rank.metrics.close()
    (rank.path / "run.json").write_text(json.dumps(described))
    claimed = claim_folder(tmp_path / "run", "rank1", 1)
    claimed.metrics.close()
    assert claimed.path == tmp_path / name / "rank1"


def test_a_run_that_is_deleted_meanwhile_is_no_obstacle(tmp_path: Path) -> None:
    """A file that was listed is gone when it is looked at."""
    (tmp_path / "run/rank0").mkdir(parents=True)
    (tmp_path / "run/rank0/metrics.jsonl").symlink_to("nowhere")
    claimed = claim_folder(tmp_path / "run")
    claimed.metrics.close()
    assert claimed.path == tmp_path / "run"
