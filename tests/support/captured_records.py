"""What a capture hands over, with nothing behind it."""

from torchotel._records import Record, Recordable


class Handed(list[Recordable]):
    """Makes records when they are looked at, as the worker does: later, when the program has gone on."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[Record] = []

    @property
    def records(self) -> list[Record]:
        """Give those of all that was handed over until now."""
        self._records += [one.record() for one in self[len(self._records) :]]
        return self._records
