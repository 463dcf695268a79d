"""Colours, figure defaults and number formats of the report page."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from torchotel._utils.text import cut, duration, rate

# Okabe and Ito's palette, which is safe for colour-blind readers; a phase has the same colour on the whole page.
PHASE_COLOURS = {
    "between": "#CC79A7",
    "data": "#E69F00",
    "forward": "#0072B2",
    "backward": "#D55E00",
    "optimizer": "#009E73",
    "other": "#A6ACB3",
}
INK, FAINT, LINE, PAPER = "#1F2933", "#616E7C", "#E4E7EB", "#FFFFFF"
ON_DARK, ON_LIGHT = "#FEFEFE", "#14202B"
"""Text colours on a coloured surface. In dark mode, the page's script replaces the four colours above only."""
ALARM = "#B3123D"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Section:
    """One section of the page: heading, introduction and figure."""

    id: str
    title: str
    lead: str
    """HTML: describes the figure. Names from the run are already escaped, since the template inserts it unchanged."""
    figure: go.Figure
    after: str = ""
    """HTML below the figure, already escaped."""


def figure(traces: Sequence[Any], height: int, **layout: Any) -> go.Figure:
    """Return a figure with the page's defaults.

    Args:
        traces: plotly traces.
        height: Pixels.
        **layout: Attributes of plotly's layout, which override the defaults.
    """
    result = go.Figure(traces)
    result.update_layout(
        template={"layout": {"xaxis": _AXIS, "yaxis": _AXIS, "colorway": [INK]}},
        height=height,
        margin={"l": 64, "r": 24, "t": 40, "b": 48},
        font={"family": FONT, "size": 12, "color": INK},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        hoverlabel={"font": {"family": FONT, "size": 12}, "align": "left"},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
    )
    result.update_layout(**layout)
    return result


_AXIS = {
    "gridcolor": LINE,
    "linecolor": LINE,
    "zeroline": False,
    "ticks": "outside",
    "tickcolor": LINE,
    "tickfont": {"color": FAINT},
    "title": {"font": {"color": FAINT}},
    "automargin": True,
}


def shade(colour: str, strength: float) -> str:
    """Return a translucent colour: strength 0 is a faint tint, 1 the full colour."""
    red, green, blue = _parts(colour)
    return f"rgba({red},{green},{blue},{_share(strength):.3g})"


def ink_on(colour: str, strength: float) -> str:
    """Return the text colour with the better contrast on a shade; INK, which dark mode replaces, on tints only."""
    share = _share(strength)
    light = _luminance([255 - (255 - part) * share for part in _parts(colour)])
    if 1.05 / (light + 0.05) > (light + 0.05) / (_luminance(_parts(INK)) + 0.05):
        return ON_DARK
    return ON_LIGHT if share == 1 else INK


def _share(strength: float) -> float:
    return 0.12 + 0.88 * min(1.0, max(0.0, strength))


def _parts(colour: str) -> Sequence[int]:
    return [int(colour[index : index + 2], 16) for index in (1, 3, 5)]


def _luminance(parts: Sequence[float]) -> float:
    """Return the relative luminance by WCAG 2.2 (https://www.w3.org/TR/WCAG22/#dfn-relative-luminance)."""
    # The constants are WCAG's.
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts]  # noqa: PLR2004 - WCAG's constants
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


_MAX_TEXT = 60
_SECOND_S = 1.0


def escaped(text: object, limit: int = _MAX_TEXT) -> str:
    """Cut and escape a text from the run, for HTML and for plotly, which reads tags and TeX in its labels."""
    return html.escape(cut(text, limit), quote=False).replace("$", "&#36;")


def sentence(text: str) -> str:
    """Return a text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def scale(seconds: float) -> tuple[str, float]:
    """Return the axis unit for a typical value, and the number of these units in a second."""
    for record, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= _SECOND_S:
            return record, factor
    return "ms", 1e3


def percent(share: float) -> str:
    """Return a share in percent, with two significant digits."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"  # noqa: PLR2004 # two digits in either case


def count(number: float, noun: str) -> str:
    """Return a count with its noun, in the plural if needed."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def count_in_words(number: float) -> str:
    """Return a large count in words: 25.6 million."""
    for record, scale_ in (("billion", 1e9), ("million", 1e6)):
        if number >= scale_:
            return f"{number / scale_:.3g} {record}"
    return f"{number:,}"


def rounded(value: float) -> float | None:
    """Round to four significant digits, which halves the page's size; None for a number that JSON cannot hold."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


__all__ = ["count", "count_in_words", "cut", "duration", "escaped", "percent", "rate", "rounded", "scale", "sentence"]
