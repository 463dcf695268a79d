"""Test the content of the page without a browser: buckets, modules, selected steps, advice."""

import html
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import recorded_runs, report_runs, run_folders
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchotel
from torchotel.runs import LayerTime, RecordLine, render
from torchotel.runs.html import (
    advice,
    document,
    gradient_figure,
    module_figure,
    step_figure,
    style,
    timeline_figure,
)
from torchotel.runs.html.data import Series, StepTime, buckets
from torchotel.runs.html.module_figure import sectors
from torchotel.runs.html.style import INK, ON_DARK, ON_LIGHT, PHASE_COLOURS, ink_on
from torchotel.runs.summary import has_several_models


def _slow_at(number: int, slow_s: float = 9.0) -> Callable[[int], float]:
    return lambda step: slow_s if step == number else 0.1


def test_shows_an_outlier_among_many_steps(tmp_path: Path) -> None:
    """Downsampling keeps the slowest step of each bucket, and each bar is a real step."""
    times = [StepTime(number, 9.0 if number == 7_777 else 0.1, (0.0,) * 5, detailed=False) for number in range(10_000)]
    found = buckets(times, 400)
    assert len(found) == 400
    assert sum(bucket.steps for bucket in found) == 10_000
    assert [bucket.slowest.number for bucket in found if bucket.slowest.duration_s > 1] == [7_777]
    assert all(bucket.median.duration_s == 0.1 for bucket in found)


def test_a_bar_is_neither_the_faster_nor_the_slower_of_two_steps(tmp_path: Path) -> None:
    """The number of steps of a bar is odd, so that one of them is in the middle."""
    times = [StepTime(number, 0.1 * (1 + number % 3), (0.0,) * 5, detailed=False) for number in range(480)]
    found = buckets(times, 400)
    assert {bucket.steps for bucket in found} == {3}
    assert all(bucket.fastest.duration_s < bucket.median.duration_s < bucket.slowest.duration_s for bucket in found)


def test_the_last_bar_with_fewer_steps_does_not_look_slower(tmp_path: Path) -> None:
    """Of an even number of steps, the bar is the lower one of the two in the middle."""
    times = [StepTime(number, 0.1 + number, (0.0,) * 5, detailed=False) for number in range(5)]
    assert [bucket.median.number for bucket in buckets(times, 2)] == [1, 3]


def test_cuts_long_bars_and_says_so(tmp_path: Path) -> None:
    section = step_figure.section(
        report_runs.content(report_runs.training(tmp_path / "run", 60, duration_s=_slow_at(30)))
    )
    assert section is not None
    assert "1 bar is cut off" in section.lead
    assert section.figure.layout.yaxis2.range[1] < 1000
    assert max(section.figure.data[0].y) == 9000  # the line above, in ms


def test_lays_modules_out_as_a_tree_with_containers(tmp_path: Path) -> None:
    summary = report_runs.content(report_runs.training(tmp_path / "run", 3)).summary
    found = {one.label: one for one in sectors(summary.forward, 500)}
    assert set(found) == {"Net", "conv", "blocks", "0", "up", "down", "head"}
    assert found["blocks"].layer is None
    assert found["blocks"].area_s == pytest.approx(0.015)
    assert found["up"].parent == found["0"].id
    assert found["0"].layer is not None
    assert (found["0"].layer.self_s, found["0"].layer.total_s) == pytest.approx((0.0, 0.015))


def _layer(path: str, total_s: float, kind: str = "Block", model: str = "Net") -> LayerTime:
    return LayerTime(model, path, kind, 1, total_s, total_s, total_s, 0.0, is_root=path == kind)


def test_gathers_the_smallest_of_many_modules() -> None:
    layers = [_layer("Net", 100.0, "Net")] + [_layer(f"block.{number}", 1 / (number + 1)) for number in range(3_000)]
    found = sectors(layers, 500)
    (rest,) = [one for one in found if one.others]
    assert len(found) == 501
    assert rest.others == 3_002 - 500
    assert sum(one.area_s for one in found if one.parent == rest.parent) == pytest.approx(
        sum(1 / n for n in range(1, 3_001))
    )
    assert {one.parent for one in found} - {one.id for one in found} == {""}


