"""A program runs as python itself would run it: what it says, what it prints of errors and how it ends are the same."""

import re
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from support import commands

pytestmark = pytest.mark.program

RUN = [sys.executable, "-m", "torchotel", "run"]
INSTRUMENT = [str(Path(sys.executable).with_name("opentelemetry-instrument")), sys.executable]
NOTHING_SENT = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}

PROGRAM = """
import atexit, multiprocessing, os, pickle, signal, sys, threading, time, warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor


class Local: pass
def double(number): return number * 2, __name__
def fail(): raise ValueError("no")
def late(): time.sleep(0.2); print("thread ended", flush=True)
def broken_hook(*error): raise TypeError("hook")

if __name__ == "__main__":
    print(sys.argv, sys.path[0], __file__, __name__, __package__, __spec__ and __spec__.name, sorted(globals()))
    print(sys.flags, sys.warnoptions, sys._xoptions, flush=True)
    assert type(pickle.loads(pickle.dumps(Local()))) is Local
    atexit.register(lambda: print("at exit", type(Local()), getattr(sys, "last_value", None), flush=True))
    match sys.argv[1]:
        case "exit": sys.exit(3)
        case "exit None": sys.exit()
        case "exit -1": sys.exit(-1)
        case "exit text": sys.exit("said at the end")
        case "exit tuple": sys.exit((1, "two"))
        case "exit at once": os._exit(9)
        case "raise": fail()
        case "chain":
            try: fail()
            except ValueError as error: raise KeyError("other") from error
        case "group": raise ExceptionGroup("several", [ValueError(1), KeyError(2)])
        case "interrupt": os.kill(os.getpid(), signal.SIGINT); time.sleep(60)
        case "terminate": os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)
        case "handled":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
            os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)
        case "thread": threading.Thread(target=late).start()
        case "thread and raise": threading.Thread(target=late).start(); fail()
        case "failing thread": threading.Thread(target=fail).start()
        case "idle pool": global_pool = ThreadPoolExecutor(1); print(global_pool.submit(double, 1).result())
        case "hook": sys.excepthook = lambda *error: print("own hook", error[0]); fail()
        case "broken hook": sys.excepthook = broken_hook; fail()
        case "exiting hook": sys.excepthook = lambda *_: sys.exit(6); fail()
        case "warning": warnings.warn("old", DeprecationWarning)
        case "fork" | "spawn" | "forkserver" as method:
            context = multiprocessing.get_context(method)
            with context.Pool(1) as pool: print(pool.map(double, [1, 2]))
            with ProcessPoolExecutor(1, context) as pool: print(list(pool.map(double, [1, 2])))
        case "forked":
            child = os.fork()
            if child == 0: sys.exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        case "torch": import torch; print(torch.ones(2).sum()); fail()
"""

WAYS = re.findall(r'"([\w -]+)"(?= \||:| as)', PROGRAM.partition("match")[2])

FORMS: list[list[str]] = [
    ["-m", "package.train", "raise"],
    ["-m", "package.train", "exit"],
    ["-m", "package.train", "spawn"],
    ["-m", "package.train", "forkserver"],
    ["-m", "package.train", "interrupt"],
    ["-m", "package.inner", "raise"],
    ["-m", "package"],
    ["-m", "package.none"],
    ["-m", "no_such_module"],
    ["-m", "broken"],
    ["folder", "raise"],
    ["folder", "fork"],
    ["archive.pyz", "raise"],
    ["./link.py", "raise", "--lr", "-h", "--", "-m"],
    ["-", "raise"],
    ["broken.py"],
    ["imports.py"],
    ["latin.py"],
]

FLAGS = [["-W", "error"], ["-X", "dev"], ["-O"], ["-P"], ["-I"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name in ("train.py", "package/train.py", "package/inner/__main__.py", "folder/__main__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(PROGRAM)
    for name in ("package/__init__.py", "package/inner/__init__.py"):
        (folder / name).touch()
    zipapp.create_archive(folder / "folder", folder / "archive.pyz")
    (folder / "link.py").symlink_to(folder / "package" / "train.py")
    (folder / "broken.py").write_text("x = (\n")
    (folder / "imports.py").write_text("import no_such_module\n")
    (folder / "latin.py").write_bytes("# coding: latin-1\nprint('\xe9')\n".encode("latin-1"))
    return folder


def _outcome(folder: Path, command: list[str]) -> tuple[str, str, int]:
    done = subprocess.run(
        command,
        cwd=folder,
        env=commands.environment(**NOTHING_SENT),
        input=PROGRAM,
        capture_output=True,
        text=True,
        timeout=commands.TIMEOUT_S,
        check=False,
    )
    errors = re.sub(r'  File "<frozen runpy>".*\n', "", done.stderr)
    return done.stdout, re.sub(r"torchotel: .*\n", "", errors), done.returncode


def _same(folder: Path, ours: list[str], words: list[str], flags: list[str] = []) -> None:  # noqa: B006 - only read
    assert _outcome(folder, [*ours[:1], *flags, *ours[1:], *words]) == _outcome(
        folder, [sys.executable, *flags, *words]
    )


@pytest.mark.parametrize("way", WAYS)
def test_ends_as_it_does_without_us(folder: Path, way: str) -> None:
    _same(folder, RUN, ["train.py", way])


@pytest.mark.parametrize("words", FORMS, ids=" ".join)
def test_runs_in_every_form_that_python_takes(folder: Path, words: list[str]) -> None:
    _same(folder, RUN, words)


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_flags_of_python_hold(folder: Path, flags: list[str]) -> None:
    _same(folder, RUN, ["train.py", "warning"], flags)


@pytest.mark.parametrize("way", ["exit text", "torch", "interrupt", "thread", "spawn", "forked"])
def test_ends_as_it_does_without_opentelemetry_instrument(folder: Path, way: str) -> None:
    _same(folder, INSTRUMENT, ["train.py", way])
