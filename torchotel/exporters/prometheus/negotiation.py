"""What a client takes, as its headers say (https://www.rfc-editor.org/rfc/rfc9110.html#section-12.5)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")


class _Range(NamedTuple):
    name: str
    parameters: Mapping[str, str]
    quality: float
    """From 0, which is a refusal, to 1."""

    def fits(self, name: str, version: str) -> bool:
        """Tell whether it has this name, and no other version."""
        return self.name == name and self.parameters.get("version", version) == version


def wants_openmetrics(accept: str) -> bool:
    """Tell whether OpenMetrics 1.0.0 is liked better than text, or as well and named; whoever likes neither gets text.

    Prometheus names several versions, and the one that we write with the highest quality.
    """
    ranges = list(_ranges(accept))
    openmetrics = _quality(ranges, "application/openmetrics-text", "1.0.0")
    text = _quality(ranges, "text/plain", "0.0.4")
    named = any(one.fits("application/openmetrics-text", "1.0.0") for one in ranges)
    return openmetrics > text or (named and openmetrics == text > 0)


def takes_gzip(accept_encoding: str) -> bool:
    """Tell whether gzip is named, or any encoding, and not refused."""
    ranges = {one.name: one.quality for one in _ranges(accept_encoding)}
    return ranges.get("gzip", ranges.get("*", 0.0)) > 0


def _ranges(header: str) -> Iterator[_Range]:
    for text in header.split(","):
        name, *rest = (part.strip() for part in text.lower().split(";"))
        parameters = {key.strip(): value.strip(' "') for key, _, value in (part.partition("=") for part in rest)}
        quality = parameters.get("q", "1")
        yield _Range(name, parameters, float(quality) if _QUALITY.fullmatch(quality) else 0.0)


def _quality(ranges: list[_Range], name: str, version: str) -> float:
    """Return what the most specific of the ranges that fit says; 0 where none does."""
    for wanted in (name, f"{name.partition('/')[0]}/*", "*/*"):
        qualities = [one.quality for one in ranges if one.fits(wanted, version)]
        if qualities:
            return max(qualities)
    return 0.0
