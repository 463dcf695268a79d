"""Test the lines of code of a stack, which a reader without the machine gets."""

import runpy
import threading
from pathlib import Path

import pytest

from torchotel._utils import stacks


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/someone/project/train.py", "train.py"),
        ("/home/someone/.venv/lib/python3.11/site-packages/torch/nn/modules/module.py", "torch/nn/modules/module.py"),
        (str(Path(stacks.__file__)), "torchotel/_utils/stacks.py"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
    ],
)
def test_a_path_has_no_name_of_a_user(path: str, shown: str) -> None:
    """Lines of torchotel keep the package in their path, also if torchotel is installed in editable mode."""
    assert str(stacks.code_line(path, 12, "run")) == f"{shown}:12 in run"


def test_the_main_thread_is_first_and_threads_of_torchotel_are_left_out() -> None:
    waits = threading.Event()
    threads = [threading.Thread(target=waits.wait, name=name) for name in ("reader", "torchotel-worker")]
    for thread in threads:
        thread.start()
    found = list(stacks.thread_stacks())
    waits.set()
    for thread in threads:
        thread.join()
    names = [stack.thread for stack in found]
    assert names[0] == "MainThread"
    assert "reader" in names
    assert "torchotel-worker" not in names
    assert found[0].frames[1].function == "test_the_main_thread_is_first_and_threads_of_torchotel_are_left_out"


def test_a_stack_ends_at_the_program(tmp_path: Path) -> None:
    """What has called the program is not its code: runpy for `python -m`, and `torchotel run`."""
    found: list[str] = []

    def in_the_program() -> None:
        main = next(stack for stack in stacks.thread_stacks() if stack.thread == threading.current_thread().name)
        found.extend(str(line) for line in main.frames)

    program = tmp_path / "train.py"
    program.write_text("call()")
    runpy.run_path(str(program), {"call": in_the_program})
    assert found[-1] == "train.py:1 in <module>"
    assert found[-2].endswith(" in in_the_program")
