"""Every private part of torch that torchotel uses, with the fallback if it is missing.

| private part | used for | without it |
|---|---|---|
| `torch.autograd._get_sequence_nr` | which nodes a call made | the output nodes alone: right for leaves |
| `torch._C.DisableTorchFunction`, `._len_torch_function_stack` | reading tensors unseen by modes | modes see it |
| `torch._C._DisableTorchDispatch`, `._len_torch_dispatch_stack` | computing unseen by modes | nothing while one is on |
| `torch._C._functorch.is_functorch_wrapped_tensor` | detecting transformed tensors | reading one fails |
| `torch._C._functorch.get_unwrapped` | gradients that a transform leaves to a backward outside of it | not detected |
| `torch._foreach_norm` | norms of many tensors in one call | `torch.linalg.vector_norm` for each |
| `Tensor._indices`, `._values` | sparse gradients that are not coalesced | their norms are not known |
| `Tensor._version` | whether gradients changed in place since they were read or unscaled | changes are not noticed |
| `clip_grad._group_tensors_by_device_and_dtype` | seeing when gradients are clipped | norms are those after clipping |
| `GradScaler._device` | whether the scale is on another device | norms there are not known |
| `torch._C._cuda_hasPrimaryContext` | reading the memory of used devices only | all devices are read |
| `torch.compiler._is_compiling_flag` | the flag of `is_compiling()`, without a call | it is called |
| `torch._C._is_tracing` | skipping `torch.jit.trace` | sizes that are read become part of the trace |
| `torch._C._current_graph_task_id` | which backward a node runs in | decided by time; recomputation counts as forward |
| `torch.autograd._engine_run_backward` | bounds of a backward | `torch.autograd.backward`, `.grad` are wrapped |
| `_BaseDataLoaderIter.__next__` | waiting for data | no data phase |
| `_global_forward_hooks_with_kwargs` | cleaning up after `remove()` | nothing to clean up |
| `RemovableHandle.hooks_dict_ref` | putting the one-shot hook back | it is registered again |
| `Module._forward_hooks`, `._forward_hooks_always_called` | the end of an outermost call | module hooks stay in |
| `Module._call_impl`, `Optimizer.step`'s wrapper | calls that an interrupt left open | they close with the step |
| `record_function` around `Optimizer.step` | what an optimizer's step raised | no error, and a late end |
| `Module._wrapped_call_impl` | which module raised, without module hooks | the outermost one is named |
| `torch._dynamo.callback` | hooks out while Dynamo compiles | a toggle costs a recompilation |
| `eval_frame.cached_backends` | whether anything was compiled before | regions are searched in any case |
| `eval_frame.set_code_exec_strategy` | hooks run uncompiled between two graphs | Dynamo inspects their callees |
| `torch.export._trace._export_to_torch_ir` | hooks out while strict export traces | it fails, as with any global hook |
| `Module._is_replica`, `._former_parameters` | DataParallel's replicas | their calls are evaluations, and end late |
| `_PipelineStageBase.forward_one_chunk` | stage and microbatch of calls | unknown, and norms of stages seem whole |
| `FullyShardedDataParallel._inter_node_pg` | which ranks have the same shard | norms of HYBRID_SHARD count on each |
| `GraphModule._in_spec` | telling an exported module from a part of a region | no span for strictly exported ones |
| `distributed_c10d._world` | finding all process groups | no collectives |
| `distributed_c10d._get_default_store` | telling launches with the same run id apart | their steps share traces |
| `DistributedDataParallel._get_ddp_logging_data` | the buckets of gradients | collectives do not name modules |
| `DistributedDataParallel._module_parameters` | the parameters in a bucket | collectives do not name modules |
| `DistributedDataParallel._comm_hooks` | telling buckets from what a hook reduces | collectives do not name modules |
| `ProcessGroup._get_sequence_number_for_group` | finding the same step on all ranks | each rank has its own traces |
| `_torchdynamo_orig_callable`, `_torchdynamo_disable` | compiled functions | a compiled `forward` is not marked |
| `Module._compiled_call_impl` | a span for `module.compile()` regions | no span for them |
| `torch._C._distributed_c10d._dump_fr_trace`, `._dump_nccl_trace` | the collectives of each process group | not read |
"""

