"""Test the ranges of logged values and of gradient norms over a run."""

import math
from pathlib import Path

from support import run_folders as folders

from torchotel.runs import Summary, ValueRange, open_run, render, summarise
from torchotel.runs.html import gather

LAID_OUT = """\
steps       2, 2 of them in detail, 6.667 a second by the wall clock
evaluations 0
samples     8, 26.67 a second by the wall clock

step time        mean       p50       p95   share
step         200.0 ms  200.0 ms  290.0 ms  100.0%
  data       20.00 ms  20.00 ms  29.00 ms   10.0%
  forward    60.00 ms  60.00 ms  87.00 ms   30.0%
  backward   80.00 ms  80.00 ms  116.0 ms   40.0%
  optimizer  20.00 ms  20.00 ms  29.00 ms   10.0%
  other      20.00 ms  20.00 ms  29.00 ms   10.0%

NaN or infinite first at step 1
  first in      the loss
  first layers  fc (gradients of step 1)
  loss before   2 at step 0
  norm before   5 at step 0, of all gradients

NaN or infinite  steps
loss                 1
gradient fc          1

logged    first        last  smallest  largest  steps
loss          2  NaN or Inf         2        2      1
lr          0.5        0.25      0.25      0.5      2
accuracy   0.75        0.75      0.75     0.75      1

gradient norm   first        last  smallest  largest  steps
all parameters      5  NaN or Inf         5        5      1
conv                4           2         2        4      2
fc                  3  NaN or Inf         3        3      1

no layer times: no step was recorded in detail"""


def _summary(folder: Path) -> Summary:
    units = [
        folders.step(
            0,
            0.1,
            values={"loss": 2.0, "lr": 0.5, "samples": 4, "phase": "warm", "on": True},
            gradient_norm=5.0,
            gradient_norms={"Net": {"conv": 4.0, "fc": 3.0}},
        ),
        folders.step(
            1,
            0.3,
            values={"loss": None, "lr": 0.25, "samples": 4},
            gradient_norm=None,
            gradient_norms={"Net": {"conv": 2.0, "fc": None}},
            nonfinite=["loss", "gradient fc"],
        ),
        {"kind": "log", "number": 1, "time_unix_nano": "1", "values": {"accuracy": 0.75}},
    ]
    run = open_run(folders.write(folder, units=units))
    return summarise(run.records(), run.spans())


def test_follows_numbers_over_the_run(tmp_path: Path) -> None:
    """Strings and booleans are left out, and NaN is counted by name."""
    value_ranges = _summary(tmp_path / "run").value_ranges
    assert value_ranges.totals == {"samples": 8}
    assert value_ranges.nonfinite == {"loss": 1, "gradient fc": 1}
    assert value_ranges.gradient == ValueRange("all parameters", 1, 5.0, None, 5.0, 5.0)
    assert value_ranges.values[1] == ValueRange("lr", 2, 0.5, 0.25, 0.25, 0.5)
    assert [layer.name for layer in value_ranges.layers] == ["conv", "fc"]


def test_lays_them_out(tmp_path: Path) -> None:
    """Losses, learning rates and norms are listed between phases and layers."""
    assert render(_summary(tmp_path / "run"), {}) == LAID_OUT


def test_models_are_kept_apart(tmp_path: Path) -> None:
    """Two networks of a GAN can have layers of the same names."""
    norms = {"Generator": {"main.0": 1.0}, "Discriminator": {"main.0": 2.0}}
    folder = folders.write(tmp_path / "run", units=[folders.step(0, 0.1, gradient_norms=norms)])
    run = open_run(folder)
    layers = summarise(run.records(), run.spans()).value_ranges.layers
    assert [layer.name for layer in layers] == ["Discriminator: main.0", "Generator: main.0"]


def test_names_layers_by_the_models_of_the_whole_run(tmp_path: Path) -> None:
    """Layers have their model's name in the whole table and figure, although each step has one model's norms."""
    steps = [{"G": {"0": 1.0}}, {"G": {"0": 3.0}, "D": {"0": 2.0}}, {"D": {"0": None}}]
    units = [folders.step(number, 0.1, gradient_norms=norms) for number, norms in enumerate(steps)]
    content = gather(open_run(folders.write(tmp_path / "run", units=units)))
    assert content.summary.value_ranges.layers == [
        ValueRange("G: 0", 2, 1.0, 3.0, 1.0, 3.0),
        ValueRange("D: 0", 1, 2.0, None, 2.0, 2.0),
    ]
    generator, discriminator = content.series.norms["G: 0"], content.series.norms["D: 0"]
    assert list(generator) == [1.0, 3.0]
    assert (math.isnan(discriminator[0]), *discriminator[1:]) == (True, 2.0, math.inf)
