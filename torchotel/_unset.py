"""What stands for an argument that was left out."""

import enum
from typing import Final


class Unset(enum.Enum):
    """The type of UNSET."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET
"""The argument's variable is read, and only then comes its default."""
