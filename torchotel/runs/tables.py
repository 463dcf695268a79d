"""Render a summary or a comparison of runs as plain aligned columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchotel._records import PHASES
from torchotel._utils.text import GREEN, RED, YELLOW, Output, cut, duration, printable, shortened
from torchotel._utils.text import rate as per_second
from torchotel.runs.compare import Diff, Row, Spread
from torchotel.runs.slow_rank import RankComparison
from torchotel.runs.summary import Failure, LayerTime, Summary, has_several_models, run_failure
from torchotel.runs.value_ranges import NOT_FINITE, Onset, ValueRange

MAX_CELL = 120
"""Characters of a cell. The run file limits no name."""
MAX_HEAD = 200
"""Characters of a line above the tables."""
_PLAIN = Output()
_MIN_TEXT_WIDTH = 20
"""Characters of a text below which optional columns are left out instead of cutting it further."""
_MIN_CUT_WIDTH = 4
_HEAD_COLOURS = {"errors": RED, "first error": RED, "ended with": RED, "left out": YELLOW, "end": YELLOW}
"""Colours of the lines above the tables, by their names."""


def render(summary: Summary, info: Mapping[str, Any], *, top: int = 10, output: Output = _PLAIN) -> str:
    """Return a summary as text.

    Args:
        summary: The numbers.
        info: The run's `run.json`.
        top: Layers to show in each direction.
        output: Terminal or file that the text is written to.
    """
    parts = [_head(summary, info, output)]
    if summary.phases:
        rows = [
            (
                phase.name if phase.name == "step" else f"  {phase.name}",
                duration(phase.mean_s),
                duration(phase.p50_s),
                duration(phase.p95_s),
                f"{phase.share:.1%}",
            )
            for phase in summary.phases
        ]
        parts.append(table(("step time", "mean", "p50", "p95", "share"), rows, left=1, output=output))
    parts += _value_ranges(summary, top, output)
    unit_name = "training steps" if summary.steps else "evaluations"
    for direction, layers in (("forward", summary.forward), ("backward", summary.backward)):
        if layers:
            parts.append(f"slowest layers, {direction}, in {unit_name}\n{_layers(layers, top, output)}")
    if summary.steps and not summary.forward:
        parts += output.wrap("no layer times: no step was recorded in detail")
    return "\n\n".join(parts)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int,
    output: Output = _PLAIN,
    spare: Sequence[Sequence[int]] = (),
    colours: Mapping[str, str] | None = None,
) -> str:
    """Align cells under their heads.

    Args:
        head: Names of the columns.
        rows: Cells, as many as there are names.
        left: Columns that are aligned to the left: texts, which are cut in the middle to fit. Numbers are not cut.
        output: Terminal or file that the table is written to.
        spare: Groups of optional columns, which are left out in this order if the texts have too little space.
        colours: Colour codes by the text of the last cell.
    """
    lines = [[cut(cell, MAX_CELL) for cell in line] for line in (head, *rows)]
    if output.width is not None:
        lines = _fitted(lines, left, output.width, spare)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for line in lines:
        *cells, last = (
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        code = (colours or {}).get(line[-1])
        aligned.append("  ".join([*cells, output.colour(last, code) if code else last]).rstrip())
    return "\n".join(aligned)


def _fitted(lines: Sequence[Sequence[str]], left: int, width: int, spare: Iterable[Sequence[int]]) -> list[list[str]]:
    """Fit a table into a width: optional columns are left out if texts become too short, then texts are cut."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    columns = list(range(len(widths)))

    def text_width() -> int:
        return width - 2 * (len(columns) - 1) - sum(widths[index] for index in columns if index >= left)

    needed = sum(min(text, _MIN_TEXT_WIDTH) for text in widths[:left])
    for group in spare:
        if text_width() < needed:
            columns = [index for index in columns if index not in group]
    texts = widths[:left]
    while sum(texts) > text_width() and max(texts) > _MIN_CUT_WIDTH:
        texts[texts.index(max(texts))] -= 1
    return [
        [shortened(line[index], texts[index]) if index < left else line[index] for index in columns] for line in lines
    ]


