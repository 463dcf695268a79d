"""Run one step of the user's model and check what torchotel records of it."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchotel import _semconv as names
from torchotel._session import Session
from torchotel._utils.stacks import is_program
from torchotel.capture import torch_internals
from torchotel.capture.module_registry import class_of, modules_of, unwrapped, walk
from torchotel.config.config import Config
from torchotel.doctor.result import CheckFailed, Finding, failed, ok, warning
from torchotel.exporters.base import InMemoryExporter
from torchotel.tracing.span import Span


class Loaded(NamedTuple):
    """A model and its batch."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def load(where: str, inputs: Sequence[tuple[tuple[int, ...], str]]) -> Loaded:
    """Import `module:name`, create the model, and return it with a batch.

    Args:
        where: A module, or (module, batch), or a function without arguments that returns one of them.
        inputs: Shape and dtype of each input; empty: the batch comes with the model.

    Raises:
        CheckFailed: The object is missing, is not a module, or cannot be created.
    """
    loaded = _make(where)
    batch: Any = ()
    if isinstance(loaded, tuple) and len(loaded) == 2:  # noqa: PLR2004 - a model and its batch
        loaded, batch = loaded
    if not isinstance(loaded, torch.nn.Module):
        text = f"{where} is of type {type(loaded).__qualname__}"
        raise CheckFailed(text, "It must be a torch.nn.Module, (model, batch), or a function that returns one of them.")
    if inputs:
        device = next((parameter.device for parameter in loaded.parameters()), torch.device("cpu"))
        batch = tuple(_tensor(shape, dtype, device) for shape, dtype in inputs)
    if isinstance(batch, Mapping):
        return Loaded(loaded, (), batch)
    return Loaded(loaded, batch if isinstance(batch, tuple) else (batch,), {})


def describe(error: BaseException) -> str:
    """Return an exception in one line, with the last line of the user's code in its traceback."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_program(frame.filename)]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def _make(where: str) -> Any:
    module, _, name = where.partition(":")
    advice = "Write it as MODULE:NAME, as Python imports it from this folder."
    with _no_telemetry():
        try:
            loaded: Any = importlib.import_module(module)
            for part in name.split("."):
                loaded = getattr(loaded, part)
            advice = "It is called without arguments: name a function that creates the model without arguments."
            return loaded if isinstance(loaded, torch.nn.Module) or not callable(loaded) else loaded()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise any exception
            raise CheckFailed(f"{where} could not be loaded: {describe(error)}", advice) from None


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """Make modules in the working directory importable, and disable an `instrument()` call in a script."""
    before = os.environ.get("OTEL_SDK_DISABLED")
    os.environ["OTEL_SDK_DISABLED"] = "true"
    path = str(Path.cwd())
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)
        if before is None:
            del os.environ["OTEL_SDK_DISABLED"]
        else:
            os.environ["OTEL_SDK_DISABLED"] = before


def _tensor(shape: tuple[int, ...], name: str, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckFailed(
            f"--input: torch has no dtype {name}", "Use a dtype of torch, like float32, bfloat16 or int64."
        )
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)  # 0 is a valid index into any embedding


_MAX_LEVELS = 3
"""Levels of nested lists that are searched; a list can contain itself."""


def unregistered(model: torch.nn.Module) -> list[str]:
    """Return the names of lists and dicts with trainable modules that `parameters()` does not contain.

    Frozen modules are left out: a teacher model is often hidden in a list on purpose.
    """
    known = {id(module) for module in modules_of(model)}
    root = class_of(unwrapped(model))
    return [
        f"{path or root}.{name}"
        for module, path, *_ in walk(model, "")
        for name, value in vars(module).items()
        if name != "_modules"
        and any(id(inner) not in known and _is_trainable(inner) for inner in _contained_modules(value, _MAX_LEVELS))
    ]


def _contained_modules(value: Any, levels: int) -> Iterator[torch.nn.Module]:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
    for inner in inside if levels else ():
        if isinstance(inner, torch.nn.Module):
            yield inner
        else:
            yield from _contained_modules(inner, levels - 1)


def _is_trainable(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


SUBJECT = "model"
_LIMIT_S = 60.0
_MAX_NAMED = 6
_NEVER_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
"""Classes without a forward."""


class _Observation(NamedTuple):
    """The spans and faults of a recorded step."""

    spans: Sequence[Span]
    faults: int

    def paths(self, direction: str) -> list[str]:
        """Return the paths of the modules with calls in a direction."""
        shared = (span.template.attributes for span in self.spans)
        return [str(values[names.MODULE_PATH]) for values in shared if values.get(names.DIRECTION) == direction]

    def compiled(self) -> list[str]:
        """Return the paths of compiled regions; the root's path is empty, as in `walk`."""
        regions = {
            "" if attributes[names.MODULE_PATH] == attributes[names.MODEL] else str(attributes[names.MODULE_PATH])
            for attributes in (span.template.attributes for span in self.spans)
            if attributes.get(names.COMPILED)
        }
        return sorted(regions)

    def folded(self) -> int:
        """Return the number of calls without a span, since the trace has `max_spans`."""
        return sum(int(str((span.attributes or {}).get(names.FOLDED_CALLS, 0))) for span in self.spans)


