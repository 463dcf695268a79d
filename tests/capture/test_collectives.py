"""Test the hooks of process groups: collectives return the same numbers, and the hooks outlast a session."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.needs import needs_group_hooks

pytestmark = [pytest.mark.program, needs_group_hooks]

START = """
import json, sys, threading, torch, torchotel
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()

def spans(captured):
    return [span for root in captured.roots for span in root.walk() if span.name.startswith("torch.collective")]
"""

PEER = """
import os

def with_a_peer(collectives):
    '''Make a group of two ranks. The second rank calls its collectives when `go_on` is called.'''
    told, tell = os.pipe()
    peer_has_ended, peer_runs = os.pipe()
    pid = os.fork()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}-2", rank=int(pid == 0), world_size=2)
    if pid == 0:
        os.close(tell)
        if os.read(told, 1):
            for _ in range(collectives):
                dist.all_reduce(torch.ones(3))
        os._exit(0)
    os.close(peer_runs)
    return lambda: os.write(tell, b"1"), peer_has_ended

def step_begins():
    model(torch.ones(2, 4)).sum().backward()
"""


def said(program: str, folder: Path) -> Any:
    """Run a program, and read what it printed."""
    path = folder / "program.py"
    path.write_text(START + program)
    done = commands.python(str(path), str(folder / "store"), cwd=folder, **commands.SILENT)
    assert done.returncode == 0, done.stderr
    assert "internal error" not in done.stderr
    return json.loads(done.stdout)


def test_sessions_beside_a_thread_that_trains(tmp_path: Path) -> None:
    """torch crashes if a hook is registered or removed while a collective runs."""
    program = """
ended = threading.Event()
def train():
    while not ended.is_set():
        step()
thread = threading.Thread(target=train)
thread.start()
seen = []
for _ in range(30):
    with torchotel.testing.capture() as captured:
        until = threading.Event()
        while captured.handle.stats()["steps"] < 3 and thread.is_alive():
            until.wait(0.01)
    seen.append(len(spans(captured)) > 0)
ended.set()
thread.join()
print(json.dumps(seen))
"""
    assert said("import torchotel.testing\n" + program, tmp_path) == [True] * 30


def test_groups_that_are_made_later_and_destroyed(tmp_path: Path) -> None:
    """A new group has hooks, a destroyed one is freed, and the number of names is bounded."""
    program = """
import gc, weakref, torchotel.testing
with torchotel.testing.capture() as captured:
    step()
    groups = [dist.new_group([0], group_desc=f"group {number}") for number in range(80)]
    step()
    for group in groups:
        dist.all_reduce(torch.ones(3), group=group)
    step()
    freed = [weakref.ref(group) for group in groups]
    for group in groups:
        dist.destroy_process_group(group)
    del group
    groups.clear()
    gc.collect()
found = [span.attributes["torch.collective.group"] for span in spans(captured)]
print(json.dumps([sum(one() is None for one in freed), found.count("default_pg"), found.count("group 0"),
                  found.count("other"), len(set(found))]))
"""
    assert said(program, tmp_path) == [80, 6, 1, 17, 65]


def test_the_result_of_a_collective_is_not_written_again(tmp_path: Path) -> None:
    """Gloo's reduce-scatter copies its result in each wait: another one would undo what the program has done since."""
    program = """
import torchotel.testing
results = [torch.ones(4) for _ in range(100)]
with torchotel.testing.capture() as captured:
    step_begins()
    for result in results:
        dist.reduce_scatter_tensor(result, torch.ones(4))
        result.zero_()
    optimizer.step()
print(json.dumps([sum(result.sum().item() for result in results), len(spans(captured)),
                  sum("torch.collective.end" in span.attributes for span in spans(captured))]))
"""
    assert said(PEER + program, tmp_path) == [0, 100, 100]


