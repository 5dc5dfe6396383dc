"""Settings of the documentation, which `make docs` builds: Sphinx, with MyST to read Markdown, and the theme furo."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "mpisgd"
author = "the authors of mpisgd"
copyright = "the authors of mpisgd, Apache-2.0"
release = re.search(r'__version__ = "(.*)"', (Path(__file__).parents[1] / "mpisgd" / "base" / "version.py").read_text())[1]

extensions = ["myst_parser"]
myst_heading_anchors = 3
smartquotes = False  # what stands there can be copied

html_theme = "furo"
html_title = "mpisgd"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
linkcheck_timeout = 10

_ROOT = Path(__file__).parents[1]


def _brought_in(app: Sphinx, docname: str, source: list[str]) -> None:
    """A page that is nothing but a link to a file outside docs/ becomes that file's text. Links lead to pages, where there are."""
    page = Path(app.env.doc2path(docname))
    text, begin = source[0], page.parent
    only = re.fullmatch(r"\[[^\]]*\]\((\.\./[^)]*\.md)\)\s*", text)
    if only is not None:
        outside = (page.parent / only[1]).resolve()
        app.env.note_dependency(str(outside))
        text, begin = outside.read_text(), outside.parent
    pages = {(_ROOT / path).resolve(): _ROOT / "docs" / name for path, name in _PAGES.items()}

    def linked(match: re.Match[str]) -> str:
        words, target, anchor = match[1], (begin / match[2]).resolve(), match[3] or ""
        if target.is_dir():  # nothing that a page could show
            return words
        target = pages.get(target, target)
        download = "path:" if target.suffix == ".md" and not target.is_relative_to(_ROOT / "docs") else ""
        return f"[{words}]({download}{os.path.relpath(target, page.parent)}{'' if download else anchor})"

    source[0] = re.sub(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)]*)?\)", linked, text)


#: Files outside docs/, and the pages that they become.
_PAGES = {
    "README.md": "index.md",
    "results/README.md": "explanation/results.md",
    "jobs/README.md": "howto/batch-scripts.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "results/faults/README.md": "explanation/fault-campaigns.md",
    "results/faults/bad_input.md": "reference/bad-input.md",
    "results/bench/NOTES.md": "explanation/bench-notes.md",
}


def setup(app: Sphinx) -> None:
    app.connect("source-read", _brought_in)
