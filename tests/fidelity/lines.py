"""A subject checked and timed, and its line of the table made."""

import warnings
from dataclasses import replace
from functools import cache

import torch

from fidelity.all_subjects import subjects
from fidelity.checked import Row, check
from fidelity.subjects import Subject
from fidelity.table import Key, Line, failed
from fidelity.training import train
from fidelity.truth import WORST_END_US, Truth, measure_undisturbed

NOT_TRUE = "not true"
EXCLUDED = "excluded"
"""The subject does not run on the chosen device."""
NO_NUMBERS = "no numbers"
"""The subject runs on the meta device."""
UNREPEATABLE = "does not repeat itself"
"""Two trainings without torchotel differ, as on a GPU whose kernels add in any order."""


@cache
def known() -> dict[Key, Subject]:
    """Collect all subjects."""
    return {Key(subject.kind, subject.name): subject for subject in subjects()}


def line_of(key: Key, *, alone: bool = False, device: str = "cpu") -> Line:
    """Check a subject; one that raises has failed, and does not end the others.

    Args:
        key: Of the subject.
        alone: Whether no other program runs.
        device: Device of the subjects that compute numbers. A subject that raises there without torchotel is excluded.
    """
    warnings.simplefilter("ignore")  # the models' own
    torch.set_num_threads(1)
    try:
        subject = known()[key]
        if device != "cpu" and subject.device == "cpu":
            subject = replace(subject, device=device)
            torch.use_deterministic_algorithms(mode=True, warn_only=True)
            if not _trains(subject):
                return Line(*key, [], same=EXCLUDED)
        return _line(key, subject, alone=alone)
    except Exception as error:  # noqa: BLE001  # a model's own, or ours: it is told, and counted as wrong
        return failed(key, f"{type(error).__name__}: {error}".partition("\n")[0])


def _trains(subject: Subject) -> bool:
    try:
        train(subject)
    except (torch.AcceleratorError, torch.OutOfMemoryError):  # may be another subject's, so it is no reason to exclude
        raise
    except Exception:  # noqa: BLE001  # the subject's own code names another device
        return False
    return True


def disturbed(line: Line) -> bool:
    """Tell whether times are off by what other programs may have done."""
    return line.times == NOT_TRUE or (line.worst_end_us or 0) > WORST_END_US


def _line(key: Key, subject: Subject, *, alone: bool) -> Line:
    row = check(subject)
    timed = subject.timed and subject.device == "cpu" and subject.loop is None
    truth = measure_undisturbed(subject, alone=alone) if timed else Truth(None, None)
    faults = truth.faults(alone=alone)
    changed = row.changed if row.repeats or subject.device == "cpu" else []
    line = Line(
        *key,
        wrong=changed + row.faults + (row.norms.faults if row.norms is not None else []) + faults,
        calls=row.calls,
        spans=row.spans,
        same=_same(row),
        trace="right" if not row.faults else f"{len(row.faults)} faults",
        norm=max(row.norms) if row.norms is not None else None,
    )
    return _timed(line, truth)._replace(times=NOT_TRUE if faults else "true") if any(truth) else line


def _timed(line: Line, truth: Truth) -> Line:
    forward, backward = truth
    return line._replace(
        ahead_us=forward.end_us if forward is not None else None,
        ratio=backward.ratio if backward is not None else None,
        end_us=backward.end_us if backward is not None else None,
        worst_end_us=max(errors.worst_us for errors in truth if errors is not None),
    )


def _same(row: Row) -> str:
    if row.subject.device == "meta":
        return NO_NUMBERS
    if not row.changed:
        return "yes"
    return f"{len(row.changed)} differ" if row.repeats else UNREPEATABLE
