"""A trace on standard output is a few lines that people can read."""

import io

import pytest
from support.otlp_traces import T0, flat, rich

import torchotel
from torchotel.exporters.base import ExportCounts, ExportStats
from torchotel.exporters.console import ConsoleExporter
from torchotel.tracing.span import Span, SpanTemplate, Trace


class Terminal(io.StringIO):
    """Remembers each write."""

    encoding = "utf-8"

    def __init__(self, *, tty: bool = False) -> None:
        super().__init__()
        self.writes: list[str] = []
        self._tty = tty

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)

    def isatty(self) -> bool:
        return self._tty


def printed(trace: Trace, monkeypatch: pytest.MonkeyPatch, *, tty: bool = False) -> tuple[str, ExportCounts]:
    terminal, stats = Terminal(tty=tty), ExportStats()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", terminal)
        ConsoleExporter(stats).export(trace)
    (text,) = terminal.writes
    return text, stats.read()


def test_prints_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a span, in the order of their start, children below their parents; a terminal could obey no name."""
    text, counts = printed(rich(), monkeypatch)
    root, *calls = text.splitlines()
    assert root == (
        "   900 ns  torch.step  low=-1  lowest=-9223372036854775808  big=9223372036854775807  "
        "beyond=9223372036854775808  torch.step.number=300  trace_id=00000000000000010000000000000001  torch.gradient"
    )
    assert calls == [
        "    10 ns    forward layer1.conv  8x3x224x224,8 → none",
        "     1 ns      forward layer1.conv  8x3x224x224,8 → none  ERROR ValueError: no ? \U0001f525 ??",
        "     1 ns      forward layer1.conv  8x3x224x224,8 → none  =  zero=0  minus=-0  lone ?=ß",
    ]
    assert counts == ExportCounts(4, 0, {})


def test_writes_once_and_clears_an_unfinished_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar on the same terminal is neither cut in two nor left before our first line."""
    assert printed(flat(50), monkeypatch, tty=True)[0].startswith("\r\x1b[K")
    assert not printed(flat(50), monkeypatch, tty=False)[0].startswith("\r")


def test_prints_what_has_no_parent_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root below a span of another process is printed as a root."""
    template = SpanTemplate("torch.evaluation", {})
    text, _ = printed(Trace(7, [Span(template, 2, 99, T0, T0 + 10**9)], {}, remote_parent=True), monkeypatch)
    assert text.startswith("  1.000 s  torch.evaluation  trace_id=")


def test_a_closed_output_harms_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What can't be printed is counted, and told once."""
    closed, stats = io.StringIO(), ExportStats()
    closed.close()
    exporter = ConsoleExporter(stats)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", closed)
        exporter.export(flat(5))
        exporter.export(flat(5))
    assert stats.read() == ExportCounts(0, 10, {"ValueError": 2})
    assert len(caplog.records) == 1


def test_is_what_the_setting_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Under `traces_exporter="console"` a step is printed, and sent nowhere."""
    with torchotel.instrument(traces_exporter="console", metrics_exporter="none") as handle, torchotel.step():
        pass
    stats = handle.stats()
    assert stats["spans_exported"] == stats["spans_recorded"] == len(capsys.readouterr().out.splitlines())
