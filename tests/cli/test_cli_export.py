"""Test `torchotel export`: formats, targets and errors."""

import json
import stat
from pathlib import Path

import pytest
from support import commands
from support import run_folders as folders
from support.otlp_http_receiver import Answer, receiver, rejected

from torchotel.cli import main
from torchotel.runs import jaeger_upload


def _run(folder: Path, traces: int) -> Path:
    lines = []
    for number in range(1, traces + 1):
        start_ns = 10 * number
        step = folders.span("torch.step", 1, 0, start_ns, start_ns + 9)
        spans = [step, folders.span("torch.data", 2, 1, start_ns, start_ns + 5)]
        lines.append(folders.request([{**span, "traceId": f"{number:032x}"} for span in spans]))
    return folders.write(folder, info={"run_id": "r"}, segments=[lines[:70], lines[70:]])


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _trace_ids(path: Path) -> list[str]:
    requests = [json.loads(line) for line in path.read_text().splitlines()]
    return [request["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] for request in requests]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_writes_a_file_for_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path / "run", 3)
    assert main(["export", "run", "--format", "chrome"]) == 0
    assert capsys.readouterr().out == "run.chrome.json: 6 spans; open it in https://ui.perfetto.dev\n"
    path = tmp_path / "run.chrome.json"
    assert len(json.loads(path.read_text())["traceEvents"]) == 6 + 3
    assert _mode(path) == 0o600


def test_writes_what_jaegers_upload_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _run(tmp_path / "run", 120)
    with (folder / "trace-00002.jsonl").open("a") as stream:
        stream.write('{"resourceSpans":[{"sco')
    assert main(["export", "run", "--format", "otlp"]) == 0
    assert "run-otlp: 3 files, at most 50 traces in each" in capsys.readouterr().out
    files = sorted((tmp_path / "run-otlp").iterdir())
    assert [path.name for path in files] == ["traces-00001.jsonl", "traces-00002.jsonl", "traces-00003.jsonl"]
    assert [len(_trace_ids(path)) for path in files] == [50, 50, 20]
    assert [_mode(path) for path in (tmp_path / "run-otlp", *files)] == [0o700, 0o600, 0o600, 0o600]
    kept = [id_ for path in files for id_ in _trace_ids(path)]
    assert kept == [f"{number:032x}" for number in range(1, 121)]


def test_bounds_the_size_of_an_uploaded_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaeger_upload, "MAX_UPLOAD_BYTES", 1500)
    _run(tmp_path / "run", 4)
    assert main(["export", "run", "--format", "otlp"]) == 0
    sizes = [path.stat().st_size for path in (tmp_path / "run-otlp").iterdir()]
    assert len(sizes) > 1
    assert max(sizes) <= 1500


def test_writes_one_file_where_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path / "few", 3)
    assert main(["export", "few", "--format", "otlp", "-o", "few.jsonl"]) == 0
    assert len(_trace_ids(tmp_path / "few.jsonl")) == 3
    _run(tmp_path / "many", 51)
    assert main(["export", "many", "--format", "otlp", "-o", "many.jsonl"]) == 2
    assert "the run is too large for one file on Jaeger's page; name a folder with -o" in capsys.readouterr().err
    assert not (tmp_path / "many.jsonl").exists()


@pytest.mark.parametrize("kind", ["chrome", "otlp"])
def test_writes_all_or_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    folder = _run(tmp_path / "run", 60)
    path = folder / "trace-00001.jsonl"
    path.write_text(path.read_text() + "no\n" + '{"resourceSpans":5}\n')
    before = sorted(tmp_path.iterdir())
    assert main(["export", "run", "--format", kind, "-o", "out"]) == 2
    assert "trace-00001.jsonl: line 61 is no JSON object" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_refuses_json_that_only_python_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = folders.request([folders.span("a", 1, 0, 0, 1)]).replace('"kind": 1', '"kind": NaN')
    folders.write(tmp_path / "run", segments=[[line]])
    assert main(["export", "run", "--format", "otlp"]) == 2
    assert "holds a line that torchotel does not write" in capsys.readouterr().err
    assert not (tmp_path / "run-otlp").exists()


