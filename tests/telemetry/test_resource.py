"""What the resource says of the process, and who has the last word."""

import pytest

from torchotel.telemetry.resource import describe_process


@pytest.mark.parametrize(
    ("variable", "given", "name"),
    [("", None, "train"), ("service.name=resnet", None, "resnet"), ("service.name=resnet", "mine", "mine")],
)
def test_service_name(monkeypatch: pytest.MonkeyPatch, variable: str, given: str | None, name: str) -> None:
    """A given name wins over that of OTEL_RESOURCE_ATTRIBUTES, and that over the script's."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", variable)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    assert describe_process(given, "train", "run", {}, {})["service.name"] == name


def test_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose own name says nothing the variable names the host."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=node-7")
    assert describe_process(None, "train", "run", {}, {})["host.name"] == "node-7"
