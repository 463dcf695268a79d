"""Test when the flight recorder is read, with a clock of the test."""

from torchotel._collectives import CollectiveReading
from torchotel.worker.collective_watch import CollectiveWatch, ReadingSchedule

READING = CollectiveReading(1, 0.0, ())


def readings(schedule: ReadingSchedule, seconds: int, limit_s: float = 60.0) -> list[int]:
    """Return after how many seconds without an event the recorder is read."""
    return [second for second in range(seconds) if schedule.is_due(float(second), limit_s)]


def test_the_second_reading_is_soon_and_each_later_one_after_twice_the_time() -> None:
    """Two readings show that no number moves, and a hang of hours writes few lines."""
    assert readings(ReadingSchedule(), 3600) == [60, 70, 140, 280, 560, 1120, 2240]


def test_an_event_begins_the_time_again() -> None:
    schedule = ReadingSchedule()
    assert readings(schedule, 62) == [60]
    assert readings(schedule, 62) == [60]


def test_a_short_limit_shortens_the_time_to_the_second_reading() -> None:
    assert readings(ReadingSchedule(), 10, limit_s=1.0) == [1, 2, 4, 8]


def test_the_worker_thread_reads_only_if_no_record_arrives() -> None:
    """The limit is longer for long steps, and the reading has the time without a record."""
    watch = CollectiveWatch(lambda: READING, 60.0)
    watch.note_step(10.0)
    read = []
    for second in range(300):
        if second < 100:
            watch.note_record(second)
        if (reading := watch.check(second)) is not None:
            read.append(reading.quiet_s)
    assert read == [100.0, 110.0]


def test_a_process_without_a_group_has_no_reading() -> None:
    watch = CollectiveWatch(lambda: None, 1.0)
    assert [watch.check(second) for second in (0.0, 3600.0)] == [None, None]
