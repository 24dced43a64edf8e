"""A dispute as portable bytes: every move, the opened operator with its inputs and proofs, and the ruling (spec/dispute.md).

Whoever holds the run's root can check all of it without torch and without trusting anybody: the game is replayed from its
moves, openings are checked against what was committed, and the operator's element is evaluated again. Only where the
operator's structure or the step's data is in dispute does a reader need the job; the check then says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from tallystick.commit.encoding import (
    HASH_BYTES,
    Fields,
    canonical_json,
    digest,
    hex_float,
    parse_canonical_json,
    parse_hex,
    parse_hex_float,
)
from tallystick.commit.state import ChunkProof, parse_chunk_proof, verify_chunk
from tallystick.commit.tensors import OpenedChunk
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation
from tallystick.protocol.game import Claim, Game, Level, Tick, apply, open_game
from tallystick.protocol.openings import Opening
from tallystick.protocol.operator_game import (
    Answered,
    Committed,
    Handed,
    Move,
    Opened,
    OperatorGame,
    Pointed,
    Revealed,
    open_operator_game,
    play_move,
)
from tallystick.protocol.operators import EarlierLeaf, OpenedLeaf, base_of, parse_operator
from tallystick.protocol.rulings import Accusation, Finding, rule_on_operator
from tallystick.protocol.run_documents import Specification, parse_specification
from tallystick.protocol.run_proofs import (
    SpecificationProof,
    StepProof,
    parse_specification_proof,
    parse_step_proof,
    verify_specification_proof,
    verify_step_proof,
)
from tallystick.protocol.step_rules import StepFacts, needs_log
from tallystick.protocol.trace import PARTIES, DisputedPosition, Party

DISPUTE_FORMAT = "tallystick/dispute/1"
DISPUTE_LIMIT = 1 << 27  # bytes of JSON
HANDED_TAG = "tallystick/handed/1"
GRIDS_ENTRY = "document/grids"
CHECKS = (
    "the order and the record of the step lie under the run's root",
    "the game over steps leads to the disputed step",
    "the game over operators leads to the disputed operator",
    "the log and the grids are the committed ones",
    "the judge's ruling is what the opened operator shows",
)
Result = Literal["passed", "failed", "not reached", "needs the job"]


@dataclass(frozen=True)
class StepsGame:
    """Levels one and two: the positions, what was stated at both ends, and every claim in order.

    Attributes:
        checkpoints: numbers of steps done at the committed states, from 0 on.
        agreed: commitment before the first step.
        ends: each party's commitment after the last.
        claims: as they were accepted.
    """

    checkpoints: tuple[int, ...]
    agreed: bytes
    ends: Mapping[Party, bytes]
    claims: tuple[Claim, ...]

    def replay(self) -> DisputedPosition:
        """Return where the game ends.

        Raises:
            ProtocolViolation: a claim breaks a rule, or the game does not end.
        """
        levels = [Level("checkpoints", self.checkpoints), Level("steps", range(self.checkpoints[-1] + 1))]
        game: Game = open_game(
            levels, agreed=self.agreed, trainer=self.ends["trainer"], auditor=self.ends["auditor"]
        )
        for claim in self.claims:
            game = apply(game, claim)
        if game.position is None:
            raise ProtocolViolation("the claims do not lead to one step")
        return game.position


@dataclass(frozen=True)
class DisputeRecord:
    """Everything about one dispute that ended at an operator.

    Attributes:
        specification, specification_proof, step_proof, run_root: the order, the trainer's record of the step, and the root
            of the trainer's run that both lie under.
        steps: levels one and two.
        chunk: bytes in a chunk of a result's tree.
        frame, grids: the step's log and the grids before it with their proofs; empty where the operator does not need them.
        moves: of level three, the ruling left out.
        opening: what the trainer opened to the judge.
        loser, reason: the ruling.
    """

    specification: Specification
    specification_proof: SpecificationProof
    step_proof: StepProof
    run_root: bytes
    steps: StepsGame
    chunk: int
    frame: bytes
    grids: tuple[tuple[ChunkProof, bytes], ...]
    moves: tuple[Move, ...]
    opening: Opening
    loser: Party
    reason: str

    def encode(self) -> bytes:
        """Return the canonical JSON of the record."""
        return canonical_json(
            {
                "chunk": self.chunk,
                "format": DISPUTE_FORMAT,
                "frame": self.frame.hex(),
                "grids": [_state_fields(piece) for piece in self.grids],
                "moves": [_move_fields(move) for move in self.moves],
                "opening": opening_fields(self.opening),
                "ruling": {"loser": self.loser, "reason": self.reason},
                "run_root": self.run_root.hex(),
                "specification": self.specification.encode().decode("ascii"),
                "specification_proof": self.specification_proof.encode().decode("ascii"),
                "step_proof": self.step_proof.encode().decode("ascii"),
                "steps": {
                    "agreed": self.steps.agreed.hex(),
                    "checkpoints": list(self.steps.checkpoints),
                    "claims": [
                        [claim.party, claim.index, claim.commitment.hex()] for claim in self.steps.claims
                    ],
                    "ends": {party: commitment.hex() for party, commitment in self.steps.ends.items()},
                },
            }
        )


@dataclass(frozen=True)
class DisputeCheck:
    """One of the numbered checks of a record."""

    number: int
    claim: str
    outcome: Result
    detail: str = ""


def opening_fields(opening: Opening) -> dict[str, object]:
    """Return an opening as a JSON object; the leaf and the partial sums stand in the trainer's move."""
    return {
        "pieces": [
            [slot, [_piece_fields(piece) for piece in pieces]]
            for slot, pieces in sorted(opening.pieces.items())
        ],
        "sources": [
            [source.index, source.leaf.decode("ascii"), [node.hex() for node in source.path]]
            for _, source in sorted(opening.sources.items())
        ],
        "state": [_state_fields(piece) for piece in opening.state],
        "stored": [_piece_fields(piece) for piece in opening.stored],
    }


