"""The processes that check subjects."""

import os

from fidelity.table import Key, Line, failed
from fidelity.workers import lines


def line_of(key: Key) -> Line:
    """Stand for a check; one ends its process."""
    if key.name == "ends":
        os._exit(1)
    return Line(*key, wrong=[str(os.getpid())])


def test_one_that_ends_its_process_is_told_and_the_others_go_on() -> None:
    """Each subject has its line, wherever it was checked."""
    keys = [Key("kind", name) for name in ("one", "ends", "two", "three")]
    found = {line.key: line for line in lines(keys, line_of, 2)}
    assert found.keys() == set(keys)
    assert found[keys[1]] == failed(keys[1], "its process ended")
    assert str(os.getpid()) not in {said for line in found.values() for said in line.wrong}
