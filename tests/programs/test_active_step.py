"""The step is current while it lasts: the user's spans, logs and `with` blocks, with either engine."""

import threading
import time
from contextvars import copy_context
from copy import copy
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.context import attach, detach
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState
from support.both_exports import ENGINES, looked
from support.recorded_training import rows
from torch import Tensor, nn

import torchotel


class Asks(nn.Module):
    """A layer whose forward opens a span of the user's."""

    def __init__(self, tracer: trace.Tracer) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tracer = tracer

    def forward(self, x: Tensor) -> Tensor:
        with self.tracer.start_as_current_span("lookup"), self.tracer.start_as_current_span("inner lookup"):
            return self.linear(x)  # type: ignore[no-any-return] # torch has it so


def _train(model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_span_opened_in_a_forward_is_the_modules_child(engine: str) -> None:
    """What is innermost answers, and the user's own spans nest among themselves."""
    with looked(engine) as look:
        _train(nn.Sequential(nn.Linear(4, 4), Asks(look.tracer)), steps=2)
    way = ["forward 1", "forward Sequential", "torch.forward", "torch.step"]
    assert look.above("lookup") == [way, way]
    assert look.above("inner lookup") == [["lookup", *way]] * 2
    assert look.above("forward 1.linear") == [way] * 2
    assert len([names for names in look.traces.values() if "lookup" in names]) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_span_opened_in_a_step_is_the_steps_child(engine: str) -> None:
    """Before the forward, after it, in the backward and after the optimizer."""
    with looked(engine) as look:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in rows(2):
            with look.tracer.start_as_current_span("prepare"):
                pass
            loss = model(batch).sum()
            loss.register_hook(lambda _: look.tracer.start_span("in backward").end())
            with look.tracer.start_as_current_span("loss"):
                loss.backward()
            optimizer.step()
            look.tracer.start_span("after").end()
    for name in ("prepare", "loss", "after"):
        assert look.above(name) == [["torch.step"]] * 2
    assert look.above("in backward") == [["loss", "torch.step"]] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_called_in_a_users_block_within_a_step_still_answers(engine: str) -> None:
    """The user's block is the step's child, and so is what the module's forward opens the module's."""
    with looked(engine) as look:
        model = Asks(look.tracer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in rows(2):
            with look.tracer.start_as_current_span("block") as block:
                model(batch).sum().backward()
                assert trace.get_current_span() is block
            optimizer.step()
    assert look.above("block") == [["torch.step"]] * 2
    assert look.above("lookup") == [["forward Asks", "torch.forward", "torch.step"]] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_an_evaluation_under_a_users_span_is_one_tree(engine: str) -> None:
    """A request holds the evaluation, which holds the module, which holds what it opens; the request stays current."""
    with looked(engine) as look:
        model = Asks(look.tracer).eval()
        for _ in range(2):
            with look.tracer.start_as_current_span("request") as request, torch.no_grad():
                model(torch.ones(1, 4))
                assert trace.get_current_span() is request
    assert look.above("lookup") == [["forward Asks", "torch.evaluation", "request"]] * 2
    assert len(look.traces) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forward_that_no_backward_follows_keeps_the_ids_that_it_gave(engine: str) -> None:
    """With gradients on it might have been a step; it is an evaluation in its own trace."""
    with looked(engine) as look:
        model = Asks(look.tracer)
        model(torch.ones(1, 4))
    assert look.above("lookup") == [["forward Asks", "torch.forward", "torch.evaluation"]]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_excluded_module_that_was_asked_is_there(engine: str) -> None:
    """Somebody's span is below it."""
    with looked(engine, exclude="*linear,1", max_spans=10) as look:
        _train(nn.Sequential(nn.Linear(4, 4), Asks(look.tracer)))
    assert look.above("lookup") == [["forward 1", "forward Sequential", "torch.forward", "torch.step"]]


def test_blocks_around_and_across_steps_leave_the_right_span_current() -> None:
    """Around: the user's comes back. Across: neither a step nor a block that has ended is ever current."""
    with looked("otlp") as look:
        model = nn.Linear(4, 4)
        assert not trace.get_current_span().get_span_context().is_valid
        with look.tracer.start_as_current_span("around") as around:
            _train(model, steps=3)
            handle = torchotel.instrument()
            handle.flush()
            assert trace.get_current_span() is around
        assert not trace.get_current_span().get_span_context().is_valid
        opened = look.tracer.start_as_current_span("across")
        _train(model)
        across = opened.__enter__()
        _train(model)
        opened.__exit__(None, None, None)
        handle.flush()
        assert not trace.get_current_span().get_span_context().is_valid
        assert across.get_span_context().is_valid
        with look.tracer.start_as_current_span("ends first") as ends_first:
            model(torch.ones(2, 4))  # a candidate that outlives the block
        assert not ends_first.is_recording()
        _train(model)
        handle.flush()
        assert not trace.get_current_span().get_span_context().is_valid


def test_what_users_set_on_the_current_span_reaches_theirs() -> None:
    """In a step the span below ours takes it, as it does without torchotel."""
    with looked("otlp") as look, look.tracer.start_as_current_span("mine"):
        for batch in rows(1):
            nn.Linear(4, 4)(batch)
            assert trace.get_current_span().is_recording()
            trace.get_current_span().set_attribute("k", 1)
            trace.get_current_span().add_event("happened")
    (mine,) = [span for span in look.exporter.get_finished_spans() if span.name == "mine"]
    assert dict(mine.attributes or {}) == {"k": 1}
    assert [event.name for event in mine.events] == ["happened"]


def test_the_current_span_reads_and_changes_as_the_users_span() -> None:
    """Renaming, links and the SDK's attributes are those of the user's span; its context is the step's."""
    with looked("otlp") as look, look.tracer.start_as_current_span("mine") as mine:
        linked = look.tracer.start_span("linked").get_span_context()
        for batch in rows(1):
            nn.Linear(4, 4)(batch)
            current: Any = trace.get_current_span()
            assert (current is mine, current.name, current.parent) == (False, "mine", None)
            current.update_name("renamed")
            current.add_link(linked, {"why": "test"})
            assert current.name == "renamed"
            assert current.context == current.get_span_context() != mine.get_span_context()
            current.end()
            assert current.end_time is not None
            assert not current.is_recording()
    (renamed,) = [span for span in look.exporter.get_finished_spans() if span.name == "renamed"]
    assert [(link.context, dict(link.attributes or {})) for link in renamed.links] == [(linked, {"why": "test"})]


def test_the_current_span_without_one_of_the_users_does_nothing() -> None:
    """It is then as a span that does not record: no change raises, and it has no attributes of the SDK's span."""
    with looked("otlp") as look:
        for batch in rows(1):
            nn.Linear(4, 4)(batch)
            current = trace.get_current_span()
            current.update_name("renamed")
            current.add_link(SpanContext(1, 2, is_remote=False))
            current.end()
            assert not any(hasattr(current, name) for name in ("name", "parent", "context", "attributes"))
            assert copy(current) is not current
            assert current.get_span_context().is_valid
    assert "renamed" not in {span.name for span in look.exporter.get_finished_spans()}


def test_a_context_handed_to_another_thread_answers_with_the_step() -> None:
    """Not with whatever module happens to run meanwhile."""
    with looked("otlp") as look:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in rows(2):
            model(batch).sum().backward()
            look.tracer.start_span("here").end()
            context = copy_context()
            elsewhere = threading.Thread(target=context.run, args=(lambda: look.tracer.start_span("there").end(),))
            elsewhere.start()
            elsewhere.join()
            optimizer.step()
    assert look.above("there") == [["torch.step"]] * 2


@pytest.mark.parametrize("first", [0, 1], ids=["in its step", "after its step"])
def test_a_context_that_a_thread_has_kept_answers_with_no_later_step(first: int) -> None:
    """A thread that got it in step 0 opens spans; if the first one comes after that step, they have no parent."""
    with looked("otlp") as look:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            loss = model(torch.ones(2, 4)).sum()
            if number == 0:
                context = copy_context()
            if number == 2:
                look.tracer.start_span("asks").end()
            loss.backward()
            optimizer.step()
            if number >= first:
                thread = threading.Thread(target=context.run, args=(lambda: look.tracer.start_span("job").end(),))
                thread.start()
                thread.join()
            optimizer.zero_grad()
    jobs = [parent for name, parent in look.spans.values() if name == "job"]
    assert len(jobs) == 4 - first
    assert len(set(jobs)) == 1
    assert look.above("job") == [[] if first else ["torch.step"]] * len(jobs)
    assert look.above("asks") == [["torch.step"]]


def test_a_context_kept_beyond_its_step_answers_with_no_later_step_on_its_own_thread() -> None:
    """A task of asyncio keeps its context, too. No ids were read during the step, so the span has no parent."""
    with looked("otlp") as look:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        contexts = []
        for batch in rows(3):
            model(batch).sum().backward()
            contexts.append(copy_context())
            contexts[0].run(lambda: look.tracer.start_span("upload").end() if len(contexts) == 3 else None)
            optimizer.step()
    assert look.above("upload") == [[]]


def test_a_span_in_a_thread_that_a_forward_starts_is_in_the_step() -> None:
    """Though the thread of the training has asked for no ids, and on a detailed step."""
    with looked("otlp") as look:

        class Fetches(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                query = threading.Thread(
                    target=copy_context().run, args=(lambda: look.tracer.start_span("query").end(),)
                )
                query.start()
                query.join()
                return super().forward(x)

        model = Fetches(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in rows(2):
            model(batch).sum().backward()
            optimizer.step()
    assert look.above("query") == [["torch.step"]] * 2


def test_the_span_of_a_context_stays_the_same() -> None:
    """Also on its own thread, amid later steps: https://opentelemetry.io/docs/specs/otel/trace/api/#get-context."""
    with looked("otlp"):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        spans: list[trace.Span] = []
        given: list[int] = []
        for batch in rows(3):
            model(batch).sum().backward()
            spans.append(trace.get_current_span())
            given.append(spans[-1].get_span_context().span_id)
            optimizer.step()
            assert [span.get_span_context().span_id for span in spans] == given
    assert len(set(given)) == 3


def test_an_evaluation_in_a_block_of_the_users_leaves_nothing_current() -> None:
    """The block brings back the span of the step before it, which the steps after it go on from."""
    with looked("otlp") as look:
        model, run = nn.Linear(4, 4), look.tracer.start_span("run")
        _train(model, steps=2)
        with trace.use_span(run), torch.no_grad():
            model(torch.ones(2, 4))
        _train(model, steps=3)
        look.handle.flush()
        assert trace.get_current_span() is trace.INVALID_SPAN


def test_the_steps_of_two_optimizers_answer_with_their_own_ids() -> None:
    """Without a loader nothing but the optimizers tells where a step of a GAN ends."""
    with looked("otlp") as look:
        pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (nn.Linear(4, 4), nn.Linear(4, 4))]
        for number in range(6):
            for model, optimizer in pairs:
                model(torch.ones(2, 4)).sum().backward()
                if number >= 3:
                    look.tracer.start_span(f"asks in {number}").end()
                optimizer.step()
    asked = [names & {f"asks in {number}" for number in range(6)} for names in look.traces.values()]
    assert sorted(filter(None, map(sorted, asked))) == [["asks in 3"], ["asks in 4"], ["asks in 5"]]


def test_nothing_is_fixed_unless_somebody_asks() -> None:
    """Without an asker no id is given out, and the current span is put back at the end."""
    with looked("otlp") as look:
        _train(nn.Linear(4, 4), steps=3)
    assert all(len(names) > 1 for names in look.traces.values() if "torch.step" in names)


@pytest.mark.parametrize("engine", ENGINES)
def test_forwards_in_blocks_of_their_own_are_one_step(engine: str) -> None:
    """Blocks that are the step's children are no other requests."""
    with looked(engine) as look:
        encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
        for batch in rows(2):
            with look.tracer.start_as_current_span("encode"):
                hidden = encoder(batch)
            with look.tracer.start_as_current_span("decode"):
                decoder(hidden).sum().backward()
            optimizer.step()
    assert look.above("encode") == look.above("decode") == [["torch.step"]] * 2
    assert look.above("torch.evaluation") == []


@pytest.mark.parametrize("engine", ENGINES)
def test_every_evaluation_of_a_long_request_that_was_asked_is_there(engine: str) -> None:
    """They are not folded: the user's spans are below them."""
    with looked(engine) as look:
        model = Asks(look.tracer).eval()
        with look.tracer.start_as_current_span("request"), torch.no_grad():
            for _ in range(20):
                model(torch.ones(1, 4))
    assert look.above("lookup") == [["forward Asks", "torch.evaluation", "request"]] * 20


def test_one_step_object_may_stand_for_blocks_one_in_another() -> None:
    """And steps after them are as ever."""
    with looked("otlp") as look:
        model, block = nn.Linear(4, 4), torchotel.step()
        with block, block:
            _train(model)
        _train(model, steps=2)
    assert len(look.above("torch.step")) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_request_does_after_a_forward_is_the_requests(engine: str) -> None:
    """Also where gradients were left on, and a step might come of it still."""
    with looked(engine) as look:
        model = Asks(look.tracer)
        for _ in range(2):
            with look.tracer.start_as_current_span("request") as request:
                model(torch.ones(1, 4))
                assert trace.get_current_span() is request
                look.tracer.start_span("store").end()
    assert look.above("store") == [["request"]] * 2
    assert look.above("lookup") == [["forward Asks", "torch.forward", "torch.evaluation"]] * 2


def test_a_late_log_record_lengthens_no_step() -> None:
    """The span lasts until then, for others may be below it; the step's duration is its own."""
    reader = InMemoryMetricReader()
    with looked("otlp", meter_provider=MeterProvider([reader])) as look:
        _train(nn.Linear(4, 4))
        time.sleep(0.3)  # the claim is about time that passes
        look.tracer.start_span("late").end()
        torchotel.instrument().flush()
        assert "torch.step.duration" in str(reader.get_metrics_data())
        (points,) = [
            metric.data.data_points
            for resource in reader.get_metrics_data().resource_metrics  # type: ignore[union-attr] # there is some
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "torch.step.duration"
        ]
    assert points[0].sum < 0.3  # type: ignore[union-attr] # a histogram's
    assert look.above("late") == [["torch.step"]]


def test_the_callers_trace_state_goes_with_it() -> None:
    """To our spans below a request, and to the user's below ours."""
    with looked("otlp") as look:
        state = TraceState([("vendor", "x")])
        caller = NonRecordingSpan(SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1), trace_state=state))
        with trace.use_span(caller), torch.no_grad():
            Asks(look.tracer)(torch.ones(1, 4))
    (lookup,) = [span for span in look.exporter.get_finished_spans() if span.name == "lookup"]
    context = lookup.get_span_context()
    assert context is not None
    assert context.trace_state.to_header() == "vendor=x"
    assert look.states == {"vendor=x"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("flags", ["01", "03"])
def test_the_callers_trace_flags_go_with_it(flags: str, engine: str) -> None:
    """To our spans below a request, to the user's below ours, and on to whom the program calls."""
    sent: dict[str, str] = {}
    caller = extract({"traceparent": f"00-{1:032x}-{2:016x}-{flags}"})
    with looked(engine) as look:
        token = attach(caller)
        model = Asks(look.tracer)
        model.linear.register_forward_hook(lambda *_: inject(sent))
        with torch.no_grad():
            model(torch.ones(1, 4))
        detach(token)
    (lookup,) = [span for span in look.exporter.get_finished_spans() if span.name == "lookup"]
    context = lookup.get_span_context()
    assert context is not None
    assert context.trace_flags == int(flags, 16)
    assert sent["traceparent"].split("-")[1::2] == [f"{1:032x}", flags]
    assert look.flags == ({int(flags, 16)} if engine == "otlp" else set())


def test_the_callers_trace_flags_are_in_links_to_it() -> None:
    """A step is a trace of its own: only its link has the flags of the caller."""
    with looked("otlp") as look:
        token = attach(extract({"traceparent": f"00-{1:032x}-{2:016x}-0b"}))
        _train(nn.Linear(4, 4))
        detach(token)
    assert look.flags == {0x03, 0x0B}
