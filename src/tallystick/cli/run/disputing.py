"""tally dispute: in one process (``run``), or as an exchange of files (``open``, ``answer``, ``rule``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from tallystick.cli.options import AsJson, JobName, OwnKey, argument, choose_source, flag, option
from tallystick.cli.run.judging import (
    DISPUTE_CODES,
    Accusation,
    LevelName,
    StatementOut,
    check_level,
    dispute,
    read_accusation,
    ruling_statement,
)
from tallystick.cli.terminal import answer as show
from tallystick.cli.terminal import done, say
from tallystick.commit.encoding import HASH_BYTES, parse_hex
from tallystick.dispute.exchange import Posting, encode_answer
from tallystick.dispute.terms import Party
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism, StoreError, TallyError
from tallystick.reports.dispute import Passed, awaiting_page, dispute_page
from tallystick.signing.dsse import parse_envelope
from tallystick.signing.keys import PublicKey, SigningKey
from tallystick.store.docket import POLL_SECONDS, AwaitingError, Docket, exchange_of
from tallystick.store.files import RunDirectory, write_whole
from tallystick.store.keys import load_key, load_public_key
from tallystick.store.mailbox import (
    RULING,
    Mailbox,
    answer_name,
    is_settled,
    mark_of,
    objection_of,
    question_name,
)

if TYPE_CHECKING:
    from typing import Any

    from tallystick.roles.parties import Respondent

ARGUMENTS = "arguments"  # the only setting of a run that a program leads (``roles.attached``)
AWAITING = 5  # exit code: an answer is awaited
PROGRAM_FAILS = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


class _RunByDefault(TyperGroup):
    """``tally dispute TRAINER_DIR AUDITOR_DIR`` is ``tally dispute run TRAINER_DIR AUDITOR_DIR``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put ``run`` before arguments that name no command."""
        if not args or args[0] not in (*self.commands, "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    help="Find the first step on which two runs part, the operator that is false in it, and who is to blame: "
    "in one process (run, which may be left out), or by files between two parties and a referee (open, answer, rule).",
)
app.command("run")(dispute)

RefereeKey = Annotated[
    str,
    option("--key", "KEY", "The referee's private key, for questions and ruling: a file, or env:NAME."),
]
Folder = Annotated[Path, argument("DOCKET", "The referee's directory.")]


def register(parent: typer.Typer) -> None:
    """Add ``tally dispute`` to ``parent``."""
    parent.add_typer(app, name="dispute")


@app.command("open")
def open_dispute(
    trainer: Annotated[Path, argument("TRAINER_DIR", "The trainer's run: documents suffice.")],
    auditor: Annotated[Path, argument("AUDITOR_DIR", "The auditor's claim, likewise.")],
    out: Annotated[Path, option("--out", "DOCKET", "The referee's directory, to be made.")],
    trainer_signs: Annotated[Path, option("--trainer-signs", "FILE", "The trainer's public key.")],
    auditor_signs: Annotated[Path, option("--auditor-signs", "FILE", "The auditor's public key.")],
    key: RefereeKey,
    level: LevelName = "operators",
    deadline: Annotated[
        int | None,
        option(
            "--deadline",
            "S",
            "Seconds for each answer, by this machine's clock; by default any time.",
            least=1,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Open a dispute by files: keep both runs' documents and keys, and make a mailbox for each party."""
    check_level(level)
    signer = load_key(key)
    places: dict[Party, Path] = {"trainer": trainer, "auditor": auditor}
    if list(RunDirectory(trainer).load_specification().job.settings) == [ARGUMENTS]:
        raise InvalidInput(
            f"{trainer}: a program leads this run, of which nobody can be asked for one step; a judge follows it from the first: "
            f"tally dispute run {trainer} {auditor} -- python FILE ARGUMENTS"
        )
    keys: dict[Party, PublicKey] = {
        "trainer": load_public_key(trainer_signs), "auditor": load_public_key(auditor_signs),
    }  # fmt: skip
    if len({keys["trainer"], keys["auditor"], signer.public_key}) < 3:
        raise InvalidInput(
            "--trainer-signs, --auditor-signs, --key: must be three keys, one of them is given twice"
        )
    exchange = exchange_of(RunDirectory(trainer), RunDirectory(auditor), level, keys)
    documents: dict[Party, dict[str, bytes]] = {}
    for party, place in places.items():
        run = RunDirectory(place)
        transcript = run.load_transcript()
        documents[party] = {
            run.specification_path.name: transcript.specification.encode(),
            run.records_path.name: transcript.encode_records(),
            run.statement_path.name: transcript.statement().encode(),
        }
    if (objection := RunDirectory(auditor).load_objection()) is not None:
        documents["auditor"][RunDirectory(auditor).objection_path.name] = objection.encode()
    docket = Docket.open(out, exchange, documents, signer, timeout_s=deadline, now=int(time.time()))
    values = {
        "auditor_mailbox": str(out / "auditor"), "dispute": docket.exchange.id.hex(), "docket": str(out),
        "deadline_s": deadline, "referee": signer.public_key.key_id, "trainer_mailbox": str(out / "trainer"),
    }  # fmt: skip
    return done(f"opened: {out}", values, as_json=as_json)