def handed_digest(opening: Opening) -> bytes:
    """Return the digest by which the trainer's last move names what it handed over."""
    return digest(HANDED_TAG, canonical_json(opening_fields(opening)))


def verify_dispute(record: DisputeRecord, *, run_root: bytes | None = None) -> list[DisputeCheck]:
    """Return the numbered checks of ``CHECKS``; the first that fails ends them.

    ``run_root`` is the root known from elsewhere; without it the record's own is taken, and whoever relies on the result
    must compare it.
    """
    found: list[DisputeCheck] = []
    facts: dict[str, object] = {}
    steps = (_check_run, _check_steps, _check_operators, _check_log, _check_ruling)
    for number, (claim, check) in enumerate(zip(CHECKS, steps, strict=True), start=1):
        if found and found[-1].outcome == "failed":
            found.append(DisputeCheck(number, claim, "not reached"))
            continue
        if found and found[-1].outcome == "not reached":
            found.append(DisputeCheck(number, claim, "not reached"))
            continue
        try:
            outcome, detail = check(record, facts, run_root)
        except (InvalidInput, Mismatch, ProtocolViolation) as problem:
            outcome, detail = "failed", str(problem)
        found.append(DisputeCheck(number, claim, outcome, detail))
    return found


Checked = tuple[Result, str]


def _check_run(record: DisputeRecord, facts: dict[str, object], run_root: bytes | None) -> Checked:
    if run_root is not None and run_root != record.run_root:
        raise Mismatch(f"the record speaks of run {record.run_root.hex()}, expected is {run_root.hex()}")
    verify_specification_proof(record.specification_proof, record.specification, record.run_root)
    verify_step_proof(record.step_proof, record.run_root)
    if record.specification_proof.tree_size != record.step_proof.tree_size:
        raise Mismatch("the two proofs speak of trees of different sizes")
    if record.step_proof.world_size != record.specification.world_size:
        raise Mismatch("the step's proof is of another number of ranks than the order")
    return "passed", f"step {record.step_proof.record.step} of run {record.run_root.hex()[:16]}.."


