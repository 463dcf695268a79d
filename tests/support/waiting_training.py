"""A training of three steps, named digits, that stays alive until it has been looked at."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support import commands

STEPS = 3
PROGRAM = f"""
import sys, torch, torchotel
handle = torchotel.instrument(service_name="digits")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range({STEPS}):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
handle.flush()
print("trained", flush=True)
sys.stdin.readline()
"""


@contextmanager
def held_training(folder: Path, **environ: str) -> Iterator[None]:
    """Run it in a process of its own; at the end of the block it ends as programs do."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=commands.environment(**environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout
        assert program.stdout.readline() == "trained\n"
        yield
    finally:
        program.communicate("\n", timeout=commands.TIMEOUT_S)
    assert program.returncode == 0
