"""Find the rank that the other ranks of a run wait for.

In a synchronous training all ranks take the same time for a step, since fast ranks wait in collectives for the slow
one. So the slow rank is the one that waits least. Its own time, without waits, shows the phase and the layer that make
it slow. Steps of different ranks are joined by their alignment, which needs no clock.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from torchotel import _semconv as names
from torchotel._records import PHASES
from torchotel._utils.text import cut, duration
from torchotel.runs.compare import WARM_UP_STEPS, run_end, self_times
from torchotel.runs.rank_folders import host_of, rank_of
from torchotel.runs.reader import LayerKey, Run, calls_by_trace

MIN_STEPS = 20
"""Common steps after the warm-up that are needed to name a rank."""
MAX_STEPS = 2_000
"""Largest number of steps that are compared."""
MIN_SHARE = 2 / 3
"""Share of these steps in which the rank has to wait least."""
MIN_COST = 0.02
"""Share of the median step below which waits and costs do not matter."""
MAIN_PART = 0.5
"""Share of a cost from which a phase or a layer explains it."""
MIN_DETAILED = 3
"""Common detailed steps that are needed to name a layer."""
MAX_OTHERS = 8
"""Largest number of other ranks whose layers are read."""
NOT_ALIGNED = "the ranks have no process group, so their steps cannot be matched"
_IN_WORDS = {
    "between": "time between steps",
    "data": "data loading",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer step",
    "other": "code between the phases",
}


class AlignedStep(NamedTuple):
    """One step of one rank."""

    duration_s: float
    wait_s: float
    """Seconds of collectives."""
    own_s: Sequence[float]
    """Seconds of each of PHASES, without the collectives that began in the phase."""
    phases_with_waits: frozenset[str]
    trace_id: str
    """Empty: the step is not detailed."""


class RankTimes(NamedTuple):
    """One rank, with its median times over the common steps."""

    rank: int
    host: str
    end: str
    """How the rank ended, in words."""
    steps: int
    """All steps of the rank."""
    step_s: float
    wait_s: float
    own_s: Mapping[str, float]
    """Seconds without collectives by phase."""


class SlowRank(NamedTuple):
    """The rank that the other ranks wait for, and what makes it slow."""

    rank: int
    host: str
    phase: str
    explains: bool
    """Whether this phase explains most of the cost."""
    cost_s: float
    """Seconds by which the rank makes a step longer."""
    share: float
    """This cost as a share of the median step."""
    layer: str = ""
    """Path of the layer that explains most of the cost in a forward or backward; empty: no single layer does."""

    def __str__(self) -> str:
        host = f" on host {cut(self.host)}" if self.host else ""
        layer = f", most of it in layer {cut(self.layer)}" if self.layer else ""
        phase = _IN_WORDS[self.phase]
        several = f"several phases, most of all its {phase}, cost every step"
        what = f"its {phase} costs every step" if self.explains else several
        return f"rank {self.rank}{host}: {what} {duration(self.cost_s)} ({self.share:.0%}){layer}"


class RankComparison(NamedTuple):
    """The ranks of a run, and the slow one if the data shows it."""

    ranks: Sequence[RankTimes]
    common_steps: int
    """Steps after the warm-up that all ranks have recorded."""
    slow: SlowRank | None
    reason: str = ""
    """Why no rank is named; empty if one is."""

    @property
    def conclusion(self) -> str:
        """Return the slow rank, or the reason why none is named, as a sentence without a full stop."""
        return str(self.slow) if self.slow else f"no rank is named as slow: {self.reason}"


def compare_ranks(runs: Sequence[Run]) -> RankComparison:
    """Compare the ranks of a run. Memory: `MAX_STEPS` steps of each rank, and the layers of a few ranks."""
    steps, counts = zip(*map(_read_steps, runs), strict=True)
    common = sorted(set.intersection(*(set(aligned) for aligned in steps)))[WARM_UP_STEPS:]
    rows = [[aligned[key] for key in common] for aligned in steps]
    ranks = [_rank_times(run, row, count) for run, row, count in zip(runs, rows, counts, strict=True)]
    if not any(counts):
        found: _Finding | str = "no rank has recorded a step"
    else:
        found = _find(rows) if len(runs) == 1 or any(steps) else NOT_ALIGNED
    if isinstance(found, str):
        return RankComparison(ranks, len(common), None, found)
    named, layer = ranks[found.position], _layer(runs, rows, found)
    share = found.cost_s / named.step_s
    slow = SlowRank(named.rank, named.host, found.phase, found.explains, found.cost_s, share, layer)
    return RankComparison(ranks, len(common), slow)


def _read_steps(run: Run) -> tuple[Mapping[tuple[int, int], AlignedStep], int]:
    """Return the steps by their alignment, and the number of all steps."""
    steps: dict[tuple[int, int], AlignedStep] = {}
    count = 0
    for record in run.records():
        if record.kind != "step":
            continue
        count += 1
        if record.alignment is not None and not record.error_type:
            steps[record.alignment] = AlignedStep(
                record.duration_s,
                sum(record.waits.values()),
                [max(0.0, record.phases.get(name, 0.0) - record.waits.get(name, 0.0)) for name in PHASES],
                frozenset(record.waits),
                record.trace_id if record.detailed else "",
            )
            if len(steps) >= 2 * MAX_STEPS:
                steps = _sample(steps)
    return _sample(steps), count


def _sample(steps: Mapping[tuple[int, int], AlignedStep]) -> dict[tuple[int, int], AlignedStep]:
    """Keep at most `MAX_STEPS` steps, chosen by the hash of the alignment: the same ones on all ranks."""
    return {alignment: steps[alignment] for alignment in sorted(steps, key=hash)[:MAX_STEPS]}


def _rank_times(run: Run, steps: Sequence[AlignedStep], count: int) -> RankTimes:
    def typical(values: Iterable[float]) -> float:
        return median(values) if steps else 0.0

    own_s = {name: typical(step.own_s[index] for step in steps) for index, name in enumerate(PHASES)}
    step_s, wait_s = typical(step.duration_s for step in steps), typical(step.wait_s for step in steps)
    return RankTimes(rank_of(run), host_of(run), run_end(run.info), count, step_s, wait_s, own_s)


class _Finding(NamedTuple):
    position: int
    """Position of the rank among the runs."""
    phase: str
    explains: bool
    cost_s: float


def _find(rows: Sequence[Sequence[AlignedStep]]) -> _Finding | str:
    """Return the slow rank, or the reason why there is none. A row contains the common steps of one rank."""
    steps = list(zip(*rows, strict=True))
    if len(rows) < 2:  # noqa: PLR2004 - a rank alone waits for no other
        return "only one rank was recorded"
    if len(steps) < MIN_STEPS:
        return (
            f"after the first {WARM_UP_STEPS} steps, {len(steps)} steps are common to all ranks, and {MIN_STEPS} are "
            "needed"
        )
    if not any(step.phases_with_waits for row in rows for step in row):
        return "no collectives were recorded, which needs torch 2.14 or later"
    step_s = median(step.duration_s for row in rows for step in row)
    if max(median(step.wait_s for step in row) for row in rows) < MIN_COST * step_s:
        return (
            f"the recorded collectives take less than {MIN_COST:.0%} of a step on every rank; on a GPU, the time of a "
            "collective is only the time until it is issued"
        )
    ((position, times),) = Counter(map(_waits_least, steps)).most_common(1)
    if times < MIN_SHARE * len(steps):
        return "no rank waits least in most of the steps"
    return _judge(rows, position, step_s)


def _waits_least(step: Sequence[AlignedStep]) -> int:
    """Return the position of the rank that waits least in a step of all ranks."""
    waits_s = [of_rank.wait_s for of_rank in step]
    return waits_s.index(min(waits_s))


def _judge(rows: Sequence[Sequence[AlignedStep]], position: int, step_s: float) -> _Finding | str:
    """Return what a rank costs the others, or the reason why the cost does not count."""
    others = [row for at, row in enumerate(rows) if at != position]
    pairs = list(zip(rows[position], zip(*others, strict=True), strict=True))
    waits_s = [median(step.wait_s for step in steps) - own.wait_s for own, steps in pairs]
    excess_s = {
        name: median(own.own_s[at] - median(step.own_s[at] for step in steps) for own, steps in pairs)
        for at, name in enumerate(PHASES)
    }
    cost_s = min(median(waits_s), sum(max(0.0, excess) for excess in excess_s.values()))
    spread_s = median(abs(wait_s - median(waits_s)) for wait_s in waits_s)
    if cost_s < MIN_COST * step_s or cost_s <= spread_s:
        return "the differences between the ranks are within the variation of the steps"
    # A collective can overlap with computation, so the own time of a phase with collectives is a lower bound: the other
    # ranks, which wait longer, can seem to compute less. A phase without collectives has no such error.
    uncertain = frozenset[str]().union(*(step.phases_with_waits for row in rows for step in row))
    explain = {name: excess for name, excess in excess_s.items() if excess >= MAIN_PART * cost_s}
    exact = {name: excess for name, excess in explain.items() if name not in uncertain}
    phase = max(exact or excess_s, key=lambda name: excess_s[name])
    return _Finding(position, phase, phase in explain, cost_s)


def _layer(runs: Sequence[Run], rows: Sequence[Sequence[AlignedStep]], found: _Finding) -> str:
    """Return the path of the layer that explains most of the cost; empty if there is none."""
    detailed = [at for at, steps in enumerate(zip(*rows, strict=True)) if all(step.trace_id for step in steps)]
    if not found.explains or found.phase not in {"forward", "backward"} or len(detailed) < MIN_DETAILED:
        return ""

    def layers_of(rank: int) -> Mapping[LayerKey, float]:
        return _layer_times(runs[rank], {rows[rank][at].trace_id for at in detailed}, found.phase)

    others: defaultdict[LayerKey, list[float]] = defaultdict(list)
    for rank in [rank for rank in range(len(runs)) if rank != found.position][:MAX_OTHERS]:
        for layer, time_s in layers_of(rank).items():
            others[layer].append(time_s)
    own = layers_of(found.position)
    excess_s = {layer: own[layer] - median(times) for layer, times in others.items() if layer in own}
    slowest = max(excess_s, key=lambda layer: excess_s[layer], default=None)
    return slowest.path if slowest is not None and excess_s[slowest] >= MAIN_PART * found.cost_s else ""


def _layer_times(run: Run, trace_ids: set[str], direction: str) -> Mapping[LayerKey, float]:
    """Return the median seconds of self time of each layer in the traces."""
    times: defaultdict[LayerKey, list[float]] = defaultdict(list)
    # The root span of an evaluation within a step has no step number.
    in_steps = (span for span in run.spans() if span.trace_id in trace_ids and names.STEP_NUMBER in span.attributes)
    for _, calls in calls_by_trace(in_steps):
        for layer, time_s in self_times(calls).items():
            if layer.direction == direction:
                times[layer].append(time_s)
    return {layer: median(values) for layer, values in times.items() if len(values) >= MIN_DETAILED}
