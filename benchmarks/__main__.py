"""Measure what torchotel costs, beside what else there is: `make bench`.

Prints a table for each part, what had to be reached, and the shares of the baseline beside those of now; exits with 1
where one of them got worse. All of it takes some twenty minutes, and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's own words, read when torch is loaded

import torch

from benchmarks import pages
from benchmarks.all_parts import parts
from benchmarks.gate import compare
from benchmarks.parts import Conditions, Part, Table, Tables
from benchmarks.sink import Sink
from benchmarks.targets import reached

BASELINE = Path(__file__).with_name("baseline.json")
say = partial(print, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, or read what was, and print; 1 where something got worse."""
    options = _parse(words)
    baseline = _read(options.baseline) if options.baseline.exists() else None  # before --json writes over it
    chosen = [part for part in parts(quick=options.quick) if re.search(options.pattern, part.name)]
    found = _read(options.read) if options.read else _measure_all(chosen, options)
    tables: dict[str, Table] = found["parts"]
    sections = [pages.section(part, tables[part.name]) for part in chosen if part.name in tables]
    if options.read:
        say("\n\n".join(sections))
    if not options.quick:  # a few steps of a tiny model reach nothing
        sections.append(pages.targets_section(list(reached(tables))))
        say(f"\n{sections[-1]}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.write:
        pages.write([found["machine"], *sections])
    if baseline is None:
        say(f"there is no {options.baseline} to compare with: --json writes one")
        return 0
    return _hold_against(baseline["parts"], tables)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("pattern", nargs="?", default="", help="of the parts to measure, such as transformer or worker")
    parser.add_argument("--quick", action="store_true", help="as short as it can be, on a tiny model: does it run?")
    parser.add_argument("--longer", type=float, default=1, metavar="TIMES", help="compare the instruments for longer")
    parser.add_argument("--memory-steps", type=int, default=2000, help="of the training looked at (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing, and take the figures from there")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/overhead.md")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="figures to compare with (%(default)s)")
    options = parser.parse_args(words)
    if options.write and (options.pattern or options.quick):
        parser.error("--write takes all parts at their full length: some of them are not the page's tables")
    return options


def _measure_all(chosen: Sequence[Part], options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)  # backward then runs on the thread that measures
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what it loses is counted
    gc.collect()
    gc.freeze()  # what the libraries brought along: to look through it before each block takes longer than the block
    tables: dict[str, Table] = {}
    say(_machine(), "\n")
    with Sink() as sink:
        conditions = Conditions(sink, options.quick, options.longer, options.memory_steps)
        for part in chosen:
            tables[part.name] = part.measure(conditions)
            sink.count()  # so that nobody counts what another has sent
            say(f"{pages.section(part, tables[part.name])}\n")
    return {"machine": _machine(), "parts": tables}


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _hold_against(baseline: Tables, tables: Tables) -> int:
    compared = list(compare(tables, baseline))
    say(pages.gate_section(compared))
    return 1 if any(one.worse for one in compared) else 0


def _machine() -> str:
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} CPUs, 1 torch thread; a turn of an empty Python loop takes {_turn_ns():.0f} ns"
    )


def _turn_ns(turns: int = 1_000_000) -> float:
    """Time an empty loop: what shared machines do in a microsecond differs by three times from hour to hour."""
    start_ns = time.thread_time_ns()
    for _ in range(turns):
        pass
    return (time.thread_time_ns() - start_ns) / turns


if __name__ == "__main__":
    sys.exit(main())
