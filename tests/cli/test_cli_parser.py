"""Test errors on unknown flags, and the help."""

from pathlib import Path

import pytest
from support import commands

from torchotel.cli import COMMANDS, main


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
    """The error shows the usage of the command, and suggests a similar flag."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(f"usage: {usage}")
    assert said in told


@pytest.mark.parametrize("words", [[], ["stack"]], ids=["torchotel", "torchotel stack"])
def test_a_missing_command_shows_the_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command, the help is printed to standard error with the exit code of wrong usage."""
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"usage: {' '.join(['torchotel', *words])} ")
    assert all(command in shown.err for command in (["up", "down", "status"] if words else ["run", "report", "stack"]))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line of the help is wider than 80 columns, and examples are not wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"] if command else ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    examples = (
        [line for line in (COMMANDS[command].__doc__ or "").splitlines() if line.startswith(" ")] if command else []
    )
    assert [line for line in examples if line not in lines] == []


def test_options_are_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    """The options of the help are grouped under headings."""
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    places = [shown.index(word) for word in ("\nrecording:", "\n  --detail", "\nexport of traces", "\n  --endpoint")]
    assert places == sorted(places)


@pytest.mark.program
def test_leaves_the_flags_of_a_script_to_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys, torch\nprint(sys.argv[1:])\n")
    done = commands.torchotel("run", "-q", "own.py", "--detial", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['--detial', '--quiet']\n")
