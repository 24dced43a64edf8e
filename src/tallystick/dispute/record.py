"""A dispute as portable bytes: every move, the opened operator with its inputs and proofs, and the ruling (spec/dispute.md).

Whoever holds the run's root can check all of it without torch and without trusting anybody: the game is replayed from its
moves, openings are checked against what was committed, and the operator's element is evaluated again. Only where the
operator's structure or the step's data is in dispute does a reader need the job; the check then says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

from tallystick.commit.codec import Document
from tallystick.commit.encoding import Fields, digest
from tallystick.commit.field_rules import At, Embedded, Hash, Hex, Row, Size, Via
from tallystick.commit.state import verify_chunk
from tallystick.dispute.bisection import Claim, Game, Level, apply, open_game
from tallystick.dispute.bounds.steps import StepFacts, needs_log
from tallystick.dispute.moves import bytes_of, move_fields, parse_move, party_in, sender_of
from tallystick.dispute.openings import Opening, StateChunk
from tallystick.dispute.operator_game import (
    Handed,
    Move,
    Opened,
    OperatorGame,
    open_operator_game,
    play_move,
)
from tallystick.dispute.operator_list import base_of, parse_operator
from tallystick.dispute.rulings import Accusation, OperatorFinding, rule_on_operator
from tallystick.dispute.signed_moves import MoveClaim, Terms, claims_of, is_move_signed
from tallystick.dispute.terms import PARTIES, DisputedPosition, Party
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation
from tallystick.run.documents import Specification
from tallystick.run.proofs import (
    SpecificationProof,
    StepProof,
    verify_specification_proof,
    verify_step_proof,
)
from tallystick.signing.keys import PublicKey, parse_public_key

DISPUTE_FORMAT = "tallystick/dispute/1"
DISPUTE_LIMIT = 1 << 27  # bytes of JSON
MOST_MOVES = 256  # two claims for each of 24 rounds and seven more are 55
LONGEST_SIGNATURE = 128  # bytes; ECDSA on P-384 in DER has 104 at most
HANDED_TAG = "tallystick/handed/1"
GRIDS_ENTRY = "document/grids"
CHECKS = (
    "the order and the record of the step lie under the run's root",
    "the game over steps leads to the disputed step",
    "the game over operators leads to the disputed operator",
    "the log and the grids are the committed ones",
    "the judge's ruling is what the opened operator shows",
    "whoever loses has signed every move of its own",
)
SIGNATURES_CHECK = 6
Result = Literal["passed", "failed", "not reached", "needs the job", "not proven"]


@dataclass(frozen=True)
class StepsGame(Document, what="dispute: steps"):
    """Levels one and two: the positions, what was stated at both ends, and every claim in order.

    Attributes:
        checkpoints: numbers of steps done at the committed states, from 0 on.
        agreed: commitment before the first step.
        ends: each party's commitment after the last.
        claims: as they were accepted.
    """

    checkpoints: tuple[int, ...]
    agreed: Hash
    ends: Mapping[Party, Hash]
    claims: tuple[Annotated[Claim, Row()], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.checkpoints) < 2 or self.checkpoints[0] != 0 or self.checkpoints[-1] >= 1 << 40:
            raise InvalidInput("dispute: checkpoints must be two or more, from 0 on")

    def replay(self) -> DisputedPosition:
        """Return where the game ends.

        Raises:
            ProtocolViolation: a claim breaks a rule, or the game does not end.
        """
        game = self.play()
        if game.position is None:
            raise ProtocolViolation("the claims do not lead to one step")
        return game.position

    def play(self) -> Game:
        """Return the game after these claims.

        Raises:
            ProtocolViolation: a claim breaks a rule.
        """
        levels = [Level("checkpoints", self.checkpoints), Level("steps", range(self.checkpoints[-1] + 1))]
        game: Game = open_game(
            levels, agreed=self.agreed, trainer=self.ends["trainer"], auditor=self.ends["auditor"]
        )
        for claim in self.claims:
            game = apply(game, claim)
        return game


def _key_fields(keys: Mapping[Party, PublicKey]) -> object:
    return {party: keys[party].spki.hex() if party in keys else None for party in PARTIES}


def _read_keys(value: object, what: str) -> Mapping[Party, PublicKey]:
    held = Fields(value, what=what, names=PARTIES)
    keys: dict[Party, PublicKey] = {}
    for party in PARTIES:
        if (text := held.optional_text(party)) is not None:
            key = parse_public_key(bytes_of(text, f"key of the {party}"), what=f"dispute: key of the {party}")
            if key.spki.hex() != text:
                raise InvalidInput(f"dispute: key of the {party} must be a SubjectPublicKeyInfo in DER")
            keys[party] = key
    return keys


@dataclass(frozen=True)
class DisputeRecord(Document, form=DISPUTE_FORMAT, what="dispute", limit=DISPUTE_LIMIT):
    """Everything about one dispute that ended at an operator.

    Attributes:
        specification, specification_proof, step_proof, run_root: the order, the trainer's record of the step, and the root
            of the trainer's run that both lie under.
        steps: levels one and two.
        chunk: bytes in a chunk of a result's tree.
        frame, grids: the step's log and the grids before it with their proofs; empty where the operator does not need them.
        auditor_run: root of the auditor's claim.
        moves: of level three, the ruling left out.
        keys: of the parties that signed; one that did not is absent.
        signatures: one for each move of a party, in order; None where it did not sign.
        opening: what the trainer opened to the judge.
        loser, reason: the ruling.
    """

    specification: Annotated[Specification, Embedded()]
    specification_proof: Annotated[SpecificationProof, Embedded()]
    step_proof: Annotated[StepProof, Embedded()]
    run_root: Hash
    steps: StepsGame
    chunk: int
    frame: Annotated[bytes, Hex()]
    grids: tuple[StateChunk, ...]
    moves: Annotated[tuple[Annotated[Move, Via(move_fields, parse_move)], ...], Size(0, MOST_MOVES)]
    opening: Opening
    loser: Annotated[Party, At("ruling", "loser"), Via(str, party_in)]
    reason: Annotated[str, At("ruling", "reason")]
    auditor_run: Hash
    keys: Annotated[Mapping[Party, PublicKey], Via(_key_fields, _read_keys)]
    signatures: tuple[Annotated[bytes, Hex(), Size(1, LONGEST_SIGNATURE)] | None, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk not in {1 << bits for bits in range(12, 17)}:
            raise InvalidInput(f"dispute: chunk size {self.chunk} is no power of two from 2**12 to 2**16")
        senders = [sender for sender in map(sender_of, self.moves) if sender is not None]
        if len(self.signatures) != len(senders):
            raise InvalidInput(
                f"dispute: signatures must be a list of {len(senders)}, has {len(self.signatures)}"
            )


def parse_dispute(data: bytes) -> DisputeRecord:
    """Return the record that ``data`` encodes; it is not verified.

    Leaf, partial sums and nodes of its opening stand in the trainer's move, and nowhere else.

    Raises:
        InvalidInput: ``data`` is not what ``DisputeRecord.encode`` returns.
    """
    record = DisputeRecord.parse(data)
    senders = [sender for sender in map(sender_of, record.moves) if sender is not None]
    signed = {sender for sender, each in zip(senders, record.signatures, strict=True) if each is not None}
    if signed != set(record.keys):
        raise InvalidInput(
            f"dispute: there are keys of {', '.join(sorted(record.keys)) or 'nobody'}, signatures of "
            f"{', '.join(sorted(signed)) or 'nobody'}"
        )
    return replace(record, opening=record.opening.with_move(record.moves))


@dataclass(frozen=True)
class DisputeCheck:
    """One of the numbered checks of a record."""

    number: int
    claim: str
    outcome: Result
    detail: str = ""


def handed_digest(opening: Opening) -> bytes:
    """Return the digest by which the trainer's last move names what it handed over."""
    return digest(HANDED_TAG, opening.encode())


