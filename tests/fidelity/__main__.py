"""Check every subject and print the table; `make fidelity` calls it.

python -m fidelity [PATTERN] [--write FILE]: PATTERN chooses among kinds and names, FILE is the page to write into.
"""

import argparse
import platform
import re
import sys
import warnings
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fidelity.all_subjects import subjects
from fidelity.checked import Row, check
from fidelity.subjects import Subject
from fidelity.truth import Truth, least_disturbed

LIBRARIES = ("torch", "torchvision", "transformers", "opentelemetry-sdk")
HEAD = (
    *("model", "calls", "spans", "bit for bit", "trace"),
    *("forward, per end", "backward, sum", "per end", "worst end"),
)
RULE = "|---|" + "---:|" * 2 + "---|" * 2 + "---:|" * 4
say = partial(print, flush=True)


def main() -> int:
    """Check what is asked for; 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m fidelity")
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # the models' own
    torch.set_num_threads(1)
    chosen = [one for one in subjects() if re.search(arguments.pattern, f"{one.kind} {one.name}")]
    lines, bad = list[str](), 0
    for place, subject in enumerate(chosen, 1):
        line, wrong = _checked(subject)
        lines.append(line)
        bad += bool(wrong)
        say(f"[{place}/{len(chosen)}] {line}", *wrong[:10])
    if arguments.write is not None and not arguments.pattern:  # some of them are not the page's table
        _write(arguments.write, chosen, lines)
    say(f"{len(chosen) - bad} of {len(chosen)} are as they must be")
    return 1 if bad else 0


def _checked(subject: Subject) -> tuple[str, list[str]]:
    """Give the line of a subject, and what is wrong with it; one that raises does not end the others."""
    try:
        row = check(subject)
        truth = least_disturbed(subject) if subject.device == "cpu" else None
    except Exception as error:  # noqa: BLE001  # a model's own, or ours: it is told, and counted as wrong
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"| {' | '.join((subject.name, '-', '-', 'failed', *('-' for _ in HEAD[4:])))} |", [text]
    return _line(row, truth), row.changed + row.faults


def _line(row: Row, truth: Truth | None) -> str:
    same = "no numbers" if row.subject.device == "meta" else "yes" if not row.changed else _changed(row)
    ahead, times = "-", ("-", "-", "-")
    if truth is not None and truth.forward.ends_ns:
        ahead = f"{truth.forward.end_us:.1f} µs"
    if truth is not None and truth.backward.ends_ns:
        backward = truth.backward
        times = (f"{backward.ratio:.4f}", f"{backward.end_us:.1f} µs", f"{backward.worst_us:.0f} µs")
    right = "right" if not row.faults else f"{len(row.faults)} faults"
    cells = (row.subject.name, f"{row.calls:,}", f"{row.spans:,}", same, right, ahead, *times)
    return f"| {' | '.join(cells)} |"


def _changed(row: Row) -> str:
    return f"{len(row.changed)} differ" if row.repeats else "does not repeat itself"


def _write(page: Path, chosen: list[Subject], lines: list[str]) -> None:
    """Put the tables, one for each kind, between the page's marks."""
    parts = [_versions()]
    for kind in dict.fromkeys(subject.kind for subject in chosen):
        own = [line for subject, line in zip(chosen, lines, strict=True) if subject.kind == kind]
        parts.append("\n".join([f"### {kind}\n", f"| {' | '.join(HEAD)} |", RULE, *own]))
    text, begin, end = page.read_text(), "<!-- table -->\n", "<!-- end of table -->"
    before, _, rest = text.partition(begin)
    page.write_text(f"{before}{begin}\n" + "\n\n".join(parts) + f"\n\n{end}{rest.partition(end)[2]}")


def _versions() -> str:
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{', '.join(found)}, Python {platform.python_version()}, {platform.system()} {platform.machine()}, no GPU"


if __name__ == "__main__":
    sys.exit(main())
