"""Whether a run has finished is what its last push says: an error is no end."""

from pathlib import Path

import pytest
from support.commands import forked_python
from support.otlp_http_receiver import Receiver
from support.scraped_metrics import pushed_series, value

import torchotel


def test_an_error_is_no_normal_end(server: Receiver) -> None:
    """A block that raises leaves `torch.run.finished` at 0."""
    endpoint = server.url.removesuffix("/v1/traces")
    with (
        pytest.raises(RuntimeError, match="mine"),
        torchotel.instrument(endpoint=endpoint, metrics_exporter="otlp", traces_exporter="none"),
    ):
        raise RuntimeError("mine")
    assert value(pushed_series(server.pushed[-1].message), "torch_run_finished") == 0


ENDINGS = [("pass", 1), ("1 / 0", 0), ("with handle: sys.exit()", 1), ("with handle: sys.exit(3)", 0)]


@pytest.mark.program
@pytest.mark.parametrize(("last_line", "finished"), ENDINGS)
def test_a_program_that_raises_has_not_finished(
    last_line: str, finished: int, server: Receiver, tmp_path: Path
) -> None:
    """Nobody shuts down: the end of the program does, and knows how it came."""
    endpoint = server.url.removesuffix("/v1/traces")
    script = f"import sys, torchotel; handle = torchotel.instrument(endpoint={endpoint!r})\n{last_line}"
    forked_python("-c", script, cwd=tmp_path, OTEL_METRICS_EXPORTER="otlp", OTEL_TRACES_EXPORTER="none")
    assert value(pushed_series(server.pushed[-1].message), "torch_run_finished") == finished


@pytest.mark.program
@pytest.mark.parametrize(("last_line", "finished"), [*ENDINGS, ("sys.exit(0)", 1), ("sys.exit(3)", 0)])
def test_a_rank_that_raises_has_not_finished(last_line: str, finished: int, server: Receiver, tmp_path: Path) -> None:
    """A child of multiprocessing ends without atexit, and its exit code is known."""
    script = CHILD.format(endpoint=server.url.removesuffix("/v1/traces"), last_line=last_line)
    forked_python("-c", script, cwd=tmp_path, OTEL_METRICS_EXPORTER="otlp", OTEL_TRACES_EXPORTER="none")
    assert value(pushed_series(server.pushed[-1].message), "torch_run_finished") == finished


CHILD = """
import multiprocessing, sys, torch, torchotel

def rank():
    handle = torchotel.instrument(endpoint={endpoint!r})
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1, 1)).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    {last_line}

child = multiprocessing.get_context("fork").Process(target=rank)
child.start()
child.join()
"""
