"""The command line: one file a command, whose docstring is its help."""

import argparse
import sys
from collections.abc import Sequence

from torchotel._types import ConfigError
from torchotel._utils.text import MAX_MESSAGE, cut
from torchotel._utils.version import package_version
from torchotel.cli import demo, diff, doctor, export, report, run, stack, summary
from torchotel.cli.parser import USAGE, HelpFormatter, Parser
from torchotel.runs import RunError

COMMANDS = {
    "run": run,
    "demo": demo,
    "summary": summary,
    "report": report,
    "diff": diff,
    "export": export,
    "doctor": doctor,
    "stack": stack,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code: 0 good, 1 the check failed, 2 usage; of `run`, the script's."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.call(arguments))
    except (ConfigError, RunError) as error:
        print(f"torchotel {arguments.command}: {cut(error, MAX_MESSAGE)}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python would complain once more at exit.
        sys.stderr.close()
        return 1


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
            # An abbreviated option could one day be a script's own.
            allow_abbrev=False,
        )
        command.set_defaults(call=module.call)
        module.add_arguments(command)
    return parser
