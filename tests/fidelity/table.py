"""The table of the page: one line for each subject."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

HEAD = (
    *("model", "calls", "spans", "bit for bit", "trace", "norms, worst"),
    *("forward, per end", "backward, sum", "per end", "worst end", "times"),
)
RULE = "|---|" + "---:|" * 2 + "---|" * 2 + "---:|" * 5 + "---|"
HEAD_OF_KINDS = ("kind", "models", "correct", "norms, worst", "backward, sum", "per end, median", "worst end")
LIBRARIES = ("torch", "torchvision", "transformers", "opentelemetry-sdk")
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"


class Key(NamedTuple):
    """Key of a subject."""

    kind: str
    name: str


class Line(NamedTuple):
    """Result of a subject, in plain values that can be sent to another process and written to a file."""

    kind: str
    name: str
    wrong: list[str]
    """Descriptions of the faults."""
    calls: int = 0
    spans: int = 0
    same: str = "-"
    trace: str = "-"
    norm: float | None = None
    """The worst relative error of a gradient norm."""
    ahead_us: float | None = None
    """Mean error of a start or end of a forward span."""
    ratio: float | None = None
    """Sum of the backward spans divided by that of the independent measurement."""
    end_us: float | None = None
    """Mean error of a start or end of a backward span."""
    worst_end_us: float | None = None
    times: str = "-"

    @property
    def key(self) -> Key:
        """Return the key of the subject."""
        return Key(self.kind, self.name)

    def __str__(self) -> str:
        counts = f"{self.calls:,}", f"{self.spans:,}"
        times = _told(self.ahead_us, ".1f", " µs"), _told(self.ratio, ".4f"), *_ends(self.end_us, self.worst_end_us)
        return _row(self.name, *counts, self.same, self.trace, _told(self.norm, ".0e"), *times, self.times)


def failed(key: Key, reason: str) -> Line:
    """Return the line of a subject that could not be checked."""
    return Line(*key, [reason], same="failed")


def write(page: Path, lines: Sequence[Line]) -> None:
    """Write the summary of each kind and its table between the two marks of the page."""
    kinds = {kind: [line for line in lines if line.kind == kind] for kind in dict.fromkeys(line.kind for line in lines)}
    sums = [_sum(kind, own) for kind, own in {**kinds, "all": lines}.items()]
    parts = [_versions(), "\n".join([_row(*HEAD_OF_KINDS), "|---|" + "---:|" * 6, *sums])]
    for kind, own in kinds.items():
        parts.append("\n".join([f"### {kind}\n", _row(*HEAD), RULE, *map(str, own)]))
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n\n{END}{rest.partition(END)[2]}")


def _sum(kind: str, lines: Sequence[Line]) -> str:
    """Return the summary line of a kind."""
    ratios = [line.ratio for line in lines if line.ratio is not None]
    ends = [line.end_us for line in lines if line.end_us is not None]
    norm = max((line.norm for line in lines if line.norm is not None), default=None)
    worst = max((line.worst_end_us for line in lines if line.worst_end_us is not None), default=None)
    span = f"{min(ratios):.4f} to {max(ratios):.4f}" if ratios else "-"
    good = sum(not line.wrong for line in lines)
    return _row(
        kind, str(len(lines)), str(good), _told(norm, ".0e"), span, *_ends(median(ends) if ends else None, worst)
    )


def _ends(typical_us: float | None, worst_us: float | None) -> tuple[str, str]:
    return _told(typical_us, ".1f", " µs"), _told(worst_us, ".0f", " µs")


def _told(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _versions() -> str:
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found += [f"Python {platform.python_version()}", f"{platform.system()} {platform.machine()}", device]
    return f"{', '.join(found)}; {datetime.now(UTC):%Y-%m-%d}"
