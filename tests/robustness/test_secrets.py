"""Headers, tokens, passwords in URLs and keys: they reach the endpoint, and nothing else."""

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import SILENT, torchotel
from support.otlp_http_receiver import Answer, Receiver, receiver

from torchotel._types import ConfigError
from torchotel.config.config import Config
from torchotel.config.otlp_endpoint import MAX_QUOTED
from torchotel.config.otlp_endpoint import OtlpEndpoint as Endpoint
from torchotel.exporters.otlp.http import HttpTransport

SECRET = "hunter2-hunter2"  # noqa: S105  # the one that is looked for
HEADERS = f"authorization=Bearer%20{SECRET},x-api-key={SECRET}"
PROGRAM = """
import logging
import sys
import torch
logging.basicConfig(level=logging.DEBUG)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Each way to give a bad setting, whose error might repeat too much of it.
BAD: list[dict[str, Any]] = [
    {"endpoint": f"ftp://me:{SECRET}@host:1"},
    {"endpoint": f"me:{SECRET}@host:4318"},
    {"endpoint": f"http://me:{SECRET}/?#@host:4318"},
    {"endpoint": f"http://host:4318/?key={SECRET}"},
    {"endpoint": f"http://me:{SECRET} @host"},
    {"endpoint": f"me:{SECRET}@a host:1", "protocol": "grpc"},
    {"headers": {f"authorization: Bearer {SECRET}": ""}},
    {"headers": {"authorization": f"Bearer {SECRET}\n"}},
    {"headers": f"authorization=Bearer {SECRET}"},
    {"headers": [("authorization", SECRET)]},
]
IGNORED = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": f"//me:{SECRET}@host",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"https://me:{SECRET}@host:port",
    "OTEL_EXPORTER_OTLP_CLIENT_KEY": f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n",
    "OTEL_EXPORTER_OTLP_CERTIFICATE": f"-----BEGIN CERTIFICATE-----{SECRET}",
}


@pytest.mark.parametrize("given", BAD, ids=range(len(BAD)))
def test_an_error_names_a_setting_and_not_its_secret(given: dict[str, Any]) -> None:
    """Neither does its traceback, nor what it carries."""
    with pytest.raises(ConfigError) as caught:
        Config.read(given, {})
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in repr((caught.value, caught.value.got))


@pytest.mark.parametrize("variable", IGNORED)
def test_a_warning_names_a_variable_and_not_its_secret(variable: str, caplog: pytest.LogCaptureFixture) -> None:
    Config.read({}, {variable: IGNORED[variable]})
    assert f"{variable} is ignored" in caplog.text
    assert SECRET not in caplog.text


def test_bad_pairs_of_headers_are_counted_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """The warning says which one, by its number."""
    config = Config.read({}, {"OTEL_EXPORTER_OTLP_HEADERS": f"good=1,authorization: Bearer {SECRET}"})
    assert dict(config.headers) == {"good": "1"}
    assert "header number 2" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "protocol", "shown"),
    [
        (f"https://me:{SECRET}@host:4318", "http/protobuf", "https://host:4318"),
        (f"https://host:4317?key={SECRET}#{SECRET}", "grpc", "https://host:4317"),
        (f"me:{SECRET}@host:4317", "grpc", "host:4317"),
        (f"dns:///me:{SECRET}@host:4317", "grpc", "dns://host:4317"),
    ],
)
def test_settings_are_shown_without_secrets(endpoint: str, protocol: str, shown: str) -> None:
    """As text, on the span of the run, in run.json, and of each receiver."""
    config = Config.read({"endpoint": endpoint, "protocol": protocol}, {"OTEL_EXPORTER_OTLP_HEADERS": HEADERS})
    assert config.public()["endpoint"] == shown
    assert SECRET not in repr(
        (config, config.public(), config.otlp_endpoint("traces"), config.otlp_endpoint("metrics"))
    )


def test_words_of_an_endpoint_are_quoted_without_our_secrets() -> None:
    """In one line of bounded length; what is too short to be a secret stays, or nothing could be read."""
    endpoint = Endpoint(
        f"http://me:p%40ss-{SECRET}@host/?key=k-{SECRET}", headers={"authorization": f"Bearer {SECRET}", "x": "a"}
    )
    said = f"bad token {SECRET}, Bearer {SECRET}, me:p@ss-{SECRET}, k-{SECRET}\r\n\x1b[2J a fact"
    assert endpoint.quote(said) == "bad token ..., ..., ..., ... ?[2J a fact"
    assert len(endpoint.quote("x" * 10_000)) == MAX_QUOTED


@pytest.mark.parametrize("value", [f" {SECRET}", f"{SECRET}\N{EURO SIGN}"])
def test_a_header_that_cannot_be_sent_is_not_repeated(value: str) -> None:
    """What the library complains of has the value in it."""
    reply = HttpTransport(Endpoint("http://127.0.0.1:9", headers={"authorization": value}), version="1").send(b"", 1)
    assert reply.error_type in {"InvalidHeader", "UnicodeEncodeError"}
    assert SECRET not in reply.text


def test_user_and_password_of_a_url_are_sent_as_such() -> None:
    """As Basic authorization, where no header says another one."""
    with receiver() as server:
        url = server.url.replace("http://", f"http://me:{SECRET}@")
        for headers in ({}, {"Authorization": "Bearer x"}):
            transport = HttpTransport(Endpoint(url, headers=headers), version="1")
            assert transport.send(transport.pack(b""), 1).error_type is None
            transport.close()
        sent = [request.headers["Authorization"] for request in server.wait_for_requests(2)]
    assert sent == ["Basic bWU6aHVudGVyMi1odW50ZXIy", "Bearer x"]


def test_no_log_of_a_library_has_them(caplog: pytest.LogCaptureFixture) -> None:
    """At level DEBUG urllib3 writes the path with its query; the filter against that goes with the transport."""
    logger = logging.getLogger("urllib3.connectionpool")
    before = list(logger.filters)
    with caplog.at_level(logging.DEBUG), receiver() as server:
        url = f"{server.url.replace('http://', f'http://me:{SECRET}@')}?key={SECRET}"
        transport = HttpTransport(Endpoint(url, headers={"authorization": f"Bearer {SECRET}"}), version="1")
        transport.send(transport.pack(b""), 1)
        transport.close()
        assert server.requests
    assert "Starting new HTTP connection" in caplog.text  # so urllib3 was heard
    assert SECRET not in caplog.text
    assert logger.filters == before


@pytest.fixture
def refusing() -> Iterator[Receiver]:
    """Refuse every request, and repeat its credentials."""
    with receiver() as server:
        body = f"token {SECRET} is not known".encode()
        server.answers.extend([Answer(401, {"X-Echo": SECRET}, body)] * 100)
        yield server


@pytest.mark.program
@pytest.mark.parametrize("command", ["run", "doctor"])
def test_commands_print_and_write_none_of_them(command: str, refusing: Receiver, tmp_path: Path) -> None:
    """A run at level DEBUG to an endpoint that refuses it and repeats the token, and the doctor at the same."""
    (tmp_path / "program.py").write_text(PROGRAM)
    base = refusing.url.removesuffix("/v1/traces").replace("http://", f"http://me:{SECRET}@")
    variables = {
        **dict.fromkeys(SILENT, "otlp"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": base,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{base}/v1/traces?key={SECRET}",
        "OTEL_EXPORTER_OTLP_HEADERS": HEADERS,
    }
    words = ("run", "program.py", f"--password={SECRET}") if command == "run" else ("doctor",)
    ended = torchotel(*words, cwd=tmp_path, **variables)
    assert refusing.requests, ended.stderr
    assert SECRET in refusing.requests[0].path  # it was told where it belongs
    assert "401" in ended.stdout + ended.stderr
    assert SECRET not in ended.stdout + ended.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "program.py"]
    assert len(files) >= (3 if command == "run" else 0)
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not any(SECRET.encode() in request.message.SerializeToString() for request in refusing.requests)
