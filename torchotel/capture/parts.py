"""The pieces that steps and evaluations are put together from."""

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, time_ns

from torchotel._records import Error, ModuleCall, Phase, Registration, SpanReference, Stamp, Unit


@dataclass(slots=True)
class Part:
    """What happened from one opening event (a fetch, a forward, …) to the next.

    A step is one part, or several: one per backward where gradients accumulate, one per network in a GAN.
    """

    start_ns: int
    end_ns: int
    fetched: bool = False
    user_span: SpanReference | None = None
    ahead: int = 0
    """Steps that are expected to end before the one that this part will belong to."""
    detailed: bool | None = None
    """None until the first forward asks."""
    forwards: int = 0
    forwards_with_grad: int = 0
    opened_without_grad: bool = False
    """Opened by a forward with gradients off: an evaluation that ends with it."""
    forward_start_ns: int | None = None
    forward_end_ns: int = 0
    error: Error | None = None
    backwards: int = 0
    optimizers: list[Hashable] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    stamps: list[Stamp] = field(default_factory=list)
    registrations: list[Registration] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self.optimizers)

    @property
    def trained(self) -> bool:
        """Whether it belongs to a step: a backward ran or an optimizer stepped."""
        return bool(self.backwards or self.optimizers)

    def forward_ends(self, now_ns: int | None = None) -> None:
        """Close the forward phase, if one is open: at the backward's start, or with its last forward."""
        if self.forward_start_ns is not None:
            end_ns = self.forward_end_ns if now_ns is None else now_ns
            self.phases.append(Phase("forward", self.forward_start_ns, end_ns, self.error))
            self.forward_start_ns = None


def join(kind: str, number: int, parts: Sequence[Part], reason: str) -> Unit:
    """Put the parts of a step or an evaluation together.

    Args:
        kind: "step" or "evaluation".
        number: How many of the kind there were before.
        parts: In order.
        reason: Why it has its detail, where it has.
    """
    detailed = any(part.detailed for part in parts)
    unit = Unit(
        kind=kind,
        number=number,
        start_ns=parts[0].start_ns,
        end_ns=max(part.end_ns for part in parts),
        unix_offset_ns=time_ns() - perf_counter_ns(),
        thread=threading.get_ident(),
        detailed=detailed,
        reason=reason if detailed else None,
        user_span=parts[0].user_span,
        grad=any(part.forwards_with_grad or part.trained for part in parts),
    )
    for part in parts:
        unit.phases += part.phases
        unit.calls += part.calls
        unit.stamps += part.stamps
        unit.registrations += part.registrations
        unit.error = unit.error or part.error
    return unit
