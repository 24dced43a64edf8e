"""One page, on a terminal and as HTML: the same words on both, and nothing of a stranger's text is markup."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from tallystick.reports.layout import (
    BAD,
    GOOD,
    Card,
    DonePage,
    Heading,
    Lines,
    Page,
    Pictures,
    Rows,
    Table,
    Words,
    raised,
)
from tallystick.reports.webpage import html

HOSTILE = "<b>[red]x[/red]</b>\x1b[2J"
WHOLE = Page(
    HOSTILE,
    BAD,
    [
        Heading(HOSTILE, 3),
        Words(Text.assemble("said ", (HOSTILE, GOOD))),
        Lines(["  two", HOSTILE]),
        Rows([(HOSTILE, HOSTILE)]),
        Table(
            (HOSTILE, "only on a page"), [(HOSTILE, "much"), ("second", "more")], numbers=(1,), page_only=(1,)
        ),
        Card([Words(HOSTILE)]),
    ],
    HOSTILE,
    [Text(HOSTILE, style=GOOD)],
)


def shown(page: object) -> str:
    file = io.StringIO()
    Console(file=file, width=80).print(page)
    return file.getvalue()


def test_markup_and_control_characters_stay_text_on_both() -> None:
    page, lines = html(WHOLE), shown(WHOLE)

    assert "\x1b" not in page + lines
    assert "<b>" not in page
    assert page.count("&lt;b&gt;[red]x[/red]&lt;/b&gt;\\x1b[2J") == 12
    assert lines.count("<b>[red]x[/red]</b>\\x1b[2J") == 8
    assert '<span class="good">&lt;b&gt;' in page


def test_what_only_a_page_has_room_for_is_not_on_a_terminal() -> None:
    for text in ("only on a page", "much", "more"):
        assert text in html(WHOLE)
        assert text not in shown(WHOLE)
    assert shown(Pictures([])) == shown(Card([Words("x")])) == ""


def test_a_long_table_is_cut_on_a_terminal_and_folded_on_a_page() -> None:
    table = Table(("n",), [(f"row {n}",) for n in range(9)], things="row", most=7)

    assert "and 2 more rows; --json lists them" in shown(table)
    assert "row 7" not in shown(table)
    page = html(Page("h", "", [table]))
    assert "<details><summary>9 rows</summary>" in page
    assert "row 8" in page


def test_powers_are_raised_and_other_signs_are_not() -> None:
    assert raised("2^-4 to 10^3") == ["2", "-4", " to 10", "3", ""]
    assert raised("a^b 2^ ^3") == ["a^b 2^ ^3"]
    assert "2<sup>-4</sup>" in html(Page("2^-4", "", []))


def test_values_are_rows_where_no_rows_are_given() -> None:
    page = DonePage("done", {"signed_by": ["a", "b"], "bytes": 3})

    assert page.fields() == {"signed_by": ["a", "b"], "bytes": 3}
    assert "signed by a, b" in " ".join(shown(page).split())
