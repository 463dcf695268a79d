"""What a program records, as text without times, ids and versions: the same on every run.

PYTHONPATH=tests python -m golden.records     # writes all records anew, after a change on purpose
"""

import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support import commands

from golden.programs import PROGRAMS

RECORDS = Path(__file__).parent / "records"
VARYING = re.compile(
    r"(\.|_|^)(version|versions|run[._]id|pid|host[._]name|instance[._]id|cuda\.\w+|python|device_name|.*duration|.*time)$"
    r"|^thread\.id$|^torchotel\.config|unix_nano|^(config|resource|phases|overhead_ratio|prometheus_port|process|trace_id)$|_s$"
)
"""Names of what differs from run to run or from machine to machine."""


def record(name: str, **variables: str) -> str:
    """Run a program; return its spans, its lines of the run file, its summary there and its metrics."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        done = commands.forked_python("-m", "golden.programs", name, str(folder), cwd=RECORDS.parents[1], **variables)
        assert done.returncode == 0, done.stderr
        info = json.loads((folder / "run.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        sections = {
            "spans": _traces(folder),
            "metrics.jsonl": [_attributes(line) for line in lines],
            "run.json": [f"{key} {_value(value)}" for key, value in info.items() if not VARYING.search(key)],
            "scrape": list(_series((folder / "scrape.txt").read_text())),
            "stderr": done.stderr.splitlines(),
        }
    return "".join(f"== {title}\n" + "".join(f"{line}\n" for line in body) for title, body in sections.items())


def _traces(folder: Path) -> list[str]:
    """Return the trees of all traces; traces and child spans are sorted by start time."""
    spans = [span for path in sorted(folder.glob("trace-*.jsonl")) for span in _spans(path)]
    spans.sort(key=lambda span: int(span["startTimeUnixNano"]))
    children = defaultdict(list)
    names = {span["spanId"]: span["name"] for span in spans}
    for span in spans:
        children[span.get("parentSpanId", "") if span.get("parentSpanId") in names else ""].append(span)

    def tree(parent: str, indent: str) -> Iterator[str]:
        for span in children[parent]:
            outside = " below a span of the program's" if not parent and span.get("parentSpanId") else ""
            yield f"{indent}{span['name']}{outside} {_attributes(_flat(span))}"
            for event in span.get("events", ()):
                yield f"{indent}  ! {event['name']} {_attributes(_flat(event))}"
            for link in span.get("links", ()):
                yield f"{indent}  -> {names.get(link['spanId'], 'a span of the program')} {_attributes(_flat(link))}"
            yield from tree(span["spanId"], indent + "  ")

    return list(tree("", ""))


def _spans(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                yield from scope["spans"]


def _flat(span: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {one["key"]: _plain(one["value"]) for one in span.get("attributes", ())}
    return {"status": span["status"], **attributes} if span.get("status") else attributes


def _plain(value: Mapping[str, Any]) -> Any:
    (kind, content), *_ = value.items()
    if kind == "arrayValue":
        return [_plain(one) for one in content.get("values", ())]
    return int(content) if kind == "intValue" else content


def _attributes(attributes: Mapping[str, Any]) -> str:
    kept = {key: _value(value) for key, value in attributes.items() if not VARYING.search(key)}
    return " ".join(f"{key}={value}" for key, value in kept.items())


def _value(value: Any) -> str:
    """Return it as JSON; `float` for a computed number, whose last digits depend on the processor."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(one)}" for key, one in value.items() if not VARYING.search(key)) + "}"
    if isinstance(value, float) and len(repr(value)) > 5:
        return "float"
    return json.dumps(value)


def _series(scrape: str) -> Iterator[str]:
    """Return every series but buckets and what is known of the process, with the values of those that count."""
    for line in scrape.splitlines():
        name = re.split(r"[{ ]", line, maxsplit=1)[0]
        if line.startswith("# TYPE"):
            yield line
        elif not line.startswith("#") and name != "target_info" and not name.endswith("_bucket"):
            series, value = line.rsplit(" ", 1)
            varies = ("seconds" in name and not name.endswith("_count")) or "bytes" in name
            yield f"{series} {'float' if varies else _value(float(value))}"


if __name__ == "__main__":
    RECORDS.mkdir(exist_ok=True)
    for one in sys.argv[1:] or PROGRAMS:
        (RECORDS / f"{one}.txt").write_text(record(one))
        print(one, flush=True)  # noqa: T201  # progress of a command that runs for a minute
