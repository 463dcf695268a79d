"""The next run of the same name exports the steps that a training and its companion, which ended together, left."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from support import commands, crashing_program
from support.otlp_http_receiver import Answer, Receiver, rejected

from torchotel._records import Error, Phase, StepRecord
from torchotel._utils.gil import GilYielder
from torchotel.config.config import Config
from torchotel.exporters.factory import make_trace_transport
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.runs import open_run
from torchotel.tracing.ids import IdGenerator
from torchotel.tracing.span_templates import Templates
from torchotel.tracing.trace_builder import TraceBuilder
from torchotel.worker import unsent_file
from torchotel.worker.unsent_file import UNSENT_NAME, UnsentFile, encode_unsent, finish_runs

STEPS = crashing_program.STEPS


def step(number: int, error: Error | None = None) -> StepRecord:
    """Return a step that the page of the training process showed."""
    start_ns = 1000 * number
    phases = [Phase("forward", start_ns, start_ns + 500, error)]
    return StepRecord("step", number, start_ns, start_ns + 500, 0, 1, detailed=False, phases=phases, error=error)


def encode(*records: StepRecord, sampler: str = "parentbased_always_on") -> list[bytes]:
    builder, ids = TraceBuilder(Templates((), (), None), 2000, GilYielder()), IdGenerator(sampler, 0.0)
    return [encode_unsent(record, builder, ids, JsonEncoder({"service.name": "earlier"}, "0")) for record in records]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that recorded two steps, and whose last lines were cut off; two more steps had no record."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"kind":"step","number":0}\n{"kind":"step","number":1}\n{"kind":"st')
    lines = encode(step(1), step(2), step(3, Error("process_ended", "")))
    (folder / UNSENT_NAME).write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def finish(folder: Path, endpoint: str, *more: Path) -> None:
    transport = make_trace_transport(Config.read({"endpoint": endpoint}, {}))
    assert transport is not None
    finish_runs([folder, *more], transport)


def numbers(folder: Path) -> list[int]:
    return [json.loads(line)["number"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_next_run_exports_the_open_step(tmp_path: Path, server: Receiver) -> None:
    """The next run takes another folder, and sends the trace under the resource of the run that was killed."""
    for end in ("SIGKILL of both", "nothing"):
        program = subprocess.run(
            [sys.executable, str(crashing_program.__file__), str(tmp_path / "run"), "forward", end],
            env=commands.environment(
                TORCHOTEL_DETAIL="off",
                TORCHOTEL_WORKER="process",
                TORCHOTEL_RUN_ID=end,
                OTEL_EXPORTER_OTLP_ENDPOINT=server.url.removesuffix("/v1/traces"),
            ),
            input=b"\n",
            capture_output=True,
            timeout=commands.TIMEOUT_S,
            check=False,
        )
    assert program.returncode == 0, program.stderr
    assert b"run ended without a shutdown. Its steps without a record were exported now" in program.stderr
    failed = [
        (names["torch.run.id"], span.name)
        for request in server.requests
        for resource in request.message.resource_spans
        for names in [{one.key: one.value.string_value for one in resource.resource.attributes}]
        for span in request.spans()
        if any(one.value.string_value == "process_ended" for one in span.attributes)
    ]
    assert failed == [("SIGKILL of both", "torch.step"), ("SIGKILL of both", "torch.forward")]
    run = open_run(tmp_path / "run")
    assert [record.number for record in run.records()] == [*range(STEPS + 1)]
    assert [span.name for span in run.spans()][-3:] == ["torch.step", "torch.between", "torch.forward"]
    assert not (run.folder / UNSENT_NAME).exists()


def test_steps_that_have_a_record_are_left_out(folder: Path, server: Receiver) -> None:
    finish(folder, server.url)
    roots = [span for span in server.spans if span.name == "torch.step"]
    assert [
        attribute.value.int_value for span in roots for attribute in span.attributes if "number" in attribute.key
    ] == [2, 3]
    assert numbers(folder) == [0, 1, 2, 3]
    assert not (folder / UNSENT_NAME).exists()
    spans = list(open_run(folder).spans())
    assert len(spans) == len(server.spans) == 4
    assert [line.error_type for line in open_run(folder).records()][-1] == "process_ended"


def test_a_live_run_is_left_alone(folder: Path, server: Receiver) -> None:
    """The training process holds the lock while its companion is replaced."""
    before = (folder / UNSENT_NAME).read_bytes()
    held = UnsentFile(folder / UNSENT_NAME)
    finish(folder, server.url)
    assert not server.requests
    assert (folder / UNSENT_NAME).read_bytes() == before
    held.close()
    finish(folder, server.url)
    assert numbers(folder) == [0, 1, 2, 3]


def test_the_last_record_may_be_long(folder: Path, server: Receiver) -> None:
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('ep"}\n{"kind":"step","number":2}\n{"kind":"step","number":3,"x":"' + 100_000 * "x" + '"}\n')
    finish(folder, server.url)
    assert not server.requests
    assert not (folder / UNSENT_NAME).exists()


def test_spans_that_the_endpoint_rejects_are_not_sent_again(
    folder: Path, server: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers.append(rejected(4, "too old"))
    finish(folder, server.url)
    assert "The endpoint rejected 4 spans of its last steps: too old" in caplog.text
    assert numbers(folder) == [0, 1, 2, 3]
    finish(folder, server.url)
    assert len(server.requests) == 1


def test_an_endpoint_that_refuses_leaves_the_file_to_the_next_run(
    folder: Path, server: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers.append(Answer(400))
    finish(folder, server.url)
    assert "its last steps could not be exported" in caplog.text
    assert [record.number for record in open_run(folder).records()] == [0, 1, 2, 3]
    finish(folder, server.url)
    assert numbers(folder) == [0, 1, 2, 3]
    assert len(server.spans) == 4


@pytest.mark.parametrize(
    "content", [b'{"number": 9}', b'{"kind": [], "number": 9}', b'{"kind": "step", "number": 9, "trace": 1}']
)
def test_a_file_that_torchotel_has_not_written_is_set_aside(
    folder: Path, server: Receiver, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / UNSENT_NAME).write_bytes(content)
    for _ in range(2):
        finish(folder, server.url)
    assert not server.requests
    assert caplog.text.count("holds a line that torchotel does not write") == 1
    assert (folder / "unsent-unreadable.jsonl").read_bytes() == content


@pytest.mark.parametrize("content", [b"\x00\xff", b"[" * 100_000, b'{"kind": "st'])
def test_an_incomplete_line_is_no_step(folder: Path, server: Receiver, content: bytes) -> None:
    (folder / UNSENT_NAME).write_bytes(content)
    finish(folder, server.url)
    assert not server.requests
    assert numbers(folder) == [0, 1]


def test_a_folder_that_cannot_be_used_stops_no_other(
    folder: Path, server: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = tmp_path / "odd"
    (odd / "metrics.jsonl").mkdir(parents=True)
    shutil.copy(folder / UNSENT_NAME, odd)
    finish(odd, server.url, folder)
    assert f"The last steps of {odd} could not be exported" in caplog.text
    assert len(server.spans) == 4


def test_steps_that_cannot_be_added_are_not_sent_again(
    folder: Path, server: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full, for example."""
    (folder / "trace-00001.jsonl").mkdir()  # LineFile refuses a name that exists
    with patch.object(unsent_file, "next_segment", lambda _: folder / "trace-00001.jsonl"):
        finish(folder, server.url)
    assert len(server.spans) > 0
    assert "were exported, but they are not in its files ([Errno 17] File exists" in caplog.text
    assert not (folder / UNSENT_NAME).exists()


