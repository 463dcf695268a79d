"""Whether and when a failed request is tried again."""

import pytest

from torchotel.exporters.otlp.sender import RetryPolicy
from torchotel.exporters.otlp.transport import Reply

FAILED = Reply("503", retry=True)
POLICY = RetryPolicy(first_backoff_s=1.0, max_elapsed_s=64.0)


def test_pauses_double_up_to_a_limit() -> None:
    """Each pause is twice the one before, none longer than half a minute or so."""
    pauses = [POLICY.pause_s(FAILED, attempts, 0.0, 0.5) for attempts in (1, 2, 3, 5, 6, 7, 5000)]
    assert pauses == [1.0, 2.0, 4.0, 16.0, 32.0, 32.0, 32.0]


def test_pauses_are_spread_by_chance() -> None:
    """Ranks that failed at one time come back within a half of the pause, not all at once."""
    assert [POLICY.pause_s(FAILED, 2, 0.0, chance) for chance in (0.0, 0.5, 1.0)] == [1.5, 2.0, 2.5]


@pytest.mark.parametrize(("asked_s", "pause_s"), [(0.0, 1.0), (0.9, 1.0), (7.0, 7.0), (64.0, 64.0), (64.1, None)])
def test_an_endpoint_can_only_lengthen_a_pause(asked_s: float, pause_s: float | None) -> None:
    """What it asks for is waited, but not less than our own pause, nor more than a request may take."""
    assert POLICY.pause_s(FAILED._replace(retry_after_s=asked_s), 1, 0.0, 0.5) == pause_s


def test_ends() -> None:
    """The last attempt is at the time limit. A refused request is not sent again."""
    assert POLICY.pause_s(FAILED, 1, 63.0, 0.5) == 1.0
    assert POLICY.pause_s(FAILED, 1, 63.5, 0.5) == 0.5
    assert POLICY.pause_s(FAILED, 1, 64.0, 0.5) is None
    assert POLICY.pause_s(FAILED._replace(retry_after_s=30.0), 1, 40.0, 0.5) is None
    assert POLICY.pause_s(Reply("400"), 1, 0.0, 0.5) is None