def check(config: Config, where: str, inputs: Sequence[tuple[tuple[int, ...], str]]) -> Iterator[Finding]:
    """Run one step of a model, and report what torchotel records of it."""
    try:
        loaded = load(where, inputs)
        backward = _run_without_torchotel(loaded)
        quiet = replace(
            config, traces_exporter="none", metrics_exporter=(), record=None, detail="all", set_global_provider=False
        )
        whole = _record_step(replace(quiet, include=None, exclude=None, max_depth=None, max_spans=None), loaded)
        as_set = _record_step(quiet, loaded)
    except CheckFailed as failure:
        yield failed(SUBJECT, failure.text, failure.advice)
        return
    if not backward:
        advice = "Check whether the model is in inference mode, or all its parameters are frozen."
        yield warning(SUBJECT, "no output requires a gradient, so no backward was run", advice)
    yield from _report(config, loaded.model, whole, as_set)
    hidden = unregistered(loaded.model)
    if hidden:
        advice = (
            "PyTorch does not register such layers: parameters() and state_dict() leave them out, no optimizer trains "
            "them, and to() does not move them. Use nn.ModuleList or nn.ModuleDict."
        )
        yield warning(SUBJECT, f"layers held in plain lists or dicts: {_listed(hidden)}", advice)
    missing = [name for name, is_present in torch_internals.found().items() if not is_present]
    if missing:
        text = f"torch {torch.__version__} lacks {', '.join(missing)}"
        yield warning(
            SUBJECT, text, "Spans are missing, or times are less exact. Install a supported version of torch."
        )


def _report(config: Config, model: torch.nn.Module, whole: _Observation, as_set: _Observation) -> Iterator[Finding]:
    called = set(whole.paths("forward"))
    name = type(model).__qualname__
    if whole.faults + as_set.faults:
        text = f"{whole.faults + as_set.faults} errors of torchotel in {name}, logged above"
        yield failed(
            SUBJECT, text, "Training would continue without the failed part. Please report this with the model."
        )
    if not called:
        advice = "No hooks ran: call model(batch) instead of model.forward(batch)."
        yield failed(SUBJECT, f"no module call of {name} was seen", advice)
        return
    spans = len(as_set.paths("forward")) + len(as_set.paths("backward"))
    # A module that is created in forward, such as a loss, is called too, but is not a module of the model.
    inside = called & {class_of(unwrapped(model)), *(path for _, path, *_ in walk(model, ""))}
    text = (
        f"{name}: {len(list(model.modules()))} modules, {len(inside)} called; a step has {spans} module spans, "
        f"{len(as_set.spans)} in all"
    )
    limit = f"max_spans is {config.max_spans if config.max_spans is not None else 'none'}"
    if as_set.folded():
        advice = (
            f"{as_set.folded()} deeper calls fold into their parents. Choose modules with include, exclude or "
            "max_depth; Jaeger displays traces of up to about 2,000 spans well."
        )
        yield warning(SUBJECT, f"{text}; {limit}", advice)
    else:
        yield ok(SUBJECT, f"{text}; {limit}")
    yield from _report_uncalled(model, whole, called)


def _report_uncalled(model: torch.nn.Module, whole: _Observation, called: set[str]) -> Iterator[Finding]:
    root, compiled = class_of(unwrapped(model)), whole.compiled()
    modules = [(path, module) for module, path, *_ in walk(model, "")]
    scripted = list[str]()
    for path, module in modules:
        if isinstance(module, torch.jit.ScriptModule) and not _is_in(path, scripted):
            scripted.append(path)
    for kind, regions in (("torch.compile", compiled), ("TorchScript", scripted)):
        if regions:
            advice = "No hooks run inside it: such a region is one span, and the modules inside it have none."
            yield ok(SUBJECT, f"{kind}: {_listed([path or root for path in regions])}", advice)
    uncalled = [
        path
        for path, module in modules
        if path not in {"", *called} and not isinstance(module, _NEVER_CALLED) and not _is_in(path, compiled + scripted)
    ]
    if uncalled:
        advice = (
            "Either this input does not use them, or other modules read their parameters (attention reads out_proj), "
            "or their forward is called directly, which runs no hooks."
        )
        yield ok(SUBJECT, f"{len(uncalled)} not called: {_listed(uncalled)}", advice)


def _is_in(path: str, regions: Sequence[str]) -> bool:
    return any(not region or path == region or path.startswith(f"{region}.") for region in regions)


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return ", ".join(paths[:_MAX_NAMED]) + more


def _run_without_torchotel(loaded: Loaded) -> bool:
    try:
        return _step(loaded)
    except Exception as error:  # noqa: BLE001 - the user's model may raise any exception
        advice = "This step ran without torchotel. Check the model and --input: SHAPE[:DTYPE], once for each input."
        raise CheckFailed(f"a step of {type(loaded.model).__qualname__} failed: {describe(error)}", advice) from None


def _record_step(config: Config, loaded: Loaded) -> _Observation:
    exporter = InMemoryExporter()
    session = Session(config, loaded.model, exporter.exporters)
    try:
        _step(loaded)
    except Exception as error:  # noqa: BLE001 - torchotel or the model may raise any exception
        advice = "The same step succeeded without torchotel. Please report this with the model."
        text = f"a step of {type(loaded.model).__qualname__} failed under torchotel: {describe(error)}"
        raise CheckFailed(text, advice) from None
    finally:
        session.flush(_LIMIT_S)
        session.stop(_LIMIT_S, finished=True)
    faults = session.stats()["internal_errors"]
    return _Observation(
        [span for trace in exporter.traces for span in trace.spans if span.template.name != names.SPAN_RUN], faults
    )


def _step(loaded: Loaded) -> bool:
    """Run forward and backward; return False if no output requires a gradient."""
    outputs = [output for output in _tensors(loaded.model(*loaded.args, **loaded.kwargs)) if output.requires_grad]
    if not outputs:
        return False
    torch.autograd.backward([output.float().mean() for output in outputs])
    loaded.model.zero_grad()
    return True


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
