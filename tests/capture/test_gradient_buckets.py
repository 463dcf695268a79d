"""Test the names of DistributedDataParallel's buckets on a real process group of one rank."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.needs import needs_group_hooks

pytestmark = [pytest.mark.program, needs_group_hooks]

PROGRAM = """
import contextlib, json, logging, signal, sys, torch, torchotel, torchotel.testing
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.head, self.frozen = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def forward(self, x):
        return self.body(self.frozen(self.head(x * self.scale)))

def wrapped(net=None, **options):
    return DistributedDataParallel(net or Net(), bucket_cap_mb=0.01, **options)

def ignoring(*names):
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    return wrapped(net)

def tied():
    net = Net()
    net.body[1].weight = net.head.weight
    return wrapped(net)

def plain(*widths):
    layers = [nn.Linear(one, other, bias=False) for one, other in zip((64, *widths), widths)]
    return wrapped(nn.Sequential(*layers))

def compressed(*widths):
    model = plain(*widths)
    model.register_comm_hook(None, fp16_compress_hook)
    return model

def frozen_later(model):
    model.module.head.requires_grad_(False)
    return model

def reducing_itself(model):
    '''The program reduces a tensor as large as a bucket in the backward.'''
    model.module.head.weight.register_hook(lambda grad: dist.all_reduce(torch.ones(64 * 65)))
    return model

def train_with_a_signal():
    '''In the second step, while the reducer has its lock, a handler exports, runs the model, and ends the session.'''
    handle = torchotel.instrument(worker="thread", traces_exporter="none", metrics_exporter="none", detail="all")
    def handler(*_):
        handle.flush()
        with torch.enable_grad():
            model.module(torch.ones(2, 64))
        handle.shutdown()
    signal.signal(signal.SIGUSR1, handler)
    buckets = []
    def hook(state, bucket):
        buckets.append(bucket)
        if len(buckets) == 3:
            signal.raise_signal(signal.SIGUSR1)
        return allreduce_hook(state, bucket)
    model = wrapped()
    model.register_comm_hook(None, hook)
    for _ in range(6):
        model(torch.ones(2, 64)).sum().backward()
    return handle.stats()["steps"] + handle.stats()["evaluations"]

def swapped():
    '''Equal layers change places after the model was wrapped.'''
    model = wrapped()
    body = model.module.body
    body[0], body[1] = body[1], body[0]
    return model

def frozen_and_unfrozen():
    model = wrapped(static_graph=True)
    model.module.head.requires_grad_(False)
    model.module.frozen.requires_grad_(True)
    return model

class Holder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)

class Other(nn.Module):
    '''Has the sizes of `plain(64, 64)`.'''
    def __init__(self):
        super().__init__()
        self.p, self.q = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x):
        return self.q(self.p(x))

def compiled(net):
    return torch.compile(DistributedDataParallel(net), backend="eager")

def reversing(model):
    '''A communication hook of the later steps reduces the buckets in the reverse order.'''
    found = []
    def hook(state, bucket):
        future = torch.futures.Future()
        found.append((bucket.buffer(), future))
        if bucket.is_last():
            for tensor, _ in found[::-1]:
                dist.all_reduce(tensor)
            for tensor, one in found:
                one.set_result(tensor)
            found.clear()
        return future
    def around(model, index, forwards=[0]):
        forwards[0] += 1
        if forwards[0] == 5:
            model.register_comm_hook(None, hook)
        return contextlib.nullcontext()
    return train(model, around=around)

def reducing_without_ddp(model):
    '''The program reduces tensors as large as the buckets, in the reverse order, in `no_sync`.'''
    parameters = list(model.parameters())
    def hook(parameter):
        dist.all_reduce(parameter.grad)
    def around(model, index, forwards=[0]):
        forwards[0] += 1
        if forwards[0] < 5:
            return contextlib.nullcontext()
        if forwards[0] == 5:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(hook)
        return model.no_sync()
    return train(model, around=around)

def failing():
    from torchotel.capture import gradient_buckets
    logging.getLogger("torchotel").setLevel(logging.CRITICAL)
    def fails(_):
        raise ValueError("a defect")
    gradient_buckets.bucket_layout = fails
    return wrapped()

