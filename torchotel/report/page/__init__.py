"""A run as one HTML page that opens anywhere; needs plotly."""

from torchotel.report.page.content import Content, gather
from torchotel.report.page.document import SECTIONS, document

__all__ = ["SECTIONS", "Content", "document", "gather"]
