"""OTEL_CONFIG_FILE: `disabled` is honoured, and the rest of the file is left to the SDK with a warning."""

from pathlib import Path

import pytest
from support.variable_effects import proves

from torchotel.config.config import Config
from torchotel.config.config_file import VARIABLES

OFF = {
    "yaml": 'file_format: "1.0"\ndisabled: true\n',
    "comment": "disabled: TRUE  # for now\n",
    "quoted": "'disabled': \"true\"\n",
    "json": '{\n  "file_format": "1.0",\n  "disabled": true\n}',
    "default": "disabled: ${SWITCHED_OFF:-true}\n",
    "byte order mark": "\ufeffdisabled: true\n",
    "variable": "disabled: ${env:OFF:-false}\n",
    "flow": '{file_format: "1.0", disabled: true}\n',
    "flow with a variable": 'propagator: {}\n"disabled": "${OFF}"\n',
    "indented": '  file_format: "1.0"\n  disabled: true\n',
    "a word of YAML 1.1": "disabled: yes\n",
    "a value that is no YAML when substituted": 'resource: "${BRACKETS}"\ndisabled: true\n',
}
ON = {
    "absent": 'file_format: "1.0"\n',
    "false": "disabled: false\n",
    "nested": "instrumentation/development:\n  disabled: true\n",
    "nested json": '{"propagator": {"disabled": true}}',
    "value": "name: disabled\nother: true\n",
    "default": "disabled: ${OFF_AT_HOME:-false}\n",
    "text of a scalar": "description: |\n  disabled: true\n  or false\n",
    "no mapping": "- disabled: true\n",
    "no scalar": "disabled: [true]\n",
    "key that is no scalar": "? [disabled]\n: true\n",
    "empty": "",
}
BROKEN = {
    "too deep": "[" * 100_000,
    "too long": "disabled: true\n" + "#" * 100_000,
    "no YAML": "disabled: true\n  api-key: secret: [\n",
    "two documents": "disabled: true\n---\ndisabled: true\n",
}


@proves(*VARIABLES)
@pytest.mark.parametrize("text", OFF.values(), ids=OFF)
def test_a_file_that_disables_is_honoured(variable: str, text: str, tmp_path: Path) -> None:
    """Whatever other variables hold, as under OTEL_SDK_DISABLED."""
    path = tmp_path / "otel.yaml"
    path.write_text(text, encoding="utf-8")
    assert Config.read({}, {variable: str(path), "OFF": "true", "BRACKETS": "[{", "TORCHOTEL_DETAIL": "junk"}).disabled


@proves(*VARIABLES)
@pytest.mark.parametrize("text", ON.values(), ids=ON)
def test_a_warning_says_that_the_rest_is_not_read(
    variable: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once."""
    path = tmp_path / "otel.yaml"
    path.write_text(text, encoding="utf-8")
    for _ in range(2):
        assert not Config.read({}, {variable: str(path)}).disabled
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{variable}: torchotel reads only `disabled` of {path}")


@proves(*VARIABLES)
def test_a_file_that_cannot_be_read_costs_a_warning(
    variable: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be meant for another program."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "binary") * 2:  # each is read twice, and warned of once
        assert Config.read({}, {variable: str(path)}) == Config()
    assert [record.getMessage().startswith(f"{variable} is ignored: ") for record in caplog.records] == [True] * 3


@proves(*VARIABLES)
@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_yaml_costs_a_warning(
    variable: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line, which quotes nothing of the file: it may hold the headers of an exporter."""
    path = tmp_path / "otel.yaml"
    path.write_text(text, encoding="utf-8")
    assert Config.read({}, {variable: str(path)}) == Config()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{variable} is ignored: {path} cannot be read (")
    assert "\n" not in record.getMessage()
    assert "secret" not in record.getMessage()


@pytest.mark.parametrize("alias", ["[{}]", "{{<<: [{}]}}"], ids=["lists", "merge keys"])
def test_nested_aliases_are_not_expanded(alias: str, tmp_path: Path) -> None:
    """Ten to the power of thirty values, or thirty nodes."""
    levels = [f"a{n}: &a{n} {alias.format(', '.join([f'*a{n - 1}'] * 10))}\n" for n in range(1, 31)]
    path = tmp_path / "otel.yaml"
    path.write_text("".join(["a0: &a0 {x: 1}\n", *levels, "disabled: true\n"]))
    assert Config.read({}, {VARIABLES[0]: str(path)}).disabled
