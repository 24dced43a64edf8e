"""What a party signs at level three, so that nobody can make moves in its name (spec/dispute.md 6).

    history = History(terms)
    claim = history.claim(move)                         # which dispute, who, after what, which move
    signature = sign_move(claim, key)
    is_move_signed(claim, signature, key.public_key)
    history.add(move)

Each move is an in-toto statement about the trainer's run: which dispute, which party, what had been said before, and the
move's digest. A record holds the signatures only: whoever has it builds the statements again. What had been said before
is a chain of digests that begins with the terms of the dispute, so no move fits another dispute, another accusation or
another order, and the first, the trainer's list, is signed before any answer to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tallystick.commit.encoding import HASH_BYTES, canonical_json, digest, parse_hex
from tallystick.dispute.bisection import Claim
from tallystick.dispute.moves import move_fields, sender_of
from tallystick.dispute.operator_game import Answered, Declined, Move
from tallystick.dispute.terms import PARTIES, Party
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.statements import RUN_DIGEST
from tallystick.signing.dsse import (
    PAYLOAD_TYPE,
    Envelope,
    Statement,
    Subject,
    known_fields,
    pre_authentication_encoding,
)
from tallystick.signing.keys import PublicKey, Signer

MOVE_TYPE = "https://tallystick/dispute-move/v0.1"
HISTORY_TAG = "tallystick/dispute-history/1"
MOVE_TAG = "tallystick/dispute-move/1"
PLACE_TAG = "tallystick/dispute-place/1"  # of no format: it only tells places apart
LIST_KIND = "committed"
MOVE_KINDS = (LIST_KIND, "answered", "declined", "claim", "revealed", "opened", "pointed", "handed")


@dataclass(frozen=True)
class Terms:
    """Which dispute it is: what both parties stand by when its level three begins.

    Attributes:
        run, auditor_run: roots of the trainer's run and of the auditor's claim about it.
        step: the disputed one.
        base: digest of the agreed state, the order, the trainer's record of the step, and the chunk size.
        claims: each party's commitment to the state after the step.
    """

    run: bytes
    auditor_run: bytes
    step: int
    base: bytes
    claims: Mapping[Party, bytes]

    def fields(self) -> dict[str, object]:
        """Return the terms as a JSON object; the run is the statement's subject."""
        return {
            "auditorRun": self.auditor_run.hex(),
            "base": self.base.hex(),
            "claims": {party: self.claims[party].hex() for party in PARTIES},
            "step": self.step,
        }

    def opening(self) -> bytes:
        """Return the digest of a dispute in which nothing has been said yet."""
        return digest(HISTORY_TAG, canonical_json({**self.fields(), "run": self.run.hex()}))


@dataclass(frozen=True)
class MoveClaim:
    """A party says: in this dispute, after what had been said there, I made this move.

    Attributes:
        terms: of the dispute.
        party: who moved.
        kind: one of ``MOVE_KINDS``.
        history: digest of everything that the parties had said.
        move: digest of the move's canonical JSON.
    """

    terms: Terms
    party: Party
    kind: str
    history: bytes
    move: bytes

    def statement(self) -> Statement:
        """Return the statement that the party signs; it has one encoding."""
        run = Subject("run", {RUN_DIGEST: self.terms.run.hex()})
        said = {
            "history": self.history.hex(),
            "kind": self.kind,
            "move": self.move.hex(),
            "party": self.party,
        }
        return Statement((run,), MOVE_TYPE, {**self.terms.fields(), **said})

    def places(self) -> tuple[bytes, ...]:
        """Return the places that the move takes; an honest party makes one move in each.

        The place after what had been said, and of a list the place of its party's list in this dispute.
        """
        here = self.terms.opening() + self.party.encode()
        after = digest(PLACE_TAG, here, self.history)
        return (after, digest(PLACE_TAG, here)) if self.kind == LIST_KIND else (after,)

    def contradicts(self, other: MoveClaim) -> bool:
        """Whether no honest party signs both: two answers to one question, or two lists for one dispute."""
        return self.move != other.move and not {*self.places()}.isdisjoint(other.places())