def _entries(rows: Iterable[tuple[str, str]], width: int, output: Output) -> Iterator[str]:
    """Yield lines of two columns: names, padded to a width, and wrapped texts."""
    for name, text in rows:
        first, *further = output.wrap(f"{name:<{width}}{cut(text, MAX_HEAD)}", " " * width)
        code = _HEAD_COLOURS.get(name)
        yield output.colour(name, code) + first[len(name) :] if code else first
        yield from further


def _head(summary: Summary, info: Mapping[str, Any], output: Output) -> str:
    rows = []
    if info.get("run_id"):
        rows.append(("run", info["run_id"]))
    model = info.get("model")
    if model:
        size = f"{model.get('modules', 0):,} modules, {model.get('parameters', 0):,} parameters"
        others = len({layer.model for layer in summary.forward}) - 1
        more = f", and {others} more" if others > 0 else ""
        rows.append(("model", f"{model.get('name', '?')}, {size}{more}"))
    steps = f"{summary.steps:,}, {summary.detailed_steps:,} of them in detail{_rate(summary.steps_per_second)}"
    rows.append(("steps", steps if summary.steps else "0"))
    in_all = f", {duration(summary.evaluation_s)} in all" if summary.evaluations else ""
    rows.append(("evaluations", f"{summary.evaluations:,}{in_all}"))
    rates = {"samples": summary.samples_per_second, "tokens": summary.tokens_per_second}
    for name, total in summary.value_ranges.totals.items():
        rows.append((name, f"{total:,}{_rate(rates.get(name))}"))
    if summary.errors:
        errors = ", ".join(f"{count:,} {kind}" for kind, count in summary.errors.items())
        rows.append(("errors", errors))
    rows += [*_failure(summary, info), *_stall(summary)]
    deleted = (info.get("recording") or {}).get("spans_deleted", 0)
    if deleted:
        rows.append(("left out", f"{deleted:,} of the oldest spans, so that the run file keeps its size"))
    if summary.folded_calls:
        rows.append(
            ("left out", f"{summary.folded_calls:,} module calls beyond max_spans; callers' self time includes them")
        )
    if info.get("finished") is False and run_failure(summary, info) is None:
        rows.append(("end", "the run has not ended, or was cut short"))
    return "\n".join(_entries(rows, 12, output))


def _rate(rate: float | None) -> str:
    return "" if rate is None else f", {per_second(rate)} a second by the wall clock"


def describe(failure: Failure) -> str:
    """Return the exception, its step and its layer in one line."""
    layer = f", in layer {cut(failure.path)}" if failure.path else ""
    return f"{cut(failure.type)} {failure.place}{layer}"


def _failure(summary: Summary, info: Mapping[str, Any]) -> list[tuple[str, str]]:
    end = run_failure(summary, info)
    failure = end or summary.first_failure
    if failure is None:
        return []
    rows = [("first error" if end is None else "ended with", describe(failure))]
    if failure.message:
        rows.append(("", failure.message))
    if failure.kind == "step" and failure.last_step is not None:
        rows.append(("", f"the last whole step before it is {failure.last_step:,}"))
    return rows


def _stall(summary: Summary) -> list[tuple[str, str]]:
    if (stall := summary.last_stall) is None:
        return []
    return [("stalled", describe(stall)), *([("", stall.message)] if stall.message else [])]


def _value_ranges(summary: Summary, top: int, output: Output) -> list[str]:
    """Return the tables of the first NaN, of logged values and of gradient norms."""
    value_ranges, parts = summary.value_ranges, []
    if value_ranges.onset is not None:
        parts.append(_onset(value_ranges.onset, value_ranges.partly_checked(summary.steps), output))
    if value_ranges.nonfinite:
        rows = [(name, f"{steps:,}") for name, steps in list(value_ranges.nonfinite.items())[: max(top, 10)]]
        parts.append(table(("NaN or infinite", "steps"), rows, left=1, output=output))
    if value_ranges.values:
        parts.append(_range_table("logged", value_ranges.values, output))
    if value_ranges.gradient is not None:
        parts.append(_range_table("gradient norm", [value_ranges.gradient, *value_ranges.layers[:top]], output))
    return parts


