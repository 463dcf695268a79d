"""`torchotel diff` as a gate."""

import argparse
from pathlib import Path

import commands
import pytest
import timed_runs

from torchotel.cli import main
from torchotel.cli.diff import share


def test_fails_on_a_regression_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, same, slow = (
        str(timed_runs.write(tmp_path / name, seed=seed, slower=slower))
        for seed, (name, slower) in enumerate([("a", {}), ("same", {}), ("slow", {"backward": 1.3})])
    )
    assert main(["diff", a, same]) == 0
    assert capsys.readouterr().out.endswith("no regression beyond 5% that is more than noise\n")
    assert main(["diff", a, slow]) == 1
    assert "regressions beyond 5%: step +1" in capsys.readouterr().out
    assert main(["diff", slow, a]) == 0
    assert main(["diff", a, slow, "--max-regression", "50%"]) == 0


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
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no share: write 5% or 0\.05"):
        share(text)