def test_draws_few_levels_of_many_modules_at_first(tmp_path: Path) -> None:
    """All modules are in the figure, of which few levels are drawn at first."""
    content = report_runs.content(report_runs.training(tmp_path / "run", 1))
    parts = [_layer(f"layers.{row}.{part}", 1.0) for row in range(200) for part in range(5)]
    grown = replace(
        content, summary=replace(content.summary, forward=[_layer("Net", 1000.0, "Net"), *parts], backward=[])
    )
    section = module_figure.section(grown)
    assert section is not None
    (icicle,) = section.figure.data
    assert (len(icicle.ids), icicle.maxdepth) == (1 + 1 + 200 + 1000, 3)


def test_bounds_the_depth_of_a_strangers_paths() -> None:
    found = sectors([_layer(".".join("a" * 5_000), 1.0)], 500)
    assert len(found) < 30


def test_puts_several_models_beside_each_other() -> None:
    found = sectors([_layer("Net", 2.0, "Net"), _layer("Critic", 1.0, "Critic", "Critic")], 500)
    assert [(one.label, one.parent, one.area_s) for one in found] == [
        ("all models", "", 3.0),
        ("Net", "all", 2.0),
        ("Critic", "all", 1.0),
    ]


def test_chooses_the_slowest_step_and_one_like_most(tmp_path: Path) -> None:
    """A slow first step does not hide the slowest step after the warm-up."""

    def duration_s(number: int) -> float:
        return {0: 5.0, 21: 2.0}.get(number, 0.1 + number / 1e6)

    traces = report_runs.content(report_runs.training(tmp_path / "run", 30, duration_s=duration_s)).traces
    assert [(title, step.number) for title, step in traces.selected()] == [
        ("Slowest step", 0),
        ("Slowest step after the first 10", 21),
        ("Median step", 15),
    ]
    assert traces.detailed == 10


def test_names_a_step_beside_the_median_as_what_it_is(tmp_path: Path) -> None:
    """The title says if the detailed step is not a median step: detail slows small models."""
    folder = report_runs.training(tmp_path / "run", 30, duration_s=lambda number: 0.15 if number % 3 == 0 else 0.1)
    content = report_runs.content(folder)
    assert [title for title, _ in content.traces.selected()][-1] == "Detailed step nearest to the median"
    section = timeline_figure.section(content)
    assert section is not None
    assert "<th>detailed step nearest to the median</th>" in section.after


def test_puts_spans_below_the_ones_they_stand_in(tmp_path: Path) -> None:
    (_, step), *_ = report_runs.content(report_runs.training(tmp_path / "run", 1)).traces.selected()
    placed = {(bar.span.name, bar.lane, bar.phase) for bar in timeline_figure.bars(step)}
    assert ("torch.step", 0, "other") in placed
    assert ("torch.data", 1, "data") in placed
    assert ("forward blocks.0.up", 4, "forward") in placed
    assert ("backward head", 3, "backward") in placed


def test_leaves_spans_out_that_stand_in_themselves(tmp_path: Path) -> None:
    """Spans whose parents form a cycle, or are outside the step, are left out."""
    spans = [
        run_folders.span("torch.step", 1, 0, 0, 100),
        run_folders.span("a", 2, 3, 0, 10),
        run_folders.span("b", 3, 2, 0, 10),
        run_folders.span("c", 4, 99, 0, 10),
    ]
    folder = run_folders.write(
        tmp_path / "run", units=[run_folders.step(0, 1e-7)], segments=[[run_folders.request(spans)]]
    )
    (_, step), *_ = report_runs.content(folder).traces.selected()
    assert [bar.span.name for bar in timeline_figure.bars(step)] == ["torch.step"]


def _units(count: int, layers: int) -> Series:
    series = Series()
    for number in range(count):
        known = {f"layer{layer}": 10.0 ** (-layer % 7) for layer in range(layers)}
        series.add(RecordLine("step", number, number, 0.1, {}, True, "", None, None, gradient_norms={"Net": {**known}}))  # noqa: FBT003 # a record
    return series


