"""Skip tests on versions of torch that lack what the tests are about; torchotel supports torch from 2.9 on."""

import pytest
import torch
from packaging.version import Version

from torchotel.capture.torch_internals import GROUPS_HAVE_HOOKS

_TORCH = Version(torch.__version__)

# Before 2.14 torchotel records no collectives, and it cannot see sends and receives.
needs_group_hooks = pytest.mark.skipif(not GROUPS_HAVE_HOOKS, reason="process groups have hooks from torch 2.14 on")
# Tried without torchotel: with 2.9.1 all schedules abort, with 2.11 the V schedule raises, with 2.13 all run.
needs_pipelines = pytest.mark.skipif(
    Version("2.13") > _TORCH, reason="pipeline schedules fail on Gloo without torchotel, too, before torch 2.13"
)
# The flight recorder of 2.9.1 and 2.10 has no group of Gloo, so there are no readings to compare; that of 2.11 has.
needs_gloo_records = pytest.mark.skipif(
    Version("2.11") > _TORCH, reason="torch records no collectives of Gloo before 2.11"
)
