"""The image of the Job that trains, as far as what it is made of: torch's own is not fetched."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.podman import need_podman

pytestmark = pytest.mark.real_server

CHECKOUT = Path(__file__).parents[2]
TRAINING = CHECKOUT / "deploy" / "kubernetes" / "training"
IMAGE = "localhost/torchotel-test-training:latest"
NEEDED = {"pyproject.toml", "README.md", "LICENSE", "torchotel", "deploy", "examples"}


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Path]:
    """Give what `COPY . /src` copies of the checkout, of a build with the ignored files of the real one."""
    need_podman()
    (tmp_path / "Containerfile").write_text("FROM scratch\nCOPY . /src\n")
    shutil.copy(TRAINING / "Containerfile.dockerignore", tmp_path)
    call("podman", "build", "-t", IMAGE, "-o", str(tmp_path / "made"), "-f", str(tmp_path / "Containerfile"), ".")
    yield tmp_path / "made" / "src"
    call("podman", "rmi", "-f", IMAGE)


def call(*words: str, folder: Path = CHECKOUT) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_more_is_copied_than_the_package_is_built_of(copied: Path, tmp_path: Path) -> None:
    """And no less: its wheel has the same files as the checkout's own."""
    assert "COPY . /src\n" in (TRAINING / "Containerfile").read_text()
    assert {path.name for path in copied.iterdir()} == NEEDED
    assert not (copied / "deploy" / "kubernetes").exists()
    assert wheel(copied, tmp_path / "of what is copied") == wheel(CHECKOUT, tmp_path / "of the checkout")


def wheel(sources: Path, folder: Path) -> set[str]:
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), folder=sources)
    (made,) = folder.iterdir()
    return set(zipfile.ZipFile(made).namelist())