def _check_steps(record: DisputeRecord, facts: dict[str, object], run_root: bytes | None) -> Checked:
    checkpoints, specification = record.steps.checkpoints, record.specification
    every = (min(at * specification.checkpoint_every, specification.steps) for at in range(len(checkpoints)))
    if any(at != wanted for at, wanted in zip(checkpoints, every, strict=True)) or (
        len(set(checkpoints)) != len(checkpoints)  # a false state in the middle is disputed too
    ):
        raise Mismatch("the game's checkpoints are not the order's")
    if record.steps.agreed.hex() != specification.initial_state:
        raise Mismatch("the game does not begin with the order's initial state")
    position = record.steps.replay()
    if position.agreed != record.step_proof.record.step or position.disputed != position.agreed + 1:
        raise Mismatch(f"the game leads to step {position.agreed}, the record is about another")
    committed = record.step_proof.record.state_root
    if committed is not None and committed != position.claims["trainer"].hex():
        raise Mismatch(f"the trainer claims {position.claims['trainer'].hex()}, its record says {committed}")
    facts["position"] = position
    return "passed", f"step {position.agreed}, {len(record.steps.claims)} claims"


def _check_operators(record: DisputeRecord, facts: dict[str, object], run_root: bytes | None) -> Checked:
    position = cast("DisputedPosition", facts["position"])
    base = base_of(
        agreed=position.agreed_commitment, specification=record.specification.leaf(),
        record=record.step_proof.record.leaf(), chunk=record.chunk,
    )  # fmt: skip
    game: OperatorGame = open_operator_game(base)
    for move in record.moves:
        game = play_move(game, _sender(move), move)
    if game.outcome is not None:
        facts["outcome"] = game.outcome
        return "passed", game.outcome.reason
    if game.stage != "judge":
        raise ProtocolViolation(f"the moves end where the game awaits {game.stage}")
    last = record.moves[-1]
    if not isinstance(last, Handed) or last.digest != handed_digest(record.opening):
        raise Mismatch("what the trainer handed over is not what its last move names")
    facts["game"], facts["base"] = game, base
    return "passed", f"operator {game.index}, {game.rounds} rounds"


def _check_log(record: DisputeRecord, facts: dict[str, object], run_root: bytes | None) -> Checked:
    position = cast("DisputedPosition", facts["position"])
    grids = b""
    for number, (proof, data) in enumerate(record.grids):
        verify_chunk(proof, data, position.agreed_commitment)
        if proof.entry.name != GRIDS_ENTRY or proof.chunk_index != number:
            raise Mismatch(f"chunk {number} of the grids is another entry's")
        grids += data
    if record.grids and len(grids) != record.grids[0][0].entry.nbytes:
        raise Mismatch("the grids are not whole")
    step = StepFacts(record.specification, record.step_proof.record, record.frame, grids)
    facts["facts"] = step
    opened = next((move.leaf.leaf for move in record.moves if isinstance(move, Opened)), None)
    if "outcome" in facts or opened is None or not needs_log(parse_operator(opened)):
        if record.frame or record.grids:
            raise Mismatch("the record holds a log that its operator does not need")
        return "passed", "the operator needs neither"
    if not record.grids:
        raise Mismatch("the operator needs the grids, and the record has none")
    return "passed", f"{len(step.log.sites)} payloads, {len(step.table.sites)} grids"


def _check_ruling(record: DisputeRecord, facts: dict[str, object], run_root: bytes | None) -> Checked:
    position = cast("DisputedPosition", facts["position"])
    if "outcome" in facts:
        outcome = facts["outcome"]
        if getattr(outcome, "loser", None) != record.loser:
            raise Mismatch(
                f"the game was lost by the {getattr(outcome, 'loser', None)}, the ruling says {record.loser}"
            )
        return "passed", f"the {record.loser} broke a rule of the game"
    game = cast("OperatorGame", facts["game"])
    finding = find_fault(
        record, cast("StepFacts", facts["facts"]), game, cast("bytes", facts["base"]), position
    )
    if finding.fault == "unknown":
        return "needs the job", finding.reason
    if not finding.is_shown:
        raise Mismatch(f"{finding.reason}; who spoilt it, the record cannot show")
    loser: Party = "trainer" if finding.fault == "faulty" else "auditor"
    if loser != record.loser:
        raise Mismatch(
            f"the opened operator speaks against the {loser}, the ruling against the {record.loser}"
        )
    return "passed", finding.reason


def find_fault(
    record: DisputeRecord, facts: StepFacts, game: OperatorGame, base: bytes, position: DisputedPosition
) -> Finding:
    """Return what the opened operator shows."""
    objection, opened = game.objection, game.opened
    assert objection is not None
    assert opened is not None
    assert game.bisection is not None
    found = game.bisection.position
    assert found is not None
    accusation = Accusation(objection.output, objection.element, game.block, objection.structure)
    opening = Opening(
        opened.leaf, record.opening.sources, record.opening.pieces, opened.partials, opened.nodes,
        record.opening.state, record.opening.stored,
    )  # fmt: skip
    return rule_on_operator(
        facts, base, record.chunk, agreed=found.agreed_commitment, claimed=found.claims["trainer"],
        agreed_state=position.agreed_commitment, claimed_state=position.claims["trainer"], accusation=accusation,
        opening=opening,
    )  # fmt: skip


