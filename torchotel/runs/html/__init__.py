"""A run as one HTML page that opens anywhere; needs plotly."""

from torchotel.runs.html.data import Content, gather
from torchotel.runs.html.page import SECTIONS, document

__all__ = ["SECTIONS", "Content", "document", "gather"]
