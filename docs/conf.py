"""The site: every Markdown page of docs/ and spec/, built by Sphinx and MyST, read without a network.

The source is the repository itself, so a link between pages is the same in the repository and on the site. ``make docs`` builds
it; ``make check-docs`` builds it strictly, so that a link or a heading that does not exist ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[1]
_version = re.search(
    r'__version__ = "(.+?)"', (ROOT / "src/tallystick/version.py").read_text(encoding="utf-8")
)
assert _version is not None

project = "Tallystick"
author = "The Tallystick project"
project_copyright = "The Tallystick project; Apache-2.0"
release = version = _version[1]

root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/*/*.md",
    "spec/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/README.md",
    "attacks/README.md",
    "reader/README.md",
]
exclude_patterns = [
    "docs/commands.in.md",
    ".venv",
    "build",
    "vectors",
    "tests",
    "src",
    ".git",
    ".cache",
    "fuzz",
]
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # a page may begin its headings where it likes
nitpicky = True
smartquotes = False

html_theme = "furo"
html_title = "Tallystick"
html_static_path = ["site"]
html_css_files = ["tallystick.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_permalinks_icon = "#"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options = {"navigation_with_keys": False, "top_of_page_buttons": []}


def _show_folders(app: Any, doctree: Any) -> None:
    """Leave the text alone of a link to a folder of the repository, which the site does not have."""
    page = Path(app.env.doc2path(app.env.docname)).parent
    for link in list(doctree.findall(addnodes.pending_xref)):
        target = str(link.get("reftarget", "")).partition("#")[0]
        if target and (page / target).is_dir():
            link.replace_self(link.children)


def _lead_to_the_first_page(app: Any, problem: Exception | None) -> None:
    """Write the page that a reader opens in the site's folder."""
    if problem is None and app.builder.format == "html":
        head = '<!doctype html><meta charset="utf-8"><title>Tallystick</title>'
        lead = '<meta http-equiv="refresh" content="0; url=docs/index.html">'
        text = '<p><a href="docs/index.html">Tallystick</a></p>'
        Path(app.outdir, "index.html").write_text(f"{head}\n{lead}\n{text}\n", encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Register these with Sphinx."""
    app.connect("doctree-read", _show_folders)
    app.add_lexer("hex", TextLexer)
    app.connect("build-finished", _lead_to_the_first_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
