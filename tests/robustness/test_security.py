"""What comes from a stranger harms nobody who reads it, and what is the user's own reaches nobody else.

See docs/security.md, whose promises these are.
"""

import gzip
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs
from support import hostile_inputs
from support import run_folders as folders
from support.otlp_http_receiver import Answer, Receiver, receiver

import torchotel
from torchotel.cli import main
from torchotel.cli.doctor import show_finding
from torchotel.cli.terminal import Terminal
from torchotel.config.otlp_endpoint import OtlpEndpoint as Endpoint
from torchotel.doctor.result import warning
from torchotel.exporters.otlp.http import MAX_ANSWER_BYTES, HttpTransport

MOST_OUTPUT = 20_000
"""Characters that a command may print of a run of two layers, whatever they are called."""
COMMANDS = {
    "summary": ("summary", "{run}"),
    "diff": ("diff", "{run}", "{run}"),
    "report": ("report", "{run}", "-o", "page.html", "--force"),
    "chrome": ("export", "{run}", "--format", "chrome", "-o", "chrome.json", "--force"),
    "otlp": ("export", "{run}", "--format", "otlp", "-o", "otlp"),
    "hang": ("hang", "{run}"),
    "send": ("export", "{run}", "--to", "http://127.0.0.1:9"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(command: str, run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command on a run; an exception of ours would come out of it."""
    code = main([word.format(run=run) for word in COMMANDS[command]])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("kind", "name"), hostile_inputs.CASES)
def test_a_strangers_run_harms_nobody(
    kind: str, name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command shows it or says why not, in a bounded number of characters that no terminal obeys."""
    code, said = call(command, hostile_inputs.write(tmp_path / "run", kind, name), capsys)
    assert code in {0, 1, 2}
    assert said.replace("\n", "").isprintable()
    assert len(said) < MOST_OUTPUT
    for file in tmp_path.glob("*.json"):
        json.loads(file.read_bytes(), parse_constant=_refuse)
    for file in tmp_path.glob("otlp/*"):
        assert [json.loads(line, parse_constant=_refuse) for line in file.read_bytes().splitlines()]
    for file in tmp_path.glob("*.html"):
        page = file.read_text().replace(get_plotlyjs(), "")
        assert _scripts(page) == 2  # plotly's and ours
        assert not any(text in page for text in ("\x1b", "\x9b", "\u202e", "\x00"))


def _refuse(constant: str) -> None:
    pytest.fail(f"{constant} is no JSON")


def _scripts(page: str) -> int:
    """Count the scripts that a browser would run."""
    found = []

    class Scripts(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not any(name.startswith("on") for name, _ in attrs)
            if tag == "script" and dict(attrs).get("type") != "application/json":
                found.append(attrs)

    Scripts().feed(page)
    return len(found)


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"hang"}))  # which reads no traces
def test_a_hostile_folder_is_named_without_harm(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own name, and that of a file in it which cannot be read."""
    run = folders.net(tmp_path / "\x1b[2J\u202erun")
    (run / "trace-\x1b[2J.jsonl").write_text("x\nx\n")
    code, said = call(command, run, capsys)
    assert code == 2
    assert "line 1 is no JSON object" in said
    assert said.replace("\n", "").isprintable()


def test_a_run_json_that_never_ends_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe is left alone, and of a file no more is read than a description may have."""
    run = folders.net(tmp_path / "run")
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    assert call("summary", run, capsys)[0] == 0
    (run / "run.json").unlink()
    with (run / "run.json").open("wb") as file:
        file.truncate(2**40)  # a hole, which takes no room
    code, said = call("summary", run, capsys)
    assert (code, "run.json: has more than" in said) == (2, True)


def test_what_is_made_of_a_run_is_the_owners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pages and exports are closed to others whatever the umask allows, and no link is written through."""
    run = folders.net(tmp_path / "run")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("page.html", ".page.html.new", "chrome.json", ".chrome.json.new"):
        (tmp_path / name).symlink_to(victim)
    with _umask(0):
        for command in ("report", "chrome", "otlp"):
            assert call(command, run, capsys)[0] == 0
    made = [tmp_path / "page.html", tmp_path / "chrome.json", *(tmp_path / "otlp").iterdir()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o600] * 3
    assert stat.S_IMODE((tmp_path / "otlp").stat().st_mode) == 0o700
    assert victim.read_text() == "mine"


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_a_target_file_is_everybodys_and_follows_no_link(tmp_path: Path) -> None:
    """Prometheus is another user and has to read it; a link that somebody put in its place stays unwritten."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "targets"
    folder.mkdir()
    name = f"torchotel-{socket.gethostname()}-{os.getpid()}.json"
    (folder / name).symlink_to(victim)
    os.mkfifo(folder / f"torchotel-{socket.gethostname()}-1.json")  # reading it would wait for a writer
    with _umask(0o077), torchotel.instrument(traces_exporter="none", discovery_dir=folder) as handle:
        (target,) = json.loads((folder / name).read_text())
        assert target["targets"] == [f"127.0.0.1:{handle.prometheus_port}"]
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o644
    assert victim.read_text() == "mine"


def test_a_finding_is_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor quotes certificates, variables and processes of others."""
    show_finding(warning("tls", hostile_inputs.NAME, f"first {hostile_inputs.NAME}"), Terminal())
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_an_answer_is_no_bomb(server: Receiver) -> None:
    """It is asked for as it is, and no more than its beginning is read."""
    server.answers.append(Answer(200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(2**26))))
    server.answers.append(Answer(200, {}, bytes(2**22)))
    transport = HttpTransport(Endpoint(server.url), version="1")
    answers = [transport.ask(b"", 10) for _ in range(2)]
    transport.close()
    assert all(0 < len(answer.content) <= MAX_ANSWER_BYTES for answer in answers)
    assert server.requests[0].headers["Accept-Encoding"] == "identity"


def test_credentials_do_not_follow_a_redirect(server: Receiver) -> None:
    """Another host would get them."""
    with receiver() as other:
        server.answers.append(Answer(307, {"Location": other.url}))
        transport = HttpTransport(Endpoint(server.url, headers={"authorization": "Bearer x"}), version="1")
        assert transport.send(transport.pack(b""), 10).error_type == "307"
        transport.close()
        assert not other.requests
