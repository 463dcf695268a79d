"""No test leaves a sender's thread behind."""

from collections.abc import Iterator

import pytest
from receiver import Receiver, receiver
from senders import sender_threads


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as running:
        yield running


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not sender_threads()
