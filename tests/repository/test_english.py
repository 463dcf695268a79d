"""The check of the repository's English."""

from pathlib import Path

import pytest

from tools.check_english import FOLDERS, ROOT, TEXTS, Finding, findings, main


def test_a_banned_phrase_is_found_with_its_line() -> None:
    text = "One.\nThe worker lets go of spans.\n"
    assert list(findings(text)) == [Finding(2, "lets go of", "release, remove or delay")]


@pytest.mark.parametrize("text", ["# bring\n# out", "Bring\nout", "> bring\n> out"])
def test_a_phrase_on_two_lines_is_found(text: str) -> None:
    assert [(one.line, one.phrase.lower()) for one in findings(text)] == [(1, "bring out")]


def test_parts_of_words_names_and_generated_tables_are_not_found() -> None:
    """Lines after a table keep their number."""
    text = "somebodys, endpoint.amid()\n<!-- table: x -->\n| nobody |\n<!-- end of table -->\nNobody."
    assert [(one.line, one.phrase) for one in findings(text)] == [(5, "Nobody")]


def test_prints_findings_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.md").write_text("The worker exports the span.")
    assert main([str(tmp_path)]) == 0
    (tmp_path / "bad.py").write_text("# Whoever reads this.")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path / 'bad.py'}:1: 'Whoever': use a component as the subject\n"


def test_all_checked_files_and_folders_exist() -> None:
    assert [name for name in TEXTS + FOLDERS if not (ROOT / name).exists()] == []


def test_the_repository_has_no_banned_phrase(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out