def _onset(onset: Onset, partly_checked: str, output: Output) -> str:
    """Return the step of the first NaN or infinity, and the values before it."""
    rows = [("first in", "the loss" if onset.loss else "the gradients")]
    if onset.layers:
        rows.append(("first layers", f"{onset.first_layers()} (gradients of step {onset.layers_step:,})"))
    if onset.loss_here is not None:
        rows.append(("loss then", f"{onset.loss_here:.4g}"))
    if onset.loss_before is not None:
        rows.append(("loss before", str(onset.loss_before)))
    if onset.gradient_norm_before is not None:
        rows.append(("norm before", f"{onset.gradient_norm_before}, of all gradients"))
    if partly_checked:
        rows.append(("checked", f"{partly_checked}; it may have begun earlier"))
    title = output.colour(f"NaN or infinite first {'seen ' if partly_checked else ''}at {onset.place}", RED)
    return "\n".join([title, *_entries([(f"  {name}", text) for name, text in rows], 16, output)])


def _range_table(title: str, tracks: Sequence[ValueRange], output: Output) -> str:
    head = (title, "first", "last", "smallest", "largest", "steps")
    rows = [(track.name, *(_number(value) for value in track[2:]), f"{track.steps:,}") for track in tracks]
    return table(head, rows, left=1, output=output)


def _number(value: float | None) -> str:
    return NOT_FINITE if value is None else f"{value:.4g}"


def _layers(layers: Sequence[LayerTime], top: int, output: Output) -> str:
    several = has_several_models(layers)
    head = ("layer", "type", "calls", "self", "share", "total", "mean")
    rows = [
        (
            layer.name(several=several),
            layer.type,
            f"{layer.calls:,}",
            duration(layer.self_s),
            f"{layer.share:.1%}",
            duration(layer.total_s),
            duration(layer.mean_s),
        )
        for layer in layers[:top]
    ]
    return table(head, rows, left=2, output=output, spare=[[head.index("mean")]])


_FINISHED = "finished"


def render_ranks(comparison: RankComparison, *, top: int = 10, output: Output = _PLAIN) -> str:
    """Return the comparison of a run's ranks as text: the slow rank, and the `top` ranks that wait least."""
    phases = [name for name in PHASES if any(rank.own_s[name] for rank in comparison.ranks)]
    head = ("rank", "host", "end", "steps", "step", "waits", *phases)
    ranks = sorted(comparison.ranks, key=lambda rank: (rank.wait_s, rank.rank))
    rows = [
        (
            str(rank.rank),
            rank.host,
            rank.end,
            f"{rank.steps:,}",
            *(duration(time_s) for time_s in (rank.step_s, rank.wait_s, *(rank.own_s[name] for name in phases))),
        )
        for rank in ranks[:top]
    ]
    hosts, ends = len({rank.host for rank in ranks}) > 1, any(rank.end != _FINISHED for rank in ranks)
    shown = [at for at, name in enumerate(head) if (name != "host" or hosts) and (name != "end" or ends)]
    left = sum(name in {"rank", "host", "end"} for name in (head[at] for at in shown))
    title = f"ranks, median of {comparison.common_steps:,} common steps, phases without waits"
    cells = [[line[at] for at in shown] for line in (head, *rows)]
    lines = [
        *_wrapped([comparison.conclusion], output).splitlines(),
        "",
        *output.wrap(title),
        table(cells[0], cells[1:], left=left, output=output),
    ]
    if comparison.slow is not None:
        lines[0] = output.colour(lines[0], YELLOW)
    if len(ranks) > top:
        lines += output.wrap(f"ranks that wait longer: {len(ranks) - top:,} (--top shows more)")
    return "\n".join(lines)


_COMPARED = {
    "plain": "steps without detail",
    "detailed": "detailed steps",
    "all": "all steps, since there are too few of one kind: detail itself takes time",
}
_DIFF_COLUMNS = ("A", "±", "B", "±", "change", "interval", "")
_FACTOR_FROM = 10
"""A change of ten times or more is shown as a factor; an interval end that is ten times away is shown as unknown."""
_UNKNOWN = "?"
_OPTIONAL_COLUMNS = ((2, 4), (1,))
"""Columns that a narrow terminal leaves out: ± of both sides first, then A, which B and the change imply."""
_DIFF_COLOURS = {"REGRESSION": RED, "slower": YELLOW, "faster": GREEN}


