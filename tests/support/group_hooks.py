"""Skip tests of collectives on a torch whose process groups have no hooks."""

import pytest

from torchotel.capture.torch_internals import GROUPS_HAVE_HOOKS

needs_group_hooks = pytest.mark.skipif(
    not GROUPS_HAVE_HOOKS,
    reason="process groups have hooks from torch 2.14 on",  # torchotel supports torch from 2.9 on, without collectives
)
