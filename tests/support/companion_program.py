"""A training with a companion process: `companion_program.py FOLDER ENDPOINT WHAT`.

It prints the id of the companion, WHAT happens after twenty steps, and it trains twenty more.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import torchotel

STEPS = 20


def say(*words: object) -> None:
    """Print a line at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def companion() -> int:
    """Return the id of the only child of this process."""
    (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return int(child)


def claimed(fd: Path) -> str:
    """Return what a descriptor is, if it belongs to torchotel."""
    try:
        target = str(fd.readlink())
    except FileNotFoundError:  # of the listing itself
        return ""
    own = "memfd:torchotel" in target or target.endswith("metrics.jsonl") or target.startswith("socket:")
    return target if own else ""


def fork() -> None:
    """Print what a forked child has of torchotel."""
    if os.fork() == 0:
        say(sorted(set(filter(None, map(claimed, Path("/proc/self/fd").iterdir())))))
        os._exit(0)
    os.wait()


def look(pid: int) -> None:
    """Print what the system shows of the companion."""
    process = Path(f"/proc/{pid}")
    say((process / "cmdline").read_text().replace("\0", " "))
    say([name in (process / "maps").read_text() for name in ("libtorch", "_multiarray_umath")])
    say(os.getsid(pid) == pid, os.getpriority(os.PRIO_PROCESS, pid))


def kill_companion(pid: int) -> None:
    """Kill the companion, and wait until another one has taken its place."""
    os.kill(pid, signal.SIGKILL)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while children.read_text().split() in ([], [str(pid)]):
        pass


def main() -> None:  # noqa: C901  # one branch for each case
    """Train, let it happen, and train on."""
    folder, endpoint, what = sys.argv[1:]
    handle = torchotel.instrument(worker="process", record=folder, endpoint=endpoint, detail="all")
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train() -> None:
        for _ in range(STEPS):
            net(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    pid = companion()
    say(pid)
    sys.stdin.readline()
    if what == "kill me":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exec":
        os.execv(sys.executable, [sys.executable, "-c", "print('another program')"])  # noqa: S606  # the case
    elif what == "kill the companion":
        handle.flush()
        kill_companion(pid)
        train()
        handle.flush()
    elif what == "kill both companions":
        handle.flush()
        kill_companion(pid)
        os.kill(companion(), signal.SIGKILL)
        while handle.flush(1):
            pass
    elif what == "stop the companion":
        os.kill(pid, signal.SIGSTOP)
        train()
        complete = handle.flush(0.2)
        os.kill(pid, signal.SIGCONT)
        say(complete, handle.flush())
    elif what == "fork":
        fork()
    elif what == "look":
        handle.flush()
        look(pid)
    train()
    handle.shutdown()
    stats = handle.stats()
    say(stats["steps"], stats["spans_recorded"] - stats["spans_exported"] - stats["spans_dropped"])


if __name__ == "__main__":
    main()