def render_diff(diff: Diff, limit: float, *, top: int = 10, output: Output = _PLAIN) -> str:
    """Return a diff as text: the `top` layers with the largest changes, and all regressions."""
    steps = diff.steps[0]
    compared = f"compared: {_compared_steps(diff)} {_COMPARED[diff.compared]}; warm-up and failed steps left out"
    step_rows = [(row.name if row is steps else f"  {row.name}", row) for row in diff.steps]
    parts = [
        *_differences(diff, output),
        _wrapped([compared], output),
        _diff_rows("median", step_rows, limit, output),
    ]
    shown = [row for rank, row in enumerate(diff.layers) if rank < top or row.verdict(limit) == "REGRESSION"]
    if shown:
        parts.append(_diff_rows("layer, self time a step", [(row.name, row) for row in shown], limit, output))
    elif not diff.layers:
        both = diff.only_before and diff.only_after
        why = "no layer has the same name in both runs" if both else "no step was recorded in detail in both runs"
        parts.append(_wrapped([f"no layers to compare: {why}"], output))
    notes = [_only_in(name, paths, top) for name, paths in (("A", diff.only_before), ("B", diff.only_after)) if paths]
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


def _compared_steps(diff: Diff) -> str:
    steps = f"{diff.steps[0].before.steps:,} and {diff.steps[0].after.steps:,}"
    if diff.runs == (1, 1):
        return steps
    return f"{diff.runs[0]:,} and {diff.runs[1]:,} runs of at least {steps}"


def _diff_rows(title: str, rows: Sequence[tuple[str, Row]], limit: float, output: Output) -> str:
    cells = [
        (name, *_spread_cells(row.before), *_spread_cells(row.after), *_change_cells(row), row.verdict(limit))
        for name, row in rows
    ]
    columns = (title, *_DIFF_COLUMNS)
    return table(columns, cells, left=1, output=output, spare=_OPTIONAL_COLUMNS, colours=_DIFF_COLOURS)


def _spread_cells(spread: Spread) -> tuple[str, str]:
    return duration(spread.median_s), f"{spread.half_width:.1%}"


def _change_cells(row: Row) -> tuple[str, str]:
    change = row.change
    if change is None:
        return _UNKNOWN, ""
    if row.after.median_s and not row.before.median_s:
        return "from 0", ""
    low = _relative_change(change.low) if change.low * _FACTOR_FROM > change.value else _UNKNOWN
    high = _relative_change(change.high) if change.high < change.value * _FACTOR_FROM else _UNKNOWN
    return _relative_change(change.value), f"{low} … {high}"


def _relative_change(ratio: float) -> str:
    return f"{ratio - 1:+.1%}" if ratio < _FACTOR_FROM else f"x{ratio:.3g}"


def _only_in(name: str, paths: Sequence[str], top: int) -> str:
    more = f" and {len(paths) - top:,} more" if len(paths) > top else ""
    return printable(f"only in {name}: {', '.join(paths[:top])}{more}")


def _conclusion(diff: Diff, limit: float) -> str:
    regressions, undecided = diff.regressions(limit), len(diff.undecided(limit))
    conclusion = f"no regression beyond {limit * 100:.6g}% that is more than noise"
    if regressions:
        names = ", ".join(f"{row.name} {_change_cells(row)[0]}" for row in regressions)
        plural = "s" if len(regressions) > 1 else ""
        conclusion = f"{len(regressions):,} regression{plural} beyond {limit * 100:.6g}%: {names}"
        if diff.runs == (1, 1):
            conclusion += "; compare several runs of each program, since one run may be slower because of the machine"
    if undecided:
        more = "longer" if diff.runs == (1, 1) else "more"
        conclusion += f"; {undecided:,} of {len(diff.judged):,} can't be told without {more} runs"
    return printable(conclusion)