def test_bounds_the_cells_of_the_heatmap(tmp_path: Path) -> None:
    content = report_runs.content(report_runs.training(tmp_path / "run", 1))
    content.series.layer_norms.clear()
    del content.series.norm_steps[:]
    grown = _units(700, 600)
    content.series.layer_norms.update(grown.layer_norms)
    content.series.norm_steps.extend(grown.norm_steps)
    content.series.steps[:] = grown.steps
    section = gradient_figure.section(content)
    assert section is not None
    assert [trace.name for trace in section.figure.data] == ["largest", "median", "smallest"]
    assert len(section.figure.data[0].z) == 600
    assert len(section.figure.data[0].z[0]) <= gradient_figure.MAX_CELLS // 600
    assert "A column stands for 5 of them" in section.lead


def test_marks_what_was_not_finite_and_keeps_layers_apart_that_look_alike(tmp_path: Path) -> None:
    long = "a" * 500
    norm_of = {f"{long}{name}{long}": norm for name, norm in (("b", 0.0), ("c", None), ("d", 1e-3))}
    units = [run_folders.step(number, 0.1, gradient_norms={"Net": norm_of}) for number in (4, 9)]
    section = gradient_figure.section(report_runs.content(run_folders.write(tmp_path / "run", units=units)))
    assert section is not None
    heat, red, crosses = section.figure.data
    assert [[place for place, bad in enumerate(row) if bad] for row in red.z[:3]] == [[], [0, 1], []]
    assert [list(row) for row in heat.z][1] == [None, None]
    assert math.isclose(heat.z[2][0], -3)
    assert heat.z[0][0] < heat.zmin  # a norm of 0
    assert list(zip(crosses.x, crosses.y, strict=True)) == [(4, 1), (9, 1)]
    assert list(heat.x) == [3.5, 6.5, 9.5]


def test_ends_the_heatmap_with_the_run(tmp_path: Path) -> None:
    """A column reaches half-way to the next one, but not beyond the first and the last step of the run."""
    norms = {"gradient_norms": {"Net": {"a": 1.0}}}
    units = [run_folders.step(number, 0.1, **(norms if number in {128, 256, 448} else {})) for number in range(480)]
    section = gradient_figure.section(report_runs.content(run_folders.write(tmp_path / "run", units=units)))
    assert section is not None
    assert list(section.figure.data[0].x) == [64.0, 192.0, 352.0, 479.5]
    assert list(section.figure.layout.xaxis.range) == [64.0, 479.5]


def test_puts_norms_where_their_steps_are(tmp_path: Path) -> None:
    """Columns are placed by step number, since norms are read on irregular steps: the first ten, then few."""
    units = [run_folders.step(number, 0.1, gradient_norms={"Net": {"a": 1.0}}) for number in (0, 1, 2, 12)]
    section = gradient_figure.section(report_runs.content(run_folders.write(tmp_path / "run", units=units)))
    assert section is not None
    assert list(section.figure.data[0].x) == [-0.5, 0.5, 1.5, 7, 12.5]
    assert list(section.figure.layout.xaxis.range) == [-0.5, 12.5]
    assert section.figure.layout.xaxis.ticktext is None
    alone = gradient_figure.section(report_runs.content(run_folders.write(tmp_path / "alone", units=units[-1:])))
    assert alone is not None
    assert (list(alone.figure.data[0].x), alone.figure.layout.xaxis.dtick) == ([11.5, 12.5], 1)


@pytest.mark.parametrize(
    ("smallest", "largest", "ticks"),
    [
        (1e-3, 1e-3, ["5e-4", "1e-3", "2e-3"]),
        (0.4, 30, ["5e-1", "1e0", "2e0", "5e0", "1e1", "2e1"]),
        (9e-5, 11, ["1e-4", "1e-3", "1e-2", "1e-1", "1e0", "1e1"]),
        (5e-21, 2e10, [f"1e{power}" for power in range(-20, 11, 4)]),
    ],
)
def test_labels_the_colours_with_round_norms(tmp_path: Path, smallest: float, largest: float, ticks: list[str]) -> None:
    """The colour scale has three to eight labels."""
    units = [run_folders.step(0, 0.1, gradient_norms={"Net": {"a": smallest, "b": largest}})]
    section = gradient_figure.section(report_runs.content(run_folders.write(tmp_path / "run", units=units)))
    assert section is not None
    bar = section.figure.data[0].colorbar
    shown = [text for text, log in zip(bar.ticktext, bar.tickvals, strict=True) if math.isclose(10**log, float(text))]
    assert shown == ticks


