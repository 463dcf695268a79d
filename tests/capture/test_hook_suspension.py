"""Hooks that go out while something is compiled, and come back."""

import threading

import pytest
from torch.nn.modules import module as nn_module

from torchotel.capture.hook_manager import ModuleHooks


@pytest.mark.usefixtures("quick_switches")
def test_hooks_come_back_when_regions_of_several_threads_have_ended() -> None:
    """However the threads take turns, as many resumptions as suspensions leave the hooks in."""

    def nothing(*_: object) -> None: ...

    def region() -> None:
        for _ in range(3000):
            hooks.suspend()
            hooks.resume()

    before = len(nn_module._global_forward_pre_hooks)
    for _ in range(8):
        hooks = ModuleHooks()
        threads = [threading.Thread(target=region) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hooks.install(nothing, nothing, nothing, nothing)
        assert len(nn_module._global_forward_pre_hooks) == before + 1
        hooks.remove()
