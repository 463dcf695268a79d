"""Test the differences between two sides in machine, versions and settings."""

from pathlib import Path
from typing import Any

import pytest
from support import run_folders as folders
from support import timed_runs

from torchotel.cli import main
from torchotel.runs import open_run
from torchotel.runs.compare import Difference, differences, read_times, run_environment

INFO: dict[str, Any] = {
    "service_name": "train.py",
    "torchotel.version": "1.0",
    "model": {"name": "Net", "modules": 3, "parameters": 1200},
    "resource": {"host.name": "one", "torch.version": "2.9.0", "torch.world_size": 1, "torch.rank": 0},
    "config": {"detail": "auto", "shapes": True, "prometheus_port": 9464},
    "finished": True,
}


def _differing(after: dict[str, Any], devices: tuple[str, ...] = ("cpu",)) -> list[Difference]:
    return list(differences([run_environment(INFO, ["cpu"])], [run_environment({**INFO, **after}, devices)]))


@pytest.mark.parametrize(
    ("after", "differing"),
    [
        ({}, []),
        ({"service_name": "other.py"}, [("program", "train.py", "other.py")]),
        (
            {"model": {"name": "Net", "modules": 4, "parameters": 1201}},
            [("model", "Net, 3 modules, 1,200 parameters", "Net, 4 modules, 1,201 parameters")],
        ),
        (
            {"resource": {"host.name": "other", "torch.version": "2.10.0", "torch.cuda.version": "13.0"}},
            [("host", "one", "other"), ("torch", "2.9.0", "2.10.0")],
        ),
        (
            {"config": {"detail": "all", "include": ["layer1*", "fc"], "shapes": True, "prometheus_port": 1}},
            [("detail", "auto", "all"), ("include", "None", "layer1*, fc")],
        ),
        (
            {"config": {"detail": "auto", "shapes": True, "worker": "process"}},
            [("worker", "None", "process")],
        ),
        ({"finished": False}, [("end", "finished", "not ended, or cut short")]),
        (
            {"error": {"type": "ValueError", "message": "secret"}},
            [("end", "finished", "ended with ValueError")],
        ),
        ({"finished": None, "model": None, "resource": {}, "config": {}}, []),
    ],
)
def test_names_what_is_known_of_both_and_differs(after: dict[str, Any], differing: list[tuple[str, str, str]]) -> None:
    assert _differing(after) == differing


def test_names_the_devices() -> None:
    assert _differing({}, ("cuda:1", "cuda:0")) == [("device", "cpu", "cuda:0, cuda:1")]
    assert _differing({}, ()) == []


def test_reads_the_devices_off_the_modules(tmp_path: Path) -> None:
    module = {"torch.module.path": "conv", "torch.module.type": "Conv2d"}
    ran_on = {"torch.step.number": 0, "torch.device": "cuda:0"}
    lines = [folders.request([folders.span("forward conv", 2, 1, 0, 9, **module, **ran_on)])]
    run = open_run(folders.write(tmp_path / "run", segments=[lines]))
    assert read_times(run).run_environment == {"device": "cuda:0"}


def test_sets_the_runs_of_a_side_against_those_of_the_other() -> None:
    """If both sides ran on the same two hosts, the host is not a difference."""
    one, two = (run_environment({"resource": {"host.name": name}}, ()) for name in ("one", "two"))
    assert differences([one, two], [two, one, one]) == []
    assert differences([one, two], [two]) == [("host", "one, two", "two")]


def test_says_it_first_and_fails_for_none_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = timed_runs.write(tmp_path / "a", info=INFO)
    b = timed_runs.write(tmp_path / "b", seed=2, info={**INFO, "service_name": "other.py", "finished": False})
    assert main(["diff", str(a), str(a)]) == 0
    assert "warning" not in capsys.readouterr().out
    assert main(["diff", str(a), str(b)]) == 0
    _, warning, *_ = capsys.readouterr().out.split("\n\n")
    assert [line.split() for line in warning.splitlines()] == [
        ["warning:", "more", "differs", "than", "the", "times"],
        ["A", "B"],
        ["program", "train.py", "other.py"],
        ["end", "finished", "not", "ended,", "or", "cut", "short"],
    ]


def test_shows_a_stranger_s_words_cut_and_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of any type from another program's file are cut and cannot control the terminal."""
    evil = "\x1b[2J\n\u202e" * 10_000
    hostile = {
        "service_name": evil,
        "model": {"name": evil},
        "resource": {"host.name": {"a": [evil]}, "torch.version": [evil] * 9, "torch.world_size": evil},
        "config": {"detail": [[evil]], "include": 10**400, "max_depth": evil, "shapes": None},
        "finished": True,
    }
    a, b = timed_runs.write(tmp_path / "a", info=INFO), timed_runs.write(tmp_path / "b", info=hostile)
    for sides in ((a, b), (b, a)):
        assert main(["diff", *map(str, sides)]) == 0
        said = capsys.readouterr().out
        assert "torch  " in said
        assert said.replace("\n", "").isprintable()
        assert len(said) < 10_000