def test_shares_of_recomputed_modules(tmp_path: Path) -> None:
    """Recomputed calls are in no call of the model, but no module takes more than the whole."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    content = recorded_runs.recorded(
        tmp_path, lambda: recorded_runs.train(Net(), 4, batch=lambda _: torch.rand(4, 64)), detail="all"
    )
    section = module_figure.section(content)
    assert section is not None
    for icicle in section.figure.data:
        shares = [float(share.rstrip("%")) for _, share in icicle.customdata]
        assert max(shares) == 100


def test_labels_modules_with_their_types(tmp_path: Path) -> None:
    """A module's label has its type, except for the root, which is its type, and for containers."""
    section = module_figure.section(report_runs.content(report_runs.training(tmp_path / "run", 3)))
    assert section is not None
    forward = section.figure.data[0]
    assert dict(zip(forward.labels, forward.text, strict=True)) == {
        "Net": "100%",
        "conv": "Conv  30%",
        "blocks": "50%",
        "0": "0  50%",
        "up": "Up  20%",
        "down": "Down  30%",
        "head": "Head  10%",
    }


def test_several_models_are_told_apart(tmp_path: Path) -> None:
    """Several models are distinguished in figures and tables by their given names; a loss is not another model."""

    def program() -> None:
        first, second = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
        torchotel.name(first, "generator")
        recorded_runs.train(first, 2)
        recorded_runs.train(second, 2)

    content = recorded_runs.recorded(tmp_path, program, detail="all")
    section = module_figure.section(content)
    assert section is not None
    forward = section.figure.data[0]
    models = {label for label, parent in zip(forward.labels, forward.parents, strict=True) if parent == "all"}
    assert models == {"generator", "Sequential"}
    assert re.search(r"ran <b>generator</b> \(.*\) and <b>Sequential</b> for <b>4", report_runs.head(content))
    for name in ("generator: 0", "generator: 1", "Sequential: 0", "generator", "Sequential"):
        assert f"<td>{name}</td>" in section.after
        assert re.search(rf"^{name} ", render(content.summary, content.info), re.MULTILINE)
    alone = [_layer("fc", 1.0, "Linear"), _layer("MSELoss", 1.0, "MSELoss", "MSELoss")]
    assert [layer.name(several=has_several_models(alone)) for layer in alone] == ["fc", "MSELoss"]


@pytest.mark.parametrize("colour", PHASE_COLOURS.values())
def test_text_on_a_shade_is_readable(colour: str) -> None:
    """Text is white on dark shades and dark on light ones; on a full colour it is the same in dark mode."""
    assert ink_on(colour, 0) == INK
    assert ink_on(colour, 1) in {ON_DARK, ON_LIGHT}


def test_says_no_share_of_waiting_where_no_loader_was_seen(tmp_path: Path) -> None:
    """Without a DataLoader the page gives no share of waiting, since other loading is in no phase."""
    without = {**PHASES, "data": 0.0}
    said = report_runs.head(report_runs.content(report_runs.training(tmp_path / "without", phases=without)))
    assert "<dt>waiting for data</dt><dd>not seen</dd><dd class=note>no DataLoader ran</dd>" in said
    assert '<i class="phase data">' not in said
    with_one = report_runs.head(report_runs.content(report_runs.training(tmp_path / "with", phases=PHASES)))
    assert "<dt>waiting for data</dt><dd>20%</dd>" in with_one


def _first(folder: Path) -> str:
    return advice.advise(report_runs.content(folder))[0].title