import functools
import gc
import inspect
import pickle
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, TypeVar

import torch
import torch.utils.data.dataloader as data_loader
from torch.autograd.graph import Node
from torch.fx import GraphModule
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

_own_random = random.Random()  # noqa: S311  # the global generator belongs to the program, which may seed it

LEAF_NUMBER = 1 << 63
"""Sequence numbers of AccumulateGrad nodes lie from here on."""

ENDS_ARE_SEEN = {"_forward_hooks", "_forward_hooks_always_called"} <= vars(nn_module.Module()).keys()
"""Whether `see_end` may be used."""

_untraced: set[str] = set()
"""Packages that Dynamo does not trace."""

COMPILING = "_is_compiling_flag"
GROUP_GRADIENTS = "_group_tensors_by_device_and_dtype"
CLIPPING = {"_clip_grads_with_norm_", "clip_grad_value_"}


class _Asked(dict[str, bool]):
    """Replaces the flags if torch keeps them elsewhere."""

    def __missing__(self, _: str) -> bool:
        return torch.compiler.is_compiling()


compiler_flags: Mapping[str, Any] = vars(torch.compiler) if hasattr(torch.compiler, COMPILING) else _Asked()
"""At `COMPILING`, whether export or Dynamo works, on any thread; with `is_dynamo_compiling()`, which Dynamo takes for
true in traced code, this equals `is_compiling()`, in half of its time."""

Undo = Callable[[], None]
F = TypeVar("F", bound=Callable[..., Any])


def _none_running() -> int:
    return -1


sequence_number: Callable[[], int] | None = getattr(torch.autograd, "_get_sequence_nr", None)
"""Returns the number that this thread's next node will get."""

graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _none_running)
"""Returns the id of the backward that runs on this thread; -1 for none."""

without_torch_function: Callable[[], AbstractContextManager[object]]
without_torch_function = getattr(torch._C, "DisableTorchFunction", nullcontext)
"""A context manager in which no `__torch_function__` of the program is called."""

torch_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
"""Returns how many torch function modes are active on this thread."""

is_traced: Callable[[], bool] = getattr(torch._C, "_is_tracing", lambda: False)
"""Returns whether `torch.jit.trace` runs on this thread, in which sizes are tensors."""

has_context: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext", lambda _: True)
"""Returns whether this process has initialised a CUDA device."""

_without_modes: Callable[[], AbstractContextManager[object]] | None
_without_modes = getattr(torch._C, "_DisableTorchDispatch", None)
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_functorch = getattr(torch._C, "_functorch", None)
is_transformed: Callable[[torch.Tensor], bool] = getattr(_functorch, "is_functorch_wrapped_tensor", lambda _: False)
"""Returns whether a tensor is inside of `vmap` or `grad`."""
_inside: Callable[[torch.Tensor], torch.Tensor] | None = getattr(_functorch, "get_unwrapped", None)
_foreach_norm = getattr(torch, "_foreach_norm", None)

_call_code = getattr(getattr(nn_module.Module, "_call_impl", None), "__code__", None)
_wrapped_call_code = getattr(getattr(nn_module.Module, "_wrapped_call_impl", None), "__code__", None)
_region_codes: list[CodeType] = []
_backward_codes: set[CodeType] = set()
_wrap_step = getattr(torch.optim.Optimizer, "profile_hook_step", None)
_step_code = _wrap_step(lambda: None).__code__ if _wrap_step is not None else None  # one code serves every optimizer


