"""Skip tests on versions of torch that lack what the tests are about; torchotel supports torch from 2.9 on."""

import pytest
import torch
from packaging.version import Version

from torchotel.capture.torch_internals import GROUPS_HAVE_HOOKS

_TORCH = Version(torch.__version__)

needs_group_hooks = pytest.mark.skipif(not GROUPS_HAVE_HOOKS, reason="process groups have hooks from torch 2.14 on")
needs_pipelines = pytest.mark.skipif(
    Version("2.13") > _TORCH, reason="schedules abort on Gloo without torchotel, too, before torch 2.13"
)
needs_gloo_records = pytest.mark.skipif(
    Version("2.10") > _TORCH, reason="torch records no collectives of Gloo before 2.10"
)
