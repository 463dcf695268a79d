"""Steps keep their order in unix time, whatever runs while the clocks are read."""

import pytest

from torchotel.capture import step_segment

UNIX_NS = 1_700_000_000_000_000_000


@pytest.mark.parametrize(
    "readings_ns",
    [
        [(0, 100, 200)],
        [(0, 5_000_000, 5_000_100), (6_000_000, 6_000_050, 6_000_100)],  # interrupted before the second clock
        [(0, 50, 4_000_000), (5_000_000, 5_000_050, 5_000_100)],  # and after it
        [(i * 10**6, i * 10**6 + 20_000 * i, i * 10**6 + 40_000 * i) for i in range(5, 0, -1)],  # each time
    ],
)
def test_clocks_are_read_close_together(
    monkeypatch: pytest.MonkeyPatch, readings_ns: list[tuple[int, int, int]]
) -> None:
    """Where something ran in between they are read again, and the closest reading counts."""
    perf = iter([time for before, _, after in readings_ns for time in (before, after)])
    unix = iter([UNIX_NS + between for _, between, _ in readings_ns])
    monkeypatch.setattr(step_segment, "perf_counter_ns", lambda: next(perf))
    monkeypatch.setattr(step_segment, "time_ns", lambda: next(unix))
    assert step_segment.unix_offset_ns() == UNIX_NS
    assert next(perf, None) is None
