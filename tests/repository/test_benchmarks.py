"""The benchmark runs, and tells worse from better; how long anything takes is nobody's claim here."""

import json
import sys
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support import commands

from benchmarks import load, memory, modes, native, overhead, pages, workloads
from benchmarks.__main__ import main
from benchmarks.all_parts import RESNET, TRANSFORMER, parts
from benchmarks.naive import NaiveInstrument
from benchmarks.parts import Conditions, Table
from benchmarks.spread import Spread, ratio_of_means, ratio_of_medians, spread
from benchmarks.targets import TARGETS, reached

ROOT = Path(__file__).parents[2]


@pytest.mark.program
def test_prints_a_figure_of_every_part(tmp_path: Path) -> None:
    """And the spans of every instrument that sends some have arrived."""
    file = tmp_path / "figures.json"
    done = commands.python("-m", "benchmarks", "--quick", "--json", str(file), cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(file.read_text(encoding="utf-8"))["parts"]
    quick = parts(quick=True)
    assert list(found) == [part.name for part in quick]
    assert [part.title for part in quick if f"### {part.title}\n" not in done.stdout] == []
    for table in found.values():
        for row, cells in table.items():
            assert f"| {row} |" in done.stdout
            assert all(map(isfinite, _numbers(cells))), row
    lost = {row: cells[overhead.LOST] for row, cells in found["tiny"].items()}
    with_thread = (modes.DEFAULT_THREAD, modes.ALL_THREAD)
    senders = (modes.OFF, modes.DEFAULT, modes.ALL, modes.SPANS, modes.FEWER, modes.SDK, modes.NAIVE, *with_thread)
    assert {row: share for row, share in lost.items() if share != "-"} == dict.fromkeys(senders, "0.0%")
    for target in TARGETS:  # each reads a figure that there is
        part = "tiny" if target.part in {TRANSFORMER, RESNET} else target.part
        row = {"wire": "tiny", "memory": memory.NONE}.get(part, target.row)
        assert target.column in found[part][row], target


@pytest.mark.program
def test_the_measurements_for_a_gpu_run_on_the_cpu() -> None:
    """On a tiny model, and no page is written."""
    done = commands.python("-m", "benchmarks.gpu", "--no-tests", "--seconds", "0", cwd=ROOT, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (0, "")
    for title in ("cost of a step", "synchronisations of 5 steps", "device times beside torch.profiler's"):
        assert f"### a tiny model: {title}\n" in done.stdout
    assert "| forwards | 13.0 |" in done.stdout
    assert "no page was written" in done.stdout


def _numbers(value: Any) -> Iterator[float]:
    for one in value.values():
        if isinstance(one, dict):
            yield from _numbers(one)
        elif not isinstance(one, str):
            yield one


@pytest.mark.parametrize(("name", "calls"), [("transformer", 124), ("resnet18", 76), ("vit", 74), ("2000", 2000)])
def test_the_naive_way_makes_two_spans_of_each_call(name: str, calls: int) -> None:
    """A forward one and a backward one below it, whatever is done in place."""
    pytest.importorskip("torchvision")
    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    workload = workloads.make(name)
    instrument = NaiveInstrument(workload.model, provider)
    instrument.install()
    workload.step()
    instrument.remove()
    spans = kept.get_finished_spans()
    forwards = {span.context.span_id: span.name for span in spans if span.name.startswith("forward")}
    above = [(span, span.parent) for span in spans if span.name.startswith("backward")]
    assert (workload.calls, len(forwards), len({parent.span_id for _, parent in above if parent})) == (calls,) * 3
    assert all(parent and forwards[parent.span_id][7:] == span.name[8:] for span, parent in above)


def test_the_plain_case_in_cpp_times_both_directions_of_each_call() -> None:
    hooks = native.load()
    if hooks is None:
        pytest.skip("no C++ compiler, or no headers of Python")
    workload = workloads.make("transformer")
    with native.on_calls(hooks):
        workload.step()
    assert hooks.take() == (124, 248, 0)
    with native.on_steps(hooks):
        workload.step()
        assert hooks.take() == (0, 0, 6)  # begin and end of the forward, of the backward and of the optimizer's step


@pytest.mark.parametrize("compiler", ["a compiler that is not there", "false"])
def test_without_a_compiler_there_is_nothing_in_cpp(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    native.load.cache_clear()
    assert native.native_modes() == []
    native.load.cache_clear()


@pytest.mark.parametrize("mode", [memory.DEFAULT, memory.FULL])
def test_memory_is_looked_at_under_each_instrument(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(mode, memory.LOOKS, memory.UNUSED)
    peaks_mb, companion_mb = json.loads(capsys.readouterr().out)
    assert (len(peaks_mb), companion_mb) == (memory.LOOKS, 0)  # the tests take the thread
    assert peaks_mb == pytest.approx(sorted(peaks_mb), abs=1)  # Linux counts the pages of each core by the handful


@pytest.mark.parametrize("words", [["worker"], ["--quick"]])
def test_the_page_takes_no_part_of_the_figures(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words, "--write"])
    assert caught.value.code == 2
    assert "--write needs all parts" in capsys.readouterr().err


def test_bounds_are_those_of_the_binomial() -> None:
    """As tables of the sign test have them; of few values all lie between."""
    assert spread([1, 2, 3]) == Spread(median=2, low=1, high=3, count=3)
    assert spread(range(1, 11)) == Spread(median=5.5, low=2, high=9, count=10)
    assert spread(range(1, 101)) == Spread(median=50.5, low=40, high=61, count=100)


def test_a_ratio_of_means_is_sure_where_all_pairs_say_the_same() -> None:
    """And one pair of many that stands out moves it, as it moves no median."""
    alike = ratio_of_means([(2.0, 1.0)] * 10)
    assert alike == Spread(median=2, low=2, high=2, count=10)
    one = ratio_of_means([(1.0, 1.0)] * 9 + [(11.0, 1.0)])
    assert (one["median"], one["low"]) == (2, 1)
    assert one["high"] > 3


def test_a_ratio_of_medians_is_as_sure_as_both() -> None:
    """Also where what stands below is not exact."""
    alike = ratio_of_medians([2.0] * 9, [1.0] * 9)
    assert alike == Spread(median=2, low=2, high=2, count=9)
    unsure = ratio_of_medians([2.0] * 9, [0.5, 1, 1.5] * 3)
    assert unsure["low"] < unsure["median"] == 2 < unsure["high"]


# ---- the gate


def _figures(folder: Path, name: str, share: float, *, wide: float = 0.01, count: int = 10) -> Path:
    """Write the figures of a run in which torchotel costs a share of what the naive way does."""
    of = Spread(median=share, low=share - wide, high=share + wide, count=count)
    row: dict[str, Any] = {overhead.STEP: of, overhead.SHARE: of, overhead.SHARE_CPU: of}
    file = folder / f"{name}.json"
    parts_ = {TRANSFORMER: dict.fromkeys((modes.EMPTY, modes.DEFAULT, modes.ALL, modes.SPANS, modes.NAIVE), row)}
    file.write_text(json.dumps({"machine": name, "parts": parts_}))
    return file


@pytest.mark.parametrize(("now", "wide", "code"), [(0.14, 0.01, 1), (0.12, 0.01, 0), (0.05, 0.01, 0), (0.14, 0.05, 0)])
def test_what_got_worse_by_a_quarter_fails(tmp_path: Path, now: float, wide: float, code: int) -> None:
    """Less than that does not, nor what is better, nor what may be noise."""
    words = ["--read", str(_figures(tmp_path, "now", now, wide=wide))]
    assert main([*words, "--baseline", str(_figures(tmp_path, "then", 0.1))]) == code


def test_of_a_few_looks_none_is_sure(tmp_path: Path) -> None:
    """The least and the greatest of two are no bounds; and a share that is next to nothing may double."""
    few, many = (str(_figures(tmp_path, f"{count}", 0.14, count=count)) for count in (5, 6))
    then = ["--baseline", str(_figures(tmp_path, "then", 0.1))]
    assert [main(["--read", one, *then]) for one in (few, many)] == [0, 1]
    small = [str(_figures(tmp_path, f"{share}", share, wide=0.001)) for share in (0.002, 0.009)]
    assert main(["--read", small[1], "--baseline", small[0]]) == 0


def test_a_new_baseline_is_held_against_the_old_one(tmp_path: Path) -> None:
    now, then = str(_figures(tmp_path, "now", 0.14)), _figures(tmp_path, "then", 0.1)
    assert main(["--read", now, "--json", str(then), "--baseline", str(then)]) == 1
    assert json.loads(then.read_text())["machine"] == "now"


def test_says_where_the_baseline_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another machine, or another hour of the same, explains more than most changes do."""
    main(["--read", str(_figures(tmp_path, "now", 0.1)), "--baseline", str(_figures(tmp_path, "then", 0.1))])
    assert "### Comparison with the baseline\n\nThen: then\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("share", "count", "verdict"),
    [(0.19, 10, "can't tell"), (0.1, 10, "yes"), (0.4, 10, "**no**"), (0.4, 5, "can't tell")],
)
def test_says_where_a_figure_can_not_tell(
    share: float, count: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is 0.2 of what the naive way costs."""
    main(["--read", str(_figures(tmp_path, "now", share, count=count))])
    assert f"| ≤ 0.200 | {share:.3f} | {verdict} |" in capsys.readouterr().out


@pytest.mark.parametrize(("alone_ms", "met"), [(0.3, False), (4.0, None)])
def test_what_the_machine_does_by_itself_is_not_held_against_a_figure(alone_ms: float, met: object) -> None:
    rows = {load.NO_SPANS: alone_ms, load.OURS: 6.0}
    sure = {name: Spread(median=ms, low=ms, high=ms, count=10) for name, ms in rows.items()}
    figures: Table = {name: {load.OFFERED: 30_000.0, load.LOST: 0.0, load.STALL: one} for name, one in sure.items()}
    (found,) = [one for one in reached({"load": figures}) if one.target.column == load.STALL]
    assert found.met is met


def test_without_a_baseline_nothing_got_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.__main__.BASELINE", tmp_path / "none.json")
    assert main(["--read", str(_figures(tmp_path, "now", 0.1))]) == 0
    assert f"no comparison: {tmp_path / 'none.json'} does not exist" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["transfomer"], "there is no part transfomer; there are transformer, resnet18"),
        (["--baseline", "missing.json"], "missing.json has no figures"),
        (["--read", "broken.json"], "broken.json has no figures"),
        (["--read", "few.json", "worker"], "none of the requested ones"),
        (["--json", "nowhere/now.json"], "there is no folder nowhere"),
        (["--longer", "-1"], "--longer must be above 0"),
    ],
)
def test_bad_words_are_told_before_anything_is_measured(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    _figures(tmp_path, "few", 0.1)
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And compares nothing."""

    def interrupted(_: Conditions) -> Table:
        raise KeyboardInterrupt

    one, other, *_ = parts(quick=True)
    done = one._replace(measure=lambda _: {"row": {"column": 1.0}})
    monkeypatch.setattr("benchmarks.__main__.parts", lambda **_: [done, other._replace(measure=interrupted)])
    file = tmp_path / "figures.json"
    assert main(["--quick", "--json", str(file)]) == 130
    assert list(json.loads(file.read_text())["parts"]) == [one.name]


def test_shows_on_a_terminal_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And leaves nothing of it there; what goes elsewhere is without it."""
    one, *_ = parts(quick=True)

    def measure(conditions: Conditions) -> Table:
        conditions.tell("halfway")
        return {"row": {"column": 1.0}}

    monkeypatch.setattr("benchmarks.__main__.parts", lambda **_: [one._replace(measure=measure)])
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        main(["--quick"])
        shown = capsys.readouterr().err
        assert shown == ("\r\x1b[Khalfway\r\x1b[K" if terminal else "")


def test_the_page_has_what_was_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And keeps what stands around it, also when it is written again."""
    page = tmp_path / "overhead.md"
    page.write_text("# Above\n\n<!-- figures -->\n<!-- end of figures -->\n\nBelow.\n")
    monkeypatch.setattr(pages, "PAGE", page)
    monkeypatch.setattr("benchmarks.__main__.BASELINE", tmp_path / "none.json")
    words = ["--read", str(_figures(tmp_path, "now", 0.1)), "--write"]
    main(words)
    once = page.read_text(encoding="utf-8")
    main(words)
    assert page.read_text(encoding="utf-8") == once
    assert once.startswith("# Above\n")
    assert once.endswith("\n\nBelow.\n")
    printed = capsys.readouterr().out
    (line,) = [line for line in once.splitlines() if line.startswith(f"| {modes.ALL} |")]
    assert line in printed
    assert "0.100 (0.090 … 0.110)" in line
