"""Cost of the report of a run of 100,000 steps and 2,000 modules: time to write, size, time to draw in Chromium.

`python -m benchmarks.report_page [FOLDER]`: the run and the page stay in FOLDER if it is given.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from torchotel import _semconv as names
from torchotel.exporters.run_file import RunFile
from torchotel.exporters.run_folder import claim_folder
from torchotel.tracing.span import Span, SpanTemplate, Trace

STEPS, MODULES, DETAIL, MAX_SPANS = 100_000, 2_000, 64, 2_000
_TRACED = 80_000
"""First step with spans: the bounded run file would have deleted earlier spans."""
_ROUNDS = 3
"""Rounds; the shortest time is used, because other programs only add to it."""
_STEP_NS = 120_000_000
_BLOCKS = MODULES // 8
_PARTS = ("", ".norm1", ".attention", ".attention.qkv", ".attention.out", ".norm2", ".mlp.up", ".mlp.down")
PATHS = [f"encoder.layers.{block}{part}" for block in range(_BLOCKS) for part in _PARTS]
BROWSER = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=600000", "--dump-dom")


def write_run(folder: Path) -> None:
    """Write a run as torchotel does, with one slow step in a thousand."""
    chance = random.Random(0)
    file = RunFile(claim_folder(folder), resource={"service.name": "bench"}, version="0")
    file.describe(
        {"service_name": "bench", "model": {"name": "Encoder", "modules": MODULES, "parameters": 1_000_000_000}}
    )
    templates = [_template(path, direction) for direction in ("forward", "backward") for path in ["Encoder", *PATHS]]
    now_ns = 1_700_000_000_000_000_000
    for number in range(STEPS):
        duration_ns = int(_STEP_NS * chance.uniform(0.9, 1.1) * (5 if chance.random() < 0.001 else 1))
        detailed = number < 10 or number % DETAIL == 0
        file.step(_line(number, now_ns, duration_ns, chance, detailed=detailed))
        if number >= _TRACED:
            file.export(_trace(number, now_ns, duration_ns, templates if detailed else []))
        now_ns += duration_ns
    file.shutdown(0)


def _template(path: str, direction: str) -> SpanTemplate:
    kind = path.rpartition(".")[2].strip("0123456789").title() or "Block"
    where = {names.MODULE_PATH: path, names.MODULE_TYPE: kind, names.MODEL: "Encoder", names.DIRECTION: direction}
    return SpanTemplate(f"{direction} {path}", {**where, names.DEVICE: "cuda:0", names.INPUT_SHAPES: ("8x512x1024",)})


def _line(number: int, now_ns: int, duration_ns: int, chance: random.Random, *, detailed: bool) -> dict[str, object]:
    shares = {"data": 0.05, "forward": 0.3, "backward": 0.55, "optimizer": 0.08, "other": 0.02}
    line: dict[str, object] = {
        "kind": "step",
        "number": number,
        "time_unix_nano": str(now_ns),
        "duration_s": duration_ns / 1e9,
        "phases": {name: share * duration_ns / 1e9 for name, share in shares.items()},
        "detailed": detailed,
        "trace_id": f"{number + 1:032x}",
        "values": {"loss": 5 / (1 + number / 5000) + chance.random() / 10, "lr": 1e-4, "samples": 32},
    }
    if detailed:
        line["gradient_norm"] = chance.lognormvariate(0, 0.3)
        line["gradient_norms"] = {"Encoder": {path: chance.lognormvariate(-5, 2) for path in PATHS[::2]}}
    return line


def _trace(number: int, now_ns: int, duration_ns: int, templates: list[SpanTemplate]) -> Trace:
    """Return the trace of a step with its phases and, in two of them, the tree of all modules."""
    spans = [Span(SpanTemplate(names.SPAN_STEP, {}), 1, 0, now_ns, now_ns + duration_ns)]
    start_ns = now_ns
    phases = {names.SPAN_DATA: 0.05, names.SPAN_FORWARD: 0.3, names.SPAN_BACKWARD: 0.55, names.SPAN_OPTIMIZER: 0.08}
    for place, (name, share) in enumerate(phases.items(), 2):
        end_ns = start_ns + int(share * duration_ns)
        spans.append(Span(SpanTemplate(name, {}), place, 1, start_ns, end_ns))
        inside = [one for one in templates if name.endswith(one.name.split()[0])][: MAX_SPANS // 2]
        spans += _modules(inside, place, start_ns, end_ns)
        start_ns = end_ns
    return Trace(number + 1, spans, {names.STEP_NUMBER: number})


def _modules(templates: list[SpanTemplate], parent: int, start_ns: int, end_ns: int) -> list[Span]:
    paths = [str(template.attributes[names.MODULE_PATH]) for template in templates]
    ids = {path: parent * 10_000 + index for index, path in enumerate(paths)}
    spans = []
    for index, (path, template) in enumerate(zip(paths, templates, strict=True)):
        last = index + sum(other.startswith(f"{path}.") for other in paths[index + 1 : index + len(_PARTS)])
        above = path.partition(".mlp")[0] if ".mlp" in path else path.rpartition(".")[0]
        begin_ns, stop_ns = (start_ns + (end_ns - start_ns) * edge // len(paths) for edge in (index, last + 1))
        if path == "Encoder":
            spans.append(Span(template, ids[path], parent, start_ns, end_ns))
        else:
            spans.append(Span(template, ids[path], ids.get(above, ids["Encoder"]), begin_ns, stop_ns - 1000))
    return spans


def main() -> None:
    """Write the run and its page, open the page, and print the figures."""
    with TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        run, page = folder / "run", folder / "run.html"
        if not run.exists():
            write_run(run)
        size_mb = sum(path.stat().st_size for path in run.iterdir()) / 1e6
        start_s = perf_counter()
        command = [sys.executable, "-m", "torchotel", "report", str(run), "-o", str(page)]
        subprocess.run(command, check=True)
        made_s = perf_counter() - start_s
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s, peak_mb = used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3
        (folder / "empty.html").write_text("")
        empty_s, opened_s = (
            min(_open(which, temporary) for _ in range(_ROUNDS)) for which in (folder / "empty.html", page)
        )
        print(f"{STEPS:,} steps, {MODULES:,} modules, {size_mb:.0f} MB of run file")
        print(f"written in {made_s:.1f} s ({cpu_s:.1f} s of one core) with {peak_mb:.0f} MB of memory")
        print(f"{page.stat().st_size / 1e6:.1f} MB large")
        print(f"drawn in {opened_s - empty_s:.1f} s more than an empty page")


def _open(page: Path, profile: str) -> float:
    start_s = perf_counter()
    words = [*BROWSER, f"--user-data-dir={profile}/profile", page.absolute().as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    if page.stat().st_size and "data-drawn-ms" not in done.stdout:
        raise RuntimeError(f"{page}: not drawn")
    return perf_counter() - start_s


if __name__ == "__main__":
    main()
