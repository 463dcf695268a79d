"""Check every subject and print the table; `make fidelity` calls it.

python -m fidelity [PATTERN] [--write FILE] [--resume FILE] [--processes N] [--device cuda]: PATTERN selects kinds and
names. --write writes the table into the page. --resume appends each line to the file and skips the subjects that it
already contains. --device trains the subjects on a device; its algorithms are set to repeat their results.
"""

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic

from fidelity.lines import EXCLUDED, NO_NUMBERS, UNREPEATABLE, disturbed, known, line_of
from fidelity.table import Key, Line, write
from fidelity.workers import lines

say = partial(print, flush=True)


def main() -> int:
    """Check the chosen subjects. Return 1 if a subject has a fault."""
    parser = argparse.ArgumentParser(prog="python -m fidelity")
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--write", type=Path, help="page to write the table into, if all subjects are chosen")
    parser.add_argument("--resume", type=Path, help="file to which lines are appended; its subjects are skipped")
    parser.add_argument("--processes", type=int, default=2, help="number of parallel processes, each on one core")
    parser.add_argument("--device", default="cpu", help="device of the subjects that compute numbers (%(default)s)")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and (arguments.write or arguments.resume):
        parser.error("--write and --resume are for the CPU: the page and the file have no device")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products repeat their results
    chosen = [key for key in known() if re.search(arguments.pattern, " ".join(key), re.IGNORECASE)]
    if not chosen:
        parser.error(f"no kind or name matches {arguments.pattern!r}")
    check = partial(line_of, device=arguments.device)
    found = _checked(chosen, check, arguments.resume, arguments.processes)
    if arguments.write is not None and not arguments.pattern:  # the page needs all subjects
        write(arguments.write, found)
    bad = [line for line in found if line.wrong]
    for line in bad:
        say(line, *line.wrong[:10], sep="\n  ")
    count = Counter(line.same for line in found)
    say(f"{len(found) - len(bad) - count[EXCLUDED]} of {len(found) - count[EXCLUDED]} are correct")
    if arguments.device != "cpu":
        say(f"{count[EXCLUDED]} more do not run on {arguments.device}, with or without torchotel")
        say(
            f"{count[UNREPEATABLE]} compute other numbers in each run, with or without torchotel: only the trace counts"
        )
        say(f"{count[NO_NUMBERS]} run on the meta device, which computes no numbers")
    return 1 if bad else 0


def _checked(chosen: Sequence[Key], check: Callable[..., Line], kept: Path | None, processes: int) -> list[Line]:
    """Check the subjects that are not in the file; return the lines of all, in order."""
    found = {line.key: line for line in _read(kept)}
    _check([key for key in chosen if key not in found], check, processes, found, kept)
    again = [key for key in chosen if disturbed(found[key])]
    if again:
        say(f"{len(again)} subjects with doubtful times, perhaps because of other programs, are checked again, alone")
        _check(again, partial(check, alone=True), 1, found, kept)
    return [found[key] for key in chosen]


def _check(
    keys: Sequence[Key], check: Callable[[Key], Line], processes: int, found: dict[Key, Line], kept: Path | None
) -> None:
    began_s = monotonic()
    for done, line in enumerate(lines(keys, check, processes), 1):
        found[line.key] = line
        if kept is not None:
            with kept.open("a") as file:
                say(json.dumps(line._asdict()), file=file)
        rest = timedelta(seconds=round((monotonic() - began_s) / done * (len(keys) - done)))
        say(f"[{done}/{len(keys)}, {rest} left] {line}", *line.wrong[:10])


def _read(kept: Path | None) -> list[Line]:
    text = kept.read_text() if kept is not None and kept.exists() else ""
    return [Line(**json.loads(line)) for line in text.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
