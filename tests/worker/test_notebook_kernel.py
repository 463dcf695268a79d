"""A notebook's kernel that is restarted ends its companion; the next kernel has a companion of its own."""

import json
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from support.commands import environment

pytestmark = pytest.mark.program

TRAINING = """
import torch, torchotel
handle = torchotel.instrument(record="run", traces_exporter="none")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
assert handle.flush()
print(handle.session.companion_pid)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[KernelManager]:
    # At half of this time the manager sends SIGTERM, and a busy machine takes seconds for an end.
    manager = KernelManager(kernel_name="python3", shutdown_wait_time=60)
    manager.start_kernel(env=environment(), cwd=str(tmp_path))
    yield manager
    manager.shutdown_kernel(now=True)


def train(kernel: KernelManager) -> int:
    """Run the training as a cell; return a descriptor of the companion, which becomes readable at its end."""
    printed: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        if message["content"].get("name") == "stdout":
            printed.append(message["content"]["text"])

    client: BlockingKernelClient = kernel.client()
    client.start_channels()
    client.wait_for_ready(60)
    reply = client.execute_interactive(TRAINING, timeout=60, output_hook=keep)
    client.stop_channels()
    assert reply["content"]["status"] == "ok", reply
    return os.pidfd_open(int("".join(printed)))


@pytest.mark.parametrize(("end", "error"), [("exit", None), ("kill", "process_ended")])
def test_a_restart_ends_the_companion(kernel: KernelManager, tmp_path: Path, end: str, error: str | None) -> None:
    """A restart lets the kernel end as a program does, or kills it."""
    first = train(kernel)
    kernel.restart_kernel(now=end == "kill")
    assert select.select([first], [], [], 60)[0]
    second = train(kernel)
    assert not select.select([second], [], [], 0)[0]
    os.close(first)
    os.close(second)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["finished"] is (end == "exit")
    assert (info["error"] or {}).get("type") == error
    for folder in ("run", "run-2"):
        lines = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        assert [line["number"] for line in lines if line["kind"] == "step"][:2] == [0, 1]