@app.command("rule")
def rule(
    folder: Folder,
    key: RefereeKey,
    job: JobName = None,
    follow: Annotated[bool, flag("--follow", "Wait for answers, to the end of the dispute.")] = False,
    statement: StatementOut = None,
    accusation: Accusation = None,
    as_json: AsJson = False,
) -> int:
    """Take the answers that have arrived, then post the next questions or rule.

    Exit codes: as `tally dispute run`, and 5 while an answer is awaited.
    """
    signer = load_key(key)
    docket = Docket(folder, signer, follow=follow)
    accused = read_accusation(accusation)
    if accused is not None:
        # Or whoever opens a dispute in an auditor's place, and stays silent, would answer that auditor's accusation.
        parse_envelope(accused, what="accusation").open([docket.exchange.keys["auditor"]], what="accusation")
    source = choose_source(job, docket.run("trainer").load_specification().job.path)

    from tallystick.roles import judge

    began, worked = time.perf_counter(), time.process_time()

    def passed() -> Passed:
        seconds = time.perf_counter() - began - docket.waited
        cpu = time.process_time() - worked
        return Passed(len(docket.rounds), docket.spent(), docket.refused, seconds, cpu)

    with docket.locked():
        try:
            result = judge.referee(docket, source)
        except AwaitingError as awaiting:
            show(awaiting_page(awaiting.awaited, awaiting.deadline, passed()), as_json=as_json)
            return AWAITING
        except KeyboardInterrupt:
            say("interrupted: what has arrived is kept; rule again to go on")
            return 130
        docket.verify_ruling(result.encode())
        if accused is not None and result.clears and not docket.has_answered("auditor"):
            raise InvalidInput(
                "--accusation: the auditor's key has signed no answer in this dispute, so nothing shows that the claim is its "
                "owner's; nothing was signed. Without --accusation the ruling can be written"
            )
        signed = ruling_statement(docket.run("trainer"), docket.run("auditor"), result, signer, accused)
        docket.end(result.encode(), result.record)
        if statement is not None:
            write_whole(statement, signed)
    record = None if result.record is None else str(folder / "record.json")
    show(dispute_page(result, str(folder / "verdict.json"), record, passed=passed()), as_json=as_json)
    return DISPUTE_CODES[result.outcome]


@app.command("answer")
def answer(
    mailbox: Annotated[Path, argument("MAILBOX", "Where the questions arrive.")],
    run: Annotated[Path, argument("DIR", "Your own run: the trainer's, or the auditor's claim.")],
    key: OwnKey,
    referee: Annotated[
        Path,
        option("--referee-signs", "FILE", "The referee's public key: what another signed is no question."),
    ],
    dispute_id: Annotated[
        str,
        option(
            "--dispute", "ID", "The dispute, as open printed it: what was asked in another is no question."
        ),
    ],
    job: JobName = None,
    follow: Annotated[
        int, option("--follow", "S", "Go on until the ruling, or S seconds without a new question.", least=0)
    ] = 0,
    as_json: AsJson = False,
) -> int:
    """Answer every question in a mailbox that has no answer yet, from your own run, signed with your own key.

    Only what the referee signed counts. Its ruling ends --follow.

    Exit codes: 0 everything is answered, 1 a question was refused, 3 this machine cannot repeat the job.
    """
    directory, signer = RunDirectory(run), load_key(key)
    if (mailbox / "docket.json").exists():
        raise InvalidInput(
            f"{mailbox}: is the referee's directory; the mailboxes are {mailbox / 'trainer'} and {mailbox / 'auditor'}"
        )
    box = Mailbox(
        mailbox, load_public_key(referee), parse_hex(dispute_id, n_bytes=HASH_BYTES, what="--dispute")
    )
    specification = directory.load_specification()
    source = choose_source(job, specification.job.path)

    from tallystick.roles import judge

    hand = _Hand(
        box,
        signer,
        objection_of(directory),
        lambda party, other: judge.respondent(directory, source, party, other, signer),
    )
    latest = time.monotonic()
    try:
        while True:
            if hand.answer_all():
                latest = time.monotonic()
            if hand.hear_ruling() or time.monotonic() - latest >= follow:
                break
            time.sleep(POLL_SECONDS)
    finally:
        hand.close()
    done(f"answered {hand.answered}", hand.fields(), as_json=as_json)
    return 1 if hand.refused.keys() - {RULING} else 0


