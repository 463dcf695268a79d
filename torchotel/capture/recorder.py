"""Composes the parts of capture: hooks that record on training threads, and records that are handed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from time import perf_counter_ns, time_ns

from torch.nn import Module

from torchotel._records import Baggage, Error, Log, ModelInfo, PhaseLog, SpanReference
from torchotel._utils.faults import Guard, Warn
from torchotel._utils.text import shortened
from torchotel.capture.active_span import ActiveSpans, MakeCurrent, StartSpan
from torchotel.capture.autograd_hooks import NodePath, RecordingSwitch
from torchotel.capture.call_signatures import CallSignatures, SeenSignatures
from torchotel.capture.collectives import Collectives
from torchotel.capture.cuda import Clock, CudaClock, DeviceMarks, Memory
from torchotel.capture.event_hooks import EventHooks
from torchotel.capture.exceptions import ErrorReader, ExceptionText
from torchotel.capture.forward_hooks import ForwardHooks
from torchotel.capture.gradient_norms import Gradients
from torchotel.capture.hook_manager import ModuleHooks
from torchotel.capture.logged_values import LearningRates, Logged, LogReader
from torchotel.capture.module_calls import ModuleCallRecorder
from torchotel.capture.module_registry import ModuleRegistry
from torchotel.capture.pending_records import HandOver, PendingLog, RecordOutput, StepRecorder
from torchotel.capture.pipeline_stages import PipelineStages
from torchotel.capture.root_calls import RootCalls
from torchotel.capture.tensor_watch import Watches
from torchotel.capture.thread_state import CurrentThread, Threads, ThreadState
from torchotel.capture.torch_compile import CompileHooks
from torchotel.sampling.detail import Detail


class Capture:
    """Record the training steps and evaluations of all threads and hand them over.

    Args:
        hand_over: Gets each finished step or evaluation, on the thread that ran it.
        detail: Which steps and evaluations are recorded in detail.
        shapes: Whether shapes and dtypes are recorded.
        exception_text: How much of an exception's text is recorded.
        gradient_norms: When norms are read: "auto" (on detailed steps), True (on every step), n for every n-th, False.
        user_span: Returns the user's span that is current on the calling thread.
        baggage: Returns the program's baggage on the calling thread, None if it is empty.
        start_span: Fixes the ids of a span that is asked for while it runs.
        make_current: Attaches a span to the context.
        clock: The clock of devices; None: CUDA's.
        warn: Logs a warning once; None: a new `Warn`.
        on_first: Called before the first record of each kind is handed over, on the thread that ran it.
        on_group: Called when a step begins with another default process group than the last step.
        phase_log: Gets the phases of the main thread while they run; None: none gets them.
    """

    def __init__(
        self,
        hand_over: HandOver,
        detail: Detail,
        *,
        shapes: bool = True,
        exception_text: ExceptionText = "first_line",
        gradient_norms: str | bool | int = "auto",
        user_span: Callable[[], SpanReference | None] = lambda: None,
        baggage: Callable[[], Baggage | None] = lambda: None,
        start_span: StartSpan | None = None,
        make_current: MakeCurrent | None = None,
        clock: Clock | None = None,
        warn: Warn | None = None,
        on_first: Callable[[], None] = lambda: None,
        on_group: Callable[[], None] = lambda: None,
        phase_log: PhaseLog | None = None,
    ) -> None:
        self.detail = detail
        self.warn = warn or Warn()
        self.threads = Threads()
        self.guard = Guard("capture", off=self.uninstall)
        self.registry = ModuleRegistry(SeenSignatures, NodePath)
        self.errors = ErrorReader(exception_text, self.registry.known)
        self.gradients = Gradients(self.registry, self.warn, setting=gradient_norms)
        self.memory, self.rates = Memory(), LearningRates()
        self.collectives = Collectives()
        self.output = RecordOutput(
            hand_over, detail, self.gradients, self.memory, user_span, baggage, self.collectives, on_first, on_group
        )
        self._phase_log = phase_log
        self._make_listener = partial(StepRecorder, output=self.output)
        self.switch = RecordingSwitch()
        self.device_marks = DeviceMarks(clock or CudaClock())
        self.current_thread = CurrentThread(self._new_thread)
        """The calling thread's state."""
        self.watches = Watches(self.current_thread, self.warn)
        self.log_reader = LogReader()
        self.hooks = ModuleHooks()
        calls = ModuleCallRecorder(
            self.registry, CallSignatures(self.warn, shapes=shapes), self.errors, self.device_marks
        )
        self.active_spans = ActiveSpans(
            start_span,
            make_current,
            baggage,
            self.output.alignment,
            calls.shown_path,
            self.switch,
            self.guard.fault,
        )
        self._make_forward_hooks(calls)
        self._make_event_hooks()
        self.pipeline_stages = PipelineStages(self.current_thread, self.gradients.pipeline_stages, self.guard)

    def _make_forward_hooks(self, calls: ModuleCallRecorder) -> None:
        self.root_calls = RootCalls(
            self.threads,
            calls,
            self.hooks,
            self.registry,
            self.active_spans,
            self.gradients,
            self.collectives.buckets,
            self.device_marks,
            self.switch,
            self.output.numbers,
            self.detail,
            self.warn,
            self.uninstall,
        )
        self.forward_hooks = ForwardHooks(
            self.root_calls, calls, self.registry.states, self.errors, self.current_thread, self.switch, self.guard
        )
        self.compile_hooks = CompileHooks(
            self.hooks,
            self.forward_hooks.on_region_start,
            self.registry.compiled,
            self.guard.guarded,
            self.threads.others_forward,
            self.warn,
        )
        self.registry.on_model_named = self.compile_hooks.wrap_regions

    def _make_event_hooks(self) -> None:
        self.event_hooks = EventHooks(
            self.current_thread,
            self.root_calls,
            self.hooks,
            self.compile_hooks,
            self.active_spans,
            self.registry,
            self.gradients,
            self.rates,
            self.errors,
            self.switch,
            self.output.user_span,
            self.output.numbers,
            self.guard,
            self.warn,
        )

    @property
    def model(self) -> ModelInfo | None:
        """The model of the first root call; None before it."""
        return self.root_calls.model

    # ---- install and remove

    def install(self) -> None:
        """Install all hooks; they see the next event."""
        self.switch.open = True
        self.event_hooks.install()
        self.watches.install()
        self.compile_hooks.install()
        self.collectives.install()
        self.pipeline_stages.install()
        own = self.forward_hooks
        self.hooks.install(own.before, own.after, own.on_root_forward_start, own.on_root_forward_end)

    def uninstall(self) -> None:
        """Remove all hooks; open steps stay until `end`. A failure to remove one does not keep the others."""
        self.switch.open = self.device_marks.on = False
        with ExitStack() as stack:
            for thread in list(self.threads.all):
                stack.callback(self.root_calls.remove_exit_hook, thread)
            parts = self.collectives, self.watches, self.event_hooks, self.compile_hooks, self.pipeline_stages
            for part in parts:
                stack.callback(part.uninstall)
            stack.callback(self.hooks.remove)

    def disable_after_fork(self) -> None:
        """Remove all hooks in a forked child."""
        self.hooks.renew_lock()
        self.uninstall()

    def pause(self) -> None:
        """Remove all hooks and hand over all records, until `resume`."""
        self.uninstall()
        self.end()

    def resume(self) -> None:
        """Install all hooks again, unless internal errors have switched capture off."""
        if not self.switch.open and not self.guard.is_off:
            self.install()

    def flush(self) -> None:
        """Hand over the finished records of the calling thread and of threads that have ended."""
        thread = self.current_thread.state
        self.root_calls.close_interrupted(thread)
        thread.step_detector.hand_over_finished()
        self.active_spans.leave_step(thread)
        thread.pending.release_all(self.output.hand_over)
        self._retire_ended()

    def end(self, error: Error | None = None) -> None:
        """Hand over the records of all threads, finished or not; to be called after `uninstall`.

        Args:
            error: The exception that ended the run, on the calling thread.
        """
        current = self.current_thread.state
        for thread in list(self.threads.all):
            self.guard.guarded(self._end)(thread, error if thread is current else None)
        self.active_spans.leave_step(current)

    def _end(self, thread: ThreadState, error: Error | None = None) -> None:
        now_ns = perf_counter_ns()
        self.root_calls.close_interrupted_calls(thread, now_ns, running=0, error=error)
        if error is not None and thread.root.in_forward:  # its calls are not recorded
            thread.step_detector.forward_ends(now_ns, error)
        thread.step_detector.end(error)
        thread.pending.release_all(self.output.hand_over)

    def register_model(self, model: Module) -> None:
        """Name the modules of a model before its first call."""
        self.registry.register_model(model)
        self.compile_hooks.wrap_regions(model)

    # ---- calls of the program

    def name(self, model: object, name: object) -> None:
        """Name a model; an invalid argument logs a warning."""
        if not isinstance(model, Module):
            self.warn("name() takes a torch.nn.Module, got %s: nothing is named", type(model).__name__)
        elif not isinstance(name, str) or not name:
            self.warn("name() takes a string that is not empty, got %r: the model keeps its name", name)
        elif not self.registry.name(model, name):
            self.warn("name(…, %r) got a part of a model: name the module that holds it", shortened(name))

    def step_begins(self) -> None:
        """Open an explicit step on the calling thread."""
        thread = self.current_thread.state
        thread.explicit_steps += 1
        if self.switch.open and thread.explicit_steps == 1:  # a nested step is part of the outer one
            self.root_calls.close_interrupted(thread)
            self.active_spans.enter(thread, thread.step_detector.step_begins(perf_counter_ns()))
            self.hooks.arm()

    def step_ends(self, exception: BaseException | None) -> None:
        """Close the explicit step."""
        thread = self.current_thread.state
        thread.explicit_steps -= 1
        if thread.explicit_steps:
            return
        self.root_calls.close_interrupted(thread)
        thread.step_detector.step_ends(perf_counter_ns(), self.errors.read(exception))
        self.active_spans.leave_step(thread)
        self.hooks.arm()

    def ask_detail(self, steps: int) -> None:
        """Record the next steps in detail, whatever the setting; from any thread."""
        segments = [thread.step_detector.open_segment for thread in list(self.threads.all)]
        began = any(
            segment is not None and not segment.evaluates and segment.detailed is not None for segment in segments
        )
        self.detail.ask(self.output.numbers["step"] + began, steps)

    def log(self, given: Mapping[str, object], *, offered: bool = False) -> None:
        """Add values to the step that is current on the calling thread, else to the last one.

        Args:
            given: The values by name.
            offered: Whether a framework logs them: the user's values have precedence.
        """
        if not self.switch.open:
            return
        thread, values = self.current_thread.state, self.log_reader.read(given, offered=offered)
        # The values of a thread without a step belong to the only thread that has one.
        others = [other for other in list(self.threads.all) if other is not thread and other.step_detector.in_step]
        logged = _current_log(thread) or (_current_log(others[0]) if len(others) == 1 else None)
        if logged is not None and not logged.closed:
            (logged.offer if offered else logged.add)(values)
        elif values:
            late = PendingLog(Log(self.output.numbers["step"] - 1, time_ns(), {}), Logged())
            (late.logged.offer if offered else late.logged.add)(values)
            thread.pending.add(late)
            thread.pending.release(self.output.hand_over)

    # ---- threads

    def _new_thread(self) -> ThreadState:
        self._retire_ended()
        thread = ThreadState(self._make_listener, self.device_marks, self.switch, self.guard.fault, self._phase_log)
        self.threads.all.add(thread)
        return thread

    def _retire_ended(self) -> None:
        """Hand over the records of threads that have ended: no event follows that would."""
        for thread in self.threads.remove_ended():
            self.hooks.remove_thread(thread)
            self._end(thread)


def _current_log(thread: ThreadState) -> Logged | None:
    """Return the log of the open step, else of the last one if it is not handed over."""
    segment = thread.step_detector.open_segment
    return segment.logged if segment is not None and not segment.evaluates else thread.pending.last_step()
