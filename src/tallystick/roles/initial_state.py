"""Where a run begins: whether the first state's optimizer, scheduler, frozen tensors and buffers are the job's own.

A state says with which numbers the steps after it were computed. So repeating these steps shows nothing of where the numbers
come from; only the job, built anew, does. What the job does not train is part of the job (class weights, masks, frozen
matrices): it is the job's to within the last bits of another machine's functions. That a job draws the same weights to train
everywhere, nobody promises: how many are others is counted. But ones and zeros are ones and zeros everywhere, trained or not:
an optimizer may hold a mask at no rate, or with no gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from tallystick.commit.encoding import parse_canonical_json, parse_hex_float
from tallystick.commit.state import Entry
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import state_entries
from tallystick.run.transcript import CURSOR

SETTINGS = ("document/optimizer", "document/scheduler")  # entries of a state that a program may still set
DOCUMENTS = (*SETTINGS, CURSOR)
MODULES = ("model/", "extra/")
OPTIMIZER = "optimizer/"  # entries of tensors that the optimizer holds: momentum can carry weights anywhere
CHUNK = 1 << 16  # elements compared at a time
BUILT_ROUNDING = (
    2.0**-16
)  # of a tensor's largest element: what sines, exponentials and normal numbers differ by elsewhere
LARGEST_COMPARED = (
    16.0  # and of an element's own size above that: beside the -1e9 of a mask zeros are not free
)
SETTING_ROUNDING = 2.0**-40  # of a hyper-parameter: schedules are computed by the machine's own library


def settings_of(session: Session) -> dict[str, Entry]:
    """Return what the session's state holds of optimizer and scheduler, by entry name."""
    return {
        entry.name: Entry(entry.name, entry.dtype, entry.shape, bytes(entry.data))
        for entry in state_entries(session)
        if entry.name in DOCUMENTS or entry.name.startswith(OPTIMIZER)
    }


@dataclass(frozen=True)
class Built:
    """One tensor as the job builds it here.

    Attributes:
        digest: of its bytes.
        values: all elements, flat, of a tensor that the job does not train (one not looked at may be anything); none of others.
        elements: how many.
        trained: whether the job trains it.
        exact: whether no machine makes other numbers of it.
    """

    digest: bytes
    values: np.ndarray
    elements: int
    trained: bool
    exact: bool


@dataclass(frozen=True)
class Beginning:
    """What of the first state's weights is the job's own.

    Attributes:
        trained, other: parameters that the job trains, and those of them in tensors that begin with other bits than here.
        others: these tensors, by name.
        rounded, rounded_parameters: tensors that the job does not train and that differ in their last bits, by name, and
            their elements.
        changed: the first one that differs by more, or is missing, and how.
    """

    trained: int = 0
    other: int = 0
    rounded: tuple[str, ...] = ()
    changed: str | None = None
    others: tuple[str, ...] = ()
    rounded_parameters: int = 0


def built_of(session: Session) -> dict[str, Built]:
    """Return the tensors of model and further modules as the session has them before its first step, by entry name."""
    trained = {f"model/{name}" for name, _ in session.parameters}
    found: dict[str, Built] = {}
    for entry in state_entries(session):
        if entry.name.startswith(MODULES):
            values, is_trained = _values(entry), entry.name in trained
            kept = values[:0] if is_trained else values
            found[entry.name] = Built(
                hashlib.sha256(entry.data).digest(), kept.copy(), values.size, is_trained, is_exact(values)
            )
    return found


def compare_beginning(built: Mapping[str, Built], stated: Mapping[str, Entry]) -> Beginning:
    """Return how the ``stated`` first state's weights compare with those that the job builds here."""
    trained = other = rounded_parameters = 0
    others: list[str] = []
    rounded: list[str] = []
    changed: str | None = None
    for name, own in built.items():
        theirs = stated.get(name)
        trained += own.elements * own.trained
        if theirs is not None and hashlib.sha256(theirs.data).digest() == own.digest:
            continue
        if own.trained and not own.exact:
            other += own.elements
            others.append(name)
        elif theirs is not None and _is_rounding(own, theirs):
            rounded.append(name)
            rounded_parameters += own.elements
        elif changed is None:
            why = "it is of ones, zeros or the like" if own.trained else "the job does not train it"
            changed = f"{name}: {why}, and it is not what the job builds"
    return Beginning(trained, other, tuple(rounded), changed, tuple(others), rounded_parameters)


def _is_rounding(own: Built, theirs: Entry) -> bool:
    values = _values(theirs)
    if values.size != own.elements or theirs.dtype not in ("F32", "F64"):
        return False
    if own.exact:
        return False
    largest = max(_largest(own.values[at : at + CHUNK]) for at in range(0, max(values.size, 1), CHUNK))
    for at in range(0, values.size, CHUNK):
        a, b = (x[at : at + CHUNK].astype(np.float64) for x in (own.values, values))
        same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities of masks among them
        with np.errstate(invalid="ignore"):
            size = np.maximum(np.where(np.isfinite(a), np.abs(a), 0.0), min(largest, LARGEST_COMPARED))
            if not (same | (np.abs(a - b) <= BUILT_ROUNDING * size)).all():
                return False
    return True


def is_exact(values: np.ndarray) -> bool:
    """Whether it is a mask, weights of 0 and 1, counts: no library rounds them."""
    return all(_are_exact(values[at : at + CHUNK]) for at in range(0, values.size, CHUNK))


def _are_exact(x: np.ndarray) -> bool:
    """Whether all numbers are multiples of 2^-11 below 2^11, infinities and NaN aside: made without an error anywhere."""
    finite = x[np.isfinite(x)].astype(np.float64)
    scaled = finite * 2.0**11
    return bool(((scaled == np.rint(scaled)) & (np.abs(finite) <= 2.0**11)).all())


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _values(entry: Entry) -> np.ndarray:
    kind = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2"}.get(entry.dtype, "u1")
    return np.frombuffer(entry.data, dtype=kind)


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
        excused = parent if name != CURSOR else None  # a continued run begins at a step 0 of its own
        if excused is not None and not list(
            _differences(_document(excused, name), _document(stated, name), name)
        ):
            continue
        found += own_ones
    for name in sorted(name for name in {**own, **stated} if name.startswith(OPTIMIZER)):
        before = None if parent is None else parent.get(name)
        if name not in stated:
            found.append(OtherSetting(f"{name}: the job's optimizer begins with it", is_number=False))
        elif _is_same(stated[name], before) or _is_same(stated[name], own.get(name)):
            continue
        elif name in own:
            found.append(OtherSetting(f"{name}: not what the job's optimizer begins with", is_number=False))
        else:
            whose = "the job's optimizer has none" if before is None else "and not as in the parent run"
            text = f"{name}: the optimizer has been at work before, {whose}"
            found.append(OtherSetting(text, is_number=False))
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
