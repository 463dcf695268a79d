"""Train a small ResNet on real handwritten digits, recorded, and show the result.

torchvision's ResNet-18 learns scikit-learn's 1,797 digits in about a minute on two cores. Traces are always
written to a run file, and also sent to the OTLP endpoint if a server listens there.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchotel.cli.options import add_options, read_options
from torchotel.cli.python_program import Program
from torchotel.cli.run import run_recorded, settings
from torchotel.config.config import Config

if TYPE_CHECKING:
    from torchotel._handle import Handle
    from torchotel.config.otlp_endpoint import OtlpEndpoint

EXAMPLE = "digits_resnet.py"
JAEGER_VERSION = "2.13.0"
"""The Jaeger version that torchotel is tested with."""
DETAIL = 8
"""Default: every 8th of some ninety steps is detailed, so that both kinds of steps are frequent enough to compare."""

_NEEDS = {"torchvision": "torchvision", "sklearn": "scikit-learn", "rich": "rich"}
"""Distributions by the module that is imported from them."""
_CONNECT_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs to train")
    add_options(parser)


def call(arguments: argparse.Namespace) -> int:
    """Train the example, recorded as by `torchotel run`; return its exit code."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the demo needs {', '.join(missing)}: pip install {' '.join(_NEEDS.values())}", file=sys.stderr)
        return 1
    epochs = () if arguments.epochs is None else ("--epochs", str(arguments.epochs))
    program = Program(str(find_example()), epochs)
    explicit = read_options(arguments)
    if not os.environ.get("TORCHOTEL_DETAIL"):
        explicit.setdefault("detail", DETAIL)
    config = settings(explicit, program)
    unreachable = config.traces_exporter == "otlp" and not listens(config.otlp_endpoint("traces"))
    if unreachable:
        print(_advice(config))
        explicit["traces_exporter"] = "none"
    return run_recorded(program, explicit, started=_print_metrics_address)


def _print_metrics_address(handle: Handle) -> None:
    port = handle.prometheus_port
    if port is not None:
        print(f"During the run, metrics are at http://{handle.config.prometheus_host}:{port}/metrics\n", flush=True)


def find_example() -> Path:
    """Return the example's path: in the installed package, or in the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "examples" / EXAMPLE
    return installed if installed.exists() else package.parent / "examples" / EXAMPLE


def listens(otlp_endpoint: OtlpEndpoint) -> bool:
    """Return whether a server accepts a connection; True for an address that only gRPC can resolve."""
    address = otlp_endpoint.address
    if address is None:
        return True
    try:
        with socket.create_connection(address[:2], timeout=_CONNECT_S):
            return True
    except OSError:
        return False


def _advice(config: Config) -> str:
    return f"""\
Nothing listens at {config.public()["traces_endpoint"]}, so traces are written to the run file only.
To see them in Jaeger, start it, run the demo again, and open http://localhost:16686:
    docker run --rm -p 127.0.0.1:16686:16686 -p 127.0.0.1:4318:4318 jaegertracing/jaeger:{JAEGER_VERSION}
To send them to another receiver, set --endpoint or OTEL_EXPORTER_OTLP_ENDPOINT.
"""
