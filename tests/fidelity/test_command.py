"""What `python -m fidelity` makes of subjects: lines, a page, an exit code."""

import json
import sys
from pathlib import Path

import pytest

from fidelity.table import BEGIN, END, Key, Line, failed, write

command = pytest.importorskip("fidelity.__main__", reason="torchvision or transformers is missing")
GOOD = Line("torch.nn, lazy", "LazyLinear", [], 8, 16, "yes", "right", 4e-8, 2.1, 1.0021, 0.1, 2.0, "true")
BAD = failed(Key("torch.nn, lazy", "LazyConv2d"), "ValueError: no")


def test_a_line_says_what_was_checked() -> None:
    """Numbers, trace, norms and times of a small subject each have their cell."""
    line = command.line_of(Key("torch.nn, normalization", "GroupNorm"))
    assert line[3:7] == (8, 16, "yes", "right")
    assert line.norm is not None
    assert 0 < line.norm < 1e-6
    assert line.ratio == pytest.approx(1, abs=0.5)


def test_a_subject_that_raises_has_failed() -> None:
    """The reason is told, and nothing raised."""
    line = command.line_of(Key("no kind", "no name"))
    assert line.same == "failed"
    assert line.wrong[0].startswith("KeyError")


@pytest.mark.parametrize(("kept", "code", "told"), [((GOOD, GOOD), 0, "2 of 2"), ((GOOD, BAD), 1, "1 of 2")])
def test_lines_are_taken_up_from_a_file(
    kept: tuple[Line, Line],
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is kept is not checked again, and counts for the exit code; names are found in any case."""
    file = tmp_path / "lines.jsonl"
    names = ("LazyLinear", "LazyConv2d")
    lines = [json.dumps(line._replace(name=name)._asdict()) for line, name in zip(kept, names, strict=True)]
    file.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sys, "argv", ["fidelity", "^Torch.nn, lazy", "--resume", str(file)])
    assert command.main() == code
    assert told in capsys.readouterr().out
    assert len(file.read_text().splitlines()) == len(names)


def test_what_may_have_been_disturbed_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second look, alone, is what counts, and is kept."""
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(GOOD._replace(wrong=["far off"], times="not true")._asdict()) + "\n")
    monkeypatch.setattr(sys, "argv", ["fidelity", "LazyLinear", "--resume", str(file)])
    assert command.main() == 0
    assert "1 subjects with doubtful times" in capsys.readouterr().out
    assert json.loads(file.read_text().splitlines()[-1])["times"] == "true"


def test_a_page_is_written_anew(tmp_path: Path) -> None:
    """Tables of the last time go, and what stands around them stays."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    write(page, [GOOD, BAD])
    first = page.read_text()
    write(page, [GOOD, BAD])
    assert page.read_text() == first
    assert first.startswith(f"before\n{BEGIN}")
    assert first.endswith(f"{END}\nafter\n")
    assert "old" not in first
    assert str(GOOD) in first
    assert "| torch.nn, lazy | 2 | 1 | 4e-08 | 1.0021 to 1.0021 | 0.1 µs | 2 µs |" in first
