"""Python programs in processes that are forked from one that has imported torch and nothing of torchotel.

Importing torch, and with the first optimizer `torch._dynamo`, takes 3 s of CPU time; a fork has both in milliseconds.
From there on a forked program is as one that was started: its `__main__`, variables, standard streams, signals and exit
are its own. A test that is about imports, memory, parent processes or Python's command line starts a process instead.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import process
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TextIO

MESSAGE_BYTES = 200_000  # what Linux takes in one message without changed limits


class ForkedProgram:
    """A running program, with the parts of `subprocess.Popen` that tests use.

    Args:
        words: The program and its arguments.
        cwd: Its working directory.
        variables: Its environment.
        stdin: The text on its standard input, or the descriptor that it reads.
    """

    def __init__(
        self, words: tuple[str, ...], cwd: Path, variables: dict[str, str], stdin: str | int | None = None
    ) -> None:
        stdout, out = os.pipe()
        self._status, status = socket.socketpair()
        self._stderr = io.TextIOWrapper(io.FileIO(os.memfd_create("stderr"), "r+"), encoding="utf-8")
        if isinstance(stdin, int):
            given = io.FileIO(stdin, closefd=False)
        else:
            given = io.FileIO(os.memfd_create("stdin"), "r+")
            given.write((stdin or "").encode())
            given.seek(0)
        job = json.dumps({"words": words, "cwd": str(cwd), "variables": variables}).encode()
        files = [given.fileno(), out, self._stderr.fileno(), status.fileno()]
        socket.send_fds(_server(), [job], files)
        given.close()
        os.close(out)
        status.close()
        self.stdout: TextIO = os.fdopen(stdout, encoding="utf-8")
        self.pid = int.from_bytes(self._status.recv(4, socket.MSG_WAITALL))
        assert self.pid, "the process that forks has ended"

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> tuple[int, str, str]:
        """Wait for the end and of the output; give the exit code and both outputs, or kill the program."""
        timer = threading.Timer(timeout_s, self.send_signal, [signal.SIGKILL])
        timer.start()
        try:
            with self.stdout, self._status, self._stderr:
                said = self.stdout.read()
                code = int.from_bytes(self._status.recv(4, socket.MSG_WAITALL), signed=True)
                self._stderr.seek(0)
                return code, said, self._stderr.read()
        finally:
            timer.cancel()


@cache
def _server() -> socket.socket:
    """Start the process that forks, which ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


def _next_job(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return what is to run in the process that is to run it, and nothing at the end."""
    while True:
        job, files, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 4)
        if not job:
            return None
        if os.fork() == 0:
            requests.close()
            _fork_program(*files)
            parsed: dict[str, Any] = json.loads(job)
            return parsed
        for file in files:
            os.close(file)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _fork_program(stdin: int, stdout: int, stderr: int, status: int) -> None:
    """Return in the program's process; this one tells its number and how it ends."""
    program = os.fork()
    for number, file in enumerate((stdin, stdout, stderr)):
        if program == 0:
            os.dup2(file, number)
        os.close(file)
    if program != 0:
        os.write(status, program.to_bytes(4))
        os.write(status, os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]).to_bytes(4, signed=True))
        os._exit(0)
    os.close(status)


def _prepare(words: list[str], cwd: str, variables: dict[str, str]) -> tuple[CodeType, dict[str, Any]]:
    """Make this process what a new one would be; give the program's code and the namespace of its `__main__`."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    vars(process)["ORIGINAL_DIR"] = cwd  # of the spawned processes of `multiprocessing`
    main = sys.modules["__main__"] = ModuleType("__main__")
    first, *sys.argv = words
    folder, name = "", "<string>"
    match first:
        case "-c":
            source, sys.argv[0] = sys.argv[0], first
        case "-m":
            source = f"import runpy; runpy.run_module({sys.argv[0]!r}, run_name='__main__', alter_sys=True)"
        case _:
            folder, name, source = str(Path(first).resolve().parent), first, Path(first).read_text(encoding="utf-8")
            sys.argv, main.__file__ = words, str(Path(first).absolute())
    sys.path.insert(0, folder)
    return compile(source, name, "exec", dont_inherit=True), vars(main)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    import_module("torch")
    gc.freeze()  # a program's last collection would copy torch's objects, for half of its CPU time
    import_module("torch._dynamo")  # with triton, which complains at the end of objects that were not collected

    job = _next_job(socket.socket(fileno=int(sys.argv[1])))
    if job is not None:
        exec(*_prepare(**job))  # noqa: S102  # the code is a test's program
