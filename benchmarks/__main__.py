"""Measure the cost of torchotel and compare it with other instruments: `make bench`.

Prints a table for each part, the targets, and the shares next to those of the baseline. Exits with 1 if a share got
worse. All parts take some twenty minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch.profiler; read when torch is loaded

import torch

from benchmarks import memory, pages
from benchmarks.all_parts import parts
from benchmarks.gate import compare
from benchmarks.parts import Conditions, Part, Table, Tables
from benchmarks.sink import Sink
from benchmarks.targets import reached

INTERRUPTED = 130
"""The exit code in shells of a program that SIGINT ended."""
BASELINE = Path(__file__).with_name("baseline.json")
say = partial(print, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, or read figures, and print them. Return 1 if a share got worse."""
    options = _parse(words)  # reads the baseline before --json overwrites it
    chosen = [part for part in parts(quick=options.quick) if part.name in options.parts or not options.parts]
    found = options.read or _measure_all(chosen, options)
    tables: dict[str, Table] = found["parts"]
    sections = [pages.section(part, tables[part.name]) for part in chosen if part.name in tables]
    if options.read:
        say("\n\n".join(sections))
    if not found["quick"]:  # a few steps of a tiny model have no targets
        sections.append(pages.targets_section(list(reached(tables))))
        say(f"\n{sections[-1]}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if found["interrupted"]:
        return INTERRUPTED
    if options.write:
        pages.write([found["machine"], *sections])
    if options.baseline is None:
        say(f"no comparison: {BASELINE} does not exist; --json writes it")
        return 0
    return _hold_against(options.baseline, tables)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="the parts to measure (all)")
    parser.add_argument("--quick", action="store_true", help="a short test run on a tiny model")
    parser.add_argument(
        "--longer",
        type=float,
        default=1,
        metavar="TIMES",
        help="factor on the measuring time; at least two rounds are run (%(default)s)",
    )
    parser.add_argument("--memory-steps", type=int, default=2000, help="steps of the memory part (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--read", type=_figures, metavar="FILE", help="read the figures from this file instead of measuring"
    )
    parser.add_argument("--write", action="store_true", help="write the tables into docs/overhead.md")
    parser.add_argument("--baseline", type=_figures, metavar="FILE", help=f"baseline instead of {BASELINE.name}")
    options = parser.parse_args(words)
    known = [part.name for part in parts(quick=options.quick)]
    if unknown := [name for name in options.parts if name not in known]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(known)}")
    if options.read and not options.read["parts"].keys() & (options.parts or known):
        parser.error(
            f"--read: the file has {', '.join(options.read['parts']) or 'no parts'}, and none of the requested ones"
        )
    if options.write and (options.parts or options.quick):
        parser.error("--write needs all parts at their full length, because it replaces all tables of the page")
    if options.longer <= 0 or options.memory_steps < memory.LOOKS:
        parser.error(f"--longer must be above 0, and --memory-steps at least {memory.LOOKS}")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    if options.baseline is None and BASELINE.exists():
        options.baseline = _figures(str(BASELINE))
    return options


def _figures(file: str) -> dict[str, Any]:
    """Read a file that --json wrote."""
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        return {
            "quick": False,
            "interrupted": False,
            "parts": dict(found["parts"]),
            "machine": found["machine"],
            **found,
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{file} has no figures of a benchmark: {error!r}") from error


def _measure_all(chosen: Sequence[Part], options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)  # then backward runs on the measuring thread
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # lost spans are counted instead
    gc.collect()
    gc.freeze()  # the libraries' objects: collecting them before each block takes longer than the block
    tables: dict[str, Table] = {}
    found = {"machine": _machine(), "quick": options.quick, "interrupted": False, "parts": tables}
    say(found["machine"], "\n")
    began_s = time.monotonic()
    try:
        with Sink() as sink:
            conditions = Conditions(sink, options.quick, options.longer, options.memory_steps, _tell)
            for number, part in enumerate(chosen, 1):
                passed = timedelta(seconds=round(time.monotonic() - began_s))
                say(f"[{number}/{len(chosen)}, {passed} passed] {part.title}")
                tables[part.name] = part.measure(conditions)
                _tell("")
                sink.count()  # so that the next part counts only its own spans
                say(f"{pages.section(part, tables[part.name])}\n")
    except KeyboardInterrupt:
        _tell("")
        say("interrupted: the figures measured so far follow")
        found["interrupted"] = True
    gc.unfreeze()  # else libraries warn at exit about objects that were never released
    return found


def _tell(text: str) -> None:
    """Show the progress on the last line of a terminal; a file gets only the figures."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _hold_against(baseline: dict[str, Any], tables: Tables) -> int:
    compared = list(compare(tables, baseline["parts"]))
    if compared:
        say(pages.gate_section(compared, baseline["machine"]))
    return 1 if any(one.worse for one in compared) else 0


def _machine() -> str:
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} CPUs, 1 torch thread; {datetime.now(UTC):%Y-%m-%d}, when an iteration of an empty Python"
        f" loop took {_turn_ns():.0f} ns and the load average was {os.getloadavg()[0]:.1f}"
    )


def _turn_ns(turns: int = 1_000_000) -> float:
    """Time an iteration of an empty loop, because the speed of shared machines varies by a factor of three."""
    start_ns = time.thread_time_ns()
    for _ in range(turns):
        pass
    return (time.thread_time_ns() - start_ns) / turns


if __name__ == "__main__":
    sys.exit(main())
