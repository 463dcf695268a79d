"""Models of the other kinds, compiled: all of one, or each of its blocks; into graphs that run as they are."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from fidelity import layer_subjects, torchvision_subjects, transformers_subjects
from fidelity.compiled import Way, blocks_in_place, in_place
from fidelity.subjects import Subject

NAMES = {
    *("LSTM", "GRU", "MultiheadAttention", "TransformerEncoder"),
    *("resnet18", "squeezenet1_1"),
    *("BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"),
    "ViTForImageClassification",
}


def subjects() -> Iterator[Subject]:
    """Yield all of them."""
    others = chain(layer_subjects.subjects(), torchvision_subjects.subjects(), transformers_subjects.subjects())
    for subject in others:
        if subject.name in NAMES and not subject.kind.endswith("quantizable"):
            yield _compiled(subject, "whole", in_place)
            if subject.name.startswith(("resnet", "Bert")):
                yield _compiled(subject, "in blocks", blocks_in_place)


def _compiled(subject: Subject, how: str, way: Way) -> Subject:
    def build() -> nn.Module:
        torch._dynamo.reset()  # it gives up on what is compiled too often
        return way(subject.build(), backend="eager")

    return replace(subject, name=f"{subject.name}, {how}", kind="compiled", build=build)
