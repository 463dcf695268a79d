"""Twelve programs record what they recorded before, span by span."""

import pytest
from golden.programs import PROGRAMS
from golden.records import RECORDS, record

pytestmark = pytest.mark.program


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_records_what_it_did(name: str, worker: str) -> None:
    """Spans, lines of the run file and metrics are those of the record, but for times and ids."""
    assert record(name, TORCHOTEL_WORKER=worker) == (RECORDS / f"{name}.txt").read_text()
