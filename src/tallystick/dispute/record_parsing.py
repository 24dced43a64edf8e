"""Records of disputes read back, whoever wrote them (spec/dispute.md 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tallystick.commit.encoding import Fields, parse_canonical_json
from tallystick.commit.state import ChunkProof, parse_chunk_proof
from tallystick.commit.tensors import OpenedChunk
from tallystick.dispute.moves import (
    ascii_of,
    bytes_of,
    hash_in,
    items_in,
    parse_claim,
    parse_move,
    party_in,
    path_in,
    sender_of,
    whole_in,
)
from tallystick.dispute.openings import Opening
from tallystick.dispute.operator_game import (
    Move,
    Opened,
)
from tallystick.dispute.operator_list import EarlierLeaf, OpenedLeaf
from tallystick.dispute.record import (
    DISPUTE_FORMAT,
    DISPUTE_LIMIT,
    LONGEST_SIGNATURE,
    MOST_MOVES,
    DisputeRecord,
    StepsGame,
)
from tallystick.dispute.terms import PARTIES, Party
from tallystick.errors import InvalidInput
from tallystick.run.documents import parse_specification
from tallystick.run.proofs import (
    parse_specification_proof,
    parse_step_proof,
)
from tallystick.signing.keys import PublicKey, parse_public_key


def parse_dispute(data: bytes) -> DisputeRecord:
    """Return the record that ``data`` encodes; it is not verified.

    Raises:
        InvalidInput: ``data`` is not what ``DisputeRecord.encode`` returns.
    """
    what = "dispute"
    names = (
        "auditor_run", "chunk", "format", "frame", "grids", "keys", "moves", "opening", "ruling", "run_root", "signatures",
        "specification", "specification_proof", "step_proof", "steps",
    )  # fmt: skip
    fields = Fields(parse_canonical_json(data, what=what, limit=DISPUTE_LIMIT), what=what, names=names)
    fields.constant("format", DISPUTE_FORMAT)
    ruling = Fields(fields.value("ruling"), what="dispute: ruling", names=("loser", "reason"))
    if len(fields.items("moves")) > MOST_MOVES:
        raise InvalidInput(f"dispute: {len(fields.items('moves'))} moves exceed the limit of {MOST_MOVES}")
    moves = tuple(parse_move(item) for item in fields.items("moves"))
    chunk = fields.integer("chunk")
    if chunk not in {1 << bits for bits in range(12, 17)}:
        raise InvalidInput(f"dispute: chunk size {chunk} is no power of two from 2**12 to 2**16")
    keys, signatures = _parse_signatures(fields, moves)
    return DisputeRecord(
        specification=parse_specification(ascii_of(fields, "specification")),
        specification_proof=parse_specification_proof(ascii_of(fields, "specification_proof")),
        step_proof=parse_step_proof(ascii_of(fields, "step_proof")),
        run_root=hash_in(fields.text("run_root"), "run_root"),
        steps=_parse_steps(fields.value("steps")),
        chunk=chunk,
        frame=bytes_of(fields.text("frame"), "frame"),
        grids=tuple(_parse_state(item) for item in fields.items("grids")),
        moves=moves,
        opening=parse_opening(fields.value("opening"), moves),
        loser=party_in(ruling.text("loser")),
        reason=ruling.text("reason"),
        auditor_run=hash_in(fields.text("auditor_run"), "auditor_run"),
        keys=keys,
        signatures=signatures,
    )


def _parse_signatures(
    fields: Fields, moves: Sequence[Move]
) -> tuple[dict[Party, PublicKey], tuple[bytes | None, ...]]:
    """Return the keys of the parties that signed something, and a signature or None for each move of a party."""
    held = Fields(fields.value("keys"), what="dispute: keys", names=PARTIES)
    keys: dict[Party, PublicKey] = {}
    for party in PARTIES:
        if (text := held.optional_text(party)) is not None:
            key = parse_public_key(bytes_of(text, f"key of the {party}"), what=f"dispute: key of the {party}")
            if key.spki.hex() != text:
                raise InvalidInput(f"dispute: key of the {party} must be a SubjectPublicKeyInfo in DER")
            keys[party] = key
    senders = [sender for sender in map(sender_of, moves) if sender is not None]
    found: list[bytes | None] = []
    signed: set[str] = set()
    items = items_in(fields.value("signatures"), "signatures", len(senders))
    for sender, item in zip(senders, items, strict=True):
        if item is None:
            found.append(None)
            continue
        if not isinstance(item, str) or not 0 < len(item) <= 2 * LONGEST_SIGNATURE:
            raise InvalidInput(f"dispute: a signature must be null or 1 to {LONGEST_SIGNATURE} bytes")
        found.append(bytes_of(item, "signature"))
        signed.add(sender)
    if signed != set(keys):
        raise InvalidInput(
            f"dispute: there are keys of {', '.join(sorted(keys)) or 'nobody'}, signatures of "
            f"{', '.join(sorted(signed)) or 'nobody'}"
        )
    return keys, tuple(found)


def _parse_steps(value: object) -> StepsGame:
    fields = Fields(value, what="dispute: steps", names=("agreed", "checkpoints", "claims", "ends"))
    checkpoints = fields.integers("checkpoints")
    if len(checkpoints) < 2 or checkpoints[0] != 0 or checkpoints[-1] >= 1 << 40:
        raise InvalidInput("dispute: checkpoints must be two or more, from 0 on")
    ends = Fields(fields.value("ends"), what="dispute: ends", names=PARTIES)
    claims = tuple(parse_claim(items_in(item, "a claim", 3)) for item in fields.items("claims"))
    return StepsGame(
        checkpoints,
        hash_in(fields.text("agreed"), "agreed"),
        {party: hash_in(ends.text(party), party) for party in PARTIES},
        claims,
    )


def _parse_state(value: object) -> tuple[ChunkProof, bytes]:
    fields = Fields(value, what="dispute: state chunk", names=("data", "proof"))
    return parse_chunk_proof(ascii_of(fields, "proof")), bytes_of(fields.text("data"), "data")


def _parse_piece(value: object) -> OpenedChunk:
    fields = Fields(value, what="dispute: chunk", names=("data", "index", "path"))
    return OpenedChunk(fields.integer("index"), bytes_of(fields.text("data"), "data"), fields.hashes("path"))


def parse_opening(value: object, moves: Sequence[Move]) -> Opening:
    """Return the opening that ``opening_fields`` writes; leaf, partial sums and nodes stand in the trainer's move.

    Raises:
        InvalidInput: it is malformed.
    """
    fields = Fields(value, what="dispute: opening", names=("pieces", "sources", "state", "stored"))
    opened = next((move for move in moves if isinstance(move, Opened)), None)
    leaf = OpenedLeaf(0, None, ()) if opened is None else opened.leaf
    sources: dict[int, EarlierLeaf] = {}
    for item in fields.items("sources"):
        index, text, path = items_in(item, "a source", 3)
        if not isinstance(text, str) or not text.isascii():
            raise InvalidInput("dispute: a source must be text")
        number = whole_in(index, "a source's number")
        _ascend(number, sources, "sources")
        sources[number] = EarlierLeaf(number, text.encode("ascii"), path_in(path, "a source's path"))
    pieces: dict[int, tuple[OpenedChunk, ...]] = {}
    for item in fields.items("pieces"):
        slot, held = items_in(item, "pieces", 2)
        number = whole_in(slot, "a slot")
        _ascend(number, pieces, "slots")
        pieces[number] = tuple(_parse_piece(each) for each in items_in(held, "chunks"))
    return Opening(
        leaf,
        sources,
        pieces,
        () if opened is None else opened.partials,
        () if opened is None else opened.nodes,
        tuple(_parse_state(item) for item in fields.items("state")),
        tuple(_parse_piece(item) for item in fields.items("stored")),
    )


def _ascend(number: int, seen: Mapping[int, object], what: str) -> None:
    if seen and number <= max(seen):
        raise InvalidInput(f"dispute: {what} must ascend")
