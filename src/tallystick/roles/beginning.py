"""Where a run begins: whether the first state's optimizer and scheduler are the job's own.

A state says with which numbers the steps after it were computed. So repeating these steps shows nothing of where the numbers
come from; only the job, built anew, does. Weights are not compared: that a job draws the same ones everywhere, nobody promises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from tallystick.commit.encoding import parse_canonical_json, parse_hex_float
from tallystick.commit.state import Entry
from tallystick.execution.session import Session
from tallystick.execution.snapshot import state_entries

DOCUMENTS = ("document/optimizer", "document/scheduler")
OPTIMIZER = "optimizer/"  # entries of tensors that the optimizer holds: momentum can carry weights anywhere
SETTING_ROUNDING = 2.0**-40  # of a hyper-parameter: schedules are computed by the machine's own library


def settings_of(session: Session) -> dict[str, Entry]:
    """Return what the session's state holds of optimizer and scheduler, by entry name."""
    return {
        entry.name: Entry(entry.name, entry.dtype, entry.shape, bytes(entry.data))
        for entry in state_entries(session)
        if entry.name in DOCUMENTS or entry.name.startswith(OPTIMIZER)
    }


@dataclass(frozen=True)
class OtherSetting:
    """Where two documents of settings part.

    Attributes:
        text: what is stated and what the job has.
        is_number: whether both state one number, and not the same. Anything else (a switch, an option that one side lacks) may
            come of another version of torch or another device, and accuses nobody.
    """

    text: str
    is_number: bool

    def __str__(self) -> str:
        return self.text


def find_other_setting(
    own: Mapping[str, Entry], stated: Mapping[str, Entry], parent: Mapping[str, Entry] | None = None
) -> OtherSetting | None:
    """Return the hyper-parameter of the ``stated`` state that is neither the job's ``own`` nor, if given, the parent's.

    The first one that is a number, else the first of any kind. Tensors of an optimizer that has not begun by the job's own
    account must be the parent's to the bit.

    Raises:
        InvalidInput: a document is malformed.
    """
    found: list[OtherSetting] = []
    for name in DOCUMENTS:
        own_ones = list(_differences(_document(own, name), _document(stated, name), name.partition("/")[2]))
        if parent is not None and not list(
            _differences(_document(parent, name), _document(stated, name), name)
        ):
            continue
        found += own_ones
    for name in sorted(stated):
        before = None if parent is None else parent.get(name)
        if not name.startswith(OPTIMIZER) or name in own or _is_same(stated[name], before):
            continue
        whose = "the job's optimizer has none" if before is None else "and not as in the parent run"
        found.append(OtherSetting(f"{name}: the optimizer has been at work before, {whose}", is_number=False))
        break
    return next((each for each in found if each.is_number), found[0] if found else None)


def _is_same(one: Entry, other: Entry | None) -> bool:
    return other is not None and (one.dtype, one.shape, bytes(one.data)) == (
        other.dtype, other.shape, bytes(other.data),
    )  # fmt: skip


def _document(entries: Mapping[str, Entry], name: str) -> object:
    entry = entries.get(name)
    return None if entry is None else parse_canonical_json(bytes(entry.data), what=name, limit=1 << 26)


def _differences(own: object, stated: object, where: str) -> Iterator[OtherSetting]:
    """Yield the places where two documents part; floats may differ in their last bits (vector libraries)."""
    mine, theirs = _number(own, where), _number(stated, where)
    if mine is not None and theirs is not None:
        # 0 for 0.0 may come of another version of torch; another number, of whatever type, cannot.
        alike = type(mine) is type(theirs)
        if mine != theirs and not _are_near(mine, theirs):
            yield OtherSetting(f"{where} is {theirs!r}, the job's own is {mine!r}", is_number=True)
        elif not alike:
            yield OtherSetting(f"{where} is {theirs!r}, the job's own is {mine!r}", is_number=False)
        return
    match own, stated:
        case dict(), dict():
            pairs = cast("tuple[dict[str, object], dict[str, object]]", (own, stated))
            if pairs[0].keys() != pairs[1].keys():
                has, lacks = (", ".join(sorted(pair)) for pair in reversed(pairs))
                yield OtherSetting(f"{where} has {has}, the job's own {lacks}", is_number=False)
            for key in sorted(pairs[0].keys() & pairs[1].keys()):
                yield from _differences(pairs[0][key], pairs[1][key], where)
        case list(), list():
            lists = cast("tuple[list[object], list[object]]", (own, stated))
            if len(lists[0]) != len(lists[1]):
                text = f"{where} has {len(lists[1])} values, the job's own {len(lists[0])}"
                yield OtherSetting(text, is_number=False)
                return
            # A mapping is a list of [key, value]; the key says more than the place.
            for a, b in zip(*lists, strict=True):
                yield from _differences(a, b, _named(where, a))
        case _:
            if own != stated:
                yield OtherSetting(f"{where} is {stated!r}, the job's own is {own!r}", is_number=False)


def _number(value: object, where: str) -> float | int | None:
    match value:
        case int() if type(value) is int:
            return value
        case {"float": str(text), **others} if not others:
            return parse_hex_float(text, what=where)
        case _:
            return None


def _are_near(own: float, stated: float) -> bool:
    """Whether two numbers are one setting: whole ones to their last digit, an infinity or NaN to nothing finite."""
    if isinstance(own, int) or isinstance(stated, int) or not (math.isfinite(own) and math.isfinite(stated)):
        return own == stated or (math.isnan(own) and math.isnan(stated))
    return abs(own - stated) <= SETTING_ROUNDING * max(abs(own), abs(stated))


def _named(where: str, item: object) -> str:
    match item:
        case [str(key), _]:
            return f"{where.partition(':')[0]}: {key}"
        case _:
            return where
