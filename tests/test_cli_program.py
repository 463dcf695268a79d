"""A program runs as python itself would run it: output, errors and exit code are the same."""

import re
from pathlib import Path

import commands
import pytest

DRIVER = """
import sys
from torchotel.cli.program import Program
module, target, *arguments = sys.argv[1:]
program = Program(target, tuple(arguments), module == "module")
program.prepare()
sys.exit(program.run())
"""

SCRIPT = """
import atexit, multiprocessing, pickle, sys, threading, time
class Local: pass
def double(number): return number * 2, __name__
def fail(): raise ValueError("no")
if __name__ == "__main__":
    print(sys.argv, sys.path[0], __file__, __name__, __package__, __spec__ and __spec__.name)
    assert type(pickle.loads(pickle.dumps(Local()))) is Local
    atexit.register(lambda: print("at exit", len(pickle.dumps(Local())) > 0))
    match sys.argv[1]:
        case "exit": sys.exit(3)
        case "text": sys.exit("said at the end")
        case "raise": fail()
        case "interrupt": raise KeyboardInterrupt
        case "thread": threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
        case "hook":
            sys.excepthook = lambda *error: print("own hook", error[0])
            fail()
        case "fork" | "spawn" as method:
            with multiprocessing.get_context(method).Pool(1) as pool: print(pool.map(double, [1, 2]))
"""

WAYS = ["exit", "text", "raise", "interrupt", "thread", "hook", "fork", "spawn", "plain"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "work" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(SCRIPT)
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(SCRIPT)
    (scripts / "__main__.py").write_text("import sys; print(sys.argv, sys.path[0], __name__)")
    (scripts / "broken.py").write_text("x = (\n")
    (scripts / "imports.py").write_text("import no_such_module\n")
    (scripts / "link.py").symlink_to(package / "train.py")
    return tmp_path / "work"


def _same(folder: Path, target: str, *arguments: str, module: bool = False) -> None:
    theirs = commands.python(*(["-m"] if module else []), target, *arguments, cwd=folder)
    ours = commands.python("-c", DRIVER, "module" if module else "script", target, *arguments, cwd=folder)
    assert ours.stdout == theirs.stdout
    assert _without_runpy(ours.stderr) == _without_runpy(theirs.stderr)
    assert ours.returncode == abs(theirs.returncode) or (theirs.returncode, ours.returncode) == (-2, 130)


def _without_runpy(text: str) -> str:
    return re.sub(r'  File "<frozen runpy>".*\n', "", text)


@pytest.mark.parametrize("way", WAYS)
def test_runs_a_script(folder: Path, way: str) -> None:
    _same(folder, "../scripts/train.py", way, "--lr", "-h")


@pytest.mark.parametrize("way", WAYS)
def test_runs_a_module(folder: Path, way: str) -> None:
    _same(folder, "package.train", way, "--lr", "-h", module=True)


@pytest.mark.parametrize("target", ["broken.py", "imports.py", "link.py", ""])
def test_runs_other_scripts_and_folders(folder: Path, target: str) -> None:
    _same(folder, f"{folder.parent}/scripts/{target}".rstrip("/"), "plain")


@pytest.mark.parametrize("target", ["no_such_module", "package.none", "package"])
def test_says_as_python_does_that_there_is_no_such_module(folder: Path, target: str) -> None:
    _same(folder, target, module=True)