def test_a_default_group_that_is_made_anew(tmp_path: Path) -> None:
    """A program may destroy its default group, also with another one, and make one that looks the same."""
    program = """
import torchotel.testing
with torchotel.testing.capture() as captured:
    for number in range(3):
        step()
        if number:
            dist.new_group([0])
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}-{number}", rank=0, world_size=1)
    step()
print(json.dumps([span.attributes["torch.collective.sequence"] for span in spans(captured)]))
"""
    assert said(program, tmp_path) == [1, 2] * 4


def test_a_hook_that_fails_does_not_reach_the_collective(tmp_path: Path) -> None:
    """An internal error is counted, and after several of them the part is off; the numbers are the program's."""
    program = """
import logging, torchotel.testing
from torchotel.capture import collectives
logging.getLogger("torchotel").setLevel(logging.CRITICAL)
def fails(*_):
    raise ValueError("a defect")
collectives.OpenCollective.issued = fails
with torchotel.testing.capture() as captured:
    for _ in range(20):
        step()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    print(json.dumps([captured.handle.stats()["internal_errors"], tensor.tolist(), len(captured.steps)]))
"""
    assert said(program, tmp_path) == [10, [1.0, 1.0, 1.0], 20]


def test_a_pending_collective_at_the_end_of_the_process(tmp_path: Path) -> None:
    """A thread that calls into an interpreter that is gone would end the process by SIGABRT."""
    program = """
class AtTheEnd:
    def __del__(self):
        go_on()
        os.read(peer_has_ended, 1)
at_the_end = AtTheEnd()
torchotel.instrument(metrics_exporter="none")
go_on, peer_has_ended = with_a_peer(1)
step_begins()
work = dist.all_reduce(torch.ones(3), async_op=True)
print(json.dumps("ended"))
"""
    assert said(PEER + program, tmp_path) == "ended"


def test_a_program_that_holds_the_interpreter(tmp_path: Path) -> None:
    """No thread of gloo waits for the program: collectives are done while Python code runs without a pause."""
    program = """
import time, torchotel.testing
with torchotel.testing.capture() as captured:
    go_on, _ = with_a_peer(8)
    step_begins()
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(8)]
    sys.setswitchinterval(1000)
    go_on()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not all(work.is_completed() for work in works):
        pass
    done = [work.is_completed() for work in works]
    sys.setswitchinterval(0.005)
    for work in works:
        work.wait()
print(json.dumps(done))
"""
    assert said(PEER + program, tmp_path) == [True] * 8


def test_a_call_that_raises_is_no_collective(tmp_path: Path) -> None:
    """The other ranks have not called it, and their next steps belong to those of this rank."""
    program = """
import torchotel.testing
from torchotel.capture.collectives import collectives_run
group = dist.distributed_c10d._get_default_group()
numbers = []
with torchotel.testing.capture():
    step()
    numbers.append(collectives_run(group))
    try:
        dist.all_gather([torch.ones(2)], torch.ones(3))
    except (RuntimeError, ValueError):
        numbers.append("raised")
    numbers.append(collectives_run(group))
    step()
    numbers.append(collectives_run(group))
print(json.dumps(numbers))
"""
    first, raised, second, third = said(program, tmp_path)
    assert (raised, second, third) == ("raised", first, first + 2)


def test_a_second_default_group(tmp_path: Path) -> None:
    """Its collectives are recorded, and the steps have traces of their own: its numbers begin with 0 again."""
    program = """
import os, torch.multiprocessing as mp, torchotel.testing
def rank(number, folder):
    dist.destroy_process_group()
    with torchotel.testing.capture() as captured:
        for name in ("first", "second"):
            dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=number, world_size=2)
            for _ in range(3):
                step()
            dist.barrier()
            dist.destroy_process_group()
    if number == 0:
        traces = [root.trace_id for root in captured.steps]
        counts = [sum(span.name == "torch.collective all_reduce" for span in root.walk()) for root in captured.steps]
        print(json.dumps([len(set(traces)), counts]), flush=True)
if __name__ == "__main__":
    mp.start_processes(rank, (os.path.dirname(sys.argv[1]),), 2, start_method="fork")
    dist.destroy_process_group()
"""
    assert said(program, tmp_path) == [6, [2] * 6]
