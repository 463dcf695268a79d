"""Unix time of what is measured by the clock that never goes back."""

from time import perf_counter_ns, time_ns

CLOSE_NS = 10_000
TRIES = 5


def unix_offset_ns() -> int:
    """Return what makes unix time of a time of `perf_counter_ns`.

    Between two clocks that are read another thread may run, for milliseconds; the step would seem to begin before the
    last one ended. Then they are read again, and those that were read closest together count.
    """
    closest_ns, offset_ns = -1, 0
    for _ in range(TRIES):
        before_ns, unix_ns, after_ns = perf_counter_ns(), time_ns(), perf_counter_ns()
        apart_ns = after_ns - before_ns
        if closest_ns < 0 or apart_ns < closest_ns:
            closest_ns, offset_ns = apart_ns, unix_ns - (before_ns + after_ns) // 2
        if apart_ns < CLOSE_NS:
            break
    return offset_ns