def test_leaves_alone_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path / "run", 1)
    assert main(["export", "run", "--format", "otlp", "-o", "run"]) == 2
    assert "run: contains other files; choose another folder with -o" in capsys.readouterr().err
    assert main(["export", "run", "--format", "chrome", "-o", "run"]) == 2
    assert "run: is a folder" in capsys.readouterr().err
    assert main(["export", "run", "--format", "chrome", "-o", "nowhere/file.json"]) == 2
    assert "nowhere/file.json: cannot be written (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "output"), [("chrome", "out.json"), ("otlp", "out.jsonl"), ("otlp", "out")], ids=["chrome", "file", "otlp"]
)
def test_overwrites_what_it_wrote_only_where_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, output: str
) -> None:
    """--force replaces earlier output completely: here two files in a folder become one."""
    words = ["--format", kind, "-o", output]
    assert main(["export", str(_run(tmp_path / "long", 60 if output == "out" else 50)), *words]) == 0
    before = _content(tmp_path / output)
    short = str(_run(tmp_path / "short", 1))
    capsys.readouterr()
    assert main(["export", short, *words]) == 2
    told = f"torchotel export: {output}: already exists; overwrite it with --force or choose another place with -o\n"
    assert capsys.readouterr().err == told
    assert _content(tmp_path / output) == before
    assert main(["export", short, *words, "--force"]) == 0
    assert main(["export", short, "--format", kind, "-o", f"new-{output}"]) == 0
    assert _content(tmp_path / output) == _content(tmp_path / f"new-{output}")


def _content(path: Path) -> dict[str, bytes]:
    files = path.iterdir() if path.is_dir() else [path]
    return {file.name.removeprefix("new-"): file.read_bytes() for file in files}


def test_replaces_no_folder_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--force does not replace a folder with other files, such as a home folder."""
    _run(tmp_path / "run", 1)
    assert main(["export", "run", "--format", "otlp"]) == 0
    (tmp_path / "run-otlp" / "notes.txt").write_text("mine")
    assert main(["export", "run", "--format", "otlp", "--force"]) == 2
    assert "run-otlp: contains other files" in capsys.readouterr().err
    assert len(list((tmp_path / "run-otlp").iterdir())) == 2


def test_sends_a_run_with_the_ids_that_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path / "run", 80)
    with receiver() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20x")
        patch.setenv("OTEL_SDK_DISABLED", "true")  # applies to programs only
        base = server.url.removesuffix("/v1/traces")
        assert main(["export", "run", "--to", base]) == 0
        assert main(["export", "run", "--to", base, "--format", "otlp"]) == 0
    first, second = server.spans[:160], server.spans[160:]
    assert first == second
    assert {(span.trace_id.hex(), span.span_id.hex()) for span in first} == {
        (f"{trace:032x}", f"{span:016x}") for trace in range(1, 81) for span in (1, 2)
    }
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer x"}
    assert capsys.readouterr().out == f"160 spans sent to {server.url}\n" * 2


def test_fails_where_not_all_arrived_and_says_how_much_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path / "run", 2)
    with receiver() as server:
        server.answers.extend([rejected(1, "too old"), Answer(400)])
        base = server.url.removesuffix("/v1/traces")
        assert main(["export", "run", "--to", base]) == 1
        assert capsys.readouterr().err == f"torchotel export: 3 of 4 spans arrived at {server.url}: too old\n"
        assert main(["export", "run", "--to", base]) == 1
        assert "0 of 4 spans arrived" in capsys.readouterr().err


def test_sends_nothing_that_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    span = {**folders.span("a", 1, 0, 0, 1), "traceId": "../../etc"}
    folders.write(tmp_path / "run", segments=[[folders.request([span])]])
    with receiver() as server:
        assert main(["export", "run", "--to", server.url.removesuffix("/v1/traces")]) == 2
        assert server.requests == []
    assert "run: holds a span that torchotel does not write" in capsys.readouterr().err


@pytest.mark.program
def test_needs_neither_torch_nor_opentelemetry_to_write(tmp_path: Path) -> None:
    _run(tmp_path / "run", 1)
    code = (
        "import sys, torchotel.cli\n"
        "for kind in ('chrome', 'otlp'):\n"
        "    assert torchotel.cli.main(['export', 'run', '--format', kind]) == 0\n"
        "assert not {'torch', 'opentelemetry'} & set(sys.modules)\n"
    )
    done = commands.python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no format given: use --format chrome, --format otlp or --to ENDPOINT"),
        (["--to", "http://localhost:4318", "--format", "chrome"], "remove --format chrome and -o"),
        (["--to", "http://localhost:4318", "-o", "x"], "remove --format chrome and -o"),
        (["--to", "localhost"], "endpoint: got 'localhost'"),
    ],
)
def test_says_how_it_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    _run(tmp_path / "run", 1)
    assert main(["export", "run", *words]) == 2
    assert said in capsys.readouterr().err
