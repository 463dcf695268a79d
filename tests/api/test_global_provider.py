"""The provider that is set globally: one that we find, and one that we set for the user's own spans.

It can be set once in a process, so each program has its own.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.otlp_grpc_receiver import grpc_receiver
from support.otlp_http_receiver import Answer, Receiver, receiver
from support.recorded_training import roots

pytestmark = pytest.mark.program

PRELUDE = """
import json, torch, torchotel
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import nn

kept = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        with trace.get_tracer("user").start_as_current_span("query"):
            return self.linear(x)

def train(steps=2):
    net = Reader()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()

def names():
    return sorted({span.name for span in kept.get_finished_spans()})
"""
OURS = ["backward Reader", "backward linear", "forward Reader", "forward linear"]
PHASES = ["torch.backward", "torch.between", "torch.forward", "torch.optimizer.step", "torch.run", "torch.step"]


def run(code: str, tmp_path: Path, server: Receiver, **variables: str) -> Any:
    """Run a program in a process of its own, where a global provider can be set, and give what it prints as JSON."""
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(code), encoding="utf-8")
    endpoint = server.url.removesuffix("/v1/traces")
    done = commands.forked_python(
        str(script),
        cwd=tmp_path,
        **{
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_METRICS_EXPORTER": "none",
            "TORCHOTEL_DETAIL": "all",
            **variables,
        },
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run three sessions under a global provider, and tell what came of them."""
    code = """
    import logging
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("torchotel").addHandler(handler)
    trace.set_tracer_provider(provider)
    with torchotel.instrument():
        train()
    spans = {span.context.span_id: span for span in kept.get_finished_spans()}
    pairs = {(span.name, spans[span.parent.span_id].name) for span in spans.values() if span.parent}
    tree = [names(), sorted(pairs), list(said)]
    kept.clear()
    other = InMemorySpanExporter()
    given = TracerProvider()
    given.add_span_processor(SimpleSpanProcessor(other))
    with torchotel.instrument(tracer_provider=given):
        train()
    beaten = [names(), sorted({span.name for span in other.get_finished_spans()})]
    kept.clear()
    with torchotel.instrument(set_global_provider=True):
        train()
    stays = [said, names(), trace.get_tracer_provider() is provider]
    print(json.dumps({"tree": tree, "beaten": beaten, "stays": stays}))
    """
    with receiver() as server:
        result: dict[str, Any] = run(code, tmp_path_factory.mktemp("found"), server)
        assert server.requests == []
    return result


def test_a_global_provider_is_found(found: dict[str, Any]) -> None:
    """One that is set before `instrument()` gets our spans and the user's, in one tree."""
    names, pairs, said = found["tree"]
    assert names == sorted([*OURS, *PHASES, "query"])
    assert ["query", "forward Reader"] in pairs
    assert ["forward Reader", "torch.forward"] in pairs
    assert said == []


@pytest.mark.parametrize(
    ("arguments", "warnings"),
    [("", 1), ("tracer_provider=provider", 0), ("set_global_provider=True", 0), ("traces_exporter='none'", 0)],
)
def test_a_provider_that_is_set_too_late_is_warned_of(
    arguments: str, warnings: int, tmp_path: Path, server: Receiver
) -> None:
    """Once, with the first step; not if torchotel needs no provider or has set one, which the API does not replace."""
    code = f"""
    import logging
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("torchotel").addHandler(handler)
    with torchotel.instrument({arguments}):
        trace.set_tracer_provider(provider)
        train()
        with torch.no_grad():
            Reader()(torch.randn(2, 4))
    print(json.dumps(said))
    """
    said = run(code, tmp_path, server)
    assert [text for text in said if "after torchotel had started" in text] == said
    assert len(said) == warnings


def test_a_given_provider_beats_the_global_one(found: dict[str, Any]) -> None:
    """Our spans go to the given one alone, the user's where they always went."""
    assert found["beaten"] == [["query"], sorted([*OURS, *PHASES])]


