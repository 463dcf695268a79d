"""All parts of the benchmark, in the order of its page."""

from benchmarks import budget, growth, load, memory, overhead, ranks, scrape, startup, step, wire, worker
from benchmarks.modes import AGAIN, ALL, ALL_THREAD, DEFAULT, DEFAULT_THREAD, NAIVE, OFF, SPANS
from benchmarks.parts import Part

TRANSFORMER, RESNET, VIT, CHAIN = "transformer", "resnet18", "vit", "2000"
TINY = "tiny"
CLOSELY = {AGAIN: 2, OFF: 2, DEFAULT: 4, DEFAULT_THREAD: 2, ALL: 2, ALL_THREAD: 2, SPANS: 2, NAIVE: 2}
"""Blocks per round of the modes that targets use, and of those compared with them."""


def parts(*, quick: bool) -> list[Part]:
    """Return the parts to measure; with `quick`, on a tiny model."""
    compared = [
        overhead.part(TRANSFORMER, "A transformer: 12 blocks, d = 64, 4x32 tokens, 124 calls a step", 200, CLOSELY),
        overhead.part(RESNET, "ResNet-18: batch 8, 3x64x64, 76 calls a step", 190, CLOSELY),
        overhead.part(VIT, "A small ViT: 6 layers, d = 64, batch 8, 3x32x32", 40),
        overhead.part(CHAIN, "A chain of 2,000 small modules", 40),
    ]
    return [
        *([overhead.part(TINY, "A transformer of two blocks", 0)] if quick else compared),
        step.part(),
        growth.part(),
        worker.part(TINY if quick else TRANSFORMER),
        wire.part(*([TINY] if quick else [TRANSFORMER, RESNET])),
        load.part(TINY if quick else TRANSFORMER),
        scrape.part(),
        ranks.part(),
        startup.part(),
        memory.part(),
        budget.part(),
    ]
