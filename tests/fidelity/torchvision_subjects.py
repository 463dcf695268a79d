"""torchvision's models: classification, detection, segmentation, video, and those that can be quantized."""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torchvision.models as zoo
from torch import nn

from fidelity.subjects import Subject

MOST_PARAMETERS = 50_000_000
"""Above it a model is run on the meta device, where the graph is the same and there are no numbers."""
_SIZES = {"inception": 299, "vit": 224, "maxvit": 224, "swin": 64}
_SIZE = 96
_OF_FEATURES = 10
"""Classes of the small heads that detectors and segmenters get."""


def subjects() -> Iterator[Subject]:
    """Yield all of them."""
    yield from _of("classification", zoo, _classified)
    yield from _of("quantizable", zoo.quantization, partial(_classified, quantize=False))
    yield from _of("segmentation", zoo.segmentation, _segmented)
    yield from _of("detection", zoo.detection, _detected)
    yield from _of("video", zoo.video, _filmed)
    yield from _of("optical flow", zoo.optical_flow, _flowing)


def _of(kind: str, module: ModuleType, subject: Callable[..., Subject]) -> Iterator[Subject]:
    for name in zoo.list_models(module=module):
        yield subject(name=name, kind=f"torchvision {kind}")


def _classified(*, name: str, kind: str, **settings: Any) -> Subject:
    build = partial(zoo.get_model, name, weights=None, **settings)
    if "googlenet" in name or "inception" in name:
        build = partial(build, init_weights=False)  # the default draws for half a minute, and warns
    size = _size(name)
    return _subject(name, kind, build, lambda: ((torch.randn(2, 3, size, size),), {}))


def _segmented(*, name: str, kind: str) -> Subject:
    build = partial(zoo.get_model, name, weights=None, weights_backbone=None, num_classes=_OF_FEATURES)
    if not name.startswith("lraspp"):
        build = partial(build, aux_loss=True)
    return _subject(name, kind, build, lambda: ((torch.randn(2, 3, _SIZE, _SIZE),), {}))


def _detected(*, name: str, kind: str) -> Subject:
    build = partial(zoo.get_model, name, weights=None, weights_backbone=None, num_classes=_OF_FEATURES)
    if not name.startswith("ssd"):  # those have one size
        build = partial(build, min_size=128, max_size=160)
    if "rcnn" in name:  # the defaults take a minute
        build = partial(build, rpn_post_nms_top_n_train=200, box_batch_size_per_image=32)

    def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        box = torch.tensor([[10.0, 10.0, 60.0, 70.0]])
        target = {"boxes": box, "labels": torch.tensor([1])}
        if name.startswith("mask"):
            target["masks"] = torch.ones(1, 128, 128, dtype=torch.uint8)
        if name.startswith("keypoint"):
            target |= {"keypoints": torch.tensor([[[20.0, 30.0, 1.0]] * 17])}
        return ([torch.rand(3, 128, 128) for _ in range(2)], [target, target]), {}

    if name.startswith("keypoint"):
        build = partial(build, num_classes=2)
    return _subject(name, kind, build, inputs, real=True)


def _filmed(*, name: str, kind: str) -> Subject:
    build = partial(zoo.get_model, name, weights=None)
    shape = (1, 3, 16, 224, 224) if name.startswith(("mvit", "s3d")) else (2, 3, 8, 64, 64)  # those have one size
    return _subject(name, kind, build, lambda: ((torch.randn(shape),), {}))


def _flowing(*, name: str, kind: str) -> Subject:
    build = partial(zoo.get_model, name, weights=None)
    return _subject(
        name, kind, build, lambda: ((torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)), {"num_flow_updates": 2})
    )


def _size(name: str) -> int:
    return next((size for start, size in _SIZES.items() if start in name), _SIZE)


def _subject(
    name: str,
    kind: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
    *,
    real: bool = False,
) -> Subject:
    device = "cpu" if real or _parameters(name) <= MOST_PARAMETERS else "meta"
    return Subject(name=name, kind=kind, build=build, inputs=inputs, device=device)


def _parameters(name: str) -> int:
    """Look up how many there are."""
    published = [weights.meta["num_params"] for weights in zoo.get_model_weights(name)]
    return int(published[0]) if published else 0
