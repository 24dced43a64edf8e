"""Moves of level three as JSON: what a record holds, what a party signs, and the readers both share (spec/dispute.md 5, 8).

One move has one form, so the digest of its canonical JSON names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, parse_hex
from tallystick.dispute.bisection import Claim
from tallystick.dispute.operator_game import (
    SENDER,
    Answered,
    Committed,
    Declined,
    Handed,
    Move,
    Opened,
    Pointed,
    Revealed,
)
from tallystick.dispute.terms import PARTIES, Party
from tallystick.errors import InvalidInput


def bytes_of(text: str, what: str) -> bytes:
    """Return the bytes that ``text`` writes in hexadecimal."""
    return parse_hex(text, n_bytes=len(text) // 2, what=f"dispute: {what}")


def hash_in(text: object, what: str) -> bytes:
    """Return 32 bytes, written in hexadecimal."""
    if not isinstance(text, str):
        raise InvalidInput(f"dispute: {what} must be a hash")
    return parse_hex(text, n_bytes=HASH_BYTES, what=f"dispute: {what}")


def party_in(text: object, what: str = "dispute") -> Party:
    """Return one of the two parties."""
    if text not in PARTIES:
        raise InvalidInput(f"{what}: {str(text)[:40]!r} is no party")
    return text


def whole_in(value: object, what: str) -> int:
    """Return a whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"dispute: {what} must be a whole number")
    return value


def items_in(value: object, what: str, count: int | None = None) -> list[object]:
    """Return a list, of ``count`` items if that is given."""
    if not isinstance(value, list) or (count is not None and len(cast("list[object]", value)) != count):
        raise InvalidInput(f"dispute: {what} must be a list" + ("" if count is None else f" of {count}"))
    return cast("list[object]", value)


WORDS: Mapping[type[Document], str] = {
    Committed: "committed", Answered: "answered", Declined: "declined", Claim: "claim", Revealed: "revealed",
    Opened: "opened", Pointed: "pointed", Handed: "handed",
}  # fmt: skip
"""The word with which a move's list begins; its fields follow."""


def move_fields(move: Move) -> list[object]:
    """Return the move as JSON.

    Raises:
        InvalidInput: a ruling or silence, which no party makes.
    """
    if not isinstance(move, Document):
        raise InvalidInput(f"dispute: a {type(move).__name__} has no place in a record")
    return move.row(WORDS[type(move)])


def parse_move(value: object, what: str = "dispute: a move") -> Move:
    """Return the move that a record holds; one that declines ends in no record.

    Raises:
        InvalidInput: it is of no known kind, or malformed.
    """
    item = items_in(value, "a move")
    for kind, word in WORDS.items():
        if item and item[0] == word and kind is not Declined:
            return cast("Move", kind.read_row(item, word, what=f"{what}: {word}"))
    raise InvalidInput("dispute: a move is of no known kind")


def sender_of(move: Move) -> Party | None:
    """Return which party makes such a move; None for the referee and the judge."""
    return move.party if isinstance(move, Claim) else SENDER.get(type(move))
