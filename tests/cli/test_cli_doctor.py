"""Test `torchotel doctor`: one line for each finding, indented advice, and the exit code."""

import re
import subprocess
from pathlib import Path

import pytest
from support import commands
from support.otlp_http_receiver import Answer, Receiver

pytestmark = pytest.mark.program

OTLP = {"Content-Type": "application/x-protobuf"}
QUIET = {"NO_PROXY": "*"}


def doctor(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return commands.python("-m", "torchotel", "doctor", *words, cwd=cwd, **{**QUIET, **variables})


def test_finds_all_well(server: Receiver, tmp_path: Path) -> None:
    server.answers.append(Answer(200, OTLP))
    done = doctor("--endpoint", server.url.removesuffix("/v1/traces"), cwd=tmp_path)
    (span,) = server.spans
    assert (done.returncode, done.stderr) == (0, "")
    assert f"ok      test span   trace id {span.trace_id.hex()}\n" in done.stdout
    assert "\n                    Its service is torchotel-doctor, its only span torchotel.doctor.\n" in done.stdout
    assert re.search(r"\n\n\d+ ok, 0 to look at, 0 failed\n$", done.stdout)


def test_says_what_failed_in_plain_ascii_without_secrets(server: Receiver, tmp_path: Path) -> None:
    server.answers.append(Answer(401, {}, "nö sesame".encode()))
    done = doctor(
        OTEL_EXPORTER_OTLP_ENDPOINT=server.url.removesuffix("/v1/traces"),
        OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20sesame",
        OTEL_EXPORTER_OTLP_ENPOINT="http://x",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "\nwarning variables   OTEL_EXPORTER_OTLP_ENPOINT is not known\n" in done.stdout
    assert "\n                    Did you mean OTEL_EXPORTER_OTLP_ENDPOINT?\n" in done.stdout
    assert "\nFAILED  endpoint    " in done.stdout
    assert done.stdout.isascii()
    assert "n\\xf6 ..." in done.stdout
    assert "sesame" not in done.stdout + done.stderr
    assert done.stdout.endswith("1 to look at, 1 failed\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--detail", "some"], "got 'some', takes"),
        (["--model", "train"], "is not MODULE:NAME"),
        (["--input", "3x"], "is not SHAPE[:DTYPE]"),
        (["--input", "8x3"], "--input needs a model: name it with --model MODULE:NAME"),
        (["train.py"], "unrecognized arguments"),
    ],
)
def test_names_a_wrong_use(tmp_path: Path, words: list[str], message: str) -> None:
    done = doctor(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_tries_a_model_and_goes_on_behind_a_check_that_breaks(tmp_path: Path) -> None:
    """A broken installation of OpenTelemetry is a finding, and the other checks continue."""
    (tmp_path / "train.py").write_text("import torch\ndef make(): return torch.nn.Linear(3, 2)\n")
    broken = tmp_path / "site" / "opentelemetry" / "sdk"
    broken.mkdir(parents=True)
    words = ["--model", "train:make", "--input", "8x3"]
    good = doctor(*words, cwd=tmp_path, **commands.SILENT)
    assert good.returncode == 0
    assert "ok      model       Linear: 1 modules, 1 called; a step has 2 module spans, 5 in all" in good.stdout
    (broken / "__init__.py").write_text("raise ImportError('broken on purpose')")
    (broken.parent / "__init__.py").write_text("__path__ = __import__('pkgutil').extend_path(__path__, __name__)")
    bad = doctor(*words, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"), **commands.SILENT)
    assert bad.returncode == 1
    assert "could not be checked: ImportError: broken on purpose" in bad.stdout
    assert "clock" in bad.stdout
    assert "Traceback" not in bad.stderr


def test_shows_signs_and_colours_on_a_terminal_alone(tmp_path: Path) -> None:
    _, plain = commands.on_a_terminal("doctor", cwd=tmp_path, NO_COLOR="1")
    assert "\N{CHECK MARK} versions" in plain
    assert "\x1b" not in plain
    code, coloured = commands.on_a_terminal("doctor", cwd=tmp_path)
    assert code == 0
    assert "\x1b[32m\N{CHECK MARK}\x1b[0m versions" in coloured


def test_wraps_to_the_width_of_the_terminal(tmp_path: Path) -> None:
    """On a terminal, findings are wrapped and indented; in a file or a pipe, a finding is one line."""
    _, shown = commands.on_a_terminal("doctor", cwd=tmp_path, COLUMNS="60", NO_COLOR="1")
    narrow = shown.splitlines()
    assert max(map(len, narrow)) <= 60
    assert narrow[1].startswith(" " * 14)
    wide = doctor(cwd=tmp_path, COLUMNS="60", **commands.SILENT).stdout.splitlines()
    assert len(wide[0]) > 80
