"""The identity of this process: its rank, its local rank, the world size, the run and the restart generation."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from torchotel._utils.process import MAX_PORT, is_child
from torchotel._utils.text import shortened

FIRST_RESERVED_STEP = 0xFFFFFFF0
"""Slurm step ids from here on belong to batch scripts and interactive shells, not to steps of `srun`."""


class Store(Protocol):
    """A key-value store that the ranks share."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set the value of a key that has none, if `expected` is empty, and return its value."""


LAUNCH_KEY = "torchotel/launch"
"""Key of the launch's id in the store of the process group."""


class Identity(NamedTuple):
    """Position of this process in its run."""

    rank: int
    local_rank: int | None
    """None if unknown: no launcher sets it, and the ranks may be on several hosts."""
    world_size: int | None
    """None if unknown: an indexed Job of Kubernetes sets only an index."""
    run_id: str
    generation: int
    """Restarts of the run so far."""
    launch: str = ""
    """Random id that the ranks of this launch have agreed on; empty without a process group of several ranks."""
    device_id: str = ""
    """UUID of the GPU; empty without one."""
    mesh: str = ""
    """Place in each dimension of the device mesh, and its size; empty without one."""


class AgreedLaunch(NamedTuple):
    """What the ranks of a launch have agreed on; empty without a process group of several ranks."""

    id: str = ""
    """A random id."""
    run_id: str = ""
    """The id of the run on the rank that was first at the store."""


NOT_AGREED = AgreedLaunch()


class _Launcher(NamedTuple):
    """Names of the variables of one launcher, which are read together: values of two launchers never mix."""

    rank: str
    world_size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()
    """The first of these variables that is set has the job's id."""
    restarts: str = ""


class _Launch(NamedTuple):
    """Values of the variables of one launcher."""

    launcher: _Launcher
    rank: int
    world_size: int | None
    local_rank: int | None
    local_size: int | None
    job: str
    generation: int


