"""The identity of a process, by the variables of each launcher."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.commands import TIMEOUT_S, environment
from torch._C._distributed_c10d import HashStore

from torchotel._utils.distributed import NOT_AGREED, OwnRunId, agree_on_launch, identify, rank_folder_name

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "PMI_JOBID": "job"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77"}
STEP = {**SLURM, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "2"}
FIRST_TASK = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
POD = {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 0, 1)),
        (TORCHRUN, (9, 1, 16)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 1, 2)),  # and no address: on this host
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-1"}, (1, None, 2)),
        (OPEN_MPI, (3, 1, 4)),
        (MPICH, (3, 1, 4)),
        (SLURM, (3, 1, 4)),
        (STEP, (3, 1, 4)),
        (POD, (3, 0, None)),
        # The first complete set counts, whole.
        ({**TORCHRUN, **FIRST_TASK}, (9, 1, 16)),
        ({**OPEN_MPI, **FIRST_TASK}, (3, 1, 4)),
        ({**MPICH, **FIRST_TASK}, (3, 1, 4)),
        ({**TORCHRUN, **POD}, (9, 1, 16)),
        ({**SLURM, "RANK": "1"}, (3, 1, 4)),
        ({**SLURM, "WORLD_SIZE": "2"}, (3, 1, 4)),
        ({**SLURM, "PMI_RANK": "0", "PMI_SIZE": "1"}, (3, 1, 4)),
        # Sets that contradict themselves, and what is no number.
        ({"RANK": "2", "WORLD_SIZE": "2"}, (0, 0, 1)),
        ({"RANK": "one", "WORLD_SIZE": "2"}, (0, 0, 1)),
        ({"RANK": "²", "WORLD_SIZE": "3"}, (0, 0, 1)),
        # What runs in a batch script or in an interactive shell is no task of a step.
        ({**FIRST_TASK, "ENVIRONMENT": "BATCH"}, (0, 0, 1)),
        ({**FIRST_TASK, "SLURM_JOB_NAME": "interactive"}, (0, 0, 1)),
        ({**FIRST_TASK, "SLURM_STEP_ID": "4294967290"}, (0, 0, 1)),
        ({**STEP, "SLURM_JOB_NAME": "interactive", "ENVIRONMENT": "BATCH"}, (3, 1, 4)),
        # Ray's workers inherit what the job had that started Ray.
        ({**SLURM, "RAY_JOB_ID": "01000000"}, (0, 0, 1)),
    ],
)
def test_reads_the_variables_of_one_launcher(environ: Mapping[str, str], expected: tuple[int, int, int]) -> None:
    found = identify(environ)
    assert (found.rank, found.local_rank, found.world_size) == expected


@pytest.mark.parametrize(
    ("environ", "run_id"),
    [
        ({}, "own"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "agreed"}, "agreed"),
        (OPEN_MPI, "prterun-host-7@1"),
        (MPICH, "job"),
        (STEP, "77.2"),
        (SLURM, "77.0"),
        (POD, "train"),
        ({**SLURM, "RAY_JOB_ID": "01000000"}, "01000000"),
        ({"KUBEFLOW_TRAINING_JOB_ID": "job"}, "job"),
        # Programs that a batch script, a shell or a pod of another kind runs one after the other.
        ({**FIRST_TASK, "ENVIRONMENT": "BATCH"}, "own"),
        ({**FIRST_TASK, "SLURM_STEP_ID": "4294967290"}, "own"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_JOBID": "77.0"}, "own"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "own"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "own"),
    ],
)
def test_takes_the_id_of_the_launcher_s_job(environ: Mapping[str, str], run_id: str) -> None:
    assert identify(environ, own_run_id="own").run_id == run_id
    assert identify(environ, "given", "own").run_id == "given"


def test_ranks_on_several_nodes_agree_on_a_run_id() -> None:
    """By the address, the port and the restart, which are the same on all of them."""
    several = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}
    found = identify(several).run_id
    assert found == identify({**several, "RANK": "0", "LOCAL_RANK": "0"}).run_id
    others = [{"MASTER_PORT": "29501"}, {"MASTER_ADDR": "node-2"}, {"TORCHELASTIC_RESTART_COUNT": "1"}]
    assert len({found, *(identify({**several, **other}).run_id for other in others)}) == 4
    nothing_in_common = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
    assert identify(nothing_in_common, own_run_id="own").run_id == "own"


def test_counts_restarts() -> None:
    assert identify({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}).generation == 2
    assert identify({**STEP, "SLURM_RESTART_COUNT": "1"}).generation == 1
    assert identify({"TORCHELASTIC_RESTART_COUNT": "2"}).generation == 0


SHOW = "import os; from torchotel._utils.distributed import identify; print(identify(os.environ).run_id or 'own')"
CHILD = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {SHOW!r}]).returncode)"
LAUNCH = """
import os, subprocess, sys
for rank, program in enumerate(sys.argv[1:]):
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    subprocess.run([sys.executable, "-c", program], env=os.environ | variables, check=True)
"""


def _launched(*programs: str, **variables: str) -> list[str]:
    command = [sys.executable, "-c", LAUNCH, *programs]
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    return [line for line in done.stdout.split() if line != "0"]


@pytest.mark.program
@pytest.mark.parametrize("variables", [{"TORCHELASTIC_RUN_ID": "none"}, {}])
def test_ranks_on_one_node_agree_on_a_run_id(variables: dict[str, str]) -> None:
    """By the process that launched them; the next launch has another."""
    one, other = (_launched(SHOW, SHOW, **variables) for _ in range(2))
    assert one[0] == one[1]
    assert other[0] == other[1]
    assert one[0] != other[0]


@pytest.mark.program
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="without /proc the parent counts as the launcher")
def test_what_a_rank_runs_in_and_what_it_starts_belong_to_its_run() -> None:
    plain, inner = _launched(SHOW, CHILD)
    assert plain == inner


@pytest.mark.program
def test_programs_that_run_alone_share_no_run_id() -> None:
    """Each draws its own, and so does each recording in one process."""
    own = OwnRunId()
    first = own.current()
    own.use()
    assert own.current() == first
    own.use()
    assert own.current() != first
    assert OwnRunId().current() != first
    done = subprocess.run([sys.executable, "-c", SHOW], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "own\n"


def test_each_rank_has_its_folder() -> None:
    assert [rank_folder_name(identify(environ)) for environ in ({}, TORCHRUN, POD)] == ["", "rank9", "rank3"]


def test_ranks_agree_on_a_launch_and_a_run() -> None:
    """The proposal of the rank that is first at the store counts; an id that is set stays."""
    store = HashStore()
    first, second = (agree_on_launch(store, run_id) for run_id in ("one \udce9", "two"))
    assert first == second
    assert first.run_id == "one ?"
    assert agree_on_launch(HashStore(), "one").id != first.id
    assert agree_on_launch(None, "one") == NOT_AGREED
    assert identify({}, None, "own", first).run_id == "one ?"
    assert identify({}, "given", "own", first).run_id == "given"
