"""A report as one HTML file: one template for all, everything escaped, nothing fetched and nothing run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from markupsafe import Markup

from tallystick.reports.chart import STYLE
from tallystick.reports.layout import BAD, GOOD, QUIET, UNSURE, Cell, Drawing, Page, pieces, printable, raised

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE = "page.html.j2"
CLASSES: Mapping[str, str] = {GOOD: "good", BAD: "bad", UNSURE: "unsure", QUIET: "quiet", "bold": "bold"}


def html(page: Page) -> str:
    """Return the page as one HTML file."""
    return _template().render(page=page, chart_style=Markup(STYLE))


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tallystick.reports", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"said": _said, "class": _class, "drawn": _drawn}
    return environment.get_template(TEMPLATE)


def _said(cell: Cell) -> Markup:
    """Return a cell's words, escaped, each run in the class of its style; of ``2^-4`` the exponent is raised."""
    return Markup("").join(
        Markup('<span class="{}">{}</span>').format(CLASSES[style], _raised(words))
        if style in CLASSES
        else _raised(words)
        for words, style in pieces(cell)
    )


def _raised(words: str) -> Markup:
    parts = enumerate(raised(printable(words)))
    return Markup("").join(Markup("<sup>{}</sup>").format(part) if at % 2 else part for at, part in parts)


def _class(style: str) -> str:
    return CLASSES.get(style, "")


def _drawn(chart: Drawing) -> Markup:
    """Return a chart, which escaped its texts when it was drawn."""
    return Markup(chart.svg())
