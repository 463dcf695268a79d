"""Flags that no command knows."""

from pathlib import Path

import commands
import pytest

from torchotel.cli import main


@pytest.mark.parametrize(
    ("words", "usage", "said"),
    [
        (["run", "--detial", "all", "train.py"], "torchotel run ", "--detial (did you mean --detail?)"),
        (["run", "--no-shape", "train.py"], "torchotel run ", "--no-shape (did you mean --no-shapes?)"),
        (["diff", "a", "b", "--max-regresion=5%"], "torchotel diff ", "--max-regresion=5% (did you mean --max-reg"),
        (["report", "run", "--ouput", "x.html"], "torchotel report ", "--ouput (did you mean --output?) x.html"),
        (["summary", "--frequency"], "torchotel summary ", "unrecognized arguments: --frequency\n"),
        (["--versoin", "stack", "status"], "torchotel ", "--versoin (did you mean --version?)"),
    ],
)
def test_says_which_flag_may_be_meant(
    capsys: pytest.CaptureFixture[str], words: list[str], usage: str, said: str
) -> None:
    """Below the usage of the command that does not know it."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(f"usage: {usage}")
    assert said in told


def test_leaves_the_flags_of_a_script_to_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys, torch\nprint(sys.argv[1:])\n")
    done = commands.torchotel("run", "-q", "own.py", "--detial", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['--detial', '--quiet']\n")
