"""The figures of the page about sizes, by the names of its program."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"


def figures() -> dict[str, Any]:
    """Run the program of the page and return its names."""
    (code,) = re.findall(r'```python title="sizing.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "sizing"}
    exec(code, names)  # noqa: S102  # our own page
    return names