def test_a_provider_that_is_set_already_stays(found: dict[str, Any]) -> None:
    """`set_global_provider` then changes nothing, and says so."""
    (warning,), names, same = found["stays"]
    assert "already" in warning
    assert (names, same) == (sorted([*OURS, *PHASES, "query"]), True)


@pytest.mark.parametrize(("ours", "worker"), [(False, "thread"), (False, "process"), (True, "thread")])
def test_a_provider_that_cannot_be_loaded_costs_a_warning(
    tmp_path: Path, server: Receiver, worker: str, *, ours: bool
) -> None:
    """OTEL_PYTHON_TRACER_PROVIDER may name one that only another program has; spans are exported without it."""
    done = commands.forked_python(
        "-c",
        textwrap.dedent(
            f"""\
            import torch, torchotel
            with torchotel.instrument(set_global_provider={ours}, prometheus_port=None):
                torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
            """
        ),
        cwd=tmp_path,
        TORCHOTEL_WORKER=worker,
        OTEL_PYTHON_TRACER_PROVIDER="absent",
        OTEL_EXPORTER_OTLP_ENDPOINT=server.url.removesuffix("/v1/traces"),
    )
    assert done.returncode == 0
    assert done.stderr.count("No tracer provider could be loaded") == 1
    assert "set globally already" not in done.stderr
    assert {"torch.run", "torch.step"} <= {span.name for span in server.spans}


def test_a_meter_provider_that_cannot_be_loaded_costs_the_users_spans_alone(tmp_path: Path, server: Receiver) -> None:
    """The SDK's span processor asks for the one that OTEL_PYTHON_METER_PROVIDER names."""
    code = """
    import torch, torchotel
    with torchotel.instrument(set_global_provider=True, prometheus_port=None):
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    """
    done = commands.forked_python(
        "-c",
        textwrap.dedent(code),
        cwd=tmp_path,
        OTEL_PYTHON_METER_PROVIDER="absent",
        OTEL_EXPORTER_OTLP_ENDPOINT=server.url.removesuffix("/v1/traces"),
    )
    assert done.returncode == 0
    assert done.stderr.count("The SDK created no tracer provider (StopIteration; OTEL_PYTHON_METER_PROVIDER") == 1
    assert {"torch.run", "torch.step"} <= {span.name for span in server.spans}


LIMITED = """
import torch, torchotel
from opentelemetry import trace
with torchotel.instrument(set_global_provider=True, prometheus_port=None) as handle:
    with trace.get_tracer("user").start_as_current_span("mine", {"a": 1}) as span:
        span.add_event("e", {"a": 1})
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert handle.flush()
"""
LIMITS = ("SPAN_ATTRIBUTE_COUNT", "SPAN_EVENT_COUNT", "SPAN_LINK_COUNT", "ATTRIBUTE_COUNT", "ATTRIBUTE_VALUE_LENGTH")


