"""Check the text of the repository for phrases that are hard to follow.

`python -m tools.check_english [PATH ...]` prints each banned phrase with its file and line. It exits with 1 if there
is one. A phrase also counts if it continues on the next line. Generated tables of the pages are skipped, because the
code that they are generated from is checked.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
FOLDERS = ("torchotel", "docs", "deploy", "tools", "benchmarks", "examples")
"""Checked without an argument; each folder with all files in it."""
SUFFIXES = {".md", ".py"}
BANNED = {
    "a component as the subject": "whoever, nobody, somebody, what is asked, what came of, what becomes of",
    "the noun": "of theirs, of ours, of yours, as above, see above, the other one",
    "if or when": "where none, where nothing, where nobody, where there is no, where there are no, where that is",
    "log, report or name": "told of, is told, are told, tells of, tell of, warned of, says so, say so",
    "export, flush or return": "bring out, brings out, brought out, bring back what, brings back, gives out",
    "include, contain or accept": "take along, takes along, taken along, brings along, brought along, takes in",
    "release, remove or delay": "let go of, lets go of, hold up, holds up, held up",
    "exporter or export": "way out, ways out",
    "a technical word": (
        "sees to, goes by, go by, amid, dearer, anew, afresh, in vain, half again, in the midst, all the same, be had,"
        " next to nothing, went NaN, lying endpoint, held against, times of a hundred"
    ),
}
"""Phrases that are nearly always wrong, by what to use instead."""
_INSTEAD = {phrase.strip().lower(): use for use, phrases in BANNED.items() for phrase in phrases.split(",")}
_BETWEEN_WORDS = r"\s+(?:[#*>]+\s+)?"  # a line break and the comment's or quote's mark may be between two words
_BANNED = re.compile(
    rf"(?<![\w.])(?:{'|'.join(phrase.replace(' ', _BETWEEN_WORDS) for phrase in _INSTEAD)})(?!\w)", re.IGNORECASE
)
_TABLE = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)


class Finding(NamedTuple):
    """A banned phrase in a text."""

    line: int
    phrase: str
    instead: str


def findings(text: str) -> Iterator[Finding]:
    """Find the banned phrases of a text."""
    written = _TABLE.sub(lambda table: "\n" * table[0].count("\n"), text)
    for match in _BANNED.finditer(written):
        phrase = re.sub(_BETWEEN_WORDS, " ", match[0])
        yield Finding(1 + written.count("\n", 0, match.start()), phrase, _INSTEAD[phrase.lower()])


def main(given: Sequence[str]) -> int:
    """Check files and folders. Return 1 if there is a banned phrase."""
    found = False
    for start in map(Path, given) if given else (ROOT / name for name in TEXTS + FOLDERS):
        for path in sorted(start.rglob("*")) if start.is_dir() else [start]:
            if path.suffix in SUFFIXES and "node_modules" not in path.parts and path.resolve() != Path(__file__):
                for line, phrase, instead in findings(path.read_text(encoding="utf-8")):
                    found = True
                    print(f"{path}:{line}: '{phrase}': use {instead}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
