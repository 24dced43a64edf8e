"""The two parties of a dispute: each answers questions from its own run directory, with its own program and key.

What a party answers follows from the question, the lists and results that earlier questions handed over, its run and its
key, so one that was killed and started again goes on: ``learn`` takes in the earlier questions without answering them again.
What is kept between questions is found by what it is, a list by its root and a step by all that was said of it. In one
process a ``roles.local_table.LocalTable`` puts the same questions to the same parties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import Entry, HeldState
from tallystick.dispute.bisection import Claim
from tallystick.dispute.bounds.formulas import Sum, is_right_partial
from tallystick.dispute.bounds.steps import StepFacts, formula_for
from tallystick.dispute.exchange import Answer, Question, unable
from tallystick.dispute.moves import hash_in, items_in, move_fields, parse_move, sender_of, whole_in
from tallystick.dispute.objections import Objection
from tallystick.dispute.openings import OPENING_LIMIT, Opening
from tallystick.dispute.operator_game import (
    Answered,
    Committed,
    Declined,
    Handed,
    Move,
    Opened,
    OperatorGame,
    Pointed,
    Revealed,
    open_operator_game,
    play_move,
)
from tallystick.dispute.operator_list import END, OperatorList, hash_of, parse_operator
from tallystick.dispute.record import GRIDS_ENTRY, handed_digest
from tallystick.dispute.rulings import Accusation
from tallystick.dispute.signed_moves import History, Terms, sign_move
from tallystick.dispute.terms import PARTIES, Party
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism, TallyError
from tallystick.roles import operator_examination, operator_replay
from tallystick.roles.operator_examination import Examination, Wanted, verify_shown
from tallystick.roles.operator_sources import Source, reader_of
from tallystick.roles.operator_trainer import TrainerSide, nodes_of
from tallystick.roles.recorded_trace import RecordedTrace
from tallystick.roles.signed_before import SignedBefore
from tallystick.run.documents import StepRecord
from tallystick.run.proofs import parse_step_proof, verify_step_proof
from tallystick.signing.keys import Signer
from tallystick.store.files import frame_digest

MOST_LISTS = 8  # of one run's trainer that an auditor keeps: an honest one has one
OVER_OPERATORS = ("list", "look", "show", "move")  # questions whose answers hang on the last bits of a step
TRACED = ("fp32", "fp64")  # policies whose steps have a list of operators
Value = TypeVar("Value")


@dataclass
class _Case:
    """A step in dispute over operators, as one party has it.

    Attributes:
        said: what questions say of it.
        step, facts, agreed: the step, its facts with the trainer's record and log, and the state before it.
        terms: which dispute it is.
        chunk: bytes in a chunk of a result's tree.
    """

    said: tuple[object, ...]
    step: int
    facts: StepFacts
    agreed: HeldState
    terms: Terms
    chunk: int


@dataclass
class _Heard:
    """What an auditor has of one list of the trainer's.

    Attributes:
        frame, leaves: the step's log and the list, as they were handed over with it.
        shown: results that were shown under it; each is checked when it is looked at.
        seen: the examination of it, once that has begun.
        own: the list that answers it, once it is objected to.
    """

    frame: bytes
    leaves: list[bytes]
    shown: dict[Source, memoryview] = field(default_factory=dict[Source, memoryview])
    seen: Examination | None = None
    own: OperatorList | None = None


class Respondent:
    """A party that answers questions.

    Args:
        trace: its run, and the program that repeats it.
        other_run: root of the other party's run.
        signer: signs its moves over operators; None where nobody asks for that.
        objection: what a dishonest auditor objects to, whatever it saw.
        verify: called before an answer is given out; raises where the program that found it is another one.
        memory: of what was signed about this run before; None where everything is asked in one process.
    """

    def __init__(
        self, trace: RecordedTrace, other_run: bytes, *, signer: Signer | None = None, objection: Objection | None = None,
        verify: Callable[[], None] = lambda: None, memory: SignedBefore | None = None,
    ) -> None:  # fmt: skip
        self.trace, self.other_run, self.signer, self.objection = trace, other_run, signer, objection
        self.verify, self.memory = verify, memory
        self.party: Party = trace.party
        self._case: _Case | None = None
        self._side: TrainerSide | None = None
        self._heard: dict[Committed, _Heard] = {}

    def answer(self, question: Question) -> Answer:
        """Return the answer to a question; where the party cannot give one it says why.

        Raises:
            InvalidInput: the question is malformed.
            Mismatch: the question contradicts what this party published or said; nothing is signed.
            OtherProgram: the job imported something on the way that the run does not state; nothing is signed either.
            Nondeterminism: this process computes otherwise than the one that signed first; nor then.
        """
        if question.party != self.party:
            raise Mismatch(f"question: is put to the {question.party}, this is the {self.party}")
        self.learn(question)
        said: Mapping[str, Callable[[Question], Answer]] = {
            "claim": self._claim, "summary": self._summary, "entries": self._entries, "frame": self._frame,
            "list": self._committed, "look": self._looked, "show": self._show, "move": self._move,
        }  # fmt: skip
        if question.kind not in said:
            raise InvalidInput(f"question: kind {question.kind[:40]!r} is unknown")
        if self.memory is not None and question.kind in OVER_OPERATORS:
            self.memory.verify_arithmetic()
        found = said[question.kind](question)
        self.verify()
        return found

    def learn(self, question: Question) -> None:
        """Take in what a question brings with it."""
        if question.kind == "claim" and self.trace.suspected is None:
            suspected = question.body.get("suspected")
            self.trace.suspected = None if suspected is None else whole_in(suspected, "a suspected step")
            named = self.trace.transcript.specification.policy.name
            self.trace.traces = question.body.get("traced") is True and named in TRACED
        if question.kind != "look":
            return
        sources = [_source(item) for item in items_in(question.body.get("sources"), "sources")]
        parts = question.parts
        if not sources:
            if len(parts) != 2:
                raise InvalidInput(f"question: must bring the log and the list, brings {len(parts)} parts")
            leaves = bytes(parts[1]).split(b"\n") if parts[1] else []
            listed = Committed(len(leaves), merkle_root([hash_of(leaf) for leaf in leaves]))
            step = whole_in(question.body.get("step"), "a step")
            if frame_digest(bytes(parts[0])) != self._record(question, step, self.other_run).log:
                raise Mismatch(
                    f"question: this is not the log of step {step} that the trainer's record names"
                )
            self._heard.setdefault(listed, _Heard(bytes(parts[0]), leaves))
            while len(self._heard) > MOST_LISTS:
                del self._heard[next(iter(self._heard))]
            return
        if len(sources) != len(parts):
            raise InvalidInput(f"question: {len(parts)} parts show {len(sources)} results")
        shown = self._heard_in(question).shown
        for source, part in zip(sources, parts, strict=True):
            shown.setdefault(source, memoryview(part))

    def _heard_in(self, question: Question) -> _Heard:
        """Return what was handed over with the list that the trainer is said to commit to."""
        listed = _listed(question)
        if listed is None or listed not in self._heard:
            raise Mismatch("question: the list that the trainer is said to commit to was not handed over")
        return self._heard[listed]

    # -- states and logs --

    def _claim(self, question: Question) -> Answer:
        index = self._index(question)
        return Answer({"commitment": self.trace.commitment_at(index).hex()})

    def _index(self, question: Question) -> int:
        index = whole_in(question.body.get("index"), "an index")
        if not 0 <= index <= self.trace.transcript.num_steps:
            raise InvalidInput(
                f"question: index {index}, the run has {self.trace.transcript.num_steps} steps"
            )
        return index

    def _summary(self, question: Question) -> Answer:
        index = self._index(question)
        state = self.trace.witness_at(index)
        if state is None or state.root != self.trace.commitment_at(index):
            return unable(self.trace.find_unopened_checkpoint(index) or "the state cannot be made again")
        return Answer({}, (state.summary.encode(),))

    def _entries(self, question: Question) -> Answer:
        state = self.trace.witness_at(self._index(question))
        if state is None:
            return unable("the state cannot be made again")
        names = _once(items_in(question.body.get("names"), "names"))
        held = [state.entries[name] for name in names if isinstance(name, str) and name in state.entries]
        return Answer({}, tuple(_bytes_of(entry) for entry in held))

    def _frame(self, question: Question) -> Answer:
        step, transcript = whole_in(question.body.get("step"), "a step"), self.trace.transcript
        if not 0 <= step < transcript.num_steps:
            raise InvalidInput(f"question: step {step}, the run has {transcript.num_steps}")
        try:
            return Answer({}, (self.trace.directory.load_frames(transcript, step, step + 1)[step],))
        except (InvalidInput, Mismatch) as problem:
            return unable(problem)

    # -- operators --

    def _committed(self, question: Question) -> Answer:
        try:
            side = self._trainer(question)
        except (InvalidInput, Nondeterminism) as problem:
            return unable(f"the trainer cannot repeat its step: {problem}")
        if side.trace.incomplete is not None:
            return unable(side.trace.incomplete)
        listed = b"\n".join(side.leaves.leaves)
        if len(listed) > question.most:
            return unable(f"the list has {len(listed)} bytes, at most {question.most} are taken")
        return self._signed(question, side.committed, parts=(listed,))

    def _show(self, question: Question) -> Answer:
        side = self._trainer(question)
        sources = _once([_source(item) for item in items_in(question.body.get("sources"), "sources")])
        total = sum(operator_examination.nbytes_of(side.trace.operators, source) for source in sources)
        if total > question.most:
            raise InvalidInput(
                f"question: these results have {total} bytes, it asks for at most {question.most}"
            )
        return Answer({}, tuple(side.show(source) for source in sources))

    def _looked(self, question: Question) -> Answer:
        try:
            case, heard, seen = self._auditor(question)
            with self.trace.ledger.charging("auditor", "examination"):
                found = seen.next(case.facts)
                while isinstance(found, Wanted) and heard.shown.keys() >= {*found.sources}:
                    _verify_shown(seen, heard.shown, found.sources, case.chunk)
                    seen.show([heard.shown[source] for source in found.sources])
                    found = seen.next(case.facts)
        except Nondeterminism as problem:
            return unable(problem)
        if isinstance(found, Wanted):
            missing = [source for source in found.sources if source not in heard.shown]
            return Answer({"wanted": [list(source) for source in missing]})
        if self.objection is not None:
            found = self.objection
        if found is None:
            why = "no operator lies outside its error bound"
            if seen.unknown is not None:
                why = f"{why}, and one is not in the table: {seen.unknown}"
            return self._signed(question, Declined(), why=why[:1000])
        with self.trace.ledger.charging("auditor", "moves"):
            heard.own = OperatorList(case.terms.base, [*heard.leaves[: found.index], found.encode()])
            answered = Answered(len(heard.own.leaves), merkle_root(heard.own.hashes))
        return self._signed(question, answered)

    def _move(self, question: Question) -> Answer:
        """Answer with the move that the game awaits of this party."""
        side = heard = None
        if self.party == "trainer":
            side = self._trainer(question)
        elif (heard := self._auditor(question)[1]).own is None:
            self._looked(question)  # a party that was started again objects to what it objected to
        case = self._case_of(question)
        game = self._game(question, case)
        if self.party not in game.awaited:
            raise Mismatch(f"question: the game awaits {game.stage}, which is not the {self.party}'s to make")
        with self.trace.ledger.charging(self.party, "moves"):
            move, parts = self._owed(game, case, side or heard)
        return self._signed(question, move, parts=parts)

    def _owed(
        self, game: OperatorGame, case: _Case, me: TrainerSide | _Heard | None
    ) -> tuple[Move, tuple[bytes, ...]]:
        own = me.leaves if isinstance(me, TrainerSide) else None if me is None else me.own
        if own is None:
            raise Mismatch("question: this auditor has not answered with a list")
        if game.stage == "bisect" and game.bisection is not None and game.bisection.midpoint is not None:
            at = game.bisection.midpoint
            return Claim(self.party, at, own.commitment_at(at)), ()
        if game.stage == "reveal":
            return Revealed(own.witness_at(game.index)), ()
        accusation = None
        if game.objection is not None:
            said = game.objection
            accusation = Accusation(said.output, said.element, game.block, said.structure)
        if isinstance(me, _Heard) and game.stage == "point" and accusation and game.opened is not None:
            assert me.seen is not None
            return Pointed(_block(me.seen, accusation, game.index, game.opened, case.facts)), ()
        if isinstance(me, TrainerSide) and game.stage == "open":
            return self._opened(me, accusation, game.index, case.facts), ()
        if isinstance(me, TrainerSide) and game.stage == "chunks" and accusation is not None:
            opening: Opening = me.open(accusation, game.index, case.facts)
            if (
                len(opening.encode()) > OPENING_LIMIT
            ):  # then the judge sees from leaf and sources that it must be
                opening = replace(opening, pieces={})
            return Handed(handed_digest(opening)), (opening.encode(),)
        raise Mismatch(f"question: the game awaits {game.stage}")

    def _opened(self, side: TrainerSide, accusation: Accusation | None, at: int, facts: StepFacts) -> Opened:
        if accusation is None:
            return Opened(side.leaves.witness_at(at))
        nodes = () if accusation.structure else side.nodes(at)
        return Opened(side.leaves.witness_at(at), side.partials(accusation, at, facts), nodes)

    def _trainer(self, question: Question) -> TrainerSide:
        """Return the trainer's side of the disputed step, repeated once."""
        if self.party != "trainer":
            raise Mismatch(f"question: {question.kind} is the trainer's to answer")
        case = self._case_of(question)
        if self._side is None:
            claimed = self.trace.witness_at(case.step + 1)
            root = case.terms.claims["trainer"]
            with self.trace.ledger.charging("trainer", "list"):
                self._side = operator_replay.defend(
                    self.trace.replay, case.agreed, case.facts.frame, case.facts.record, base=case.terms.base,
                    chunk=case.chunk, claimed_root=root,
                    claimed=None if claimed is None or claimed.root != root else claimed,
                    made=self.trace.traced_under(case.facts.record),
                )  # fmt: skip
                merkle_root(self._side.leaves.hashes)  # hashed at the list's expense
        if _listed(question) not in (None, self._side.committed):
            raise Mismatch("question: the trainer is said to commit to another list than its own")
        return self._side

    def _auditor(self, question: Question) -> tuple[_Case, _Heard, Examination]:
        if self.party != "auditor":
            raise Mismatch(f"question: {question.kind} is the auditor's to answer")
        case, heard = self._case_of(question), self._heard_in(question)
        if heard.seen is None:
            own = self.trace.traced_under(case.facts.record)
            with self.trace.ledger.charging("auditor", "examination"):
                if own is None:
                    own = operator_replay.own_step(
                        self.trace.replay, case.agreed, case.facts.frame, case.facts.record, chunk=case.chunk
                    )
                heard.seen = Examination(own, [parse_operator(leaf) for leaf in heard.leaves], case.agreed)
        return case, heard, heard.seen

    def _case_of(self, question: Question) -> _Case:
        """Return the step in dispute, having checked that the question speaks of what this party published."""
        step = whole_in(question.body.get("step"), "a step")
        stated = question.body.get("claims")
        if not isinstance(stated, dict) or set(stated) != set(PARTIES):
            raise InvalidInput("question: claims must hold one for each party")
        claims: dict[Party, bytes] = {party: hash_in(stated[party], "a claim") for party in PARTIES}
        frame = self._heard_in(question).frame if self.party == "auditor" else b""
        said = step, claims, question.body.get("step_proof"), frame
        if self._case is None or self._case.said != said:
            self._case = self._open_case(step, claims, question, frame)
            self._side = None
            for heard in self._heard.values():
                heard.seen = heard.own = None
        return self._case

    def _open_case(self, step: int, claims: Mapping[Party, bytes], question: Question, frame: bytes) -> _Case:
        transcript, trace = self.trace.transcript, self.trace
        if not 0 <= step < transcript.num_steps:
            raise InvalidInput(f"question: step {step}, the run has {transcript.num_steps}")
        if claims[self.party] != trace.commitment_at(step + 1):
            raise Mismatch(
                f"question: the {self.party} is said to claim {claims[self.party].hex()} after step {step}"
            )
        agreed = trace.witness_at(step)
        if agreed is None or agreed.root != trace.commitment_at(step) or GRIDS_ENTRY not in agreed.entries:
            raise Nondeterminism(f"the {self.party} cannot make the state before step {step} again")
        said = step, claims, question.body.get("step_proof"), frame
        if self.party == "trainer":
            record = transcript.record(step)
            frame = trace.directory.load_frames(transcript, step, step + 1)[step]
            run, auditor_run = transcript.root(), self.other_run
        else:
            run, auditor_run = self.other_run, transcript.root()
            record = self._record(question, step, run)
            if frame_digest(frame) != record.log:
                raise Mismatch(f"question: the log handed over with the list is not that of step {step}")
        facts = StepFacts(transcript.specification, record, frame, bytes(agreed.entries[GRIDS_ENTRY].data))
        base, chunk = operator_replay.list_base(agreed, facts)
        return _Case(said, step, facts, agreed, Terms(run, auditor_run, step, base, claims), chunk)

    def _record(self, question: Question, step: int, run: bytes) -> StepRecord:
        text = question.body.get("step_proof")
        if not isinstance(text, str) or not text.isascii():
            raise InvalidInput("question: the proof of the trainer's record is missing")
        proof = parse_step_proof(text.encode("ascii"))
        verify_step_proof(proof, run)
        if proof.record.step != step:
            raise Mismatch(
                f"question: the trainer's record is of step {proof.record.step}, asked is step {step}",
                where="step of the trainer's record",
                own=str(step),
                stated=str(proof.record.step),
            )
        return proof.record

    def _game(self, question: Question, case: _Case) -> OperatorGame:
        game = open_operator_game(case.terms.base)
        for move in _moves(question):
            game = play_move(game, sender_of(move), move)
        return game

    def _signed(
        self, question: Question, move: Move, *, parts: Sequence[bytes] = (), **more: object
    ) -> Answer:
        """Return the answer with a move, signed after everything that the question says was said before."""
        signature: bytes | None = None
        if self.signer is not None:
            with self.trace.ledger.charging(self.party, "moves"):
                said = History(self._case_of(question).terms)
                for earlier in _moves(question):
                    said.add(earlier)
                claim = said.claim(move)
                if self.memory is not None:
                    self.memory.keep(claim)
                signature = sign_move(claim, self.signer)
        stated = ["declined"] if isinstance(move, Declined) else move_fields(move)
        return Answer(
            {"move": stated, "signature": None if signature is None else signature.hex(), **more},
            tuple(parts),
        )


