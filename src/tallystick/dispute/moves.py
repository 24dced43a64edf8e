"""Moves of level three as JSON: what a record holds, what a party signs, and the readers both share (spec/dispute.md 5, 8).

One move has one form, so the digest of its canonical JSON names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tallystick.commit.encoding import HASH_BYTES, Fields, hex_float, parse_hex, parse_hex_float
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
from tallystick.dispute.operator_list import OpenedLeaf
from tallystick.dispute.terms import PARTIES, Party
from tallystick.errors import InvalidInput


def ascii_of(fields: Fields, name: str) -> bytes:
    """Return a document within the record; all of these raise InvalidInput, which names what stood there."""
    try:
        return fields.text(name).encode("ascii")
    except UnicodeEncodeError:
        raise InvalidInput(f"dispute: {name} is not ASCII") from None


def bytes_of(text: str, what: str) -> bytes:
    """Return the bytes that ``text`` writes in hexadecimal."""
    return parse_hex(text, n_bytes=len(text) // 2, what=f"dispute: {what}")


def hash_in(text: object, what: str) -> bytes:
    """Return 32 bytes, written in hexadecimal."""
    if not isinstance(text, str):
        raise InvalidInput(f"dispute: {what} must be a hash")
    return parse_hex(text, n_bytes=HASH_BYTES, what=f"dispute: {what}")


def party_in(text: object) -> Party:
    """Return one of the two parties."""
    if text not in PARTIES:
        raise InvalidInput(f"dispute: {str(text)[:40]!r} is no party")
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


def path_in(value: object, what: str) -> tuple[bytes, ...]:
    """Return a list of hashes."""
    return tuple(hash_in(node, what) for node in items_in(value, what))


def parse_claim(item: Sequence[object]) -> Claim:
    """Return the claim that [party, index, commitment] writes."""
    return Claim(
        party_in(item[0]), whole_in(item[1], "a claim's index"), hash_in(item[2], "a claim's commitment")
    )


def _leaf_fields(opened: OpenedLeaf) -> dict[str, object]:
    return {
        "index": opened.index,
        "leaf": None if opened.leaf is None else opened.leaf.decode("ascii"),
        "path": [node.hex() for node in opened.path],
        "rest": [node.hex() for node in opened.rest],
    }


def _parse_leaf(value: object) -> OpenedLeaf:
    fields = Fields(value, what="dispute: leaf", names=("index", "leaf", "path", "rest"))
    text = fields.optional_text("leaf")
    if text is not None and not text.isascii():
        raise InvalidInput("dispute: leaf is not ASCII")
    leaf = None if text is None else text.encode("ascii")
    return OpenedLeaf(fields.integer("index"), leaf, fields.hashes("path"), fields.hashes("rest"))


def move_fields(move: Move) -> list[object]:
    """Return the move as JSON.

    Raises:
        InvalidInput: a ruling or silence, which no party makes.
    """
    if isinstance(move, Committed):
        return ["committed", move.count, move.root.hex()]
    if isinstance(move, Answered):
        return ["answered", move.count, move.root.hex()]
    if isinstance(move, Declined):
        return ["declined"]
    if isinstance(move, Claim):
        return ["claim", move.party, move.index, move.commitment.hex()]
    if isinstance(move, Revealed):
        return ["revealed", _leaf_fields(move.opened)]
    if isinstance(move, Opened):
        partials = [[hex_float(p), hex_float(q)] for p, q in move.partials]
        return ["opened", _leaf_fields(move.leaf), partials, [node.hex() for node in move.nodes]]
    if isinstance(move, Pointed):
        return ["pointed", move.block]
    if isinstance(move, Handed):
        return ["handed", move.digest.hex()]
    raise InvalidInput(f"dispute: a {type(move).__name__} has no place in a record")


def parse_move(value: object) -> Move:
    """Return the move that a record holds; one that declines ends in no record.

    Raises:
        InvalidInput: it is of no known kind, or malformed.
    """
    item = items_in(value, "a move")
    match item:
        case ["committed", count, root]:
            return Committed(whole_in(count, "a count"), hash_in(root, "a root"))
        case ["answered", count, root]:
            return Answered(whole_in(count, "a count"), hash_in(root, "a root"))
        case ["claim", party, index, commitment]:
            return parse_claim((party, index, commitment))
        case ["revealed", leaf]:
            return Revealed(_parse_leaf(leaf))
        case ["opened", leaf, partials, nodes]:
            return Opened(
                _parse_leaf(leaf),
                tuple(_parse_partial(each) for each in items_in(partials, "partial sums")),
                path_in(nodes, "nodes"),
            )
        case ["pointed", block]:
            return Pointed(whole_in(block, "a block"))
        case ["handed", named]:
            return Handed(hash_in(named, "a digest"))
        case _:
            raise InvalidInput("dispute: a move is of no known kind")


def _parse_partial(value: object) -> tuple[float, float]:
    p, q = items_in(value, "a partial sum", 2)
    if not isinstance(p, str) or not isinstance(q, str):
        raise InvalidInput("dispute: a partial sum must be two hexadecimal floats")
    return parse_hex_float(p, what="dispute: partial sum"), parse_hex_float(q, what="dispute: magnitude")


def sender_of(move: Move) -> Party | None:
    """Return which party makes such a move; None for the referee and the judge."""
    return move.party if isinstance(move, Claim) else SENDER.get(type(move))
