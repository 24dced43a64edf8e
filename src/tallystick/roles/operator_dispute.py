"""Level three of a dispute on a real step: the trainer lists its operators, an auditor looks for a false one, a judge rules.

The trainer repeats the step from the agreed state, keeps every result and opens what it is asked for. The auditor repeats it
too and compares result by result; where its own differs by more than noise can explain, it evaluates that element from the
trainer's own inputs with the operator's error bound, and objects to the first operator that fails. So it never objects to
an honest operator, however different the two machines are. What neither shows goes to the judge of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import HeldState
from tallystick.dispute.bisection import GameOutcome, Silence
from tallystick.dispute.bounds.steps import StepFacts, needs_log
from tallystick.dispute.exchange import (
    LONGEST_REASON,
    MOST_PARTS,
    Answer,
    ForfeitError,
    Part,
    Question,
    QuestionChannel,
    ask_one,
)
from tallystick.dispute.moves import bytes_of, items_in, move_fields, parse_move, whole_in
from tallystick.dispute.openings import OPENING_LIMIT, Opening
from tallystick.dispute.operator_game import (
    Committed,
    Declined,
    Handed,
    Move,
    OperatorGame,
    open_operator_game,
    play_move,
)
from tallystick.dispute.operator_list import (
    BATCH,
    Operator,
    hash_of,
    parse_operator,
)
from tallystick.dispute.record import LONGEST_SIGNATURE, handed_digest
from tallystick.dispute.rulings import Accusation, OperatorFinding, rule_on_operator
from tallystick.dispute.signed_moves import History, Terms, is_move_signed
from tallystick.dispute.terms import PARTIES, Party, Ruling
from tallystick.errors import InvalidInput, Mismatch
from tallystick.execution.operator_writer import whole
from tallystick.execution.step import map_tensors
from tallystick.execution.step_trace import array_of
from tallystick.roles.costs import Ledger
from tallystick.roles.operator_examination import SHOWN_LIMIT, nbytes_of, verify_shown
from tallystick.roles.operator_replay import find_structure
from tallystick.roles.operator_sources import Source
from tallystick.roles.replay import Replay
from tallystick.run.proofs import StepProof
from tallystick.signing.keys import PublicKey


@dataclass(frozen=True)
class Cost:
    """What level three took.

    Attributes:
        operators: leaves of the trainer's list.
        trainer_bytes, auditor_bytes: what each sent in the game.
        opened_bytes: results that the trainer opened to the auditor while it looked for the false one.
        judge_bytes: what the judge read.
        seconds: by party: trainer (repeating, hashing), auditor (repeating, comparing), judge.
    """

    operators: int
    trainer_bytes: int
    auditor_bytes: int
    opened_bytes: int
    judge_bytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class OperatorResult:
    """How level three ended.

    Attributes:
        loser: ``trainer`` or ``auditor``; None where the whole step has to be judged.
        reason: in words; of a fallback, why.
        rounds: of bisection.
        index, operator: the disputed leaf, as number and as module, phase and name; None if there is none.
        accusation: the element or structure that the auditor named.
        cost: what it took.
        evidence: what a record needs.
        step_seconds: time of one plain step on this machine.
        signed: keys of the parties that signed their moves.
    """

    loser: Party | None
    reason: str
    rounds: int
    index: int | None
    operator: Operator | None
    accusation: Accusation | None
    cost: Cost
    evidence: RecordParts | None = None
    step_seconds: float | None = None
    signed: Mapping[Party, PublicKey] = field(default_factory=dict[Party, PublicKey])

    @property
    def share_of_step(self) -> float | None:
        """The judge's time over that of one step, both on this machine; None if either was not measured."""
        judged = self.cost.seconds.get("judge")
        return None if judged is None or not self.step_seconds else judged / self.step_seconds

    def fields(self) -> dict[str, object]:
        """Return what a verdict says of it."""
        op, accusation, cost = self.operator, self.accusation, self.cost
        named = None if op is None else {"module": op.module, "name": op.name, "phase": op.phase}
        element = (
            None if accusation is None or accusation.structure else [accusation.output, accusation.element]
        )
        return {
            "element": element,
            "fallback": None if self.loser is not None else self.reason,
            "index": self.index,
            "judge_bytes": cost.judge_bytes,
            "opened_bytes": cost.opened_bytes,
            "operator": named,
            "operators": cost.operators,
            "signed": {p: self.signed[p].key_id if p in self.signed else None for p in PARTIES},
            "sent": {"auditor": cost.auditor_bytes, "trainer": cost.trainer_bytes},
            "structure": accusation is not None and accusation.structure,
        }


