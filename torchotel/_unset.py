"""What stands for an argument that was left out."""


class Unset:
    """The type of UNSET."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"  # copies are the same one


UNSET = Unset()
"""The argument's variable is read, and only then comes its default."""
