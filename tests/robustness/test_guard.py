"""The guard: what it takes, what it says, when it gives up; and warnings that are logged once."""

import logging
import threading

import pytest

from torchotel._utils.faults import Guard, Warn


def _fail(guard: Guard, times: int = 1) -> None:
    for _ in range(times):
        try:
            _ = 1 // 0
        except ZeroDivisionError:
            guard.fault()


def test_logs_the_first_fault_with_its_traceback_and_counts_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = Guard("forward capture")
    _fail(guard, 3)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("torchotel", logging.ERROR)
    assert "forward capture" in record.getMessage()
    assert "ZeroDivisionError: " in record.getMessage()
    assert guard.faults == 3
    assert not guard.is_off


def test_switches_the_part_off_once_at_the_tenth_fault(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    guard = Guard("paths", lambda: calls.append(1))
    _fail(guard, 9)
    assert not calls
    _fail(guard, 5)
    assert calls == [1]
    assert guard.is_off
    assert "paths switched off after 10 internal errors" in caplog.text


def test_wraps_a_cold_callback() -> None:
    guard = Guard("paths")

    @guard.guarded
    def half(number: int) -> int:
        """Halve it."""
        if number % 2:
            raise ValueError(number)
        return number // 2

    assert half(4) == 2
    assert half(3) is None
    assert (guard.faults, half.__doc__) == (1, "Halve it.")


def test_lets_a_keyboard_interrupt_pass() -> None:
    guard = Guard("paths")

    @guard.guarded
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert guard.faults == 0


def test_survives_a_failing_callback_and_a_failing_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(logging.getLogger("torchotel"), "error", fail)
    guard = Guard("paths", fail, limit=1)
    _fail(guard, 2)
    assert guard.is_off


def test_survives_faults_while_a_fault_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("paths")

    class Reentrant(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _fail(guard)

    handler = Reentrant()
    logging.getLogger("torchotel").addHandler(handler)
    try:
        _fail(guard)
    finally:
        logging.getLogger("torchotel").removeHandler(handler)
    assert guard.faults == 2
    assert len(caplog.records) == 1


def test_counts_faults_of_all_threads() -> None:
    calls: list[int] = []
    guard = Guard("paths", lambda: calls.append(1))
    threads = [threading.Thread(target=_fail, args=(guard, 50)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert guard.faults == 200
    assert calls == [1]


def test_warns_of_each_problem_once(caplog: pytest.LogCaptureFixture) -> None:
    warn = Warn()
    assert [warn("%d is too much", 5), warn("%d is too much", 6), warn("%s", "b", key="b")] == [True, False, True]
    assert not warn("%s", "another text", key="b")
    assert [record.getMessage() for record in caplog.records] == ["5 is too much", "b"]
    warn.forget()
    assert warn("%d is too much", 7)


def test_warns_again_after_the_quiet_time(caplog: pytest.LogCaptureFixture) -> None:
    warn = Warn(quiet_s=0.0)
    assert [warn("no answer"), warn("no answer")] == [True, True]
    assert len(caplog.records) == 2


def test_logs_an_error_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        _ = 1 // 0
    assert Warn()("could not divide", error=raised.value)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "ZeroDivisionError" in caplog.text


def test_one_of_many_threads_warns(caplog: pytest.LogCaptureFixture) -> None:
    warn, logged = Warn(), list[bool]()
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        logged.append(warn("from any thread"))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(logged) == len(caplog.records) == 1
