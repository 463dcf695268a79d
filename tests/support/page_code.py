"""Run the code blocks of a page in a process of its own, in their order, as its reader would.

    python run_page.py PAGE

A block with a title is a file that the reader saves. Any other python block runs in the one namespace of the page, an
sh block in bash. What the reader has already, such as a model, stands in an `invisible-code-block` comment; above what
can't be run here stands a `skip: next` comment with the reason, and a test knows all reasons.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from unittest import SkipTest

from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.evaluators.skip import Skipper
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer
from sybil.typing import Evaluator

_INFO = re.compile(r'(?P<language>\w*)(?: title="(?P<title>[^"]+)")?$\n?', re.MULTILINE)


def parse(page: Path) -> Document:
    """Find the blocks of a page that are run or saved, and those that say why they are not."""
    return Document.parse(str(page), _blocks, SkipParser())


def languages(page: Path) -> set[str]:
    """Give the languages of all blocks of a page."""
    lexed = RawFencedCodeBlockLexer(_INFO)(Document.parse(str(page)))
    return {region.lexemes["language"] for region in lexed}


def blocks(page: Path) -> list[str]:
    """Give the code of a page that is run or saved."""
    return [str(example.parsed) for example in parse(page).examples() if not _is_skip(example)]


def not_run(page: Path) -> Iterator[tuple[str, str]]:
    """Give what is not run, by its first line, and the reason."""
    examples = list(parse(page).examples())
    for skip, block in pairwise(examples):
        if _is_skip(skip):
            _, reason = skip.parsed
            yield str(block.parsed).splitlines()[0], reason.strip('"')


def _is_skip(example: Example) -> bool:
    return isinstance(example.region.evaluator, Skipper)


def _blocks(document: Document) -> Iterator[Region]:
    for region in RawFencedCodeBlockLexer(_INFO)(document):
        yield from _evaluated(region, region.lexemes["language"], region.lexemes["title"])
    for region in DirectiveInHTMLCommentLexer("invisible-code-block")(document):
        info = _INFO.match(region.lexemes["arguments"])
        assert info is not None
        yield from _evaluated(region, info["language"], info["title"])


def _evaluated(region: Region, language: str, title: str | None) -> Iterator[Region]:
    region.parsed = region.lexemes["source"]
    evaluators: dict[str, Evaluator] = {"python": PythonEvaluator(), "sh": _run}
    region.evaluator = evaluators.get(language)
    if title is not None:
        region.evaluator = lambda example: _save(example, title)
    if region.evaluator is not None:
        yield region


def _save(example: Example, title: str) -> None:
    Path(title).write_text(example.parsed, encoding="utf-8")


def _run(example: Example) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words = ["bash", "-euo", "pipefail", "-c", example.parsed]
    subprocess.run(words, env={**os.environ, "PATH": path}, check=True)


if __name__ == "__main__":
    for example in parse(Path(sys.argv[1])).examples():
        try:
            example.evaluate()
        except SkipTest as skipped:
            print(f"{sys.argv[1]}:{example.line}: not run, {skipped}")  # noqa: T201  # for who runs a page by hand
