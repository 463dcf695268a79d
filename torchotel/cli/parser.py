"""A command line that says of a flag it does not know which one may be meant."""

import argparse
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class Parser(argparse.ArgumentParser):
    """End with the usage of the command itself, whose flags alone are known; what a script is given is its own."""

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
