"""Render a run as one self-contained HTML page; needs plotly and Jinja2."""

from torchotel.runs.html.data import Content, gather
from torchotel.runs.html.page import SECTIONS, document

__all__ = ["SECTIONS", "Content", "document", "gather"]
