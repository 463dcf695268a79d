"""Check every subject and print the table; `make fidelity` calls it.

python -m fidelity [PATTERN] [--write FILE] [--resume FILE] [--processes N]: PATTERN chooses among kinds and names,
the table is written into the page, and lines are kept in the file to resume from, as they come.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic

from fidelity.lines import known, line_of
from fidelity.table import Key, Line, write
from fidelity.truth import WORST_END_US
from fidelity.workers import lines

say = partial(print, flush=True)


def main() -> int:
    """Check what is asked for; 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m fidelity")
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--write", type=Path, help="page that the table is written into, if all subjects are in it")
    parser.add_argument("--resume", type=Path, help="file of lines: they are kept there, and not checked again")
    parser.add_argument("--processes", type=int, default=2, help="how many check at once, each on one core")
    arguments = parser.parse_args()
    chosen = [key for key in known() if re.search(arguments.pattern, " ".join(key), re.IGNORECASE)]
    if not chosen:
        parser.error(f"nothing is called {arguments.pattern!r}")
    found = _checked(chosen, arguments.resume, arguments.processes)
    if arguments.write is not None and not arguments.pattern:  # some of them are not the page's table
        write(arguments.write, found)
    bad = [line for line in found if line.wrong]
    for line in bad:
        say(line, *line.wrong[:10], sep="\n  ")
    far = [line.key[1] for line in found if (line.worst_end_us or 0) > WORST_END_US]
    say(f"an end that is off by more than {WORST_END_US} µs, as only other programs' doing may be: {len(far)}", *far)
    say(f"{len(found) - len(bad)} of {len(found)} are as they must be")
    return 1 if bad else 0


def _checked(chosen: Sequence[Key], kept: Path | None, processes: int) -> list[Line]:
    """Check those that are not kept already; give the lines of all, in their order."""
    found = {line.key: line for line in _read(kept)}
    left = [key for key in chosen if key not in found]
    began_s = monotonic()
    for done, line in enumerate(lines(left, line_of, processes), 1):
        found[line.key] = line
        if kept is not None:
            with kept.open("a") as file:
                say(json.dumps(line._asdict()), file=file)
        rest = timedelta(seconds=round((monotonic() - began_s) / done * (len(left) - done)))
        say(f"[{done}/{len(left)}, {rest} left] {line}", *line.wrong[:10])
    return [found[key] for key in chosen]


def _read(kept: Path | None) -> list[Line]:
    text = kept.read_text() if kept is not None and kept.exists() else ""
    return [Line(**json.loads(line)) for line in text.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
