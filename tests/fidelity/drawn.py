"""Inputs of transformers' models, by the names that their forwards have for them."""

from collections.abc import Mapping
from typing import Any

import torch

Settings = Mapping[str, Any]

WORDS = 99
LENGTH = 12
SIDE = 32


def words() -> Settings:
    """Draw two sentences; each word is the label of its place."""
    drawn = torch.randint(3, WORDS, (2, LENGTH))
    return {"input_ids": drawn, "labels": drawn}


def prompt() -> Settings:
    return {**words(), "use_cache": False}


def sentences() -> Settings:
    return {**words(), "labels": torch.tensor([0, 1])}


def spans() -> Settings:
    ends = torch.tensor([3, 5])
    return {"input_ids": words()["input_ids"], "start_positions": ends, "end_positions": ends}


def fakes() -> Settings:
    return {"input_ids": words()["input_ids"], "labels": torch.randint(0, 2, (2, LENGTH))}


def pixels() -> Settings:
    """Draw two pictures."""
    return {"pixel_values": torch.randn(2, 3, SIDE, SIDE)}


def labelled() -> Settings:
    return {**pixels(), "labels": torch.tensor([0, 1])}


def segmented() -> Settings:
    return {**pixels(), "labels": torch.randint(0, 2, (2, SIDE, SIDE))}


def films() -> Settings:
    return {"pixel_values": torch.randn(2, 4, 3, SIDE, SIDE), "labels": torch.tensor([0, 1])}


def waves() -> Settings:
    return {"input_values": torch.randn(2, 800), "labels": torch.randint(3, WORDS, (2, 4))}


def mels() -> Settings:
    labels = torch.randint(3, WORDS, (2, LENGTH))
    return {"input_features": torch.randn(2, 16, 60), "labels": labels, "use_cache": False}


def pictures_with_words() -> Settings:
    return {**pixels(), "input_ids": words()["input_ids"]}


def pairs() -> Settings:
    return {**pictures_with_words(), "return_loss": True}


def captions() -> Settings:
    return {**pixels(), **words()}


def blanks() -> Settings:
    drawn = words()
    return {"inputs": drawn["input_ids"], "labels": drawn["labels"]}
