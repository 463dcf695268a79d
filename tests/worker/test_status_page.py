"""The status page: the training thread writes its phases, and the companion reads them after its end."""

import random
import struct
import timeit
from collections.abc import Iterator

import pytest

from torchotel.worker.channel import Receiver, Sender
from torchotel.worker.stats import CaptureStats
from torchotel.worker.status_page import (
    MAX_PHASES,
    PAGE_BYTES,
    PagePhase,
    PageReader,
    PhaseWriter,
    hide_phases,
    write_counts,
)

THREAD = 42
LATER_NS = 1 << 40


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender(1000)
    yield sender
    sender.close()


@pytest.fixture
def writer(sender: Sender) -> PhaseWriter:
    return PhaseWriter(sender.page, THREAD)


@pytest.fixture
def reader(sender: Sender) -> PageReader:
    return PageReader(Receiver(sender.fd).page)


def test_counts_of_capture_and_the_share_of_detail_arrive(sender: Sender, reader: PageReader) -> None:
    assert (reader.counts, reader.overhead_ratio) == (CaptureStats(0, 0, 0), 0.0)
    counts = CaptureStats(calls_dropped=1, stamps_dropped=2, internal_errors=2**40)
    for ratio in (0.0123, None):
        write_counts(sender.page, counts, ratio)
        assert (reader.counts, reader.overhead_ratio) == (counts, ratio)


def test_phases_arrive_in_order_and_the_open_ones_have_no_end(writer: PhaseWriter, reader: PageReader) -> None:
    writer.begin("forward", 10, grad=False)
    writer.end("forward", 20)
    writer.begin("optimizer", 30, alignment=(1 << 40, 2))
    writer.begin("forward", 40, alignment=(0, 0))
    assert reader.phases(LATER_NS) == [
        PagePhase("forward", 10, 20, grad=False),
        PagePhase("optimizer", 30, 0, grad=True, alignment=(1 << 40, 2)),
        PagePhase("forward", 40, 0, grad=True, alignment=(0, 0)),
    ]
    assert reader.thread == THREAD


def test_the_end_of_a_phase_ends_those_inside_of_it(writer: PhaseWriter, reader: PageReader) -> None:
    """An interrupt may have left them open; an end without a beginning ends nothing."""
    writer.begin("optimizer", 10)
    writer.begin("backward", 20)
    writer.end("data", 25)
    writer.end("optimizer", 30)
    writer.end("optimizer", 40)
    assert [(phase.kind, phase.end_ns) for phase in reader.phases(LATER_NS)] == [("optimizer", 30), ("backward", 30)]


def test_a_further_phase_replaces_the_oldest(writer: PhaseWriter, reader: PageReader) -> None:
    """The end of a phase that was replaced is not written. The place of the next phase is not read."""
    writer.begin("optimizer", 1)
    for start_ns in range(10, 10 + 20 * MAX_PHASES, 10):
        writer.begin("forward", start_ns)
        writer.end("forward", start_ns + 5)
    writer.end("optimizer", 5000)
    last = [PagePhase("forward", start_ns, start_ns + 5, grad=True) for start_ns in range(10, 20 * MAX_PHASES + 10, 10)]
    assert reader.phases(LATER_NS) == last[-MAX_PHASES + 1 :]


def test_phases_before_another_companion_are_not_read(sender: Sender, writer: PhaseWriter, reader: PageReader) -> None:
    writer.begin("data", 10)
    assert not reader.is_partial
    hide_phases(sender.page)
    writer.begin("forward", 20)
    assert reader.is_partial
    assert [phase.kind for phase in reader.phases(LATER_NS)] == ["forward"]


def test_a_released_page_raises_nothing(writer: PhaseWriter, sender: Sender) -> None:
    """A wrapper may be called after the end of a session."""
    writer.begin("data", 10)
    sender.page.release()
    writer.end("data", 20)
    writer.begin("forward", 30)
    writer.note_module("layer")


def test_the_module_that_runs_arrives_until_its_forward_ends(writer: PhaseWriter, reader: PageReader) -> None:
    """Of a long path the first bytes are kept."""
    assert reader.module == ""
    writer.begin("forward", 10)
    for path, kept in (("layers.0.größe", "layers.0.größe"), ("a", "a"), ("x" * 1000, "x" * 256)):
        writer.note_module(path)
        assert reader.module == kept
    writer.end("forward", 20)
    assert reader.module == ""


def test_garbage_is_left_out(sender: Sender, reader: PageReader) -> None:
    """Only phases whose times are possible are read, in order."""
    words = random.Random(1)
    for bits in (1, 3, 8, 40, 64):
        for _ in range(200):
            sender.page[:] = memoryview(
                struct.pack(f"{PAGE_BYTES // 8}Q", *(words.getrandbits(bits) for _ in range(PAGE_BYTES // 8)))
            ).cast("Q")
            phases = reader.phases(LATER_NS)
            assert len(phases) < MAX_PHASES
            starts = [phase.start_ns for phase in phases]
            assert starts == sorted(starts)
            assert all(phase.start_ns <= (phase.end_ns or LATER_NS) <= LATER_NS for phase in phases)


def test_a_phase_costs_little(writer: PhaseWriter) -> None:
    """A bound that a busy machine keeps, for both calls; the cost is about a tenth of it."""

    def phase() -> None:
        writer.begin("forward", 10)
        writer.end("forward", 20)

    assert min(timeit.repeat(phase, number=1000, repeat=20)) / 1000 < 10e-6
