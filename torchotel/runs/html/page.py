"""Render the report page: one file that opens without a network and runs no scripts but its own."""

import gzip
from base64 import b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib import resources

from jinja2 import Environment, StrictUndefined
from plotly.offline import get_plotlyjs

from torchotel.runs.html import (
    gradient_figure,
    logged_figure,
    module_figure,
    overview,
    rank_figure,
    step_figure,
    timeline_figure,
)
from torchotel.runs.html.data import Content
from torchotel.runs.html.style import PHASE_COLOURS, Section, cut, duration, percent

SECTIONS: Sequence[Callable[[Content], Section | None]] = (
    rank_figure.section,
    step_figure.section,
    module_figure.section,
    gradient_figure.section,
    timeline_figure.section,
    logged_figure.section,
)


def document(content: Content, on_section: Callable[[], object] = lambda: None) -> str:
    """Return the whole page as HTML; `drawn` is called after each of the SECTIONS, for a progress display."""
    sections = []
    for make in SECTIONS:
        section = make(content)
        if section is not None:
            sections.append(section)
        on_section()
    plotly, script = get_plotlyjs(), _resource("page.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"cut": cut, "duration": duration, "percent": percent}
    return environment.from_string(_resource("page.html")).render(
        overview.overview(content),
        policy=_policy([plotly, script]),
        style=_resource("page.css"),
        colours=PHASE_COLOURS,
        sections=sections,
        # plotly's script is most of the page; compression reduces it to a third.
        plotly=b64encode(gzip.compress(plotly.encode(), mtime=0)).decode(),
        script=script,
    )


def _policy(scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy that allows the page's own scripts only, in case any text was not escaped."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return resources.files(__package__ or "torchotel.runs.html").joinpath(name).read_text("utf-8")
