"""Test the readings of PyTorch's flight recorder in a process of its own: the recorder is one for the process."""

from pathlib import Path

import pytest
from support import commands

from torchotel.capture.flight_recorder import read_collectives

PROGRAM = """
import torch, torch.distributed as dist
from torchotel.capture.flight_recorder import read_collectives

def counts():
    reading = read_collectives(with_places=True)
    return [] if reading is None else [(group.name, group.ranks, group.enqueued) for group in reading.groups]

print(counts())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(counts())
data = dist.new_group([0], group_desc="data")
for _ in range(3):
    dist.all_reduce(torch.ones(1))
dist.barrier(data)
print(counts())
reading = read_collectives(with_places=True)
print([(one.sequence, one.operation) for one in reading.groups[0].collectives])
print([stack.thread for stack in reading.stacks][0], reading.stacks[0].frames[-1])
print(read_collectives(with_places=False).stacks)
for _ in range(2500):
    dist.all_reduce(torch.ones(1))
print(counts())
del torch._C._distributed_c10d._dump_fr_trace
print(counts())
dist.destroy_process_group()
print(counts())
"""


def test_a_process_without_torch_distributed_has_no_reading() -> None:
    assert read_collectives(with_places=True) is None


@pytest.mark.program
def test_a_reading_has_the_groups_of_the_process(tmp_path: Path) -> None:
    """A group without collectives is at 0. A group whose collectives have left the recorder is unknown.

    Without the private function of PyTorch, nothing is read.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    done = commands.python("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = "('0(default_pg)', (0,), {})"
    assert done.stdout.splitlines() == [
        "[]",
        f"[{first.format(0)}]",
        f"[{first.format(3)}, ('1(data)', (0,), 1)]",
        "[(1, 'all_reduce'), (2, 'all_reduce'), (3, 'all_reduce')]",
        "MainThread program.py:17 in <module>",
        "()",
        f"[{first.format(2503)}]",
        "[]",
        "[]",
    ]