@pytest.mark.parametrize("text", ["abc", "-1", "9" * 20, " "])
def test_a_malformed_limit_costs_no_span(text: str, tmp_path: Path, server: Receiver) -> None:
    """The SDK raises of it when it is imported, which samplers and pushed metrics do too, or when a span begins."""
    done = commands.forked_python(
        "-c",
        LIMITED,
        cwd=tmp_path,
        OTEL_EXPORTER_OTLP_ENDPOINT=server.url.removesuffix("/v1/traces"),
        OTEL_METRICS_EXPORTER="otlp",
        OTEL_TRACES_SAMPLER="traceidratio",
        **{f"OTEL_{name}_LIMIT": text for name in LIMITS},
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stderr.count("is ignored") == (len(LIMITS) if text in {"abc", "-1"} else 0), done.stderr
    assert {"torch.run", "torch.step", "mine"} <= {span.name for span in server.spans}
    assert server.pushed


@pytest.mark.parametrize(
    ("name", "text"),
    [("MAX_QUEUE_SIZE", "0"), ("MAX_QUEUE_SIZE", "1"), ("MAX_EXPORT_BATCH_SIZE", "9999"), ("SCHEDULE_DELAY", "0")],
)
def test_a_batch_setting_that_the_sdk_refuses_costs_no_span(
    name: str, text: str, tmp_path: Path, server: Receiver
) -> None:
    """The specification's defaults apply, with a warning: the SDK raises of a queue shorter than a batch."""
    done = commands.forked_python(
        "-c",
        LIMITED,
        cwd=tmp_path,
        OTEL_EXPORTER_OTLP_ENDPOINT=server.url.removesuffix("/v1/traces"),
        OTEL_METRICS_EXPORTER="none",
        **{f"OTEL_BSP_{name}": text},
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stderr.count("OTEL_BSP_") == 1, done.stderr
    assert {"torch.run", "torch.step", "mine"} <= {span.name for span in server.spans}


def test_a_provider_of_ours_sends_the_users_spans(tmp_path: Path, server: Receiver) -> None:
    """With `set_global_provider` both arrive at one endpoint in one tree; the next session finds it and keeps it."""
    code = """
    counts = []
    for _ in range(2):
        with torchotel.instrument(set_global_provider=True, headers={"authorization": "Bearer x"}) as handle:
            train()
            assert handle.flush()
        counts.append(handle.stats()["spans_exported"])
    print(json.dumps([counts, names(), type(trace.get_tracer_provider()).__name__]))
    """
    assert run(code, tmp_path, server) == [[18, 18], [], "TracerProvider"]
    assert len(server.spans) == 2 * (18 + 2)
    steps = [root for root in roots(server.spans) if root.name == "torch.step"]
    assert len(steps) == 4
    for step in steps:
        call = step.find("forward Reader")
        assert sorted(child.name for child in call.children) == ["forward linear", "query"]
    headers = [{name.lower(): value for name, value in request.headers.items()} for request in server.requests]
    assert {one["authorization"] for one in headers} == {"Bearer x"}
    makers = {
        (scope.scope.name == "torchotel", told["service.name"], told["telemetry.sdk.name"])
        for request in server.requests
        for resource in request.message.resource_spans
        for told in [{entry.key: entry.value.string_value for entry in resource.resource.attributes}]
        for scope in resource.scope_spans
    }
    # "opentelemetry" is reserved for OpenTelemetry's SDKs, which made the program's spans and not ours.
    assert makers == {(True, "program", "torchotel"), (False, "program", "opentelemetry")}


def test_a_provider_of_ours_speaks_the_protocol_of_ours(tmp_path: Path, server: Receiver) -> None:
    """Over gRPC both arrive at one endpoint, with the headers that were given."""
    with grpc_receiver() as peer:
        code = f"""
        endpoint, headers = {peer.endpoint!r}, {{"X-Key": "v"}}
        with torchotel.instrument(
            set_global_provider=True, protocol="grpc", endpoint=endpoint, headers=headers
        ) as handle:
            train()
            assert handle.flush()
        print(json.dumps(handle.stats()))
        """
        stats = run(code, tmp_path, server)
        assert len(peer.spans) == stats["spans_exported"] + 2
        assert sum(span.name == "query" for span in peer.spans) == 2
        assert {call.metadata["x-key"] for call in peer.calls} == {"v"}
    assert not server.requests


def test_without_grpc_the_users_spans_are_sent_over_http(tmp_path: Path, server: Receiver) -> None:
    """If grpcio cannot be imported, only the protocol grpc is unavailable."""
    code = """
    import sys
    sys.modules["grpc"] = None
    with torchotel.instrument(set_global_provider=True) as handle:
        train()
        assert handle.flush()
    print(json.dumps(handle.stats()["spans_exported"]))
    """
    assert run(code, tmp_path, server) == 18
    assert sum(span.name == "query" for span in server.spans) == 2


def test_without_grpc_the_users_spans_are_printed(tmp_path: Path) -> None:
    """The console needs no protocol."""
    code = """
    import sys
    sys.modules["grpc"] = None
    with torchotel.instrument(set_global_provider=True, traces_exporter="console", prometheus_port=None):
        train()
    """
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(code), encoding="utf-8")
    done = commands.forked_python(str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The SDK created no tracer provider" not in done.stderr
    assert done.stdout.count('"name": "query"') == 2


def test_a_sampler_of_the_environment_holds_for_both(tmp_path: Path, server: Receiver) -> None:
    """The user's spans are sampled with the step that they are in."""
    code = """
    with torchotel.instrument(set_global_provider=True) as handle:
        train(20)
    print(json.dumps(handle.stats()))
    """
    stats = run(code, tmp_path, server, OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.5")
    queries = {span.trace_id for span in server.spans if span.name == "query"}
    steps = {span.trace_id for span in server.spans if span.name == "torch.step"}
    assert queries == steps
    assert 0 < len(steps) < 20  # fewer than it takes to find one slow, which would be kept late
    assert stats["spans_recorded"] == stats["spans_exported"] + stats["spans_sampled_out"]


def test_nothing_of_it_runs_in_a_loader_worker(tmp_path: Path, server: Receiver) -> None:
    """A DataLoader's forked workers replay nothing, and send nothing of ours."""
    code = """
    import os
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            train(1)
            return torch.ones(4)

    with torchotel.instrument(set_global_provider=True) as handle:
        for batch in DataLoader(Rows(), num_workers=2, multiprocessing_context="fork"):
            train(1)
    print(json.dumps(handle.stats()))
    """
    stats = run(code, tmp_path, server, OTEL_BSP_SCHEDULE_DELAY="100")
    ours = [span for span in server.spans if span.name != "query"]
    assert len(ours) == stats["spans_exported"] == stats["spans_recorded"]
    assert sum(span.name == "torch.step" for span in ours) == stats["steps"] == 4


def test_an_endpoint_of_ours_that_is_down(server: Receiver, tmp_path: Path) -> None:
    """With a dead endpoint a program under `set_global_provider` ends in time."""
    server.answers.extend([Answer(503)] * 1000)
    code = """
    import time
    handle = torchotel.instrument(set_global_provider=True)
    train()
    begun = time.monotonic()
    handle.shutdown(timeout_s=1)
    print(json.dumps(time.monotonic() - begun))
    """
    took_s = run(code, tmp_path, server, OTEL_EXPORTER_OTLP_TIMEOUT="3")
    assert took_s < 30  # the attempts go on for 64 seconds


# ---- the program's random numbers


def test_random_numbers_of_the_program_stay(tmp_path: Path, server: Receiver) -> None:
    """A provider that is set after us, one that is found and one that is given draw nothing for our spans."""
    code = """
    import random
    before, counts = random.getstate(), []
    def session(late=False, **settings):
        with torchotel.instrument(**settings):
            if late:
                trace.set_tracer_provider(provider)
            plain = nn.Linear(4, 4)  # no spans of its own
            optimizer = torch.optim.SGD(plain.parameters(), 0.1)
            for _ in range(2):
                plain(torch.randn(2, 4)).sum().backward()
                optimizer.step()
        counts.append(sum(span.name == "torch.step" for span in kept.get_finished_spans()))
        kept.clear()
        return random.getstate() == before
    same = [session(True, tracer_provider=trace.get_tracer_provider()), session(), session(tracer_provider=provider)]
    print(json.dumps([same, counts]))
    """
    assert run(code, tmp_path, server) == [[True] * 3, [2] * 3]


def test_ids_of_a_provider_of_ours(tmp_path: Path, server: Receiver) -> None:
    """With `set_global_provider` the user's spans draw nothing either, and forked processes have ids of their own."""
    code = """
    import os, random
    before = random.getstate()
    torchotel.instrument(set_global_provider=True)
    train()
    def trace_id():
        return trace.get_tracer("user").start_span("request").get_span_context().trace_id
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, trace_id().to_bytes(16, "big"))
        os._exit(0)
    os.wait()
    ids = {trace_id(), int.from_bytes(os.read(reading, 16), "big")}
    print(json.dumps([random.getstate() == before, len(ids), 0 in ids]))
    """
    assert run(code, tmp_path, server) == [True, 2, False]
