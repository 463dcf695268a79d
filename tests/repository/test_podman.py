"""A test that needs podman is skipped where that can't work, and fails where what comes with it is required."""

from pathlib import Path

import pytest
from support import podman, server_binaries

Outcome = type[BaseException]
SKIPPED: Outcome = pytest.skip.Exception
FAILED: Outcome = pytest.fail.Exception


@pytest.mark.parametrize(("required", "outcome"), [(False, SKIPPED), (True, FAILED)])
def test_what_comes_with_a_podman_that_works_may_be_required(
    *, required: bool, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "exit 0", monkeypatch)
    monkeypatch.setattr(server_binaries, "REQUIRED", required)
    monkeypatch.setattr(podman, "COMES_WITH", {tmp_path / "busybox": "a package brings it"})
    with pytest.raises(outcome, match=r"^there is no .*/busybox; a package brings it$"):
        podman.need_podman()


def test_a_podman_that_cannot_work_is_never_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_binaries, "REQUIRED", True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SKIPPED, match=r"^podman is not installed$"):
        podman.need_podman()
    install(tmp_path, "echo no namespaces >&2; exit 125", monkeypatch)
    with pytest.raises(SKIPPED, match=r"^podman does not work here: no namespaces"):
        podman.need_podman()


def install(folder: Path, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "podman").write_text(f"#!/bin/sh\n{does}\n")
    (folder / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
