"""Programs, servers, receivers and recorded runs that tests share."""

from pathlib import Path

PROGRAMS = Path(__file__).parent
"""The folder of the programs that tests start by their file."""
