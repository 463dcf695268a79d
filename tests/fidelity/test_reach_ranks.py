"""Training on several ranks."""

from pathlib import Path

import pytest
from support.needs import needs_pipelines

from fidelity.data_parallel import data_parallel
from fidelity.pipelines import pipelines
from fidelity.ranks import Trainings, check_on_ranks
from fidelity.sharded import sharded, sharded_and_compiled
from fidelity.tensor_parallel import tensor_parallel

pytestmark = pytest.mark.program


@pytest.mark.parametrize(
    "trainings", [data_parallel, sharded, tensor_parallel, pytest.param(pipelines, marks=needs_pipelines)]
)
def test_ranks_that_share_a_model(trainings: Trainings, tmp_path: Path) -> None:
    """All numbers of each rank are the same with torchotel, the trace is right, and names have no wrapper."""
    check_on_ranks(trainings, tmp_path)


def test_ranks_that_compile_a_sharded_model(tmp_path: Path) -> None:
    """All numbers of each rank are the same with torchotel, and names have no wrapper."""
    check_on_ranks(sharded_and_compiled, tmp_path, compiled=True)