def operator_of(record: DisputeRecord) -> str:
    """Return the name of the opened operator, for people."""
    for move in record.moves:
        if isinstance(move, Opened) and move.leaf.leaf is not None:
            return str(parse_operator(move.leaf.leaf))
    return "none"


# -- bytes ---------------------------------------------------------------------------------------


def parse_dispute(data: bytes) -> DisputeRecord:
    """Return the record that ``data`` encodes; it is not verified.

    Raises:
        InvalidInput: ``data`` is not what ``DisputeRecord.encode`` returns.
    """
    what = "dispute"
    names = (
        "chunk", "format", "frame", "grids", "moves", "opening", "ruling", "run_root", "specification",
        "specification_proof", "step_proof", "steps",
    )  # fmt: skip
    fields = Fields(parse_canonical_json(data, what=what, limit=DISPUTE_LIMIT), what=what, names=names)
    fields.constant("format", DISPUTE_FORMAT)
    ruling = Fields(fields.value("ruling"), what="dispute: ruling", names=("loser", "reason"))
    moves = tuple(_parse_move(item) for item in fields.items("moves"))
    chunk = fields.integer("chunk")
    if chunk not in {1 << bits for bits in range(12, 17)}:
        raise InvalidInput(f"dispute: chunk size {chunk} is no power of two from 2**12 to 2**16")
    return DisputeRecord(
        specification=parse_specification(_ascii(fields, "specification")),
        specification_proof=parse_specification_proof(_ascii(fields, "specification_proof")),
        step_proof=parse_step_proof(_ascii(fields, "step_proof")),
        run_root=_hash(fields.text("run_root"), "run_root"),
        steps=_parse_steps(fields.value("steps")),
        chunk=chunk,
        frame=_bytes(fields.text("frame"), "frame"),
        grids=tuple(_parse_state(item) for item in fields.items("grids")),
        moves=moves,
        opening=_parse_opening(fields.value("opening"), moves),
        loser=_party(ruling.text("loser")),
        reason=ruling.text("reason"),
    )


def _ascii(fields: Fields, name: str) -> bytes:
    try:
        return fields.text(name).encode("ascii")
    except UnicodeEncodeError:
        raise InvalidInput(f"dispute: {name} is not ASCII") from None


