"""Test the exit code of `torchotel diff`."""

import argparse
import re
from pathlib import Path

import pytest
from support import commands, timed_runs

from torchotel.cli import main
from torchotel.cli.diff import share


def test_fails_on_a_regression_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, same, slow = (
        str(timed_runs.write(tmp_path / name, seed=seed, slower=slower))
        for seed, (name, slower) in enumerate([("a", {}), ("same", {}), ("slow", {"backward": 1.3})])
    )
    assert main(["diff", a, same]) == 0
    assert "no regression beyond 5% that is more than noise" in capsys.readouterr().out
    assert main(["diff", a, slow]) == 1
    assert "regressions beyond 5%: step +1" in capsys.readouterr().out
    assert main(["diff", slow, a]) == 0
    assert main(["diff", a, slow, "--max-regression", "50%"]) == 0


def test_fails_on_the_step_alone_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --fail-on step, a slower layer is shown but does not fail."""
    a = str(timed_runs.write(tmp_path / "a", seed=1))
    b = str(timed_runs.write(tmp_path / "b", seed=2, slower={"conv": 1.3}))
    assert main(["diff", a, b]) == 1
    assert capsys.readouterr().out.count("REGRESSION") == 1
    assert main(["diff", a, b, "--fail-on", "step"]) == 0
    assert any(line.split()[:2] + line.split()[-1:] == ["forward", "conv", "slower"] for line in _lines(capsys))
    c = str(timed_runs.write(tmp_path / "c", seed=3, slower={"backward": 1.5}))
    assert main(["diff", a, c, "--fail-on", "step"]) == 1
    assert "1 regression beyond 5%: step +" in _lines(capsys)[-1]


def test_compares_folders_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, factor in (("main", 1.0), ("same", 1.0), ("slow", 1.5)):
        for place in range(4):
            folder = tmp_path / side / str(place)
            timed_runs.write(folder, seed=ord(side[1]) + place, slower={"backward": factor})
    main_runs, same, slow = (str(tmp_path / side) for side in ("main", "same", "slow"))
    assert main(["diff", main_runs, same]) == 0
    assert "compared: 4 and 4 runs of at least 24 and 24 steps without detail" in capsys.readouterr().out
    assert main(["diff", main_runs, slow]) == 1
    assert "2 regressions beyond 5%: step +2" in _lines(capsys)[-1]
    assert main(["diff", main_runs, f"{slow}/0"]) == 1
    assert "compared: 4 and 1 runs" in capsys.readouterr().out


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.program
def test_says_the_same_each_time_and_needs_no_torch(tmp_path: Path) -> None:
    a, b = (timed_runs.write(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    code = (
        "import sys, torchotel.cli\n"
        f"assert torchotel.cli.main(['diff', {str(a)!r}, {str(b)!r}]) == 0\n"
        "assert not {'torch', 'opentelemetry'} & set(sys.modules)\n"
    )
    first, second = (commands.python("-c", code, cwd=tmp_path, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == second.stdout


@pytest.mark.parametrize("other", ["missing", "short", "foreign"])
def test_exits_with_two_where_a_run_cannot_be_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    a = timed_runs.write(tmp_path / "a")
    timed_runs.write(tmp_path / "short", steps=3)
    (timed_runs.write(tmp_path / "foreign") / "metrics.jsonl").write_text("no\nno\n")
    assert main(["diff", str(a), str(tmp_path / other)]) == 2
    assert capsys.readouterr().err.startswith("torchotel diff: ")


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), ("0", 0), ("150 %", 1.5), ("2.5%", 0.025)])
def test_reads_a_share(text: str, value: float) -> None:
    assert share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["5", "-1%", "nan", "nan%", "inf%", "", "%", "5%%", "much"])
def test_refuses_what_is_no_share(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a share: write 5% or 0\.05"):
        share(text)


PATH = "encoder.layers.11.self_attention.output_projection.linear"


def _long(folder: Path, seed: int, factor: float) -> str:
    layers = {PATH: 0.2, f"{PATH}_norm": 0.1}
    info = {"model": {"name": "Transformer" * 8, "modules": seed, "parameters": 1}}
    return str(timed_runs.write(folder, seed=seed, layers=layers, slower={PATH: factor}, info=info))


@pytest.mark.program
def test_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    _long(tmp_path / "a", 1, 1.0)
    _long(tmp_path / "b", 2, 1.5)
    code, shown = commands.on_a_terminal("diff", "a", "b", cwd=tmp_path, COLUMNS="80", NO_COLOR="1")
    assert code == 1
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^forward enc\S*…\S*ear +\d.* REGRESSION$", shown, re.MULTILINE)
    wide = commands.torchotel("diff", "a", "b", cwd=tmp_path)
    assert max(map(len, wide.stdout.splitlines())) > 130
    assert re.search(rf"^forward {PATH} .* REGRESSION$", wide.stdout, re.MULTILINE)


@pytest.mark.program
def test_colours_verdicts_and_warnings_on_a_terminal_alone(tmp_path: Path) -> None:
    _long(tmp_path / "a", 1, 1.0)
    _long(tmp_path / "b", 2, 1.5)
    _, shown = commands.on_a_terminal("diff", "a", "b", cwd=tmp_path, COLUMNS="200")
    found = re.findall(r"\x1b\[(\d\d)m *(\w+)", shown)
    assert found == [("33", "warning"), ("31", "REGRESSION"), ("31", "1")]
    for variables in ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in commands.on_a_terminal("diff", "a", "b", cwd=tmp_path, **variables)[1]
    piped = commands.torchotel("diff", "a", "b", cwd=tmp_path, NO_COLOR="", FORCE_COLOR="").stdout
    forced = commands.torchotel("diff", "a", "b", cwd=tmp_path, NO_COLOR="", FORCE_COLOR="1").stdout
    assert "\x1b" not in piped
    assert "\x1b[31mREGRESSION\x1b[0m" in forced
    assert re.sub(r"\x1b\[\d+m", "", forced) == piped
