"""Every private part of torch that is touched: which this torch has, and what happens where one is missing."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from torchotel.capture import torch_internals
from torchotel.testing import capture

ROOT = Path(__file__).parents[2]
WHOLE = [
    "torch.step",
    [
        "torch.data",
        "torch.data",
        ["torch.forward", [["forward Sequential", ["forward 0", "forward 1"]]]],
        ["torch.backward", [["backward Sequential", ["backward 1", "backward 0"]]]],
        "torch.optimizer.step",
    ],
]
LEAVES = [
    *WHOLE[:1],
    [
        *WHOLE[1][:3],
        ["torch.backward", [["backward Sequential", ["backward 1", "backward 0"]]]],
        "torch.optimizer.step",
    ],
]
NO_DATA = ["torch.step", ["torch.data", *WHOLE[1][2:]]]

# Torch is loaded once, and each seam is taken away in a fork of its own, before torchotel sees torch.
DRIVER = """
import json, os, sys, types
import torch
import torch._dynamo  # the optimizer would import it in each fork
import torch.utils.data.dataloader as data_loader
from torch.nn.modules import module as nn_module

sys.path.insert(0, sys.argv[1])

def hide_engine():
    # As if torch called it by another name: backward and grad keep it, nobody else finds it.
    names = dict(vars(torch.autograd))
    for name in ("backward", "grad"):
        known = names[name]
        setattr(torch.autograd, name, types.FunctionType(known.__code__, names, name, known.__defaults__))
    del torch.autograd._engine_run_backward

for number, taking in enumerate(json.loads(sys.argv[2])):
    if os.fork() == 0:
        exec(taking)
        from support.recorded_training import recorded
        with recorded() as run:
            net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for x in torch.utils.data.DataLoader(torch.randn(4, 2), 4):
                net(x).sum().backward()
                optimizer.step()
        print(json.dumps([number, run.steps[0].tree()]), flush=True)
        os._exit(0)
    os.wait()
"""

MISSING: dict[str, tuple[str, Any]] = {
    "nothing": ("pass", WHOLE),
    "sequence_number": ("del torch.autograd._get_sequence_nr", LEAVES),
    "graph_task": ("del torch._C._current_graph_task_id", WHOLE),
    "engine": ("hide_engine()", WHOLE),
    "data_loader": ("del data_loader._BaseDataLoaderIter", NO_DATA),
    "compiler_flags": ("torch.compiler.is_compiling = bool; del torch.compiler._is_compiling_flag", WHOLE),
    "clipping": ("del torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", WHOLE),
    "forward_hooks_with_kwargs": ("nn_module._global_forward_hooks_with_kwargs = {}", WHOLE),
}


def trees() -> dict[str, Any]:
    """Run the same program with each seam taken away."""
    takings = json.dumps([taking for taking, _ in MISSING.values()])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, str(ROOT / "tests"), takings],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    return {name: found.get(number, done.stderr) for number, name in enumerate(MISSING)}


def test_all_seams_are_found() -> None:
    """This torch has every seam; where a newer one loses some, this says which."""
    missing = [name for name, there in torch_internals.found().items() if not there]
    assert missing == [], f"torch {torch.__version__} has lost {missing}"


@pytest.mark.program
def test_without_a_seam() -> None:
    """Training goes on without each of them, and what is still known is still told."""
    assert trees() == {name: tree for name, (_, tree) in MISSING.items()}


def test_private_parts_stand_in_one_file() -> None:
    """No other file reaches into torch's private names; modules' own registries have no public form."""
    registries = {"_modules", "_parameters", "_buffers", "_is_view", "_base", "_compiled_call_impl"}
    registries.add("_replace")  # a NamedTuple's, and public
    for path in (ROOT / "torchotel" / "capture").glob("*.py"):
        attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        ours = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"}
        private = {node.attr for node in attributes if node.attr.startswith("_") and not node.attr.startswith("__")}
        private -= ours
        assert path.name == "torch_internals.py" or private <= registries, (path.name, private - registries)


@pytest.mark.filterwarnings("ignore:.*jit:FutureWarning", "ignore:.*jit:DeprecationWarning")
def test_a_profiled_block_can_be_scripted() -> None:
    """TorchScript reads the source of `record_function`, whose end is wrapped."""

    def add_one(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.profiler.record_function("add"):
            return x + 1

    with capture():
        assert torch.jit.script(add_one)(torch.ones(1)) == 2


def test_code_that_dynamo_leaves_alone_is_not_a_compilation() -> None:
    """Else each start would search all modules of the process, for 0.1 s, once an optimizer has imported Dynamo."""
    torch._dynamo.reset()
    torch._dynamo.disable(len)  # as a decorator in torch.optim
    assert not torch_internals.has_compiled()
    torch.nn.Linear(1, 1).compile(backend="eager")
    assert torch_internals.has_compiled()
    torch._dynamo.reset()


def test_parts_of_distributed_training_may_be_missing() -> None:
    """A torch without them has no stage of a pipeline that is seen, no group of replicas, and no buckets."""
    module = ModuleType("stage")
    torch_internals.around_stage_forward(module, lambda *_: None, lambda: None)()
    assert not hasattr(module, "_PipelineStageBase")
    assert torch_internals.replica_group(object()) is None
    assert torch_internals.bucket_layout(SimpleNamespace(logger=object())) == []
    assert torch_internals.reduced_parameters(object()) == []
    assert torch_internals.has_communication_hook(object())


def test_a_stage_of_a_pipeline_is_seen_until_undone() -> None:
    class Stage:
        def forward_one_chunk(self, fwd_chunk_id: int, args: str) -> str:
            return f"{args} {fwd_chunk_id}"

    module, original = ModuleType("stage"), Stage.forward_one_chunk
    vars(module)["_PipelineStageBase"] = Stage
    seen: list[object] = []
    undo = torch_internals.around_stage_forward(module, lambda *begun: seen.append(begun), lambda: seen.append("end"))
    stage = Stage()
    assert stage.forward_one_chunk(3, "x") == "x 3"
    assert seen == [(stage, 3), "end"]
    undo()
    assert Stage.forward_one_chunk is original