def train(*models, steps=6, around=lambda model, index: contextlib.nullcontext(), backwards=1):
    '''Return the collectives of the backwards of the last step, which averages its loss, too.'''
    parameters = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    with torchotel.testing.capture(max_spans=None) as captured:
        for _ in range(steps):
            optimizer.zero_grad()
            for model in models:
                for index in range(backwards):
                    with around(model, index):
                        prediction = model(torch.ones(2, 64))
                        loss = nn.MSELoss()(prediction, torch.zeros_like(prediction))
                        loss.backward()
                dist.all_reduce(loss.detach())
            optimizer.step()
    spans = [span for span in captured.steps[-1].walk() if span.name == "torch.collective all_reduce"]
    names = "torch.collective.bytes", "torch.collective.modules"
    return [[span.attributes.get(name) for name in names] for span in spans]

def accumulating(model, index):
    return model.no_sync() if index == 0 else contextlib.nullcontext()

def joined(model, index):
    return Join([model])
"""
WEIGHT_BYTES, BIAS_BYTES = 4 * 64 * 64, 4 * 64
LAYER_BYTES = WEIGHT_BYTES + BIAS_BYTES
LOSS: list[Any] = [4, None]
LAYERS: list[list[Any]] = [[LAYER_BYTES, ["body.1"]], [LAYER_BYTES, ["body.0"]]]
NET = [*LAYERS, [LAYER_BYTES, ["head"]], [BIAS_BYTES, ["Net"]], LOSS]


def said(expressions: Iterable[str], folder: Path) -> Mapping[str, Any]:
    """Return the values of expressions in one process."""
    path = folder / "program.py"
    path.write_text(f"{PROGRAM}\nprint(json.dumps({{name: eval(name) for name in {[*expressions]!r}}}))")
    done = commands.python(str(path), str(folder / "store"), cwd=folder, **commands.SILENT)
    assert done.returncode == 0, done.stderr
    assert "internal error" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_bucket_names_its_modules(tmp_path: Path) -> None:
    """In the order of the backward, without the wrapper; the program's own collective has no modules.

    A backward without reductions is before the last one, or a second model, or the ranks tell each other that they go
    on. A shared parameter has the path of the first module that has it.
    """
    expected = {
        "train(wrapped())": NET,
        "train(wrapped(plain(64, 32).module, static_graph=True))": [[4 * 64 * (64 + 32), ["1", "0"]], LOSS],
        "train(wrapped(), wrapped())": [*NET, *NET],
        "train(wrapped(), around=accumulating, backwards=2)": NET,
        "train(wrapped(), plain(32, 16))": [*NET, [4 * (64 * 32 + 32 * 16), ["1", "0"]], LOSS],
        "train(swapped())": NET,
        "train(ignoring('head.bias'))": [*LAYERS, [WEIGHT_BYTES, ["head"]], [BIAS_BYTES, ["Net"]], LOSS],
        "[one for one in train(wrapped(), around=joined) if one[1]]": NET[:-1],
        "train(tied())": [
            [LAYER_BYTES + BIAS_BYTES, ["body.1", "body.0"]],
            [LAYER_BYTES, ["head"]],
            [BIAS_BYTES, ["Net"]],
            LOSS,
        ],
    }
    assert said(expected, tmp_path) == expected


def test_no_modules_are_named_if_they_are_not_known(tmp_path: Path) -> None:
    found = said(
        [
            "train(wrapped(find_unused_parameters=True))",  # the backward does not arrange the buckets
            "train(compressed(128, 32))",  # a compressed bucket is as large as another one
            "train(plain(32, 64), compressed(64, 64))",  # the compressed buckets are as large as those of a model
            "train(frozen_later(wrapped(static_graph=True)))",
            "train(reducing_itself(wrapped()))",
            "train(frozen_and_unfrozen())",
            "reversing(plain(64, 64, 64))",
            "reducing_without_ddp(plain(64, 64, 64))",
            # A model that is not called itself looks like another one.
            "train(DistributedDataParallel(plain(64, 64).module), compiled(Other()))",
            "train(plain(64, 64), Holder(wrapped(Other())))",
            "train(plain(64, 64), Holder(compressed(128, 64)))",
        ],
        tmp_path,
    )
    for expression, collectives in found.items():
        losses = [index for index, one in enumerate(collectives) if one == LOSS]
        of_last_model = collectives[losses[-2] + 1 if len(losses) > 1 else 0 : -1]
        assert of_last_model, expression
        assert not any(modules for _, modules in of_last_model), expression


def test_a_signal_in_a_communication_hook(tmp_path: Path) -> None:
    """Reading the buckets there would wait for ever for a lock that the thread has."""
    assert said(["train_with_a_signal()"], tmp_path) == {"train_with_a_signal()": 2}


def test_a_reader_that_fails_stops_only_the_names(tmp_path: Path) -> None:
    expression = "train(failing(), steps=20)"
    assert said([expression], tmp_path) == {expression: [[size_bytes, None] for size_bytes, _ in NET]}
