"""What a program says of its own training: `log`, `name`, `watch`, `step`.

Without `instrument()` all of it does nothing.

Nor does it inside a function that is compiled: there it would break the graph.
"""

from __future__ import annotations

import sys
from contextlib import ContextDecorator

TYPE_CHECKING = False  # typing takes half of what `import torchotel` does
if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor
    from torch.nn import Module

    from torchotel._session import Session


def log(**values: object) -> None:
    """Log values of the current training step, else of the last one.

    A tensor of one element is read a step later, without a synchronisation. `loss`, `lr`, `samples`, `tokens` and
    `epoch` are known; any other name becomes the step's attribute `torch.log.<name>` and the gauge `torch_log{name}`.
    `samples` and `tokens` add up within a step. What can't be taken is left out with a warning; nothing is raised.

    Args:
        **values: Numbers, tensors of one element; strings too under names that are not known.
    """
    session = _running()
    if session is not None:
        session.log(values)


def name(model: Module, name: str) -> None:
    """Name a model: its spans have the name as `torch.model`, and so have its metrics.

    Without this a model has the name of its class. Call it after `instrument()`, before or after the model's first
    call; spans and metrics of earlier calls keep the old name. A second model of the same name gets `-2`, as with
    classes. Names are cut at 1,024 characters. If `model` is a part of another module or no module, or `name` is empty
    or no string, a warning is logged and nothing is named. Raises nothing.

    Args:
        model: The whole model, with or without a wrapper such as DistributedDataParallel.
        name: What to call it: `generator`.
    """
    session = _running()
    if session is not None:
        session.name(model, name)


def watch(tensor: Tensor, name: str) -> None:
    """Report the gradient of an intermediate tensor, whenever a backward computes it.

    It becomes an event of the backward's span, with shape and L2 norm, and the gauge `torch_tensor_gradient_norm`.
    To be called in each step, where the tensor is made; its gradient is left as it is, and the tensor is not kept.

    Args:
        tensor: One that requires grad.
        name: What to call it: `attention.probs`.
    """
    session = _running()
    if session is not None:
        session.watch(tensor, name)


class step(ContextDecorator):  # noqa: N801  # reads as a function: `with torchotel.step():`
    """Mark the bounds of a training step: `with torchotel.step(epoch=3): ...`, or `@torchotel.step()` on a function.

    Whatever runs inside is one step, which takes in the fetch of its batch just before it. A block inside another is
    part of it. An exception that leaves the block is noted on the step.

    Args:
        **values: Logged of the step, as by `log`.
    """

    def __init__(self, **values: object) -> None:
        self._values = values
        self._sessions: list[Session | None] = []  # of blocks that are open: one object may stand for several

    def __enter__(self) -> None:
        session = _running()
        self._sessions.append(session)
        if session is not None:
            session.step_begins()
            session.log(self._values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._sessions.pop()
        if session is not None:
            session.step_ends(error)


def _running() -> Session | None:
    handle = sys.modules.get("torchotel._handle")  # importing it would bring in torch
    # While Dynamo compiles we are not there, or a graph would break, and `fullgraph=True` would raise.
    return None if handle is None or handle.is_compiling() else handle.running()
