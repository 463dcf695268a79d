"""Training on several ranks."""

from pathlib import Path

import pytest
from torch import distributed
from torch.multiprocessing.spawn import spawn

from fidelity.ranks import rank_of_two

pytestmark = pytest.mark.program


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo")
def test_ranks_that_share_a_model(tmp_path: Path) -> None:
    """DDP, plain or with a static graph, and fully_shard; all numbers of each rank are the same, the trace right."""
    spawn(rank_of_two, (tmp_path,), nprocs=2)
