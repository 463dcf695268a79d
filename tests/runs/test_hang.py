"""Test the comparison of readings: which rank is behind, and which of several hangs is the cause."""

from pathlib import Path

from torchotel._collectives import CollectiveReading, EnqueuedCollective, GroupReading
from torchotel.runs.hang import NOT_RECORDED, RankEvidence, Verdict, find_hang


def group(name: str, enqueued: int, *ranks: int, waits: bool = False, operation: str = "all_reduce") -> GroupReading:
    """Return the reading of a group whose last collective has ended, or is waited in."""
    last = EnqueuedCollective(enqueued, operation, finished=not waits)
    return GroupReading(name, name, ranks, enqueued, enqueued - waits, (last,) if enqueued else ())


def rank(number: int, *groups: GroupReading, before: tuple[GroupReading, ...] | None = None) -> RankEvidence:
    """Return a rank with two readings, the first with other groups if they are named."""
    readings = [CollectiveReading(1, 60.0, before or groups), CollectiveReading(2, 70.0, groups)]
    return RankEvidence(number, "host", 100 + number, Path("run"), 0, readings, "")


def behind(verdict: Verdict) -> list[tuple[str, list[int]]]:
    """Return the ranks that are behind, by group."""
    return [(hang.group, [one.rank for one in hang.behind]) for hang in verdict.hangs]


def test_a_rank_without_any_collective_is_behind() -> None:
    """The first collective of a group, for example a barrier after the start."""
    verdict = find_hang([rank(0, group("0", 1, 0, 1, waits=True)), rank(1, group("0", 0, 0, 1))])
    assert behind(verdict) == [("0", [1])]
    assert verdict.hangs[0].operation == "all_reduce"


def test_a_recorder_that_records_nothing_shows_no_hang() -> None:
    """Torch before 2.11 records no collectives of Gloo."""
    ranks = [rank(0, group("a", 0, 0, 1)), rank(1, group("a", 0, 0, 1))]
    assert find_hang(ranks) == Verdict((), [NOT_RECORDED])


def test_equal_numbers_are_no_hang() -> None:
    waiting = group("0", 5, 0, 1, waits=True)
    assert find_hang([rank(0, waiting), rank(1, waiting)]) == ((), ["all ranks have enqueued the same collectives"])


def test_the_group_whose_rank_waits_nowhere_is_the_cause() -> None:
    """Rank 1 is behind in a, because it waits for rank 2 in b."""
    verdict = find_hang(
        [
            rank(0, group("a", 9, 0, 1, waits=True)),
            rank(1, group("a", 8, 0, 1), group("b", 4, 1, 2, waits=True)),
            rank(2, group("b", 3, 1, 2)),
        ]
    )
    assert behind(verdict) == [("b", [2]), ("a", [1])]


def test_a_rank_that_moves_in_any_group_may_be_the_cause() -> None:
    """A pipeline: rank 1 is behind in a, and works through b."""
    verdict = find_hang(
        [
            rank(0, group("a", 9, 0, 1, waits=True)),
            rank(1, group("a", 8, 0, 1), group("b", 4, 1), before=(group("a", 8, 0, 1), group("b", 3, 1))),
        ]
    )
    assert verdict == ((), ["the numbers of group b have moved between the last two readings of rank 1"])


def test_a_group_that_a_rank_does_not_know_is_not_compared() -> None:
    """Its collectives have left the flight recorder of rank 1."""
    verdict = find_hang([rank(0, group("a", 9, 0, 1)), rank(1, group("b", 2, 1))])
    assert verdict == ((), ["the number of group a is unknown on rank 1"])


def test_operations_that_have_ended_do_not_differ() -> None:
    """Only a collective that a rank waits in can be the cause of a hang."""
    done = [rank(number, group("0", 5, 0, 1, operation=name)) for number, name in enumerate(("gather", "send"))]
    assert not find_hang(done).hangs
    waiting = rank(0, group("0", 5, 0, 1, operation="gather", waits=True))
    (hang,) = find_hang([waiting, done[1]]).hangs
    assert (hang.mismatch_sequence, hang.mismatch) == (5, {"gather": [0], "send": [1]})
