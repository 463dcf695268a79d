"""Records cross to the companion process and are what they were."""

import marshal
from dataclasses import asdict, replace
from enum import IntEnum, StrEnum

import numpy as np
import pytest
import torch
from torch import nn

import torchotel
from torchotel._records import (
    CallNote,
    DeviceMemory,
    DeviceTimes,
    Error,
    GradientNorms,
    Log,
    ModelInfo,
    Phase,
    Record,
    Registration,
    SpanReference,
    StepRecord,
    TensorGradient,
)
from torchotel._utils.distributed import Identity
from torchotel.testing import capture
from torchotel.worker.channel import ChannelError
from torchotel.worker.record_codec import RecordDecoder, RecordEncoder, RunStart


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Three detailed steps with norms and values, and a value that was logged late."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with capture(net, gradient_norms=True) as captured:
        for _ in range(3):
            loss = net(torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torchotel.log(loss=loss, kind="train")
        captured.handle.flush()
        torchotel.log(late=1.5)
        return captured.records


def plain(record: Record | RunStart) -> str:
    """Write all of a record, with tuples and lists alike."""
    assert isinstance(record, StepRecord)
    return repr(asdict(record)).replace("(", "[").replace(")", "]").replace(",]", "]")


def test_records_of_a_training_are_equal_behind_the_channel(records: list[Record]) -> None:
    encoder, decoder = RecordEncoder(), RecordDecoder()
    kinds = [type(record).__name__ for record in records]
    assert kinds == ["StepRecord"] * 3 + ["Log"]
    for record in records:
        decoded = decoder.decode(encoder.encode(record))
        encoder.confirm()
        assert isinstance(decoded, type(record))
        if isinstance(record, StepRecord):
            assert plain(decoded) == plain(record)
        else:
            assert decoded == record


def test_all_fields_cross(records: list[Record]) -> None:
    """Those that a plain training does not have, too; baggage is only for the program's provider."""
    step = records[0]
    assert isinstance(step, StepRecord)
    error = Error("ValueError", "bad", "0")
    full = replace(
        step,
        user_span=SpanReference(1 << 127, 1 << 63, sampled=True, remote=True, state="a=b", other_flags=2),
        identity=SpanReference(3, 4, sampled=False),
        error=error,
        phases=[Phase("forward", 1, 2, error, None, "end", 5), Phase("optimizer", 2, 3, None, "SGD")],
        calls=[
            call._replace(note=CallNote(error, "end", recompute=True, span_id=7, lane=1, microbatch=(1, 2)))
            for call in step.calls
        ],
        registrations=[Registration(1, "a", "module")],
        tensor_gradients=[TensorGradient(1, "a", "2x3", None), TensorGradient(1, "b", "2x3", float("inf"))],
        memory=[DeviceMemory("cuda:0", 1, 2, 3)],
        gradients=GradientNorms(5.0, ((step.calls[0].signature.module, 5.0),), sharded=True),
        device_times=[DeviceTimes({1: 2}, [[(1, 2, 3)]])],
        baggage={"user": object()},
    )
    decoded = RecordDecoder().decode(RecordEncoder().encode(full))
    assert plain(decoded) == plain(replace(full, baggage=None))


class Level(IntEnum):
    HIGH = 3


def test_values_of_subclasses_cross_as_plain_values() -> None:
    """`marshal` would refuse an enum and write the bytes of a NumPy number."""
    log = Log(1, 2, {"a": np.float64(0.5), "b": Level.HIGH, "c": True, "d": np.str_("text")})
    decoded = RecordDecoder().decode(RecordEncoder().encode(log))
    assert decoded == Log(1, 2, {"a": 0.5, "b": 3, "c": True, "d": "text"})
    assert isinstance(decoded, Log)
    assert [type(value) for value in decoded.values.values()] == [float, int, bool, str]


def test_a_definition_is_sent_until_one_message_with_it_was_sent(records: list[Record]) -> None:
    """A full channel drops a message; the next one has the definitions again, and later ones have none."""
    encoder, decoder = RecordEncoder(), RecordDecoder()
    dropped = encoder.encode(records[0])
    encoder.retract()
    again = encoder.encode(records[0])
    assert len(again) == len(dropped)
    encoder.confirm()
    decoder.decode(again)
    short = encoder.encode(records[0])
    assert len(short) < len(again) * 0.8
    assert plain(decoder.decode(short)) == plain(records[0])


def test_a_record_does_not_carry_the_definitions_of_dropped_ones(records: list[Record]) -> None:
    """Else no later record would fit into a channel that is too small for one detailed step."""
    encoder, decoder = RecordEncoder(), RecordDecoder()
    (log,) = [record for record in records if isinstance(record, Log)]
    alone = RecordEncoder().encode(log)
    encoder.encode(records[0])
    encoder.retract()
    message = encoder.encode(log)
    encoder.confirm()
    assert len(message) == len(alone)
    assert decoder.decode(message) == log
    assert plain(decoder.decode(encoder.encode(records[0]))) == plain(records[0])


def test_a_receiver_that_missed_definitions_refuses_the_message(records: list[Record]) -> None:
    encoder = RecordEncoder()
    encoder.encode(records[0])
    encoder.confirm()
    with pytest.raises(ChannelError, match="is missing"):
        RecordDecoder().decode(encoder.encode(records[0]))


def test_a_message_that_is_none_is_an_error() -> None:
    for message in (b"", b"abc", marshal.dumps(1)):
        with pytest.raises(ChannelError, match="no message"):
            RecordDecoder().decode(message)


class Name(StrEnum):
    HIDDEN = "hidden"


def test_names_of_subclasses_cross_as_plain_names(records: list[Record]) -> None:
    """One that `marshal` refuses would keep all later messages from being written, as they define it again."""
    step = records[0]
    assert isinstance(step, StepRecord)
    module = replace(step.calls[0].signature.module, path=Name.HIDDEN, type=np.str_("Layer"))
    calls = [step.calls[0]._replace(signature=replace(step.calls[0].signature, module=module))]
    named = replace(step, calls=calls, registrations=[Registration(1, Name.HIDDEN, "module")])
    decoded = RecordDecoder().decode(RecordEncoder().encode(named))
    assert isinstance(decoded, StepRecord)
    (call,) = decoded.calls
    assert [type(name) for name in (call.signature.module.path, call.signature.module.type)] == [str, str]
    assert (call.signature.module.path, call.signature.module.type) == ("hidden", "Layer")
    assert decoded.registrations == [Registration(1, "hidden", "module")]


def test_another_version_is_refused(records: list[Record]) -> None:
    _, *rest = marshal.loads(RecordEncoder().encode(records[0]))  # noqa: S302  # encoded here
    with pytest.raises(ChannelError, match="version 99"):
        RecordDecoder().decode(marshal.dumps((99, *rest)))


def test_the_start_of_a_run_crosses() -> None:
    start = RunStart(Identity(1, None, 2, "run", 0), ModelInfo("Net", 3, 40))
    assert RecordDecoder().decode(RecordEncoder().encode_start(start)) == start
    without = RunStart(Identity(0, 0, None, "run", 1), None)
    assert RecordDecoder().decode(RecordEncoder().encode_start(without)) == without
