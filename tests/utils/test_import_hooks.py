"""What waits for an import sees it, whoever asks about the module before."""

import importlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from torchotel._utils.imports import after_import

NAME = "module_that_is_waited_for"


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(NAME, None)


def test_acts_once_when_the_module_is_loaded() -> None:
    seen: list[object] = []
    after_import(NAME, lambda module: seen.append(vars(module)["value"]))
    assert seen == []
    importlib.import_module(NAME)
    importlib.reload(sys.modules[NAME])
    assert seen == [1]


def test_acts_although_somebody_only_asked_whether_the_module_is_there() -> None:
    """Transformers and accelerate look for torch's spec before they import it."""
    seen: list[ModuleType] = []
    after_import(NAME, seen.append)
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_source(NAME) == "value = 1\n"  # type: ignore[attr-defined] # a source loader's
    assert seen == []
    module = importlib.import_module(NAME)
    assert seen == [module]


def test_two_may_wait_and_one_be_called_off() -> None:
    seen: list[str] = []
    after_import(NAME, lambda _: seen.append("first"))
    call_off = after_import(NAME, lambda _: seen.append("second"))
    after_import(NAME, lambda _: seen.append("third"))
    call_off()
    module = importlib.import_module(NAME)
    assert sorted(seen) == ["first", "third"]
    assert module.__spec__ is not None
    assert module.__loader__ is module.__spec__.loader
    assert type(module.__loader__) is SourceFileLoader


def test_is_called_off_between_finding_and_loading() -> None:
    seen: list[ModuleType] = []
    call_off = after_import(NAME, seen.append)
    spec = importlib.util.find_spec(NAME)
    call_off()
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert seen == []


@pytest.mark.parametrize("error", [ImportError, ValueError, KeyboardInterrupt])
def test_is_not_seen_in_the_traceback_of_a_failed_import(tmp_path: Path, error: type[BaseException]) -> None:
    """Two wait, so that one loads through the other."""
    (tmp_path / f"{NAME}.py").write_text(f"raise {error.__name__}('broken')\n")
    call_off = [after_import(NAME, lambda _: None) for _ in range(2)]
    with pytest.raises(error) as caught:
        __import__(NAME)  # as the statement does; importlib.import_module shows frames of its own
    files = [Path(frame.filename) for frame in traceback.extract_tb(caught.tb)]
    assert files == [Path(__file__), tmp_path / f"{NAME}.py"]
    for call in call_off:
        call()


class _Slow(MetaPathFinder):
    """Finds nothing, and takes its time until it is told to go on."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == NAME:
            self.asked.set()
            assert self.go_on.wait(60)


def test_another_threads_import_misses_no_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python goes through `sys.meta_path` by position: were one taken out meanwhile, the next would not be asked."""
    slow = _Slow()
    call_off = after_import("another_module", lambda _: None)
    finders = list(sys.meta_path)
    finders.insert(finders.index(PathFinder), slow)
    monkeypatch.setattr(sys, "meta_path", finders)
    importing = threading.Thread(target=importlib.import_module, args=(NAME,))
    importing.start()
    assert slow.asked.wait(60)
    call_off()
    slow.go_on.set()
    importing.join(60)
    assert NAME in sys.modules


def test_what_waits_leaves_one_finder_however_many_there_were() -> None:
    after_import(NAME, lambda _: None)()
    before = len(sys.meta_path)
    for _ in range(3):
        after_import(NAME, lambda _: None)()
    importlib.import_module(NAME)
    assert len(sys.meta_path) == before


class _Impatient(MetaPathFinder):
    """Answers before all others, as finders of type checkers do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, path, target)


def test_comes_before_finders_that_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    after_import(NAME, lambda _: None)()
    monkeypatch.setattr(sys, "meta_path", [_Impatient(), *sys.meta_path])
    seen: list[ModuleType] = []
    after_import(NAME, seen.append)
    assert seen == [importlib.import_module(NAME)]


def test_what_waits_for_one_module_does_so_each_for_itself() -> None:
    """An error in one, or one that calls another off, is no matter to the rest."""
    seen: list[str] = []

    def fail(_: ModuleType) -> None:
        third()
        raise ValueError("broken")

    after_import(NAME, fail)
    after_import(NAME, lambda _: seen.append("second"))
    third = after_import(NAME, lambda _: seen.append("third"))
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module(NAME)
    importlib.import_module(NAME)
    assert seen == ["second"]


def test_waits_where_the_finders_were_replaced_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    after_import(NAME, lambda _: None)()
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    seen: list[ModuleType] = []
    after_import(NAME, seen.append)
    assert seen == [importlib.import_module(NAME)]
