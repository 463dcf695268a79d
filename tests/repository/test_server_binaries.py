"""A test that needs a real server is skipped where there is none, and fails where one is required."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support import server_binaries
from support.server_binaries import built, tool

from torchotel.stack.binaries import Backend


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOTEL_BACKENDS", str(tmp_path))
    monkeypatch.setattr(server_binaries, "BUILD_TOOLS", False)


@pytest.mark.parametrize("give", [built, lambda backend: tool(backend, lambda work, made: None)], ids=["built", "tool"])
@pytest.mark.parametrize(("required", "outcome"), [(False, pytest.skip.Exception), (True, pytest.fail.Exception)])
def test_a_missing_binary_is_named(
    give: Callable[[Backend], Path], *, required: bool, outcome: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_binaries, "REQUIRED", required)
    with pytest.raises(outcome, match=r"^server 1\.0 is not in .*server-1\.0; .* builds it$"):
        give(Backend("server", "1.0", ("server",)))
