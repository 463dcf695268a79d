"""Test the lines of code of a stack, which a reader without the machine gets."""

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