def test_a_foreign_line_of_metrics_blames_no_other_file(folder: Path, server: Receiver) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('\n{"kind": "step", "number": "two"}\n{"kind": "step", "number": null}\n')
    finish(folder, server.url)
    assert [span.name for span in server.spans].count("torch.step") == 2
    assert not list(folder.glob("*unreadable*"))


def test_a_folder_whose_file_system_has_no_locks(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is unknown whether its run lives, and no file is left there in the first place."""
    refuse = OSError(errno.ENOSYS, "Function not implemented")
    with patch("fcntl.flock", side_effect=refuse):
        finish(folder, "http://localhost:1")
        (folder / UNSENT_NAME).unlink()
        with pytest.raises(OSError, match="not implemented"):
            UnsentFile(folder / UNSENT_NAME)
    assert not (folder / UNSENT_NAME).exists()
    assert not caplog.records


def test_a_link_is_not_followed(folder: Path, server: Receiver, tmp_path: Path) -> None:
    shutil.move(folder / UNSENT_NAME, tmp_path / "other")
    (folder / UNSENT_NAME).symlink_to(tmp_path / "other")
    finish(folder, server.url)
    assert not server.requests
    assert (tmp_path / "other").exists()


@pytest.mark.parametrize(("sampler", "traces"), [("always_off", [False, False]), ("traceidratio", [False, True])])
def test_sampling_decides_which_steps_have_a_trace(sampler: str, traces: list[bool]) -> None:
    """A failed step is kept unless the sampler is always_off."""
    lines = encode(step(1), step(2, Error("process_ended", "")), sampler=sampler)
    assert ["trace" in json.loads(line) for line in lines] == traces
