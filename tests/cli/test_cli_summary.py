"""Test `torchotel summary`, and the command line without installed packages."""

import os
import re
from pathlib import Path

import pytest
from support import commands, run_folders

from torchotel.cli import main


def test_shows_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folders.net(tmp_path / "run")
    assert main(["summary", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "slowest layers, backward, in training steps\nlayer" in shown
    assert main(["summary", str(folder), "--top", "1"]) == 0
    assert len(capsys.readouterr().out) < len(shown)


def test_shows_the_newest_run_where_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["summary"]) == 2
    assert "torchotel-runs: no run found; name a run folder" in capsys.readouterr().err
    for number, name in enumerate(["b", "c", "a"]):
        folder = run_folders.net(tmp_path / "torchotel-runs" / name)
        os.utime(folder, ns=(number, number))
    assert main(["summary"]) == 0
    assert capsys.readouterr().out.endswith("read from torchotel-runs/a\n")


def test_shows_all_ranks_of_the_newest_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        resource = {"torch.run.id": "r", "torch.rank": rank, "torch.world_size": 3}
        units = [run_folders.step(number, 0.1) for number in range(2)]
        run_folders.write(Path(f"torchotel-runs/a/rank{rank}"), info={"resource": resource}, units=units)
    assert main(["summary"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("no rank is named as slow: ")
    assert "\nrank 0 of 3\nsteps       2" in shown
    folders = "torchotel-runs/a/rank0 … torchotel-runs/a/rank1"
    assert shown.endswith(f"\nread from {folders}; missing there: 1 of 3 ranks\n")


def test_names_the_only_rank_and_the_later_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    for time_s, name in enumerate(("run/rank1", "run-2/rank1", "run-3/rank1", "run-10/rank1")):
        resource = {"torch.run.id": name, "torch.rank": 1, "torch.world_size": 2}
        run_folders.write(tmp_path / name, info={"resource": resource}, units=[run_folders.step(0, 0.1)])
        os.utime(tmp_path / name / "metrics.jsonl", (time_s, time_s))
    assert main(["summary", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rank 1 of 2\nsteps       1")
    later = ", ".join(f"{folder}-{number}" for number in (2, 3, 10))
    assert shown.endswith(
        f"\nread from {folder / 'rank1'}; missing there: 1 of 2 ranks\n\nlater runs with this name: {later}\n"
    )
    assert main(["summary", str(folder / "rank1")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rank 1 of 2\n")
    assert "missing" not in shown


@pytest.mark.program
def test_fits_a_terminal_and_colours_what_failed(tmp_path: Path) -> None:
    path = "encoder.layers.11.self_attention.output_projection.linear"
    failed = run_folders.step(1, 0.1, phases={}) | {"error": {"type": "ValueError", "message": "no " * 60}}
    calls = [run_folders.module(path, 2, 0, 0, 10), run_folders.module(f"{path}_norm", 3, 0, 20, 30)]
    info = {"run_id": "r", "error": failed["error"]}
    run_folders.write(tmp_path / "run", info=info, units=[failed], segments=[[run_folders.request(calls)]])
    code, shown = commands.on_a_terminal("summary", "run", cwd=tmp_path, COLUMNS="80")
    assert code == 0
    assert re.findall(r"\x1b\[31m(.*?)\x1b\[0m", shown) == ["errors", "ended with"]
    assert max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in shown.splitlines()) <= 80
    assert re.search(r"^enco\S*…\S*_norm ", shown, re.MULTILINE)
    piped = commands.torchotel("summary", "run", cwd=tmp_path).stdout
    assert f"\n{path}_norm " in piped
    assert "\x1b" not in piped


def test_says_that_a_folder_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(tmp_path)]) == 2
    assert f"torchotel summary: {tmp_path}: no run in it" in capsys.readouterr().err


@pytest.mark.program
def test_needs_neither_torch_nor_opentelemetry(tmp_path: Path) -> None:
    folder = run_folders.net(tmp_path / "run")
    code = (
        "import sys, torchotel.cli, torchotel.runs\n"
        f"assert torchotel.cli.main(['summary', {str(folder)!r}]) == 0\n"
        "assert not {'torch', 'opentelemetry'} & set(sys.modules)\n"
    )
    done = commands.python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [["nothing"], ["summary", "--top", "x"], ["summary", "--top", "-1"], ["diff", "--top", "0"], ["demo", "--epochs"]],
)
def test_exits_with_two_on_a_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: torchotel" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"], ["summary", "-h"], ["demo", "-h"]])
def test_explains_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    assert "torchotel" in capsys.readouterr().out