class History:
    """What the parties of one dispute have said so far, as the chain of digests that each next move answers.

    ``claim`` gives what a party signs for its next move, ``add`` takes a move that was accepted. A move that contradicts
    an earlier one of its party answers what that one answered.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._digest = terms.opening()
        self._asked: dict[tuple[Party, str, int], bytes] = {}

    def claim(self, move: Move) -> MoveClaim:
        """Return what the move's party signs if it makes it now.

        Raises:
            InvalidInput: no party makes such a move.
        """
        party, fields = sender_of(move), move_fields(move)
        if party is None:
            raise InvalidInput(f"a {fields[0]} is no move of a party")
        answers = self._asked.get((party, *_question_of(move)), self._digest)
        return MoveClaim(self.terms, party, str(fields[0]), answers, digest(MOVE_TAG, canonical_json(fields)))

    def add(self, move: Move) -> None:
        """Take in a move that was made; silence and rulings are nobody's and leave no trace."""
        if (party := sender_of(move)) is not None:
            self._asked.setdefault((party, *_question_of(move)), self._digest)
            self._digest = digest(HISTORY_TAG, self._digest, canonical_json(move_fields(move)))


def claims_of(terms: Terms, moves: Sequence[Move]) -> list[MoveClaim]:
    """Return what is to be signed for each move of a party, in order."""
    history, found = History(terms), list[MoveClaim]()
    for move in moves:
        if sender_of(move) is not None:
            found.append(history.claim(move))
        history.add(move)
    return found


def _question_of(move: Move) -> tuple[str, int]:
    """Return what the move answers; two answers of one party to one question contradict each other."""
    if isinstance(move, Claim):
        return "claim", move.index
    return ("answered" if isinstance(move, (Answered, Declined)) else str(move_fields(move)[0])), 0


def sign_move(claim: MoveClaim, signer: Signer) -> bytes:
    """Return the signature over the DSSE encoding of the claim's statement."""
    return signer.sign(pre_authentication_encoding(PAYLOAD_TYPE, claim.statement().encode()))


def is_move_signed(claim: MoveClaim, signature: bytes, key: PublicKey) -> bool:
    """Return whether ``key`` made the signature over the claim's statement."""
    return key.is_signed(signature, pre_authentication_encoding(PAYLOAD_TYPE, claim.statement().encode()))


def move_envelope(claim: MoveClaim, signature: bytes, key: PublicKey) -> bytes:
    """Return the signed claim as a DSSE envelope: a document of its own, evidence beside another one."""
    return Envelope(PAYLOAD_TYPE, claim.statement().encode(), ((key.key_id, signature),)).encode()


def read_move(statement: Statement, *, what: str = "statement") -> MoveClaim:
    """Return what a statement of this type says; that a key signed it is for the caller to know.

    Raises:
        InvalidInput: another type, or a field missing or malformed.
        Mismatch: it has not one subject ``run``.
    """
    if statement.predicate_type != MOVE_TYPE:
        raise InvalidInput(f"{what}: predicateType must be {MOVE_TYPE}")
    names = ("auditorRun", "base", "claims", "history", "kind", "move", "party", "step")
    top = known_fields(statement.predicate, names, what=f"{what}: predicate")
    claims = known_fields(top.value("claims"), PARTIES, what=f"{what}: claims")
    party, kind, step = top.text("party"), top.text("kind"), top.integer("step")
    if party not in PARTIES:
        raise InvalidInput(f"{what}: {party[:40]!r} is no party")
    if kind not in MOVE_KINDS:
        raise InvalidInput(f"{what}: kind must be one of {', '.join(MOVE_KINDS)}, is {kind[:40]!r}")
    if step < 0:
        raise InvalidInput(f"{what}: step must be 0 or more, is {step}")
    run = statement.digest_of("run", RUN_DIGEST)
    if run is None:
        raise Mismatch(f"{what}: has no subject run with a digest {RUN_DIGEST}")

    def hashed(text: str, name: str) -> bytes:
        return parse_hex(text, n_bytes=HASH_BYTES, what=f"{what}: {name}")

    terms = Terms(
        run=hashed(run, "run"),
        auditor_run=hashed(top.text("auditorRun"), "auditorRun"),
        step=step,
        base=hashed(top.text("base"), "base"),
        claims={each: hashed(claims.text(each), f"claim of the {each}") for each in PARTIES},
    )
    return MoveClaim(
        terms, party, kind, hashed(top.text("history"), "history"), hashed(top.text("move"), "move")
    )
