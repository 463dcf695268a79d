"""The command line: one file a command, whose module docstring is the command's help."""

import argparse
import sys
import textwrap
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from torchotel._limits import MAX_MESSAGE
from torchotel._types import ConfigError
from torchotel._utils.installation import package_version
from torchotel._utils.text import cut
from torchotel.cli import demo, diff, doctor, export, hang, report, run, stack, summary
from torchotel.runs import RunError

USAGE = 2
"""Exit code of a command with wrong arguments, or with input that the command cannot use."""

COMMANDS = {
    "run": run,
    "demo": demo,
    "summary": summary,
    "report": report,
    "diff": diff,
    "hang": hang,
    "export": export,
    "doctor": doctor,
    "stack": stack,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 success, 1 failed check, 2 wrong usage; for `run`, the script's."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.call(arguments))
    except (ConfigError, RunError) as error:
        print(f"torchotel {arguments.command}: {cut(error, MAX_MESSAGE)}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has ended. Python would report the error again at exit.
        sys.stderr.close()
        return 1


class HelpFormatter(argparse.HelpFormatter):
    """Wrap paragraphs to the terminal's width; indented paragraphs are examples and stay unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            paragraph.rstrip()
            if paragraph.startswith(" ")
            else textwrap.fill(paragraph, width, break_on_hyphens=False, break_long_words=False)
            for paragraph in text.split("\n\n")
        )


class Parser(argparse.ArgumentParser):
    """Parse a command line; errors show the command's usage and suggest the flag that may be meant."""

    def show_help(self, _: argparse.Namespace) -> int:
        """Print the help to standard error and return the exit code of wrong usage, since no command was named."""
        self.print_help(sys.stderr)
        return USAGE

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments; unknown arguments are an error of the command, not of the whole command line."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(map(self._with_suggestion, unknown))}")
        return arguments, unknown

    def _with_suggestion(self, word: str) -> str:
        flag = word.partition("=")[0]
        near = get_close_matches(flag, self._option_string_actions, 1) if flag.startswith("--") else []
        return f"{word} (did you mean {near[0]}?)" if near else word


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="torchotel", description="OpenTelemetry for PyTorch training.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"torchotel {package_version()}")
    parser.set_defaults(call=parser.show_help)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = module.__doc__ or ""
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=HelpFormatter,
            # A new option of torchotel could make an abbreviation ambiguous.
            allow_abbrev=False,
        )
        command.set_defaults(call=module.call)
        module.add_arguments(command)
    return parser
