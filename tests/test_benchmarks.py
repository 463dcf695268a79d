"""The benchmark runs; how long anything takes is nobody's claim here."""

import json
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import commands

ROOT = Path(__file__).parents[1]


def test_prints_a_figure_for_every_instrument(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = commands.python("-m", "benchmarks", "--quick", "--json", str(file), cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(file.read_text(encoding="utf-8"))
    assert list(result["modes"]) == [
        "empty global hooks",
        'torchotel, hooks out (detail="off")',
        "torchotel, capture alone",
        "torchotel, capture + build + encode",
        "torchotel, the whole with export",
        "naive instrumentation on the SDK",
    ]
    assert list(result["step_thread"]) == [
        'detail="off", no loader',
        "paused, no loader",
        'detail="off", with a loader',
        "paused, with a loader",
    ]
    assert list(result["worker"]) == [
        "build the trace",
        "encode as protobuf",
        "compress with gzip",
        "encode as JSON",
        "the SDK's encoder, for comparison",
        "encode and send, whole",
        "replay through the SDK's tracer",
        "replay, and the SDK sends, whole",
    ]
    rows = {line[:37].rstrip(): line[37:].split() for line in done.stdout.splitlines()}
    for name, figures in {**result["modes"], **result["step_thread"], **result["worker"]}.items():
        assert all(map(isfinite, _numbers(figures))), name
        assert isfinite(float(rows[name][0])), name
    assert result["modes"]["torchotel, the whole with export"]["delivered"] == {"share": 1.0}


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    else:
        yield value
