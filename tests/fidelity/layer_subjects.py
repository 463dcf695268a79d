"""torch.nn's layers: recurrent, attention, sparse, lazy, parametrized, made ready for quantization, of any dtype."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, parametrize, rnn, spectral_norm, weight_norm

from fidelity.subjects import Subject

SIDE = 8


Make = Callable[[], nn.Module]


class Applied(nn.Module):
    """Parts under their names, and a forward that is a function of this and the inputs."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what was given."""
        return self.run(self, *args, **kwargs)


def applied(run: Callable[..., Any], **parts: Make) -> Make:
    """Give what makes such a model."""
    return lambda: Applied(run, **{name: make() for name, make in parts.items()})


def chain(*parts: Make) -> Make:
    """Give what makes a sequence of parts."""
    return lambda: nn.Sequential(*[make() for make in parts])


def subject(kind: str, name: str, build: Make, *shape: int, **settings: Any) -> Subject:
    """Make one whose input is one tensor of normal numbers; three rows of `SIDE` by default."""
    inputs = partial(_drawn, torch.float32, shape or (3, SIDE))
    return Subject(name=name, kind=kind, build=build, **{"inputs": inputs, **settings})


def _drawn(dtype: torch.dtype, shape: tuple[int, ...] = (3, SIDE)) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(shape, dtype=dtype),), {}


def subjects() -> Iterator[Subject]:
    """Yield all of them."""
    yield from _recurrent()
    yield from _attention()
    yield from _indexed()
    yield from _images()
    yield from _normalizations()
    yield from _activations()
    yield from _lazy()
    yield from _parametrized()
    yield from _quantized()
    yield from _other_numbers()


def _recurrent() -> Iterator[Subject]:
    of = partial(subject, "torch.nn, recurrent")
    for layer in (nn.RNN, nn.LSTM, nn.GRU):
        two = partial(layer, SIDE, 6, 2)
        yield of(layer.__name__, two, 5, 3, SIDE)
        yield of(f"{layer.__name__}, both ways", partial(two, bidirectional=True, dropout=0.3), 5, 3, SIDE)
    yield of("LSTM, projected", partial(nn.LSTM, SIDE, 6, proj_size=4, batch_first=True), 3, 5, SIDE)

    def packed(model: Any, x: Tensor) -> Any:
        return model.lstm(rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2])))

    yield of("LSTM, packed", applied(packed, lstm=partial(nn.LSTM, SIDE, 6)), 5, 3, SIDE)

    def unrolled(model: Any, x: Tensor) -> Any:
        state: Any = None
        for row in x:
            state = model.cell(row, state)
        return state

    for cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        yield of(cell.__name__, applied(unrolled, cell=partial(cell, SIDE, 6)), 5, 3, SIDE)


def _attention() -> Iterator[Subject]:
    of = partial(subject, "torch.nn, attention")
    words = (4, 3, SIDE)
    attention = partial(nn.MultiheadAttention, SIDE, 2, dropout=0.1)
    with_weights = applied(lambda m, x: m.attention(x, x, x), attention=attention)
    yield of("MultiheadAttention", with_weights, *words)
    without = applied(lambda m, x: m.attention(x, x, x, need_weights=False), attention=attention)
    yield of("MultiheadAttention, without weights", without, *words)
    encoder = partial(nn.TransformerEncoderLayer, SIDE, 2, 16)
    yield of("TransformerEncoderLayer", partial(encoder, norm_first=True), *words)
    yield of("TransformerEncoder", lambda: nn.TransformerEncoder(encoder(batch_first=True), 2), *words)
    transformer = partial(nn.Transformer, SIDE, 2, 2, 2, 16)
    yield of("Transformer", transformer, inputs=lambda: ((torch.randn(words), torch.randn(5, 3, SIDE)), {}))


def _indexed() -> Iterator[Subject]:
    of = partial(subject, "torch.nn, index inputs", inputs=lambda: ((torch.randint(0, 20, (3, 4)),), {}))
    embedding = partial(nn.Embedding, 20, SIDE)
    yield of("Embedding", partial(embedding, padding_idx=0, max_norm=1.0))  # which changes its weight in place
    yield of("Embedding, sparse", partial(embedding, sparse=True), momentum=0.0)
    yield of("EmbeddingBag, sparse", partial(nn.EmbeddingBag, 20, SIDE, mode="mean", sparse=True), momentum=0.0)
    yield of("EmbeddingBag, greatest", partial(nn.EmbeddingBag, 20, SIDE, mode="max"))


def _images() -> Iterator[Subject]:
    of = partial(subject, "torch.nn, image layers")
    for size, conv, back in (
        (1, nn.Conv1d, nn.ConvTranspose1d),
        (2, nn.Conv2d, nn.ConvTranspose2d),
        (3, nn.Conv3d, nn.ConvTranspose3d),
    ):
        there = partial(conv, 2, 4, 3, groups=2)
        layers = chain(there, partial(nn.ReLU, inplace=True), partial(back, 4, 2, 3))
        yield of(f"{conv.__name__}, {back.__name__}", layers, 2, 2, *[6] * size)

    def pooled(model: Any, x: Tensor) -> Any:
        small, places = model.pool(x)
        return model.up(model.unpool(small, places)), model.unfold(x), model.average(x)

    pool = applied(
        pooled,
        pool=partial(nn.MaxPool2d, 2, return_indices=True),
        unpool=partial(nn.MaxUnpool2d, 2),
        up=partial(nn.Upsample, scale_factor=2),
        unfold=partial(nn.Unfold, 2),
        average=partial(nn.AdaptiveAvgPool2d, 2),
    )
    yield of("pooling and its inverse", chain(partial(nn.Conv2d, 2, 4, 1), pool), 2, 2, 6, 6)
    shuffles = chain(partial(nn.Conv2d, 2, 8, 1), partial(nn.ChannelShuffle, 2), partial(nn.PixelShuffle, 2))
    yield of("shuffles", shuffles, 2, 2, 4, 4)