@dataclass(frozen=True)
class Signing:
    """Whose signatures over operators count.

    Attributes:
        known: keys of the parties that sign; moves of one that is absent are unsigned.
        asked: keys that the judge knows; a party's move without a signature of its key here counts as not made.
    """

    known: Mapping[Party, PublicKey] = field(default_factory=dict[Party, PublicKey])
    asked: Mapping[Party, PublicKey] = field(default_factory=dict[Party, PublicKey])


@dataclass(frozen=True)
class RecordParts:
    """What a record of the dispute needs besides the run's own documents."""

    facts: StepFacts
    base: bytes
    chunk: int
    game: OperatorGame
    accusation: Accusation
    opening: Opening
    agreed_state: bytes
    finding: OperatorFinding
    keys: Mapping[Party, PublicKey]
    signatures: tuple[bytes | None, ...]


LIST_LIMIT = 1 << 24  # bytes of a list, some 50,000 operators; of a longer one the whole step is judged
SHORTEST_LEAF = 96  # bytes: what is left of a leaf without any name, input or output
MOST_LOOKS = 1 << 12  # of an auditor, which asks for four times as much each time up to the limit


@dataclass
class OperatorDispute:
    """Level three as the referee leads it: it asks both parties, checks what they say, and rules.

    Attributes:
        table: where questions are asked.
        step: the disputed one.
        agreed: state before it: its summary, and the grids.
        agreed_whole: asks for all of it, where structure is disputed.
        facts: agreed facts of the step.
        step_proof: the trainer's record of the step under its run's root, for the auditor.
        terms: which dispute it is.
        replay: the job, for where structure or data are disputed.
        signing: keys whose signatures are asked for, and those that sign at all.
        confirms: says, for the whole state before the step and a leaf's place and structure, in which arithmetics the job's
            own list has another leaf there than the judge's; None if in none.
    """

    table: QuestionChannel
    step: int
    agreed: HeldState
    agreed_whole: Callable[[], HeldState | None]
    facts: StepFacts
    step_proof: StepProof
    terms: Terms
    chunk: int
    replay: Replay
    signing: Signing
    ledger: Ledger = field(default_factory=Ledger)
    confirms: Callable[[HeldState, int, bytes], str | None] = lambda agreed, at, structure: None

    def __post_init__(self) -> None:
        self.sent: dict[Party, int] = dict.fromkeys(PARTIES, 0)
        self.opened = self.judged = self.count = self.looks = 0
        self.shown: set[Source] = set()
        self.signatures: list[bytes | None] = []
        self.said = History(self.terms)
        self.operators: list[Operator] = []
        self.game = open_operator_game(self.terms.base)

    def play(self) -> OperatorResult:
        """Play level three and return how it ended.

        Raises:
            ForfeitError: a party did not answer in time.
        """
        try:
            return replace(self._play(), signed=dict(self.signing.known))
        except _UnsignedError as unsigned:
            # At the judge's table alone: files without a signature are not taken.
            return OperatorResult(
                unsigned.party, str(unsigned), self.game.rounds, None, None, None, self.cost(), signed=dict(self.signing.known)
            )  # fmt: skip

    def _play(self) -> OperatorResult:
        listed = self._ask("trainer", "list", self._listed, most=LIST_LIMIT)
        if isinstance(listed, str):
            return _fallback(listed, self.cost())
        blob, said = listed
        self._moved("trainer", said)
        looked = self._ask("auditor", "look", self._looked, parts=(self.facts.frame, blob), sources=[])
        while isinstance(looked, list):
            self.looks += 1
            self.shown |= {*looked}
            wanted, sources = looked, [list(source) for source in looked]
            most = sum(nbytes_of(self.operators, source) for source in wanted)
            shown = self._ask("trainer", "show", partial(self._shown, wanted), most=most, sources=sources)
            self.opened += most
            looked = self._ask("auditor", "look", self._looked, parts=shown, sources=sources)
        if isinstance(looked, str):
            return _fallback(looked, self.cost())
        said, why = looked
        self._moved("auditor", said)
        if self.game.stage == "step":
            return replace(_fallback(why, self.cost()), rounds=self.game.rounds)
        while self.game.awaited:
            self._round(self.game.awaited[0])
        if self.game.outcome is not None:
            return self._broken(self.game.outcome)
        return self._ruled()

    # -- asking --

    def body(self, party: Party, **more: object) -> dict[str, object]:
        """Return what every question of level three says; to the auditor also the trainer's record of the step."""
        if party == "auditor":
            more["step_proof"] = self.step_proof.encode().decode("ascii")
        moves = [move_fields(move) for move in self.game.log if not isinstance(move, (Silence, Ruling))]
        claims = {party: claim.hex() for party, claim in self.terms.claims.items()}
        return {"claims": claims, "moves": moves, "step": self.step, **more}

    def _ask(
        self, party: Party, kind: str, read: Callable[[Answer], Read], *,
        most: int = 0, parts: Sequence[Part] = (), **more: object,
    ) -> Read:  # fmt: skip
        question = Question(party, kind, self.body(party, **more), tuple(parts), most)

        def reading(answer: Answer) -> Read:
            found = read(answer)
            self.sent[party] += answer.nbytes if kind != "show" else 0
            return found

        return ask_one(self.table, question, reading)

    def _listed(self, answer: Answer) -> str | tuple[bytes, SaidMove]:
        if answer.cannot is not None:
            return answer.cannot
        (part,) = answer.expect_parts(1)
        said, blob = self._said(answer, "trainer"), bytes(part)
        if not isinstance(said.move, Committed):
            raise InvalidInput("answer: the trainer must commit to its list")
        count = blob.count(b"\n") + 1 if blob else 0
        if said.move.count != count:  # before anything is made of each leaf
            raise Mismatch(f"answer: the list has {count} leaves, the move commits to {said.move.count}")
        if len(blob) < SHORTEST_LEAF * count:
            raise InvalidInput(
                f"answer: {count} leaves of {SHORTEST_LEAF} bytes or more are not {len(blob)} bytes"
            )
        leaves = blob.split(b"\n") if blob else []
        operators = [parse_operator(leaf) for leaf in leaves]
        if said.move.root != merkle_root([hash_of(leaf) for leaf in leaves]):
            raise Mismatch("answer: the list is not the one that the move commits to")
        self.operators, self.count = operators, count
        return blob, said

    def _looked(self, answer: Answer) -> str | list[Source] | tuple[SaidMove, str]:
        answer.expect_parts(0)
        if answer.cannot is not None:
            return f"the auditor cannot repeat the step: {answer.cannot}"
        if "wanted" in answer.body:
            wanted: list[Source] = []
            for item in answer.fields("wanted").items("wanted"):
                at, number = items_in(item, "a result", 2)
                wanted.append((whole_in(at, "a leaf"), whole_in(number, "an output")))
            if not 0 < len(wanted) <= MOST_PARTS or len({*wanted} - self.shown) != len(wanted):
                raise InvalidInput(f"answer: must want 1 to {MOST_PARTS} results, each once in the dispute")
            if self.looks >= MOST_LOOKS:
                raise InvalidInput(f"answer: results were shown {MOST_LOOKS} times; object, or decline")
            if sum(nbytes_of(self.operators, source) for source in wanted) > SHOWN_LIMIT and len(wanted) > 1:
                raise InvalidInput(f"answer: several results may have {SHOWN_LIMIT} bytes together")
            return wanted
        why = answer.body.get("why", "")
        if not isinstance(why, str) or len(why) > LONGEST_REASON:
            raise InvalidInput("answer: why must be a short text")
        return self._said(answer, "auditor"), why

    def _shown(self, wanted: Sequence[Source], answer: Answer) -> tuple[Part, ...]:
        answer.fields()
        for source, data in zip(wanted, answer.expect_parts(len(wanted)), strict=True):
            verify_shown(self.operators, source, memoryview(data), self.chunk)
        return answer.parts

    def _said(self, answer: Answer, party: Party) -> SaidMove:
        """Return the move in an answer, whose signature fits and that the rules allow now.

        Raises:
            InvalidInput, Mismatch, ProtocolViolation: it is none.
        """
        signature = answer.body.get("signature")
        if signature is not None and not (
            isinstance(signature, str) and 0 < len(signature) <= 2 * LONGEST_SIGNATURE
        ):
            raise InvalidInput(f"answer: signature must be null or 1 to {LONGEST_SIGNATURE} bytes")
        fields = answer.body.get("move")
        move = Declined() if fields == ["declined"] else parse_move(fields)
        opening: Opening | None = None
        if isinstance(move, Handed):
            (part,) = answer.expect_parts(1)
            opening = Opening.parse(bytes(part)).with_move(self.game.log)
            if handed_digest(opening) != move.digest:
                raise Mismatch("answer: what was handed over is not what the move names")
        found = SaidMove(move, None if signature is None else bytes_of(signature, "signature"), opening)
        key = self.signing.known.get(party)
        claim = self.said.claim(move)
        if key is not None and (found.signature is None or not is_move_signed(claim, found.signature, key)):
            raise Mismatch(f"answer: the move is not signed with key {key.key_id[:16]}..")
        play_move(
            self.game, party, move
        )  # raises where the rules do not allow it; its effect is taken when its turn comes
        return found

    def _round(self, party: Party) -> None:
        """Ask a party for the move that it owes; one after the other, as each signs what was said before."""

        def read(asked: Party, answer: Answer) -> SaidMove:
            found = self._said(answer, asked)
            self.sent[asked] += answer.nbytes
            return found

        replies = self.table.ask({party: Question(party, "move", self.body(party), (), OPENING_LIMIT)}, read)
        if party not in replies:
            self.game = play_move(self.game, None, Silence(self.table.deadline))
            assert self.game.outcome is not None
            raise ForfeitError(self.game.outcome.loser, self.game.outcome.reason)
        self._moved(party, replies[party])

    def _moved(self, party: Party, said: SaidMove) -> None:
        """Take in a move; where a signature is asked for and there is none, it was not made in time.

        Raises:
            _UnsignedError: as said.
        """
        asked = self.signing.asked.get(party)
        claim = self.said.claim(said.move)
        if asked is not None and not (
            said.signature is not None and is_move_signed(claim, said.signature, asked)
        ):
            raise _UnsignedError(party, self.game, asked)
        self.game = play_move(self.game, party, said.move)
        self.signatures.append(said.signature)
        self.said.add(said.move)
        if said.opening is not None:
            self.opening = said.opening

    # -- how it ends --

    def cost(self) -> Cost:
        """Return what was counted so far."""
        return Cost(
            self.count,
            self.sent["trainer"],
            self.sent["auditor"],
            self.opened,
            self.judged,
            _seconds(self.ledger),
        )

    def _broken(self, outcome: GameOutcome) -> OperatorResult:
        """Return the result where a party lost by a rule of the game: no operator was judged."""
        loser: Party = "trainer" if outcome.loser == "trainer" else "auditor"
        return OperatorResult(loser, outcome.reason, self.game.rounds, None, None, None, self.cost())

    def _ruled(self) -> OperatorResult:
        game, at, opening = self.game, self.game.index, self.opening
        assert game.objection is not None
        assert game.opened is not None
        assert game.bisection is not None
        position = game.bisection.position
        assert position is not None
        accusation = Accusation(
            game.objection.output, game.objection.element, game.block, game.objection.structure
        )
        opening = replace(
            opening, leaf=game.opened.leaf, partials=game.opened.partials, nodes=game.opened.nodes
        )
        op = self.operators[at] if at < len(self.operators) else None
        state = self.agreed_whole() if accusation.structure else None
        with self.ledger.charging("judge", "ruling"):
            structure = None if state is None else self.own_structure(state, at)
            batch = self.own_batch() if op is not None and op.name == BATCH else None
        # As a judge of its own, who has decoded nothing for the parties.
        facts = replace(self.facts)
        with self.ledger.charging("judge", "ruling"):
            finding = rule_on_operator(
                facts, self.terms.base, self.chunk, agreed=position.agreed_commitment, claimed=position.claims["trainer"],
                agreed_state=self.agreed.root, claimed_state=self.terms.claims["trainer"], accusation=accusation,
                opening=opening, own_structure=structure, own_batch=batch,
            )  # fmt: skip
        if state is not None and structure is not None:
            dissent = self.confirms(state, at, structure)
            if dissent is not None:
                fallback = _fallback(f"the operator's structure is not proven: {dissent}", self.cost())
                return replace(fallback, rounds=game.rounds, index=at, operator=op)
        self.judged = opening.nbytes + (len(facts.frame) + len(facts.grids) if needs_log(op) else 0)
        if batch is not None:
            self.judged += sum(map(len, batch.values()))
        if finding.fault == "unknown":
            fallback = _fallback(f"the operator cannot be judged by itself: {finding.reason}", self.cost())
            return replace(fallback, rounds=game.rounds, index=at, operator=op)
        loser: Party = "trainer" if finding.fault == "faulty" else "auditor"
        game = play_move(game, None, Ruling(loser, finding.reason))
        evidence = RecordParts(
            self.facts, self.terms.base, self.chunk, game, accusation, opening, self.agreed.root, finding,
            self.signing.known, tuple(self.signatures),
        )  # fmt: skip
        return OperatorResult(loser, finding.reason, game.rounds, at, op, accusation, self.cost(), evidence)

    def own_structure(self, state: HeldState, at: int) -> bytes:
        """Return the structure of leaf ``at`` of the job's own list; empty if it ends before."""
        return find_structure(self.replay, state, self.facts.record, self.facts.frame, at)

    def own_batch(self) -> dict[str, bytes]:
        """Return the job's own data of the step, by place."""
        found: dict[str, bytes] = {}

        def one(where: str, tensor: Tensor) -> Tensor:
            plain = tensor.detach().contiguous()
            found[where] = array_of(whole(plain.clone())).tobytes()
            return tensor

        map_tensors(self.replay.job.batch(self.step), one, "batch")
        return found


Read = TypeVar("Read")


@dataclass(frozen=True)
class SaidMove:
    """A move as a party said it: with its signature, and what it handed over."""

    move: Move
    signature: bytes | None
    opening: Opening | None = None


def _seconds(ledger: Ledger) -> dict[str, float]:
    """Return what level three took of each party that has done something there."""
    found = {
        "trainer": ledger.of("trainer", "list", "moves").wall,
        "auditor": ledger.of("auditor", "examination", "moves").wall,
        "judge": ledger.of("judge", "ruling").wall,
    }
    return {who: seconds for who, seconds in found.items() if seconds}


def _fallback(reason: str, cost: Cost) -> OperatorResult:
    return OperatorResult(None, reason, 0, None, None, None, cost)


class _UnsignedError(Exception):
    """A party owed a signed move and none came by the deadline."""

    def __init__(self, party: Party, game: OperatorGame, key: PublicKey) -> None:
        owed = f"the {party} owed a signed move ({game.stage}), and none came with key {key.key_id[:16]}.."
        super().__init__(f"no answer: {owed}; that is the judge's word")
        self.party: Party = party
