"""Where a run begins: whether the first state's optimizer and scheduler are the job's own.

A state says with which numbers the steps after it were computed. So repeating these steps shows nothing of where the numbers
come from; only the job, built anew, does. Weights are not compared: that a job draws the same ones everywhere, nobody promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from tallystick.commit.encoding import parse_canonical_json, parse_hex_float
from tallystick.commit.state import Entry
from tallystick.execution.session import Session
from tallystick.execution.snapshot import state_entries

DOCUMENTS = ("document/optimizer", "document/scheduler")
SETTING_ROUNDING = 2.0**-40  # of a hyper-parameter: schedules are computed by the machine's own library


def settings_of(session: Session) -> dict[str, Entry]:
    """Return the documents of optimizer and scheduler in the session's state, by entry name."""
    return {
        entry.name: Entry(entry.name, entry.dtype, entry.shape, bytes(entry.data))
        for entry in state_entries(session)
        if entry.name in DOCUMENTS
    }


def find_other_setting(
    own: Mapping[str, Entry], stated: Mapping[str, Entry], parent: Mapping[str, Entry] | None = None
) -> str | None:
    """Return the first hyper-parameter of the ``stated`` state that is neither the job's ``own`` nor, if given, the parent's.

    Raises:
        InvalidInput: a document is malformed.
    """
    for name in DOCUMENTS:
        found = _first_other(_document(own, name), _document(stated, name), name.partition("/")[2])
        if found is not None and parent is not None:
            found = found and _first_other(_document(parent, name), _document(stated, name), "the parent's")
        if found is not None:
            return found
    return None


def _document(entries: Mapping[str, Entry], name: str) -> object:
    entry = entries.get(name)
    return None if entry is None else parse_canonical_json(bytes(entry.data), what=name, limit=1 << 26)


def _first_other(own: object, stated: object, where: str) -> str | None:
    """Return the first place where two documents part; floats may differ in their last bits (vector libraries)."""
    match own, stated:
        case {"float": str(a), **x}, {"float": str(b), **y} if not x and not y:
            mine, theirs = (parse_hex_float(text, what=where) for text in (a, b))
            same = mine == theirs or abs(mine - theirs) <= SETTING_ROUNDING * max(abs(mine), abs(theirs))
            return None if same else f"{where} is {theirs!r}, the job's own is {mine!r}"
        case dict(), dict():
            pairs = cast("tuple[dict[str, object], dict[str, object]]", (own, stated))
            if pairs[0].keys() != pairs[1].keys():
                return (
                    f"{where} has {', '.join(sorted(pairs[1]))}, the job's own {', '.join(sorted(pairs[0]))}"
                )
            rows = [(pairs[0][key], pairs[1][key], where) for key in sorted(pairs[0])]
        case list(), list():
            mine, theirs = cast("tuple[list[object], list[object]]", (own, stated))
            if len(mine) != len(theirs):
                return f"{where} has {len(theirs)} values, the job's own {len(mine)}"
            # A mapping is a list of [key, value]; the key says more than the place.
            rows = [(a, b, _named(where, a)) for a, b in zip(mine, theirs, strict=True)]
        case _:
            return None if own == stated else f"{where} is {stated!r}, the job's own is {own!r}"
    return next((found for a, b, place in rows if (found := _first_other(a, b, place)) is not None), None)


def _named(where: str, item: object) -> str:
    match item:
        case [str(key), _]:
            return f"{where.partition(':')[0]}: {key}"
        case _:
            return where