def verify_dispute(
    record: DisputeRecord,
    *,
    run_root: bytes | None = None,
    known: Mapping[Party, Sequence[str]] | None = None,
) -> list[DisputeCheck]:
    """Return the numbered checks of ``CHECKS``; the first that fails ends them.

    ``run_root`` is the root known from elsewhere, ``known`` the ids of the keys that are each party's. Without them the
    record's own are taken, and whoever relies on the result must compare them.
    """
    found: list[DisputeCheck] = []
    facts: dict[str, object] = {}

    def check_signatures(record: DisputeRecord, facts: dict[str, object], root: bytes | None) -> Checked:
        return _check_signatures(record, facts, known)

    steps = (_check_run, _check_steps, _check_operators, _check_log, _check_ruling, check_signatures)
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
        raise Mismatch(
            f"the record speaks of run {record.run_root.hex()}, expected is {run_root.hex()}",
            where="dispute: run",
            own=run_root.hex(),
            stated=record.run_root.hex(),
        )
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
        raise Mismatch(
            f"the trainer claims {position.claims['trainer'].hex()}, its record says {committed}",
            where="dispute: the trainer's state",
            own=position.claims["trainer"].hex(),
            stated=committed,
        )
    facts["position"] = position
    return "passed", f"step {position.agreed}, {len(record.steps.claims)} claims"


