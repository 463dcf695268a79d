"""Command lines whose help fits the terminal, and whose errors suggest the flag that may be meant."""

import argparse
import sys
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

USAGE = 2
"""Exit code of a command that was used wrongly or cannot do its work."""


class HelpFormatter(argparse.HelpFormatter):
    """Wrap paragraphs to the terminal, and leave indented ones, which are examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            paragraph.rstrip()
            if paragraph.startswith(" ")
            else textwrap.fill(paragraph, width, break_on_hyphens=False, break_long_words=False)
            for paragraph in text.split("\n\n")
        )


class Parser(argparse.ArgumentParser):
    """A parser of which each command has its own usage and flags; a script's arguments are left to the script."""

    def show_help(self, _: argparse.Namespace) -> int:
        """Show the help because no command was named; the exit code is that of wrong usage."""
        self.print_help(sys.stderr)
        return USAGE

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and let nothing be unknown."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(map(self._with_guess, unknown))}")
        return arguments, unknown

    def _with_guess(self, word: str) -> str:
        flag = word.partition("=")[0]
        near = get_close_matches(flag, self._option_string_actions, 1) if flag.startswith("--") else []
        return f"{word} (did you mean {near[0]}?)" if near else word