def _bytes(text: str, what: str) -> bytes:
    return parse_hex(text, n_bytes=len(text) // 2, what=f"dispute: {what}")


def _hash(text: object, what: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidInput(f"dispute: {what} must be a hash")
    return parse_hex(text, n_bytes=HASH_BYTES, what=f"dispute: {what}")


def _party(text: object) -> Party:
    if text not in PARTIES:
        raise InvalidInput(f"dispute: {str(text)[:40]!r} is no party")
    return text


def _whole(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"dispute: {what} must be a whole number")
    return value


def _items(value: object, what: str, count: int | None = None) -> list[object]:
    if not isinstance(value, list) or (count is not None and len(cast("list[object]", value)) != count):
        raise InvalidInput(f"dispute: {what} must be a list" + ("" if count is None else f" of {count}"))
    return cast("list[object]", value)


def _path(value: object, what: str) -> tuple[bytes, ...]:
    return tuple(_hash(node, what) for node in _items(value, what))


def _parse_steps(value: object) -> StepsGame:
    fields = Fields(value, what="dispute: steps", names=("agreed", "checkpoints", "claims", "ends"))
    checkpoints = fields.integers("checkpoints")
    if len(checkpoints) < 2 or checkpoints[0] != 0 or checkpoints[-1] >= 1 << 40:
        raise InvalidInput("dispute: checkpoints must be two or more, from 0 on")
    ends = Fields(fields.value("ends"), what="dispute: ends", names=PARTIES)
    claims = tuple(_parse_claim(_items(item, "a claim", 3)) for item in fields.items("claims"))
    return StepsGame(
        checkpoints,
        _hash(fields.text("agreed"), "agreed"),
        {party: _hash(ends.text(party), party) for party in PARTIES},
        claims,
    )


def _parse_claim(item: Sequence[object]) -> Claim:
    return Claim(_party(item[0]), _whole(item[1], "a claim's index"), _hash(item[2], "a claim's commitment"))


def _state_fields(piece: tuple[ChunkProof, bytes]) -> dict[str, object]:
    return {"data": piece[1].hex(), "proof": piece[0].encode().decode("ascii")}


def _parse_state(value: object) -> tuple[ChunkProof, bytes]:
    fields = Fields(value, what="dispute: state chunk", names=("data", "proof"))
    return parse_chunk_proof(_ascii(fields, "proof")), _bytes(fields.text("data"), "data")


def _piece_fields(piece: OpenedChunk) -> dict[str, object]:
    return {"data": piece.data.hex(), "index": piece.index, "path": [node.hex() for node in piece.path]}


def _parse_piece(value: object) -> OpenedChunk:
    fields = Fields(value, what="dispute: chunk", names=("data", "index", "path"))
    return OpenedChunk(fields.integer("index"), _bytes(fields.text("data"), "data"), fields.hashes("path"))


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


def _move_fields(move: Move) -> list[object]:
    if isinstance(move, Committed):
        return ["committed", move.count, move.root.hex()]
    if isinstance(move, Answered):
        return ["answered", move.count, move.root.hex()]
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
    if isinstance(move, Tick):
        return ["tick", move.now]
    raise InvalidInput(f"dispute: a {type(move).__name__} has no place in a record")


def _parse_move(value: object) -> Move:
    item = _items(value, "a move")
    match item:
        case ["committed", count, root]:
            return Committed(_whole(count, "a count"), _hash(root, "a root"))
        case ["answered", count, root]:
            return Answered(_whole(count, "a count"), _hash(root, "a root"))
        case ["claim", party, index, commitment]:
            return _parse_claim((party, index, commitment))
        case ["revealed", leaf]:
            return Revealed(_parse_leaf(leaf))
        case ["opened", leaf, partials, nodes]:
            return Opened(
                _parse_leaf(leaf),
                tuple(_parse_partial(each) for each in _items(partials, "partial sums")),
                _path(nodes, "nodes"),
            )
        case ["pointed", block]:
            return Pointed(_whole(block, "a block"))
        case ["handed", named]:
            return Handed(_hash(named, "a digest"))
        case ["tick", now]:
            return Tick(_whole(now, "a tick"))
        case _:
            raise InvalidInput("dispute: a move is of no known kind")


def _parse_partial(value: object) -> tuple[float, float]:
    p, q = _items(value, "a partial sum", 2)
    if not isinstance(p, str) or not isinstance(q, str):
        raise InvalidInput("dispute: a partial sum must be two hexadecimal floats")
    return parse_hex_float(p, what="dispute: partial sum"), parse_hex_float(q, what="dispute: magnitude")


def _sender(move: Move) -> Party | None:
    if isinstance(move, Claim):
        return move.party
    if isinstance(move, (Committed, Opened, Handed)):
        return "trainer"
    return "auditor" if isinstance(move, (Answered, Revealed, Pointed)) else None


def _parse_opening(value: object, moves: Sequence[Move]) -> Opening:
    fields = Fields(value, what="dispute: opening", names=("pieces", "sources", "state", "stored"))
    opened = next((move for move in moves if isinstance(move, Opened)), None)
    leaf = OpenedLeaf(0, None, ()) if opened is None else opened.leaf
    sources: dict[int, EarlierLeaf] = {}
    for item in fields.items("sources"):
        index, text, path = _items(item, "a source", 3)
        if not isinstance(text, str) or not text.isascii():
            raise InvalidInput("dispute: a source must be text")
        number = _whole(index, "a source's number")
        _ascend(number, sources, "sources")
        sources[number] = EarlierLeaf(number, text.encode("ascii"), _path(path, "a source's path"))
    pieces: dict[int, tuple[OpenedChunk, ...]] = {}
    for item in fields.items("pieces"):
        slot, held = _items(item, "pieces", 2)
        number = _whole(slot, "a slot")
        _ascend(number, pieces, "slots")
        pieces[number] = tuple(_parse_piece(each) for each in _items(held, "chunks"))
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
