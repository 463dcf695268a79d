"""Test `torchotel report`: the page is written completely or not at all."""

import io
import stat
import sys
from pathlib import Path

import pytest
from support import commands, report_runs

from torchotel.cli import main
from torchotel.cli.terminal import Progress


@pytest.mark.program
def test_writes_one_page_for_its_owner_alone(tmp_path: Path) -> None:
    """With a pipe, the command prints only the page's name, without progress."""
    report_runs.training(tmp_path / "morning")
    done = commands.torchotel("report", "morning", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("morning.html: 2.")
    page = tmp_path / "morning.html"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert page.read_text("utf-8").rstrip().endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["morning", "morning.html"]


def test_takes_the_newest_run_and_overwrites_a_page_only_where_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report_runs.training(tmp_path / "torchotel-runs" / "a", steps=2)
    page = tmp_path / "page.html"
    page.write_text("old")
    assert main(["report", "-o", "page.html"]) == 2
    told = "torchotel report: page.html: already exists; overwrite it with --force or choose another place with -o\n"
    assert (capsys.readouterr().err, page.read_text()) == (told, "old")
    assert main(["report", "-o", "page.html", "--force"]) == 0
    assert "2 training steps" in page.read_text("utf-8")
    assert capsys.readouterr().out.startswith("page.html: ")


def test_says_which_package_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "the report needs plotly: pip install plotly\n"


def test_leaves_the_old_page_where_the_run_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = report_runs.training(tmp_path / "run", steps=2)
    (folder / "metrics.jsonl").write_text("{bad\n{}\n")
    page = tmp_path / "page.html"
    page.write_text("old")
    assert main(["report", str(folder), "-o", str(page), "--force"]) == 2
    assert "metrics.jsonl: line 1 is no JSON object" in capsys.readouterr().err
    assert page.read_text() == "old"


def test_says_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = report_runs.training(tmp_path / "run", steps=1)
    assert main(["report", str(folder), "-o", str(tmp_path / "absent" / "page.html")]) == 2
    assert "page.html: cannot be written (No such file or directory); choose another place with -o" in (
        capsys.readouterr().err
    )


@pytest.mark.program
def test_needs_neither_torch_nor_opentelemetry(tmp_path: Path) -> None:
    folder = report_runs.training(tmp_path / "run", steps=1)
    code = (
        "import sys, torchotel.cli\n"
        f"assert torchotel.cli.main(['report', {str(folder)!r}]) == 0\n"
        "assert not {'torch', 'opentelemetry'} & set(sys.modules)\n"
    )
    done = commands.python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_shows_its_progress_on_a_terminal_and_takes_it_away() -> None:
    terminal, pipe = _Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with Progress(200, stream) as progress:
            progress.begin("reading")
            progress.advance(150)
            progress.begin("drawing")
    first, *_, last, nothing = terminal.getvalue().split("\r\x1b[K")[1:]
    assert (first, last, nothing) == ("reading 0%", "drawing 75%", "")
    assert pipe.getvalue() == ""
