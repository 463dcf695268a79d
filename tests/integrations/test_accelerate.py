"""Test that values from Accelerate's `log` are recorded, and that its wrappers do not change module names."""

from collections.abc import Iterator

import pytest
import torch
from support.framework_loops.logged_values import EPOCH, LOSS, STEP, of_steps
from support.framework_loops.model_and_data import BATCHES, EPOCHS, Net, Setting, loader
from support.scraped_metrics import scrape
from torch import distributed

import torchotel
from torchotel import _semconv as names
from torchotel._limits import MAX_LOG_NAMES
from torchotel.testing import capture

accelerate = pytest.importorskip("accelerate", reason="accelerate is missing")
loop = pytest.importorskip("support.framework_loops.accelerate_loop", reason="accelerate is missing")


def test_what_is_logged_with_the_accelerator_is_the_steps() -> None:
    """Logged values are recorded without a tracker, with the program's step number."""
    before = accelerate.Accelerator.log
    with capture() as captured:
        losses = loop.train(Setting())
    assert of_steps(captured, EPOCH, STEP, LOSS) == [
        (number // BATCHES, 100 + number, losses[number]) for number in range(EPOCHS * BATCHES)
    ]
    assert captured.handle.stats()["internal_errors"] == 0
    assert accelerate.Accelerator.log is before


class Unreadable:
    @property
    def item(self) -> object:
        raise RuntimeError("not loaded")


def test_values_for_trackers_alone_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """Images are ignored; names beyond the limit are logged once, and the user's own names have a separate limit."""
    loop.forget()
    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    net, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader(BATCHES))
    given: dict[object, object] = {1: 2.0, "image": Unreadable()}
    given |= {f"metric {number}": 1.0 for number in range(100)}
    with capture() as captured:
        for batch in batches:
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log(given)
            torchotel.log(mine=3.0)
    loop.forget()
    assert of_steps(captured, "torch.log.mine", "torch.log.metric 7") == [(3.0, 1.0)] * BATCHES
    assert captured.handle.stats()["internal_errors"] == 0
    (record,) = [record for record in caplog.records if record.name == "torchotel"]
    assert f"log() takes {MAX_LOG_NAMES} names of a framework; 'metric 62'" in record.getMessage()


def test_every_name_that_is_taken_is_a_series() -> None:
    """Names of the user, of a framework and of watched tensors have separate limits, and all are metrics."""
    loop.forget()
    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    net, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader(BATCHES))
    watched = torch.ones(1, requires_grad=True)
    with torchotel.instrument(traces_exporter="none", prometheus_port=0) as handle:
        for number in range(100):
            torchotel.watch(watched, f"tensor {number}")
        accelerator.backward(net(**next(iter(batches)))["loss"] + watched.sum())
        optimizer.step()
        accelerator.log({f"theirs {number}": 1.0 for number in range(MAX_LOG_NAMES)})
        torchotel.log(**{f"mine {number}": 1.0 for number in range(MAX_LOG_NAMES)})
        handle.flush()
        series = [name for name, _ in scrape(handle.prometheus_port).series]
    loop.forget()
    counts = [series.count(name) for name in ("torch_log", "torch_tensor_gradient_norm")]
    assert counts == [2 * MAX_LOG_NAMES, 100]


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """Create a process group of one rank, in which Accelerate wraps a model in DDP."""
    store = distributed.HashStore()  # type: ignore[attr-defined]  # not in torch's public types
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_a_model_that_accelerate_wraps_in_ddp_keeps_its_names() -> None:
    """DDP adds one call around the model's; the paths of the model and of its modules are unchanged."""
    loop.forget()
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = accelerate.DistributedType.MULTI_CPU  # Accelerate does not wrap for one rank
    net = Net()
    net, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader(BATCHES))
    with capture() as captured:
        for batch in batches:
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    loop.forget()
    assert len(captured.steps) == BATCHES
    for step in captured.steps:
        wrapper = step.find(names.SPAN_FORWARD).children[0]
        assert wrapper.attributes[names.MODULE_TYPE] == "DistributedDataParallel"
        called = [span.name for span in wrapper.walk() if span.name != "torch.collective broadcast"]  # of the buffers
        assert called[1:] == ["forward Net", "forward body", "forward body.0", "forward body.1", "forward head"]
        assert "backward body.0" in [span.name for span in step.find(names.SPAN_BACKWARD).walk()]
