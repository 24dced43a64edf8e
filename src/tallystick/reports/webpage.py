"""One self-contained HTML page: headings, paragraphs, tables and drawings; no script, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from tallystick.reports.layout import escaped

STYLE = """
body{font:15px/1.5 Helvetica,Arial,sans-serif;color:#222;max-width:1180px;margin:2em auto;padding:0 1em}
h1{font-size:1.6em;margin-bottom:.2em}h2{font-size:1.2em;margin-top:2em}
table{border-collapse:collapse;margin:1em 0;font-size:14px}th,td{padding:.25em .7em;text-align:left;vertical-align:top}
th{border-bottom:2px solid #444}td{border-bottom:1px solid #ddd}
td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
tr.bad td{background:#fdeee6}.good{color:#00704f;font-weight:bold}.wrong{color:#b34700;font-weight:bold}
.wide{overflow-x:auto}p.quiet{color:#555}
@media print{body{margin:0;max-width:none}h2{page-break-after:avoid}table,svg{page-break-inside:avoid}}
"""


def paragraph(text: str, *, kind: str = "") -> str:
    """Return a paragraph; ``kind`` is good, wrong or quiet."""
    return f'<p class="{kind}">{escaped(text)}</p>' if kind else f"<p>{escaped(text)}</p>"


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f"<h2>{escaped(text)}</h2>"


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    bad: Sequence[int] = (),
) -> str:
    """Return a table; columns ``numbers`` are aligned right and rows ``bad`` are shaded."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="n">{escaped(text)}</{tag}>'
            if at in numbers
            else f"<{tag}>{escaped(text)}</{tag}>"
            for at, text in enumerate(texts)
        )

    lines = [f"<tr>{cells('th', columns)}</tr>"]
    lines += [
        f"<tr{' class=' + chr(34) + 'bad' + chr(34) if at in bad else ''}>{cells('td', row)}</tr>"
        for at, row in enumerate(rows)
    ]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def drawing(svg: str) -> str:
    """Return an SVG document made by this package as a part of the page."""
    return f'<div class="wide">{svg}</div>'


def webpage(title: str, parts: Sequence[str]) -> str:
    """Return the whole page; ``parts`` are what the functions above return."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head><body><h1>{escaped(title)}</h1>"
    )
    return "\n".join([head, *parts, "</body></html>"]) + "\n"