_MERGED = ("blocks.0.down", "conv")
PHASES = {"data": 0.02, "forward": 0.3, "backward": 0.6, "optimizer": 0.05, "other": 0.03}


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ("NaN or infinity began at step 0", {"nonfinite": ["gradient conv"]}),
        ("40 failures, the first at step 0", {"error": {"type": "ValueError", "message": "no"}}),
        ("Waiting for data takes 20% of the time", {"phases": {**PHASES, "data": 0.2}}),
        ("The optimizer takes 50% of the time", {"phases": {**PHASES, "optimizer": 0.5}}),
        ("40% of the time is in no phase", {"phases": {**PHASES, "other": 0.4}}),
        ("The run has not ended", {"info": {"finished": False}}),
        (
            "One module takes 40% of the backward phase",
            {"phases": PHASES, "rename": lambda name: name.replace(*_MERGED)},
        ),
        ("Only 2 steps recorded in detail", {"phases": dict.fromkeys(PHASES, 0.0), "detail": 20}),
        ("Gradients vanish in 1 layer", {"phases": PHASES, "gradient_norms": {"Net": {"a": 1e-9, "b": 1.0}}}),
    ],
)
def test_says_what_to_do_first(tmp_path: Path, said: str, more: dict[str, Any]) -> None:
    assert _first(report_runs.training(tmp_path / "run", 40, duration_s=lambda _: 1.0, **more)) == said


@pytest.mark.parametrize(("step_s", "advised"), [(0.001, 0), (0.01, 1)])
def test_a_wait_of_microseconds_needs_no_worker(tmp_path: Path, step_s: float, advised: int) -> None:
    """A worker of a DataLoader costs more than it saves there, whatever the share."""
    phases = {**dict.fromkeys(PHASES, 0.0), "data": step_s / 2}
    folder = report_runs.training(tmp_path / "run", 40, duration_s=lambda _: step_s, phases=phases)
    titles = [one.title for one in advice.advise(report_runs.content(folder))]
    assert sum(title.startswith("Waiting for data") for title in titles) == advised


def test_names_the_phase_that_made_steps_slow(tmp_path: Path) -> None:
    folder = report_runs.training(tmp_path / "run", 60, duration_s=_slow_at(30))
    (found,) = [one for one in advice.advise(report_runs.content(folder)) if "more than 2 times" in one.title]
    assert found.title.startswith("1 step took")
    assert found.text.startswith("The slowest is step 30 with 9.000 s, 3.560 s of that in <b>backward</b> beyond")


def test_notices_that_steps_become_slower(tmp_path: Path) -> None:
    folder = report_runs.training(tmp_path / "run", 80, duration_s=lambda number: 0.1 + number / 1000)
    assert any(one.title.endswith("slower over the run") for one in advice.advise(report_runs.content(folder)))


def test_finds_nothing_where_there_is_nothing(tmp_path: Path) -> None:
    even = {f"layer{number}": 1.0 for number in range(3)}
    folder = run_folders.write(
        tmp_path / "run",
        units=[run_folders.step(number, 1.0, phases=PHASES, gradient_norms={"Net": even}) for number in range(40)],
    )
    content = report_runs.content(folder)
    assert advice.advise(content) == []
    assert "Nothing stands out" in document(content)


def test_asks_the_browser_for_its_own_scripts_alone(tmp_path: Path) -> None:
    """The Content-Security-Policy allows the page's own scripts only, so that unescaped text could not run."""
    page = html.unescape(document(report_runs.content(report_runs.training(tmp_path / "run", 2))))
    (policy,) = [line for line in page.splitlines() if "Content-Security-Policy" in line]
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert policy.count("'sha256-") == 2


@pytest.mark.parametrize(("value", "words"), [(1690.4, "1,690"), (12_345.6, "12,346"), (3.14159, "3.142")])
def test_writes_rates_without_an_exponent(value: float, words: str) -> None:
    assert style.rate(value) == words


@pytest.mark.parametrize(("seconds", "unit"), [(3.0, "s"), (0.02, "ms"), (4e-6, "µs"), (0.0, "ms")])
def test_chooses_units_that_suit(seconds: float, unit: str) -> None:
    assert style.scale(seconds)[0] == unit


def test_cuts_names_in_their_middle() -> None:
    assert style.cut("encoder.layers.11.attention.out_proj", 20) == "encoder.l…n.out_proj"
    assert len(style.cut("x" * 1_000_000)) == 60
    assert style.cut("a\u202eb\nc\ud800") == "a?b?c?"
    assert style.escaped("<b>$1$</b>") == "&lt;b&gt;&#36;1&#36;&lt;/b&gt;"