_TORCHRUN = _Launcher(
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",), "TORCHELASTIC_RESTART_COUNT"
)
"""https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables. Others set some of these, too."""
_OPEN_MPI = _Launcher(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_MPICH = _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_JOBID",))
_SLURM = _Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", (), "SLURM_RESTART_COUNT")
_SLURM_STEP = _SLURM._replace(world_size="SLURM_STEP_NUM_TASKS")
_KUBERNETES = _Launcher("JOB_COMPLETION_INDEX", "", "", "")
_RAY = _Launcher("", "", "", "")


def identify(
    environ: Mapping[str, str], run_id: str | None = None, own_run_id: str = "", agreed: AgreedLaunch = NOT_AGREED
) -> Identity:
    """Return the identity of this process, without communication; it may change until a process group exists.

    Sources in order: the default process group of `torch.distributed`, then the first launcher with complete and
    consistent variables, of torchrun, Ray, Open MPI, MPICH, Slurm, and an indexed Job of Kubernetes.

    Args:
        environ: The environment.
        run_id: The configured id of the run.
        own_run_id: The id of the run if this is the only process.
        agreed: What `agree_on_launch` returned.
    """
    launch, group = _find_launch(environ), _default_group()
    rank, world_size = group or ((0, 1) if launch is None else (launch.rank, launch.world_size))
    local_rank = None
    if launch is not None and launch.rank == rank and launch.world_size in {None, world_size}:
        local_rank = launch.local_rank
    if local_rank is None and (world_size == 1 or _is_local(environ.get("MASTER_ADDR", ""))):
        local_rank = rank
    return Identity(
        rank,
        local_rank,
        world_size,
        shortened(
            run_id
            or _job_id(environ, launch)
            or agreed.run_id
            or _common_launcher_id(environ, launch, world_size)
            or own_run_id
        ),
        0 if launch is None else launch.generation,
        agreed.id,
    )


def agree_on_launch(store: Store | None, run_id: str) -> AgreedLaunch:
    """Return a random id and an id of the run that are the same on all ranks of a launch.

    The ids of launchers do not tell two launches of a program apart: many programs set a constant one. The store is
    accessed once, and no rank waits for another.

    Args:
        store: The store of the process group; None: there is no group of several ranks.
        run_id: The id of the run that this rank proposes; that of the rank that is first at the store is used.
    """
    if store is not None:
        proposed = f"{uuid4().hex}/{run_id}".encode("utf-8", "replace").decode()
        with suppress(RuntimeError):  # another kind of store, or its process has ended
            launch_id, _, agreed_run_id = store.compare_set(LAUNCH_KEY, "", proposed).decode().partition("/")
            return AgreedLaunch(launch_id, agreed_run_id)
    return NOT_AGREED


def rank_folder_name(identity: Identity) -> str:
    """Return the name of this rank's folder in the folder of the run; empty for the only process of a run."""
    return "" if identity.world_size == 1 else f"rank{identity.rank}"


def has_rank_name(folder: Path) -> bool:
    """Return whether a folder is named as the folder of a rank."""
    return re.fullmatch(r"rank\d+", folder.name) is not None


def own_port(port: int, local_rank: int | None) -> int:
    """Return this rank's port: the first port plus the local rank; 0 means any free port."""
    own = port + (local_rank or 0) if port else 0
    return own if own <= MAX_PORT else 0


class OwnRunId:
    """Random run id of a single process: each recording has a new one. The resource detector reads it, too."""

    def __init__(self) -> None:
        self._process, self._id, self._used = 0, "", False

    def current(self) -> str:
        """Return the id of the current or the next recording."""
        if self._process != os.getpid():  # the first call, or a forked child
            self._process, self._id, self._used = os.getpid(), uuid4().hex[:12], False
        return self._id

    def use(self) -> None:
        """Start a recording; draw a new id if an earlier recording used the current id."""
        if self.current() and self._used:
            self._id = uuid4().hex[:12]
        self._used = True


own_run = OwnRunId()


def _find_launch(environ: Mapping[str, str]) -> _Launch | None:
    launch = _read(_TORCHRUN, environ) or _ray_launch()
    if launch is None and not environ.get("RAY_JOB_ID"):  # Ray's workers inherit variables of the launcher of Ray
        mpi = [found for launcher in (_OPEN_MPI, _MPICH) if (found := _read(launcher, environ)) is not None]
        # Slurm also sets MPICH's variables; in a shell they are for one rank.
        several = [found for found in mpi if found.world_size != 1]
        return several[0] if several else _slurm_launch(environ) or _kubernetes_launch(environ)
    return launch


def _read(launcher: _Launcher, environ: Mapping[str, str]) -> _Launch | None:
    """Read the variables of a launcher; None if they are incomplete or contradict each other."""
    rank, size = _number(environ, launcher.rank), _number(environ, launcher.world_size)
    if rank is None or size is None or rank >= size:
        return None
    job = next((text for name in launcher.job if (text := environ.get(name, ""))), "")
    return _Launch(
        launcher,
        rank,
        size,
        _number(environ, launcher.local_rank),
        _number(environ, launcher.local_size),
        "" if job.lower() == "none" else job,  # torchrun's default
        _number(environ, launcher.restarts) or 0,
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _slurm_launch(environ: Mapping[str, str]) -> _Launch | None:
    """Read the variables of a task of `srun`; None in a batch script or a shell of `salloc` or `srun --pty`.

    Those have the variables of a task, too.
    """
    step = _number(environ, "SLURM_STEP_ID")
    if step is None:
        started = environ.get("ENVIRONMENT") != "BATCH" and environ.get("SLURM_JOB_NAME") not in {"bash", "interactive"}
    else:
        started = step < FIRST_RESERVED_STEP and not ("SLURM_PTY_PORT" in environ and os.isatty(0))
    launch = _read(_SLURM_STEP, environ) or _read(_SLURM, environ)
    if launch is None or not started:
        return None
    job = environ.get("SLURM_JOB_ID", "")
    return launch._replace(job=f"{job}.{step or 0}" if job else "")


def _kubernetes_launch(environ: Mapping[str, str]) -> _Launch | None:
    """Read the index of a pod of an indexed Job; its host name is the Job's name and the index.

    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
    """
    index = _number(environ, _KUBERNETES.rank)
    if index is None:
        return None
    name, _, last = environ.get("HOSTNAME", "").rpartition("-")
    return _Launch(_KUBERNETES, index, None, 0, None, name if last == str(index) else "", 0)


def _ray_launch() -> _Launch | None:
    """Read the context of Ray Train if the program has imported it."""
    train: Any = sys.modules.get("ray.train")
    with suppress(Exception):  # there is no context outside of its workers
        context = train.get_context()
        found = context.get_world_rank(), context.get_world_size(), context.get_local_rank(), None
        if isinstance(found[0], int) and isinstance(found[1], int):
            return _Launch(_RAY, *found, "", 0)
    return None


def _default_group() -> tuple[int, int] | None:
    """Return rank and size of the default process group, if there is one."""
    distributed: Any = sys.modules.get("torch.distributed")
    with suppress(Exception):  # the group is being destroyed, or torch has no torch.distributed
        if distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
    return None


def _job_id(environ: Mapping[str, str], launch: _Launch | None) -> str:
    """Return the id that the launcher gives the job; empty if it gives none."""
    job = launch.job if launch is not None else ""
    job = job or environ.get("RAY_JOB_ID", "") or environ.get("KUBEFLOW_TRAINING_JOB_ID", "")
    if not job and (task := _slurm_launch(environ)) is not None:  # its script has set the variables of torchrun
        job = task.job
    return job


def _common_launcher_id(environ: Mapping[str, str], launch: _Launch | None, world_size: int | None) -> str:
    """Return a hash of what processes with one launcher have in common; empty if this is the only process."""
    agent = launch is not None and "TORCHELASTIC_RUN_ID" in environ
    if world_size == 1 and not agent and not is_child():
        return ""
    if world_size != 1 and not _is_one_node(launch, environ.get("MASTER_ADDR", "")):
        names = "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"
        common = [environ.get(name, "") for name in names]
        return _hashed(*common, environ.get("TORCHELASTIC_RESTART_COUNT", "")) if any(common) else ""
    if launch is not None:
        launcher = _launcher_process(launch.launcher, environ)
    else:
        parent = multiprocessing.parent_process()
        launcher = os.getppid() if parent is None or parent.pid is None else parent.pid
    # A shell may start several runs. The agent of torchrun has one run, and a restart may change its port.
    return _hashed(*_started(launcher), "" if agent else environ.get("MASTER_PORT", ""))


def _is_one_node(launch: _Launch | None, address: str) -> bool:
    if launch is not None and launch.local_size is not None:
        return launch.local_size == launch.world_size
    return _is_local(address)


def _is_local(address: str) -> bool:
    return address in {"", "localhost", "::1"} or address.startswith("127.")


def _launcher_process(launcher: _Launcher, environ: Mapping[str, str]) -> int:
    """Return the nearest ancestor process outside of this rank: a rank may run in a wrapper and start processes."""
    own = {f"{name}={environ.get(name, '')}".encode() for name in launcher[:4] if name in environ}
    process = os.getppid()
    with suppress(OSError, IndexError, ValueError):  # of another user, or no /proc: use the parent
        while own and own <= set(Path(f"/proc/{process}/environ").read_bytes().split(b"\0")):
            process = int(_stat(process)[1])
    return process


def _started(process: int) -> tuple[str, ...]:
    """Return values that identify a process: host, boot, start time and pid."""
    started = boot = ""
    with suppress(OSError, IndexError):  # there is no /proc
        started, boot = _stat(process)[19], Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname(), boot, started, str(process)


def _stat(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third; the second is a name of any characters."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _hashed(*parts: str) -> str:
    return hashlib.sha256("/".join(parts).encode("utf-8", "replace")).hexdigest()[:12]