def _check_operators(record: DisputeRecord, facts: dict[str, object], run_root: bytes | None) -> Checked:
    position = cast("DisputedPosition", facts["position"])
    base = record_base(record, position)
    facts["base"] = base
    game: OperatorGame = open_operator_game(base)
    for move in record.moves:
        game = play_move(game, sender_of(move), move)
    if game.outcome is not None:
        facts["outcome"] = game.outcome
        return "passed", game.outcome.reason
    if game.stage != "judge":
        raise ProtocolViolation(f"the moves end where the game awaits {game.stage}")
    last = record.moves[-1]
    if not isinstance(last, Handed) or last.digest != handed_digest(record.opening):
        raise Mismatch("what the trainer handed over is not what its last move names")
    facts["game"] = game
    return "passed", f"operator {game.index}, {game.rounds} rounds"


def _check_log(record: DisputeRecord, facts: dict[str, object], run_root: bytes | None) -> Checked:
    position = cast("DisputedPosition", facts["position"])
    grids = b""
    for number, (proof, data) in enumerate((each.proof, each.data) for each in record.grids):
        verify_chunk(proof, data, position.agreed_commitment)
        if proof.entry.name != GRIDS_ENTRY or proof.chunk_index != number:
            raise Mismatch(f"chunk {number} of the grids is another entry's")
        grids += data
    if record.grids and len(grids) != record.grids[0].proof.entry.nbytes:
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


def _check_signatures(
    record: DisputeRecord, facts: dict[str, object], known: Mapping[Party, Sequence[str]] | None
) -> Checked:
    position, loser = cast("DisputedPosition", facts["position"]), record.loser
    claims = claims_of(_terms(record, position, cast("bytes", facts["base"])), record.moves)
    for number, (claim, signature) in enumerate(zip(claims, record.signatures, strict=True)):
        if signature is None:
            continue
        if not is_move_signed(claim, signature, record.keys[claim.party]):
            key = record.keys[claim.party].key_id
            raise Mismatch(
                f"move {number} ({claim.kind}): the signature is not of the {claim.party}'s key {key}"
            )
    own = [
        signature for claim, signature in zip(claims, record.signatures, strict=True) if claim.party == loser
    ]
    if missing := own.count(None):
        signed = "none" if missing == len(own) else f"{len(own) - missing}"
        return "not proven", (
            f"{signed} of the {loser}'s {len(own)} moves is signed: that the {loser} made them is the judge's word"
        )
    if not own:
        return "not proven", f"the {loser} made no move"
    key_id = record.keys[loser].key_id
    if known is not None and key_id not in known.get(loser, ()):
        return "not proven", (
            f"the moves are signed with key {key_id}, which is not the {loser}'s: that the {loser} made them is the "
            "judge's word"
        )
    return "passed", f"all {len(own)} moves of the {loser}, with key {key_id}"


def signed_claims(record: DisputeRecord) -> list[tuple[MoveClaim, bytes, PublicKey]]:
    """Return every signed move of a record: what it claims, the signature and the key; nothing is verified.

    Raises:
        ProtocolViolation: the claims of the record do not lead to one step.
    """
    position = record.steps.replay()
    claims = claims_of(_terms(record, position, record_base(record, position)), record.moves)
    return [
        (claim, signature, record.keys[claim.party])
        for claim, signature in zip(claims, record.signatures, strict=True)
        if signature is not None
    ]


def find_contradiction(one: DisputeRecord, other: DisputeRecord) -> str | None:
    """Return in words what one key signed in one record that contradicts what it signed in the other, or None.

    Signatures are not verified.

    Raises:
        ProtocolViolation: the claims of a record do not lead to one step.
    """
    for claim, _, key in signed_claims(one):
        for theirs, _, signer in signed_claims(other):
            if key == signer and claim.contradicts(theirs):
                return f"another {claim.kind} move of the {claim.party}'s key {key.key_id[:16]}.. in the same dispute"
    return None


def record_base(record: DisputeRecord, position: DisputedPosition) -> bytes:
    """Return what both lists of operators begin with."""
    return base_of(
        agreed=position.agreed_commitment, specification=record.specification.leaf(),
        record=record.step_proof.record.leaf(), chunk=record.chunk,
    )  # fmt: skip


def _terms(record: DisputeRecord, position: DisputedPosition, base: bytes) -> Terms:
    return Terms(record.run_root, record.auditor_run, position.agreed, base, position.claims)


def find_fault(
    record: DisputeRecord, facts: StepFacts, game: OperatorGame, base: bytes, position: DisputedPosition
) -> OperatorFinding:
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
