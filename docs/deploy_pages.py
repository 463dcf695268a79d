"""Add the READMEs of `deploy/` to the site. mkdocs runs this file as a hook.

The links in these files, and the links to them, are relative to the repository. On the site, links are relative to
`docs/`.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_PAGES = ("deploy/README.md", "deploy/kubernetes/README.md")
_LINK = re.compile(r"(?<=\]\()\.\./[^)#\s]+")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are outside of `docs/`."""
    for path in _PAGES:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace links between `docs/` and `deploy/` by links of the site."""
    uri = page.file.src_uri
    folder = posixpath.dirname(uri if uri in _PAGES else f"docs/{uri}")

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[0]))
        return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(uri))

    return _LINK.sub(on_site, markdown)