def node_of(tensor: torch.Tensor) -> Node | None:
    """Return the node that made a tensor; None if reading it raises, as for a view whose base was changed."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def node_number(node: Node) -> int:
    """Return the sequence number of an autograd node."""
    return node._sequence_nr()


@contextmanager
def unseen() -> Iterator[None]:
    """Compute unseen by autograd and by modes of the program."""
    with without_torch_function(), torch.no_grad(), (_without_modes or nullcontext)():  # a mode sees `no_grad`, too
        yield


def seen_by_modes() -> bool:
    """Return whether a dispatch mode of the program would see operations inside `unseen`."""
    return _without_modes is None and _dispatch_modes() > 0


def modes_are_on() -> bool:
    """Return whether any mode of the program is active."""
    return _dispatch_modes() > 0 or torch_function_modes() > 0


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is neither a subclass with its own dispatch nor inside a transform."""
    ours = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return ours and not is_transformed(tensor)


def has_gradient_outside(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is inside of a transform, and the tensor that it wraps requires grad outside."""
    if _inside is None or not is_transformed(tensor):
        return False
    while is_transformed(tensor):
        tensor = _inside(tensor)
    return tensor.requires_grad


def norms(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> Sequence[torch.Tensor]:
    """Compute the L2 norm of each tensor, in one call; all are of one device and type.

    Args:
        tensors: Dense and plain tensors.
        dtype: The dtype of the sum; None: that of the tensors.
    """
    if _foreach_norm is not None:
        return _foreach_norm(tensors, 2, dtype=dtype)  # type: ignore[no-any-return] # a private function has no type
    return [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse tensor as they are; the public methods require a coalesced one."""
    return tensor._indices(), tensor._values()


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for one that was made in inference mode."""
    try:
        return tensor._version
    except (AttributeError, RuntimeError):
        return 0


def scale_of(scaler: Any, device: torch.device) -> torch.Tensor | None:
    """Return a scale, or that of a `GradScaler`, on a device, without reading it; None if it is on another one."""
    if isinstance(scaler, torch.Tensor):
        return scaler if scaler.device == device else None
    if device.type != getattr(scaler, "_device", device.type):
        return None
    scale = inspect.unwrap(type(scaler).scale)  # the wrapper would count the tensor as a loss
    return scale(scaler, torch.ones((), device=device))  # type: ignore[no-any-return] # it is a tensor


def found() -> dict[str, bool]:
    """Return which private parts this torch has, except those of Dynamo and export, which are imported later."""
    return {
        "sequence_number": sequence_number is not None,
        "graph_task": graph_task is not _none_running,
        "engine": hasattr(torch.autograd, "_engine_run_backward"),
        "data_loader": hasattr(data_loader, "_BaseDataLoaderIter"),
        "forward_hooks_with_kwargs": hasattr(nn_module, "_global_forward_hooks_with_kwargs"),
        "compiler_flags": hasattr(torch.compiler, COMPILING),
        "module_call": _call_code is not None,
        "wrapped_call": _wrapped_call_code is not None,
        "optimizer_step": _step_code is not None,
        "ends": ENDS_ARE_SEEN,
        "compiled_call": hasattr(nn_module.Module, "_compiled_call_impl"),
        "dispatch_modes": _without_modes is not None,
        "transforms": hasattr(_functorch, "is_functorch_wrapped_tensor") and _inside is not None,
        "foreach_norm": _foreach_norm is not None,
        "clipping": GROUP_GRADIENTS in vars(torch.nn.utils.clip_grad),
        "sparse_parts": hasattr(torch.Tensor, "_indices") and hasattr(torch.Tensor, "_values"),
        "flight_recorder": any(True for _ in flight_recorders()) or not torch.distributed.is_available(),
    }


def calls_in_progress() -> int | None:
    """Count the module calls on this thread's Python stack, including regions; None if unknown."""
    return _frames_of(_call_code, *_region_codes)


def runs_region(function: F) -> F:
    """Count a function's calls as module calls: a region that is compiled in place has no other frame."""
    _region_codes.append(function.__code__)
    return function


def innermost_call() -> int | None:
    """Return an identifier of the module call that a pre-hook runs in; None if unknown.

    Only a function that the pre-hook calls may call it.
    """
    frame = _call_around(sys._getframe(4))  # the hook calls it through `RootCalls.enter`
    return None if frame is None else id(frame)


def ending_call() -> tuple[int | None, bool]:
    """Return an identifier of the call whose forward hook runs, and whether it runs because the forward raised.

    Only a wrapped hook may call it: PyTorch calls the wrapper, which calls the hook.
    """
    frame = sys._getframe(3)
    if frame.f_code is _call_code:
        return id(frame), True
    found = _call_around(frame)
    return (None if found is None else id(found)), False


def is_inside(call: int | None) -> bool:
    """Return whether the innermost module call runs inside another one, identified by `innermost_call`."""
    innermost = frame = _call_around(sys._getframe(1))
    while frame is not None and id(frame) != call:
        frame = _call_around(frame.f_back)
    return frame is not innermost and frame is not None


def _call_around(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _call_code:
        frame = frame.f_back
    return frame


def optimizer_steps_in_progress() -> int | None:
    """Count the optimizers' steps on this thread's Python stack; None if unknown."""
    return _frames_of(_step_code)


def backwards_in_progress() -> int:
    """Count the runs of the autograd engine on this thread's Python stack, from the hook before to the hook after."""
    return _frames_of(*_backward_codes) or 0


def modules_that_raised(traceback: TracebackType | None) -> list[torch.nn.Module]:
    """List the modules whose calls an exception has passed through, outermost first.

    `f_locals` would copy the arguments of the call, and so keep tensors after `traceback.clear_frames`. The garbage
    collector's view of a frame copies nothing, but lacks frames that still run.
    """
    found = []
    while traceback is not None:
        if traceback.tb_frame.f_code is _wrapped_call_code:
            held = gc.get_referents(traceback.tb_frame)  # `self` is the first local variable
            found += [one for one in held if issubclass(type(one), torch.nn.Module)][:1]
        traceback = traceback.tb_next
    return found


def _frames_of(code: CodeType | None = None, *others: CodeType) -> int | None:
    if code is None:
        return None
    codes = {id(code), *map(id, others)}
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        count += id(frame.f_code) in codes
        frame = frame.f_back
    return count


def is_generated(module: torch.nn.Module) -> bool:
    """Return whether a module is a graph that Dynamo or AOTAutograd made: part of a region, not of the program."""
    if not isinstance(module, GraphModule) or "_in_spec" in vars(module):
        return False  # an exported module takes the original's arguments
    return "dynamo_compile_id" in module.meta or not (module._modules or module._parameters or module._buffers)


def runs_without_parts(module: torch.nn.Module) -> bool:
    """Return whether a module was scripted, traced or exported with modules in it, which its calls do not call."""
    if isinstance(module, torch.jit.ScriptModule):
        return any(True for _ in module.children()) or not hasattr(module, "training")  # a frozen one has lost them
    if not isinstance(module, GraphModule) or is_generated(module):
        return False
    called = {str(node.target).partition(".")[0] for node in module.graph.nodes if node.op == "call_module"}
    return not called.issuperset(module._modules)


def replica_group(sharded: object) -> Any:
    """Return the group of the ranks with the same shard of a `FullyShardedDataParallel`; None: no other rank."""
    return getattr(sharded, "_inter_node_pg", None)


def is_replica(module: torch.nn.Module) -> bool:
    """Return whether a module is a copy that DataParallel made for one forward."""
    return "_is_replica" in vars(module)


def made_for_replica(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    """Return the tensors in place of a replica's own parameters, which another thread made of them."""
    tensors: dict[str, torch.Tensor] = vars(module).get("_former_parameters", {})
    return tensors.values()


def forget_kwargs_hook(handle_id: int) -> None:
    """Remove the entry that `RemovableHandle.remove` leaves behind for a global forward hook with kwargs."""
    getattr(nn_module, "_global_forward_hooks_with_kwargs", {}).pop(handle_id, None)


def new_hook_id() -> int:
    """Return an id that no other hook has."""
    return RemovableHandle(OrderedDict()).id


def hooks_of(handle: RemovableHandle) -> dict[int, Any] | None:
    """Return the dictionary of a handle's hook, by hook id; None if unknown."""
    find: Callable[[], dict[int, Any] | None] = getattr(handle, "hooks_dict_ref", lambda: None)
    return find()


def see_end(module: nn_module.Module, hook_id: int, hook: Callable[..., None]) -> None:
    """Call a hook at the end of the module's calls, as a hook with `always_call`, in a quarter of the time."""
    module._forward_hooks[hook_id] = hook
    module._forward_hooks_always_called[hook_id] = True


def forget_end(module: nn_module.Module, hook_id: int) -> None:
    """Remove that hook."""
    module._forward_hooks.pop(hook_id, None)
    module._forward_hooks_always_called.pop(hook_id, None)


def is_compiled_function(function: object) -> bool:
    """Return whether `torch.compile` made a function."""
    return hasattr(function, "_torchdynamo_orig_callable")


def is_outside_dynamo(function: object) -> bool:
    """Return whether a function is marked so that Dynamo never traces it."""
    return bool(getattr(function, "_torchdynamo_disable", False))


def outside_dynamo(function: F) -> F:
    """Mark a function so that Dynamo never traces it, without importing Dynamo (1.4 s, 150 MiB)."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined] # Dynamo's own mark
    return function


def runs_plainly(function: F) -> F:
    """Exclude a function and all functions that it calls from compilation by Dynamo, for the whole process."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Replace an attribute by the result of `make`; undoing keeps a later replacement by another library."""
    original = owner.__dict__[name]
    ours = make(original)
    setattr(owner, name, ours)

    def undo() -> None:
        if owner.__dict__.get(name) is ours:
            setattr(owner, name, original)

    return undo


def _all_of(undos: Sequence[Undo]) -> Undo:
    def undo_all() -> None:
        for undo in undos:
            undo()

    return undo_all


def _runs_backward(function: F) -> F:
    _backward_codes.add(function.__code__)
    return function


def around_backward(begin: Callable[[Any], None], end: Callable[..., None]) -> Undo:
    """Call `begin` and `end` around each run of the autograd engine, nested ones included.

    `begin` gets the roots. `end` gets what the run raised, and `accumulates`: whether it adds to `grad`, as
    `torch.autograd.grad` does not.
    """

    def make(run: Callable[..., Any]) -> Callable[..., Any]:
        by_name = getattr(run, "__name__", "") != "grad"

        @outside_dynamo
        @_runs_backward
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            accumulates = kwargs.get("accumulate_grad", by_name)
            begin(args[0] if args else next(iter(kwargs.values()), ()))
            try:
                result = run(*args, **kwargs)
            except BaseException as error:
                end(error, accumulates=accumulates)
                raise
            end(None, accumulates=accumulates)
            return result

        return run_backward

    if hasattr(torch.autograd, "_engine_run_backward"):
        return replace(torch.autograd, "_engine_run_backward", make)
    return _all_of([replace(torch.autograd, name, make) for name in ("backward", "grad")])


def around_fetch(
    begin: Callable[[], None],
    end: Callable[[str, BaseException | None], None],
) -> Undo:
    """Call `begin` and `end` around each fetch.

    `end` gets "made", "fetched", "ended" or "failed", and the exception of a fetch that failed.
    """

    def make(outcome: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(fetch: Callable[..., Any]) -> Callable[..., Any]:
            @outside_dynamo
            def timed(self: Any) -> Any:
                begin()
                try:
                    result = fetch(self)
                except StopIteration:
                    end("ended", None)
                    raise
                except BaseException as error:
                    end("failed", error)
                    raise
                end(outcome, None)
                return result

            return timed

        return wrap

    undos = [replace(data_loader.DataLoader, "__iter__", make("made"))]
    iterator = getattr(data_loader, "_BaseDataLoaderIter", None)
    if iterator is not None:
        undos.append(replace(iterator, "__next__", make("fetched")))
    return _all_of(undos)


def after_failed_step(end: Callable[[BaseException], None]) -> Undo:
    """Call `end` with an exception of an optimizer's step, after which PyTorch runs no post-hook.

    PyTorch labels each step for its profiler, and the end of that block gets the exception. TorchScript compiles the
    original.
    """

    def make(leave: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(leave)
        def leave_block(self: Any, kind: Any, error: BaseException | None, traceback: Any) -> Any:
            if error is not None and sys._getframe(1).f_code is _step_code:
                end(error)
            return leave(self, kind, error, traceback)

        return leave_block

    return replace(torch.autograd.profiler.record_function, "__exit__", make)


def around_scaler_step(begin: Callable[[], None], end: Callable[[torch.optim.Optimizer], None]) -> Undo:
    """Call `begin` and `end` around `GradScaler.step`, which skips the step if gradients overflow."""

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        @outside_dynamo
        def timed(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            begin()
            result = step(self, optimizer, *args, **kwargs)
            end(optimizer)
            return result

        return timed

    return replace(torch.amp.GradScaler, "step", make)


def after_scaling(scaler: type, seen: Mapping[str, Callable[..., object]]) -> Undo:
    """Call a function after each call of a method of a `GradScaler` class.

    It gets the scaler, the method's result and the method's arguments.
    """

    def make(see: Callable[..., object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = method(self, *args, **kwargs)
                see(self, result, *args, *kwargs.values())
                return result

            return call

        return wrap

    return _all_of([replace(scaler, name, make(see)) for name, see in seen.items()])


def before_clipping(begin: Callable[[Sequence[torch.Tensor]], None]) -> Undo:
    """Call `begin` with gradients before functions of `torch.nn.utils` clip them.

    They first group the gradients by a function of their module, which is replaced. So functions that were imported
    before are seen, too, and no iterator of parameters is consumed. Dynamo traces the original.
    """
    names = vars(torch.nn.utils.clip_grad)
    if GROUP_GRADIENTS not in names:
        return lambda: None

    def make(group: Callable[..., Any]) -> Callable[..., Any]:
        def group_gradients(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_name in CLIPPING:  # `get_total_norm` groups gradients, too
                begin(tensors[0])
            return group(tensors, *args, **kwargs)

        group_gradients._torchdynamo_inline = group  # type: ignore[attr-defined] # Dynamo's own mark
        return group_gradients

    return replace(torch.nn.utils.clip_grad, GROUP_GRADIENTS, make)


def before_sharded_clipping(sharded: type, begin: Callable[[Sequence[torch.Tensor]], None]) -> Undo:
    """Call `begin` with gradients before the method of `FullyShardedDataParallel` that clips them."""

    def make(clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def clip_grad_norm(self: Any, *args: Any, **kwargs: Any) -> Any:
            begin([parameter.grad for parameter in self.parameters() if parameter.grad is not None])
            return clip(self, *args, **kwargs)

        return clip_grad_norm

    return replace(sharded, "clip_grad_norm_", make)


def around_stage_forward(stages: ModuleType, begin: Callable[[Any, int], object], end: Callable[[], object]) -> Undo:
    """Call `begin` with the stage and the microbatch's number, and `end`, around each forward of a pipeline's stage."""
    stage = getattr(stages, "_PipelineStageBase", None)
    if not hasattr(stage, "forward_one_chunk"):
        return lambda: None

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def forward_one_chunk(self: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            begin(self, fwd_chunk_id)
            try:
                return forward(self, fwd_chunk_id, *args, **kwargs)
            finally:
                end()

        return forward_one_chunk

    return replace(stage, "forward_one_chunk", make)


def around_module_compile(
    wrap: Callable[[torch.nn.Module, Callable[..., Any]], Callable[..., Any]],
) -> Undo:
    """Wrap the compiled call that `module.compile()` sets, which runs no hooks."""

    def make(compile_module: Callable[..., Any]) -> Callable[..., Any]:
        def compile_and_wrap(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = compile_module(self, *args, **kwargs)
            compiled = getattr(self, "_compiled_call_impl", None)
            if compiled is not None:
                self._compiled_call_impl = wrap(self, compiled)
            return result

        return compile_and_wrap

    return replace(torch.nn.Module, "compile", make)


def has_compiled() -> bool:
    """Return whether `torch.compile` was called since Dynamo was reset; True if unknown.

    `torch._dynamo.disable` adds None to the backends, and optimizers use it.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    backends = getattr(frames, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())


def keep_untraced(trace_rules: ModuleType, package: str) -> None:
    """Exclude a package from tracing by Dynamo, for the whole process.

    Only once for each package, because each call makes Dynamo's pattern of excluded files longer.
    """
    add = getattr(trace_rules, "add", None)
    if add is not None and package not in _untraced:
        _untraced.add(package)
        add(package)


def around_compilation(dynamo_callback: ModuleType, begin: Callable[[], None], end: Callable[[], None]) -> Undo:
    """Call `begin` and `end` around each compilation, also after `torch._dynamo.reset()`, which clears callbacks."""
    handler: Any = getattr(dynamo_callback, "callback_handler", None)
    if handler is None:
        return lambda: None
    clear = handler.clear

    def started(_: object) -> None:
        begin()

    def ended(_: object) -> None:
        end()

    def register() -> None:
        handler.register_start_callback(started)
        handler.register_end_callback(ended)

    def clear_and_register() -> None:
        clear()
        register()

    def undo() -> None:
        if handler.clear is clear_and_register:
            del handler.clear
        if started in handler.start_callbacks:
            handler.remove_start_callback(started)
            handler.remove_end_callback(ended)

    register()
    handler.clear = clear_and_register
    return undo


def around_strict_export(trace: ModuleType, begin: Callable[[], None], end: Callable[[], None]) -> Undo:
    """Call `begin` and `end` around the tracing of `torch.export.export(strict=True)`."""

    def make(export: Callable[..., Any]) -> Callable[..., Any]:
        def without_hooks(*args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                return export(*args, **kwargs)
            finally:
                end()

        return without_hooks

    if not hasattr(trace, "_export_to_torch_ir"):
        return lambda: None
    return replace(trace, "_export_to_torch_ir", make)


def default_group() -> Any:
    """Return the default process group; None if there is none, or if it has one rank."""
    distributed = _distributed()
    group = None if distributed is None else distributed.GroupMember.WORLD
    return None if group is None or group.size() == 1 else group


def sequence_of(group: Any) -> int | None:
    """Return the number of the last collective of a process group; None if its backend has no numbers."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # also while the group is destroyed
        return None


def group_store() -> Any:
    """Return the store of the default process group; None without one of several ranks.

    That of the agent of torchrun outlives a restart. Each restart has a prefix, which is left out.
    """
    find = getattr(_distributed(), "_get_default_store", None)
    store: Any = None if find is None or default_group() is None else find()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


MESH_PREFIX = "mesh_"
"""Prefix of the descriptions of the groups of a device mesh."""

GROUPS_HAVE_HOOKS = hasattr(getattr(getattr(torch, "distributed", None), "ProcessGroup", None), "register_pre_hook")
"""Whether collectives can be seen: from torch 2.14 on."""


HOOKED_OPERATIONS: Mapping[int, str] = {
    operation.value: name
    for name, operation in getattr(
        getattr(getattr(torch._C, "_distributed_c10d", None), "HookOpName", None), "__members__", {}
    ).items()
}
"""The names of the operations that hooks see, by their number."""


def groups_made() -> tuple[weakref.ref[Any] | None, int]:
    """Return the default process group, weakly, and how many groups were made since: both change with new groups."""
    world = getattr(_distributed(), "_world", None)
    default = getattr(world, "default_pg", None)
    return None if default is None else weakref.ref(default), int(getattr(world, "group_count", 0))


def process_groups() -> list[Any]:
    """Return the process groups that this process is a member of."""
    return list(getattr(getattr(_distributed(), "_world", None), "pg_map", ()))


def mesh_place() -> str:
    """Return the place of this rank in each dimension of its device meshes, and its size: `dp=1/4,tp=0/2`.

    The groups of a mesh are named after its dimensions. Each name counts once, and numbers of dimensions do not.
    """
    places = {str(group.group_desc): f"{group.rank()}/{group.size()}" for group in process_groups()}
    names = {description.removeprefix(MESH_PREFIX): description for description in places}
    return ",".join(
        f"{name}={places[description]}"
        for name, description in names.items()
        if description.startswith(MESH_PREFIX) and not name.startswith("dim_")
    )


def group_name(group: Any) -> str:
    """Return the description of a process group, or its number if the program gave none."""
    description = str(group.group_desc)
    return str(group.group_name) if description in {"", "undefined"} else description


def bucket_layout(model: Any) -> list[tuple[int, list[int]]]:
    """Return size in bytes and parameters of each bucket of a DistributedDataParallel model, in the order of reduction.

    Parameters have their numbers in the reducer. Empty: the order is not known, as before the third forward. The call
    takes the lock of the reducer.
    """
    if getattr(model, "logger", None) is None:  # it reduces no parameter itself
        return []
    logged: Mapping[str, Any] = getattr(model, "_get_ddp_logging_data", dict)()
    sizes, buckets = (logged.get(f"rebuilt_{name}", "") for name in ("bucket_sizes", "per_bucket_param_indices"))
    try:
        numbers = [[int(number) for number in bucket.split()] for bucket in buckets.split(",")]
        return list(zip(map(int, sizes.split(",")), numbers, strict=True))
    except ValueError:  # they are empty
        return []


def reduced_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of the reducer of a DistributedDataParallel model by their numbers; empty: unknown.

    The model has those that it had when it was wrapped, and not which of them were frozen then. A static graph may be
    trained after others were frozen, and its parameters are unknown if some are.
    """
    wrapped: list[torch.nn.Parameter] = getattr(model, "_module_parameters", [])
    trained = [parameter for parameter in wrapped if parameter.requires_grad]
    has_static_graph = getattr(model, "static_graph", True)
    return trained if not has_static_graph or len(trained) == len(wrapped) else []


def has_communication_hook(model: Any) -> bool:
    """Return whether a DistributedDataParallel model may reduce something else than its buckets."""
    return bool(getattr(model, "_comm_hooks", True))


def may_be_waited_for_again(work: Any) -> bool:
    """Return whether another thread may wait for a collective, too, without an effect on its result.

    Gloo's reduce-scatter copies its result in each wait, and would undo what the program has done with it since its own
    wait. Only such works have no future (`LambdaWork` of torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
    """
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True


def backend_of(group: Any) -> str:
    """Return the name of the backend of a process group; empty if it has several or none."""
    try:
        return str(group.name())
    except RuntimeError:
        return ""


def add_collective_hooks(group: Any, begins: Callable[[Any], None], issued: Callable[[Any], None]) -> Undo:
    """Call `begins` before each collective of a process group, and `issued` after it was issued.

    An id that another hook has would replace that hook, so it is random.
    """
    hook_id = _own_random.getrandbits(62)
    group.register_pre_hook(hook_id, begins)
    group.register_post_hook(hook_id, issued)
    kept = weakref.ref(group)

    def undo() -> None:
        living = kept()
        if living is not None:
            living.unregister_pre_hook(hook_id)
            living.unregister_post_hook(hook_id)

    return undo


def _distributed() -> ModuleType | None:
    return sys.modules.get("torch.distributed.distributed_c10d")


def flight_recorders() -> Iterator[tuple[str, Callable[..., Mapping[str, Any]]]]:
    """Yield each backend that has a flight recorder, with a function that returns the content of the recorder.

    With `with_stacks=True`, the function also returns the Python stack of each collective.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    for backend, name in (("nccl", "_dump_nccl_trace"), ("gloo", "_dump_fr_trace")):
        dump = getattr(module, name, None)
        if dump is not None:
            yield backend, functools.partial(_read_flight_recorder, dump)


def _read_flight_recorder(dump: Callable[..., bytes], *, with_stacks: bool) -> Mapping[str, Any]:
    content = pickle.loads(dump(includeCollectives=True, includeStackTraces=with_stacks, onlyActive=False))  # noqa: S301  # of this process
    return {"entries": (), "pg_status": {}, **content}