def _block(seen: Examination, accusation: Accusation, at: int, opened: Opened, facts: StepFacts) -> int:
    """Return which partial sum or node the auditor points at."""
    if at < len(seen.theirs) and seen.theirs[at].name == END:
        pairs = zip(opened.nodes, nodes_of(seen.theirs, at), strict=False)
        return next((number for number, (stated, own) in enumerate(pairs) if stated != own), -1)
    try:
        read = reader_of(seen.seen, at)
        formula = formula_for(seen.theirs[at], accusation.output, accusation.element, read, facts)
    except (InvalidInput, ArithmeticError, LookupError, ValueError):
        return -1
    if isinstance(formula, Sum) and formula.num_blocks == len(opened.partials):
        for number, (stated, found) in enumerate(zip(opened.partials, formula.partials(), strict=True)):
            if not is_right_partial(stated, found):
                return number
    return -1


def _verify_shown(
    seen: Examination, shown: dict[Source, memoryview], sources: Sequence[Source], chunk: int
) -> None:
    """Return if what was shown is what the trainer's list commits to; whoever asks may be anybody.

    Raises:
        InvalidInput, Mismatch: it is not; whatever is not is forgotten, and nothing is signed.
    """
    false: TallyError | None = None
    for source in sources:
        try:
            verify_shown(seen.theirs, source, shown[source], chunk)
        except TallyError as problem:
            del shown[source]
            false = problem
    if false is not None:
        raise false


def _moves(question: Question) -> list[Move]:
    return [parse_move(item) for item in items_in(question.body.get("moves"), "moves")]


def _listed(question: Question) -> Committed | None:
    """Return to which list the trainer is said to commit."""
    return next((move for move in _moves(question) if isinstance(move, Committed)), None)


def _once(items: list[Value]) -> list[Value]:
    """Return what is asked for, each once.

    Raises:
        InvalidInput: something is asked for twice.
    """
    if len({str(item) for item in items}) != len(items):
        raise InvalidInput("question: asks for the same thing twice")
    return items


def _source(item: object) -> Source:
    at, number = items_in(item, "a result", 2)
    return whole_in(at, "a leaf"), whole_in(number, "an output")


def _bytes_of(entry: Entry) -> memoryview:
    view = memoryview(entry.data)
    return view.cast("B") if view.nbytes else memoryview(b"")