def _normalizations() -> Iterator[Subject]:
    of = partial(subject, "torch.nn, normalization")
    layers: dict[str, Make] = {
        "BatchNorm2d": partial(nn.BatchNorm2d, 4),
        "BatchNorm2d, averaging all": partial(nn.BatchNorm2d, 4, momentum=None),
        "InstanceNorm2d": partial(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True, momentum=0.3),
        "GroupNorm": partial(nn.GroupNorm, 2, 4),
        "LayerNorm": partial(nn.LayerNorm, [4, 5, 5]),
        "RMSNorm": partial(nn.RMSNorm, [5]),
        "LocalResponseNorm": partial(nn.LocalResponseNorm, 2),
    }
    for name, make in layers.items():
        around = chain(partial(nn.Conv2d, 2, 4, 1), make, partial(nn.ReLU, inplace=True))
        yield of(name, around, 3, 2, 5, 5)


def _activations() -> Iterator[Subject]:
    of = partial(subject, "torch.nn, activations and losses")
    in_place = (nn.ReLU, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.RReLU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Dropout)
    others = (nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.PReLU, nn.AlphaDropout, nn.Identity, nn.LogSigmoid)
    linear = partial(nn.Linear, SIDE, SIDE)
    of_place = [part for one in in_place for part in (linear, partial(one, inplace=True))]
    yield of("activations in place", chain(*of_place))
    yield of("activations", chain(*[part for one in others for part in (linear, one)]))

    def judged(model: Any, x: Tensor) -> Any:
        y = model.linear(x)
        return [model.mse(y, x), model.entropy(y, x.argmax(1)), model.adaptive(y, x.argmax(1))]

    adaptive = partial(nn.AdaptiveLogSoftmaxWithLoss, SIDE, SIDE, [2, 4])
    yield of("losses", applied(judged, linear=linear, mse=nn.MSELoss, entropy=nn.CrossEntropyLoss, adaptive=adaptive))


def _lazy() -> Iterator[Subject]:
    of = partial(subject, "torch.nn, lazy")
    linear = partial(nn.LazyLinear, 6)
    yield of("LazyLinear", chain(linear, nn.ReLU, linear))
    yield of("LazyConv2d", chain(partial(nn.LazyConv2d, 4, 3), nn.LazyBatchNorm2d, nn.Flatten, linear), 2, 2, 6, 6)


def _parametrized() -> Iterator[Subject]:
    of = partial(subject, "torch.nn, parametrized")
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "orthogonal": parametrizations.orthogonal,
        "weight norm": parametrizations.weight_norm,
        "spectral norm": parametrizations.spectral_norm,
        "weight norm by a hook": weight_norm,
        "spectral norm by a hook": spectral_norm,
    }
    for name, wrap in wraps.items():
        wrapped = partial(_wrapped, wrap)
        yield of(name, chain(wrapped, nn.ReLU, wrapped))

    def cached(model: Any, x: Tensor) -> Any:
        with parametrize.cached():
            return model.linear(model.linear(x))

    yield of("weight norm, cached", applied(cached, linear=partial(_wrapped, parametrizations.weight_norm)))


def _wrapped(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return wrap(nn.Linear(SIDE, SIDE))


def _quantized() -> Iterator[Subject]:
    of = partial(subject, "torch.nn, quantization-aware")

    def prepared() -> nn.Module:
        layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
        model = quantization.QuantWrapper(layers).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        ready: nn.Module = quantization.prepare_qat(model)
        return ready

    yield of("prepare_qat", prepared, 2, 2, 6, 6)
    fake: Any = quantization.FakeQuantize
    linear = partial(nn.Linear, SIDE, SIDE)
    yield of("FakeQuantize", chain(linear, fake, nn.ReLU, fake, linear))


def _other_numbers() -> Iterator[Subject]:
    of = partial(subject, "torch.nn, other dtypes")
    for dtype in (torch.float64, torch.bfloat16):
        linear, norm = partial(nn.Linear, SIDE, SIDE, dtype=dtype), partial(nn.LayerNorm, SIDE, dtype=dtype)
        yield of(str(dtype).removeprefix("torch."), chain(linear, norm, linear), inputs=partial(_drawn, dtype))
    linear = partial(nn.Linear, SIDE, SIDE, dtype=torch.complex64)
    seen = applied(lambda m, x: torch.view_as_real(m.layers(x)), layers=chain(linear, linear))
    yield of("complex64", seen, inputs=partial(_drawn, torch.complex64))

    def cast(model: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model.layers(x)

    linear, norm = partial(nn.Linear, SIDE, SIDE), partial(nn.LayerNorm, SIDE)
    yield of("autocast to bfloat16", applied(cast, layers=chain(linear, norm, linear)))
