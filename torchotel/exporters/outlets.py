"""What every way out of metrics has in common."""

from typing import Protocol


class MetricsOutlet(Protocol):
    """A way out of metrics: from its constructor to `shutdown` it shows or sends what they say."""

    def prepare(self) -> None:
        """Load what is slow to load; called on the worker before there is anything to count."""

    def first_step(self) -> None:
        """Begin what had to wait until this process trains; called on the worker."""

    def flush(self, deadline_s: float) -> bool:
        """Bring out the present state; False where it could not be by `deadline_s` of `time.monotonic()`."""

    def shutdown(self, deadline_s: float) -> None:
        """Bring out the last state, let go of threads, ports and files; nothing is shown any more."""

    def detach(self) -> None:
        """Be off in a forked child, and leave alone what is the parent's."""
