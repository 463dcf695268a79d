"""Test that flags are read by the rules for variables."""

import argparse

import pytest

from torchotel._types import ConfigError
from torchotel.cli.options import add_options, read_options
from torchotel.config.config import Config


def said(*words: str) -> Config:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return Config.read(read_options(parser.parse_args(words)), {})


def test_an_endpoint_of_grpc_needs_no_scheme() -> None:
    """The endpoint's form depends on --protocol, in either order of the flags."""
    assert said("--endpoint", "localhost:4317", "--protocol", "grpc").traces_endpoint == "localhost:4317"
    with pytest.raises(ConfigError, match=r"endpoint \(from --endpoint\): got 'localhost:4318', takes"):
        said("--endpoint", "localhost:4318")


def test_each_kind_of_value() -> None:
    """Strings, numbers, lists, mappings and booleans are read."""
    config = said("--detail", "8", "--no-shapes", "--include", "a.*,b", "--headers", "x=1", "--overhead-budget", "0.05")
    assert (config.detail, config.shapes, config.include) == (8, False, ("a.*", "b"))
    assert (dict(config.headers), config.overhead_budget) == ({"x": "1"}, 0.05)