class _Hand:
    """A party at its mailbox, in one dispute; ``objection`` is the digest of what it objects to, or None."""

    def __init__(
        self, box: Mailbox, signer: SigningKey, objection: bytes | None,
        open_party: Callable[[Party, bytes], Respondent],
    ) -> None:  # fmt: skip
        self.box, self.signer, self.objection, self.open_party = box, signer, objection, open_party
        self.party: Respondent | None = None
        # Of questions that were taken in, by round: the marks of question and answer.
        self.learnt: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.ruling: dict[str, object] | None = None
        self.refused: dict[str, str] = {}
        # Refused files, by round and by how many questions had been taken in by then.
        self.put_off: dict[tuple[int, int], tuple[int, ...]] = {}
        self.taken = 0
        self.answered, self.sent, self.seconds, self.cpu_seconds = 0, 0, 0.0, 0.0

    def answer_all(self) -> bool:
        """Answer what is there; whether anything was."""
        any_new = False
        for number in self.box.numbers():
            mark = mark_of(self.box.path / question_name(number))
            if self._marks_of(number) == self.learnt.get(number) or mark == self.put_off.get(
                (number, self.taken)
            ):
                continue  # otherwise what stands in its place now may be another question, or its answer is gone
            began, worked = time.perf_counter(), time.process_time()
            try:
                any_new |= self._take(number)
            except Nondeterminism:
                raise
            # One question that cannot be answered is no end of the others.
            except (TallyError, *PROGRAM_FAILS) as problem:
                kind = "" if isinstance(problem, TallyError) else f"{type(problem).__name__}: "
                if f"{number}" not in self.refused:
                    say(f"question {number} is refused: {kind}{problem}")
                self.refused[f"{number}"] = f"{kind}{problem}"
                if not isinstance(
                    problem, (StoreError, OSError, MemoryError)
                ):  # these may be over at the next look
                    self.put_off[number, self.taken] = mark
                continue
            self.seconds += time.perf_counter() - began
            self.cpu_seconds += time.process_time() - worked
            self.refused.pop(f"{number}", None)
            if number not in self.learnt:
                self.taken, self.put_off = self.taken + 1, {}
            marks = mark, self._marks_of(number)[1]
            self.learnt[number] = marks if all(map(is_settled, marks)) else ((), ())
        return any_new

    def _marks_of(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        place = self.box.path
        return mark_of(place / question_name(number)), mark_of(place / answer_name(number))

    def _take(self, number: int) -> bool:
        """Answer a question, unless that is done; whether it was not."""
        began = time.perf_counter()
        posting = self.box.load(number)
        party = self._party_for(posting)
        if self.box.is_answered(posting, self.signer.public_key):
            party.learn(posting.question)
            return False
        said = party.answer(posting.question)
        if said.nbytes_of_parts > posting.question.most:
            raise InvalidInput(
                f"question: at most {posting.question.most} bytes are asked for, the answer has {said.nbytes_of_parts}"
            )
        if party.memory is not None:
            said = party.memory.answer_once(posting, said)
        size = self.box.put_answer(posting, encode_answer(posting, said, self.signer))
        self.answered, self.sent = self.answered + 1, self.sent + size
        say(f"round {number}: {posting.question.kind}, {size:,} bytes, {time.perf_counter() - began:.2f} s")
        return True

    def hear_ruling(self) -> bool:
        """Whether the referee has ruled; what is no ruling on this dispute is said to be refused, and passed over."""
        try:
            found = self.box.load_ruling()
        except TallyError as problem:
            if RULING not in self.refused:
                say(f"{RULING} is no ruling: {problem}")
            self.refused[RULING] = str(problem)
            return False
        self.refused.pop(RULING, None)
        if found is not None:
            self.ruling = {
                "loser": found.loser, "outcome": found.outcome, "reason": found.reason, "step": found.step,
            }  # fmt: skip
        return found is not None

    def _party_for(self, posting: Posting) -> Respondent:
        """Return the party that answers for this run; a question about another run or objection is refused."""
        me = posting.question.party
        roots: dict[Party, bytes] = {"trainer": posting.run, "auditor": posting.auditor_run}
        party = self.party or self.open_party(me, roots["auditor" if me == "trainer" else "trainer"])
        if (own := party.trace.transcript.root()) != roots[me]:
            if self.party is None:
                party.trace.replay.session.close()
            raise Mismatch(f"question: is about the {me}'s run {roots[me].hex()}, this run is {own.hex()}")
        self.party = party
        if posting.key != (own_key := self.signer.public_key.key_id):
            raise Mismatch(
                f"question: is to be answered with the {me}'s key {posting.key[:64]}, --key is {own_key}",
                where="key", own=own_key, stated=posting.key,
            )  # fmt: skip
        if me == "auditor" and posting.objection != self.objection:
            stated, mine = (
                "none" if each is None else each.hex() for each in (posting.objection, self.objection)
            )
            raise Mismatch(
                f"question: says that the auditor's objection is {stated}, this run's is {mine}",
                where="objection", own=mine, stated=stated,
            )  # fmt: skip
        return party

    def fields(self) -> dict[str, object]:
        """Return what was done as a JSON object."""
        return {
            "answered": self.answered, "cpu_seconds": round(self.cpu_seconds, 3), "refused": self.refused,
            "ruling": self.ruling, "seconds": round(self.seconds, 3), "sent_bytes": self.sent,
        }  # fmt: skip

    def close(self) -> None:
        """Let go of what the party holds."""
        if self.party is not None:
            self.party.trace.replay.session.close()
            self.party = None
