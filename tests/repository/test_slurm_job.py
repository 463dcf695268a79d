"""The job script for Slurm, with stand-ins for the scheduler's commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import PROGRAMS, commands

from torchotel.runs.rank_folders import open_ranks

pytestmark = pytest.mark.program

ROOT = Path(__file__).parents[2]
SRUN = """#!/bin/bash
for rank in 0 1; do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2 SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
done
wait -n && wait -n
"""


def test_each_task_is_a_rank_of_one_run(tmp_path: Path) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho 127.0.0.1\n"}.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    (binaries / "torchotel").write_text(f'#!/bin/sh\nexec {sys.executable} -m torchotel "$@"\n')
    (binaries / "torchotel").chmod(0o755)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["/bin/bash", str(ROOT / "examples" / "slurm_job.sh"), str(PROGRAMS / "launched_ddp_program.py"), "once"],
        cwd=tmp_path,
        env=commands.environment(PATH=f"{binaries}:{os.environ['PATH']}", **job, **commands.SILENT),
        capture_output=True,
        text=True,
        timeout=commands.TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = open_ranks(tmp_path / "torchotel-runs" / "4711")
    assert [(run.info["resource"]["torch.rank"], run.info["run_id"]) for run in runs] == [(0, "4711.0"), (1, "4711.0")]
