"""The table in `config/otel_variables.py` lists every variable of the specification, and a test covers each."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
from support import commands
from support.variable_effects import PROVEN, proves

import torchotel
from torchotel.config import config_file
from torchotel.config.config import SETTINGS, Config
from torchotel.config.otel_variables import VARIABLES, Variable

PACKAGE = Path(torchotel.__file__).parent

# Variables that other programs read, and unused ones.


def rows(reader: str) -> list[Variable]:
    return [variable for variable in VARIABLES.values() if variable.reader == reader]


PROVIDERS = [variable.name for variable in rows("provider")]
UNREAD = [variable.name for variable in rows("none")]
JUNK = "-1 junk"
TRAIN = """
import torch, torchotel
with torchotel.instrument(set_global_provider={}) as handle:
    with torchotel.step():
        torch.nn.Linear(2, 2)(torch.rand(1, 2)).sum().backward()
print(handle.stats())
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Give what a program says under variables that hold junk, with a provider of ours and without."""
    environ = {**dict.fromkeys([*PROVIDERS, *UNREAD], JUNK), "OTEL_TRACES_EXPORTER": "console"}
    folder = tmp_path_factory.mktemp("programs")
    told = {}
    for provider in (True, False):
        done = commands.python("-c", TRAIN.format(provider), cwd=folder, OTEL_METRICS_EXPORTER="none", **environ)
        assert done.returncode == 0, done.stderr
        assert "'spans_dropped': 0" in done.stdout
        assert "torch.step" in done.stdout
        told[provider] = done.stderr
    return told


@pytest.mark.program
@proves(*PROVIDERS)
def test_a_provider_reads_it(variable: str, told: dict[bool, str]) -> None:
    """It complains of the junk; without it nobody does."""
    assert variable in told[True] or JUNK in told[True]
    assert variable not in told[False]


@pytest.mark.program
@proves(*UNREAD)
def test_nobody_reads_it(variable: str, told: dict[bool, str], caplog: pytest.LogCaptureFixture) -> None:
    """Nothing changes, and nobody complains, whatever is in it."""
    assert Config.read({}, {variable: JUNK}) == Config.read({}, {})
    assert variable not in told[True] + told[False]
    assert not caplog.records


# The table is whole.


def test_each_variable_has_a_proof() -> None:
    """Here, or in one of the files beside."""
    for path in Path(__file__).parent.glob("test_otel_variables_*.py"):
        import_module(path.stem)
    assert sorted(set(PROVEN)) == sorted(VARIABLES)


def test_the_table_says_who_reads() -> None:
    """What the configuration reads, and only that, is said to be read by torchotel."""
    read = {name for setting in SETTINGS.values() for name in setting.variables if name.startswith("OTEL_")}
    assert read | set(config_file.VARIABLES) == {variable.name for variable in rows("torchotel")}
    assert all(variable.does.startswith("not used: ") for variable in rows("none"))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_code_names_no_other(path: Path) -> None:
    """Every variable of OpenTelemetry that stands in the code stands in the table."""
    strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    named = {text for text in strings if isinstance(text, str) and text.startswith("OTEL_") and text.isupper()}
    assert {text for text in named if text.replace("_", "").isalpha() and not text.endswith("_")} <= set(VARIABLES)
