"""Render a diff as plain aligned columns."""

from collections.abc import Iterable, Sequence

from torchotel._utils.text import GREEN, RED, YELLOW, Output, duration, printable
from torchotel.runs.compare import Diff, Row, Spread
from torchotel.runs.summary_table import table

_COMPARED = {
    "plain": "steps without detail",
    "detailed": "detailed steps",
    "all": "all steps, since there are too few of one kind: detail itself takes time",
}
_HEAD = ("A", "±", "B", "±", "change", "interval", "")
_MANY = 10
"""A change of ten times or more is shown as a factor; an interval end that is ten times away is shown as unknown."""
_UNKNOWN = "?"
_SPARE = ((2, 4), (1,))
"""Columns that a narrow terminal leaves out: ± of both sides first, then A, which B and the change imply."""
_COLOURS = {"REGRESSION": RED, "slower": YELLOW, "faster": GREEN}
_PLAIN = Output()


def render_diff(diff: Diff, limit: float, *, top: int = 10, output: Output = _PLAIN) -> str:
    """Return a diff as text: the `top` layers with the largest changes, and all regressions."""
    steps = diff.steps[0]
    compared = f"compared: {_counts(diff)} {_COMPARED[diff.compared]}; warm-up and failed steps left out"
    parts = [
        *_differences(diff, output),
        _wrapped([compared], output),
        _rows("median", [(row.name if row is steps else f"  {row.name}", row) for row in diff.steps], limit, output),
    ]
    shown = [row for rank, row in enumerate(diff.layers) if rank < top or row.verdict(limit) == "REGRESSION"]
    if shown:
        parts.append(_rows("layer, self time a step", [(row.name, row) for row in shown], limit, output))
    elif not diff.layers:
        both = diff.only_before and diff.only_after
        why = "no layer has the same name in both runs" if both else "no step was recorded in detail in both runs"
        parts.append(_wrapped([f"no layers to compare: {why}"], output))
    notes = [_only(name, paths, top) for name, paths in (("A", diff.only_before), ("B", diff.only_after)) if paths]
    hidden = len(diff.layers) - len(shown)
    if hidden:
        notes.insert(0, f"{hidden:,} further layers, which changed less (--top shows more)")
    if notes:
        parts.append(_wrapped(notes, output))
    conclusion = _wrapped([_conclusion(diff, limit)], output)
    return "\n\n".join([*parts, output.colour(conclusion, RED) if diff.regressions(limit) else conclusion])


def _wrapped(lines: Iterable[str], output: Output) -> str:
    return "\n".join(piece for line in lines for piece in output.wrap(line))


def _differences(diff: Diff, output: Output) -> Sequence[str]:
    if not diff.differences:
        return ()
    title = output.colour("warning: more differs than the times", YELLOW)
    return [f"{title}\n{table(('', 'A', 'B'), diff.differences, left=3, output=output)}"]


def _counts(diff: Diff) -> str:
    steps = f"{diff.steps[0].before.steps:,} and {diff.steps[0].after.steps:,}"
    if diff.runs == (1, 1):
        return steps
    return f"{diff.runs[0]:,} and {diff.runs[1]:,} runs of at least {steps}"


def _rows(title: str, rows: Sequence[tuple[str, Row]], limit: float, output: Output) -> str:
    cells = [(name, *_spread(row.before), *_spread(row.after), *_change(row), row.verdict(limit)) for name, row in rows]
    return table((title, *_HEAD), cells, left=1, output=output, spare=_SPARE, colours=_COLOURS)


def _spread(spread: Spread) -> tuple[str, str]:
    return duration(spread.median_s), f"{spread.half_width:.1%}"


def _change(row: Row) -> tuple[str, str]:
    change = row.change
    if change is None:
        return _UNKNOWN, ""
    if row.after.median_s and not row.before.median_s:
        return "from 0", ""
    low = _share(change.low) if change.low * _MANY > change.value else _UNKNOWN
    high = _share(change.high) if change.high < change.value * _MANY else _UNKNOWN
    return _share(change.value), f"{low} … {high}"


def _share(ratio: float) -> str:
    return f"{ratio - 1:+.1%}" if ratio < _MANY else f"x{ratio:.3g}"


def _only(name: str, paths: Sequence[str], top: int) -> str:
    more = f" and {len(paths) - top:,} more" if len(paths) > top else ""
    return printable(f"only in {name}: {', '.join(paths[:top])}{more}")


def _conclusion(diff: Diff, limit: float) -> str:
    regressions, undecided = diff.regressions(limit), len(diff.undecided(limit))
    conclusion = f"no regression beyond {limit * 100:.6g}% that is more than noise"
    if regressions:
        names = ", ".join(f"{row.name} {_change(row)[0]}" for row in regressions)
        plural = "s" if len(regressions) > 1 else ""
        conclusion = f"{len(regressions):,} regression{plural} beyond {limit * 100:.6g}%: {names}"
        if diff.runs == (1, 1):
            conclusion += "; compare several runs of each program, since one run may be slower because of the machine"
    if undecided:
        more = "longer" if diff.runs == (1, 1) else "more"
        conclusion += f"; {undecided:,} of {len(diff.judged):,} can't be told without {more} runs"
    return printable(conclusion)
