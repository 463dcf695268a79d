"""Twelve programs record what they recorded before, span by span."""

import pytest
from golden.programs import PROGRAMS
from golden.records import RECORDS, record

pytestmark = pytest.mark.program


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_records_what_it_did(name: str, worker: str) -> None:
    """Spans, lines of the run file and metrics are those of the record, but for times and ids.

    Only a companion process can see a stall.
    """
    found = record(name, TORCHOTEL_WORKER=worker)
    if worker == "process":
        assert "\ntorch_run_stalled 0.0\n" in found
        found = "".join(line for line in found.splitlines(keepends=True) if "torch_run_stalled" not in line)
    assert found == (RECORDS / f"{name}.txt").read_text()
