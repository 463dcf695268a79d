"""Put the page together: one file that opens without a network and runs no code but its own."""

import gzip
import html
from base64 import b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib import resources
from string import Template

from plotly.offline import get_plotlyjs

from torchotel.runs.html import gradient_figure, logged_figure, module_figure, overview, step_figure, timeline_figure
from torchotel.runs.html.data import Content
from torchotel.runs.html.style import PHASE_COLOURS, Section

SECTIONS: Sequence[Callable[[Content], Section | None]] = (
    step_figure.section,
    module_figure.section,
    gradient_figure.section,
    timeline_figure.section,
    logged_figure.section,
)


def document(content: Content, drawn: Callable[[], object] = lambda: None) -> str:
    """Write the whole page; `drawn` is called after each of the SECTIONS."""
    sections = []
    for make in SECTIONS:
        section = make(content)
        if section is not None:
            sections.append(section)
        drawn()
    plotly, script = get_plotlyjs(), _resource("page.js")
    return Template(_resource("page.html")).substitute(
        policy=_policy([plotly, script]),
        title=html.escape(f"{overview.title(content)} · torchotel"),
        heading=html.escape(overview.title(content)),
        about=overview.about(content),
        glance=overview.glance(content),
        style=_resource("page.css") + _phase_rules(),
        navigation="".join(f'<a href="#{section.id}">{section.title}</a>' for section in sections)
        + '<a href="#settings">Settings of the run</a>',
        sections="\n".join(map(_section, sections)),
        settings=overview.settings(content),
        # Plotly's code is nearly all of the page, and a third of its size if it is compressed.
        plotly=b64encode(gzip.compress(plotly.encode(), mtime=0)).decode(),
        script=script,
    )


def _section(section: Section) -> str:
    # plotly's JSON has no <, > or /, so nothing in it can end the element.
    figure = section.figure.to_json()
    return (
        f'<section id="{section.id}"><h2>{section.title}</h2><p>{section.lead}</p>'
        f'<div class="figure" id="figure-{section.id}" style="min-height:{section.figure.layout.height}px"></div>'
        f'<script type="application/json" data-figure="figure-{section.id}">{figure}</script>{section.after}</section>'
    )


def _policy(scripts: Sequence[str]) -> str:
    """Allow the page's own scripts and nothing else: what slipped through all escaping still could not run or load."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _phase_rules() -> str:
    return "".join(f".phase.{name}{{background:{colour}}}" for name, colour in PHASE_COLOURS.items())


def _resource(name: str) -> str:
    return resources.files(__package__ or "torchotel.runs.html").joinpath(name).read_text("utf-8")
