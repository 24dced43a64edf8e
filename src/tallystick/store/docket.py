"""A dispute on disk: what the referee keeps, and the mailboxes of the two parties (spec/dispute.md 15).

    docket.json                     which dispute, whose keys, how long an answer may take; written once
    documents/trainer, /auditor     both runs' documents: no state, no log
    trainer/0003.question, .answer  the trainer's mailbox: what it is asked and what it says; auditor/ likewise
    accepted/0003.trainer.answer    the referee's own copy of an answer that counts
    journal.json                    when what was asked, and what has arrived; written whole or not at all
    panel/DIGEST.json               what the judge's other arithmetics said to one question (roles.panel)
    verdict.json, record.json       how it ended; a mailbox has ruling.json too, which the referee signed

The mailboxes may be anybody's to write. The referee reads an answer, checks it and copies it before it counts; what is in
a mailbox later changes nothing, except that two answers which one party signed to one question cost it the game.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tallystick.commit.encoding import HASH_BYTES, Fields, canonical_json, parse_canonical_json, parse_hex
from tallystick.dispute.exchange import (
    ANSWER_LIMIT,
    HEAD_LIMIT,
    Answer,
    Exchange,
    ForfeitError,
    PostedRuling,
    Posting,
    Question,
    read_answer,
    signed_payload,
    size_of,
)
from tallystick.dispute.terms import PARTIES, Party
from tallystick.dispute.verdict import VERDICT_LIMIT, parse_verdict
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism, StoreError, TallyError
from tallystick.run.documents import verify_one_order
from tallystick.signing.keys import PublicKey, Signer, parse_public_key
from tallystick.store.files import RunDirectory, read_whole, storing, write_pieces, write_whole
from tallystick.store.mailbox import (
    QUESTION_FILE_LIMIT,
    RULING,
    answer_name,
    is_settled,
    mark_of,
    objection_of,
    question_name,
)
from tallystick.store.regular import open_regular
from tallystick.store.rounds import Round, Taken, read_round

DOCKET_FORMAT = "tallystick/dispute-docket/2"
IN_THE_WAY = (
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EACCES,
    errno.ELOOP,
)
"""What the system answers where something lies in a mailbox, or in its place, that a file cannot take the place of."""
VERDICT = "verdict.json"
JOURNAL_FORMAT = "tallystick/dispute-journal/2"
DOCKET_LIMIT = 1 << 16
JOURNAL_LIMIT = 1 << 24
POLL_SECONDS = 0.2
Value = TypeVar("Value")


class AwaitingError(Exception):
    """The referee waits for answers; ``awaited`` are parties, ``deadline`` a UTC second or None."""

    def __init__(self, number: int, awaited: list[Party], deadline: int | None) -> None:
        super().__init__(f"round {number}: awaiting {' and '.join(awaited)}")
        self.number, self.awaited, self.deadline = number, awaited, deadline


class Docket:
    """One dispute on the referee's disk; a table (``dispute.exchange.QuestionChannel``) at which files pass.

    Attributes:
        refused: answers that were refused, and files that a mailbox did not take, since this object was made, and why, by
            file.
        waited: seconds that ``ask`` spent waiting.
        signer: the referee, who signs questions and ruling.
        follow: whether ``ask`` waits for what it asked, or raises ``AwaitingError``.
        clock: UTC seconds since 1970.

    Raises:
        InvalidInput, StoreError: no docket is there.
        Mismatch: ``signer`` is not the referee of this dispute.
    """

    def __init__(
        self, path: Path, signer: Signer, *, follow: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self.path, self.signer, self.follow, self.clock = path, signer, follow, clock
        data = read_whole(path / "docket.json", limit=DOCKET_LIMIT, what="a dispute's docket")
        names = (
            "auditor_run", "format", "keys", "level", "nonce", "objection", "opened", "referee", "run", "timeout_s",
        )  # fmt: skip
        fields = Fields(
            parse_canonical_json(data, what="docket", limit=DOCKET_LIMIT), what="docket", names=names
        )
        fields.constant("format", DOCKET_FORMAT)
        keys = Fields(fields.value("keys"), what="docket: keys", names=PARTIES)
        self.exchange = Exchange(
            _hash(fields.text("run")), _hash(fields.text("auditor_run")), fields.text("level"),
            {party: parse_public_key(bytes.fromhex(keys.text(party)), what=f"docket: key of the {party}") for party in PARTIES},
            None if fields.value("objection") is None else _hash(fields.text("objection")), _hash(fields.text("nonce")),
        )  # fmt: skip
        if (own := signer.public_key.spki.hex()) != (stated := fields.text("referee")):
            raise Mismatch(
                f"{path}: another key than the one given is the referee's",
                where="referee's key",
                own=own,
                stated=stated,
            )
        self.timeout_s = None if fields.value("timeout_s") is None else fields.integer("timeout_s")
        self.opened = fields.integer("opened")
        self.rounds = self._load_journal()
        self.refused: dict[str, str] = {}
        self.deadline = "no deadline"
        self.waited = 0.0
        self._next = 0
        self._since: dict[int, float] = {}  # rounds posted by this object, by a clock that nobody sets
        self._marks: dict[Path, tuple[int, ...]] = {}  # of files that were looked at and need not be again

    @classmethod
    def open(
        cls, path: Path, exchange: Exchange, documents: Mapping[Party, Mapping[str, bytes]], signer: Signer, *,
        timeout_s: int | None, now: int,
    ) -> Docket:  # fmt: skip
        """Write a new docket; opening the same dispute there again, whatever its nonce, changes nothing.

        Raises:
            StoreError: another dispute is there, or the disk refused.
        """
        keys = {party: exchange.keys[party].spki.hex() for party in PARTIES}
        if (path / "docket.json").exists():
            docket = cls(path, signer)
            there = replace(docket.exchange, nonce=exchange.nonce)
            if (there.id, docket.timeout_s) != (exchange.id, timeout_s):
                raise StoreError(f"{path}: another dispute is there")
            return docket
        with storing(str(path)):
            if path.is_dir() and any(path.iterdir()):
                raise StoreError(
                    f"{path}: is not empty, and holds no dispute; a new directory is made for one"
                )
        for party in PARTIES:
            with storing(str(path)):
                (path / party).mkdir(parents=True, exist_ok=True)
            for name, data in documents[party].items():
                write_whole(path / "documents" / party / name, data)
        said = {
            "auditor_run": exchange.auditor_run.hex(), "format": DOCKET_FORMAT, "keys": keys, "level": exchange.level,
            "nonce": exchange.nonce.hex(), "objection": None if exchange.objection is None else exchange.objection.hex(),
            "opened": now, "referee": signer.public_key.spki.hex(), "run": exchange.run.hex(), "timeout_s": timeout_s,
        }  # fmt: skip
        write_whole(path / "docket.json", canonical_json(said))
        return cls(path, signer)

    def run(self, party: Party) -> RunDirectory:
        """Return the directory with a party's documents."""
        return RunDirectory(self.path / "documents" / party)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Inside, no other process rules on this dispute.

        Raises:
            StoreError: one does.
        """
        with storing(str(self.path)), (self.path / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(f"{self.path}: another process is ruling on this dispute") from None
            yield

    # -- the table --

    def ask(
        self, questions: Mapping[Party, Question], read: Callable[[Party, Answer], Value]
    ) -> Mapping[Party, Value]:
        """Post the questions of the next round, unless they are, and return what was answered; see ``Table``.

        Raises:
            AwaitingError: an answer is missing, and its deadline is not over.
            Nondeterminism: what would have to be asked for is more than a referee takes.
            ForfeitError: a party signed two different answers to one question.
        """
        for party, question in questions.items():
            if question.most > ANSWER_LIMIT:
                raise Nondeterminism(
                    f"the {party}'s {question.kind} may have {question.most} bytes, a referee takes at most {ANSWER_LIMIT}"
                )
        number, self._next = self._next, self._next + 1
        held = self._post(number, questions)
        found: dict[Party, Value] = {}
        while True:
            now = int(self.clock())
            if number == len(self.rounds) - 1:  # where it was found when it is ruled on again
                self._check_words()
            for party in questions:
                if party in found or party in held.silent:
                    continue
                posting = self._posting(number, held, questions[party])
                if party in held.taken:
                    found[party] = read(party, self._read(self._accepted(number, party), posting)[0])
                    continue
                self._see_delivered(party, posting)
                if (value := self._take(number, party, posting, read, now)) is not None:
                    found[party] = value[0]
            awaited: list[Party] = [
                party for party in questions if party not in found and party not in held.silent
            ]
            if not awaited:
                return found
            if self._is_over(number, held, now):
                # Only now, after another look: an answer that is there when the referee looks is in time.
                held.silent += awaited
                self._save_journal()
                return found
            if not self.follow:
                deadline = None if self.timeout_s is None else held.posted + self.timeout_s
                raise AwaitingError(number, awaited, deadline)
            time.sleep(POLL_SECONDS)
            self.waited += POLL_SECONDS

    def _is_over(self, number: int, held: Round, now: int) -> bool:
        """Whether a round's time is over; for whoever has waited here since it was posted, by both clocks."""
        if self.timeout_s is None or now <= held.posted + self.timeout_s:
            return False
        since = self._since.get(number) if self.follow else None
        return since is None or time.monotonic() - since > self.timeout_s

    def _post(self, number: int, questions: Mapping[Party, Question]) -> Round:
        if number < len(self.rounds) and not self.rounds[number].delivered:
            del self.rounds[
                number:
            ]  # the disk refused, or the process died: it is asked anew, and its time begins
        if number == len(self.rounds):
            self._since[number] = time.monotonic()
            held = Round(int(self.clock()), {})
            for party, question in questions.items():
                posting = self._posting(number, held, question)
                head, *parts = map(size_of, posting.encode(self.signer))
                if head > HEAD_LIMIT or (nbytes := head + sum(parts)) > QUESTION_FILE_LIMIT:
                    raise Nondeterminism(
                        f"the {party}'s {question.kind} has {head} and {sum(parts)} bytes, a party reads {HEAD_LIMIT} and "
                        f"{QUESTION_FILE_LIMIT} in all"
                    )
                held.asked[party] = posting.digest().hex(), nbytes
            self.rounds.append(held)
            self._save_journal()  # before anybody can answer: asked again, it is the same question
        held = self.rounds[number]
        for party, question in questions.items():
            posting = self._posting(number, held, question)
            if held.asked.get(party, ("", 0))[0] != posting.digest().hex():
                raise StoreError(
                    f"{self.path}: round {number} asked the {party} something else before; was the job or the program changed?"
                )
            # What was answered is put right too: a party that starts again may need what it brought.
            self._see_delivered(party, posting)
        if not held.delivered:
            held.delivered = True
            self._save_journal()
        self.deadline = "no deadline" if self.timeout_s is None else f"second {held.posted + self.timeout_s}"
        return held

    def _deliver(self, party: Party, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file into a party's mailbox, if nothing that the party has put there is in the way.

        Raises:
            StoreError: the referee's own disk refused: no party loses by that.
        """
        try:
            write_pieces(self.path / party / name, pieces)
        except StoreError as problem:
            cause = problem.__cause__
            if not isinstance(cause, OSError) or cause.errno not in IN_THE_WAY:
                raise
            self.refused[f"{party}/{name}"] = str(problem)

    def _see_delivered(self, party: Party, posting: Posting) -> None:
        """Put a question where it was delivered, unless it lies there."""
        file = self.path / party / question_name(posting.round)
        mark = mark_of(file)
        if mark and self._marks.get(file) == mark:
            return
        if not self._holds(file, posting):
            self._deliver(party, file.name, posting.encode(self.signer))
        elif is_settled(mark):
            self._marks[file] = mark

    def _posting(self, number: int, held: Round, question: Question) -> Posting:
        deadline = None if self.timeout_s is None else held.posted + self.timeout_s
        dispute = self.exchange
        return Posting(
            dispute.id,
            dispute.run,
            dispute.auditor_run,
            dispute.objection,
            dispute.keys[question.party].key_id,
            number,
            question,
            deadline,
        )

    def _read(self, path: Path, posting: Posting) -> tuple[Answer, bytes, int]:
        """Return the answer in a file, the digest of what was signed, and the file's length."""
        key = self.exchange.keys[posting.question.party]
        with open_regular(path, "an answer is awaited", folder=True) as file:
            size = os.fstat(file.fileno()).st_size
            answer, payload = read_answer(file, size, posting, key, what=path.name)
            return answer, payload, size

    def _take(
        self,
        number: int,
        party: Party,
        posting: Posting,
        read: Callable[[Party, Answer], Value],
        now: int,
    ) -> tuple[Value] | None:
        """Return what an answer says that has arrived, and keep it; None if there is none that counts."""
        path, key = self.path / party / answer_name(number), self.exchange.keys[party]
        mark = mark_of(path)
        if not mark or self._marks.get(path) == mark:
            return None  # nothing, or what was refused
        try:
            answer, payload, size = self._read(path, posting)
            value = read(party, answer)
            head = _head(path)  # the file may have been changed in between
            if signed_payload(head, posting.digest().hex(), key, what=path.name) != payload:
                raise Mismatch(f"{path.name}: changed while it was read")
        except TallyError as problem:
            self.refused[f"{party}/{path.name}"] = str(problem)
            if is_settled(mark):
                self._marks[path] = mark
            return None
        self.refused.pop(f"{party}/{path.name}", None)
        copy = self._accepted(number, party)
        write_pieces(copy, (head + b"\n", *answer.parts))
        at = now if self.timeout_s is None else min(now, self.rounds[number].posted + self.timeout_s)
        self.rounds[number].taken[party] = Taken(at, size, hashlib.sha256(head).hexdigest(), payload.hex())
        self._save_journal()
        return (value,)

    def _check_words(self) -> None:
        """Return if no mailbox holds another signed answer to a question than the one that was taken.

        Raises:
            ForfeitError: one does; its first line, the signed statement, is kept beside the answer that was taken.
        """
        is_ruled = (self.path / VERDICT).exists()  # what is said after the ruling changes nothing
        for number, held in enumerate(self.rounds):
            for party, taken in held.taken.items():
                kept = self._accepted(number, party).with_suffix(".contradiction")
                path = kept if kept.exists() else self.path / party / answer_name(number)
                mark = mark_of(path)
                if not mark or self._marks.get(path) == mark or (is_ruled and path != kept):
                    continue
                if path != kept and is_settled(mark):
                    self._marks[path] = mark
                try:
                    head = _head(path)
                    if hashlib.sha256(head).hexdigest() == taken.head:
                        continue
                    signed = signed_payload(
                        head, held.asked[party][0], self.exchange.keys[party], what=path.name
                    )
                except TallyError as problem:
                    self.refused[f"{party}/{answer_name(number)}"] = f"answered already; {problem}"
                    continue
                if signed.hex() != taken.payload:
                    write_whole(kept, head + b"\n")
                    raise ForfeitError(
                        party,
                        f"equivocation: {party} signed two different answers to the question of round {number}",
                    )

    def _accepted(self, number: int, party: Party) -> Path:
        return self.path / "accepted" / f"{number:04d}.{party}.answer"

    # -- the journal --

    def _load_journal(self) -> list[Round]:
        path = self.path / "journal.json"
        if not path.exists():
            return []
        value = parse_canonical_json(
            read_whole(path, limit=JOURNAL_LIMIT, what="a journal"), what="journal", limit=JOURNAL_LIMIT
        )
        fields = Fields(value, what="journal", names=("format", "rounds"))
        fields.constant("format", JOURNAL_FORMAT)
        return [read_round(item) for item in fields.items("rounds")]

    def _save_journal(self) -> None:
        said = {"format": JOURNAL_FORMAT, "rounds": [held.fields() for held in self.rounds]}
        write_whole(self.path / "journal.json", canonical_json(said))

    def has_answered(self, party: Party) -> bool:
        """Whether an answer that the party signed has counted in this dispute."""
        return any(party in held.taken for held in self.rounds)

    def verify_ruling(self, verdict: bytes) -> None:
        """Return if the dispute has not been ruled on otherwise.

        Raises:
            Mismatch: it has: a judge signs one ruling.
        """
        path = self.path / VERDICT
        if path.exists() and read_whole(path, limit=VERDICT_LIMIT, what="a ruling") != verdict:
            raise Mismatch(
                f"{path}: this dispute was ruled on otherwise; that ruling stands, nothing was signed"
            )

    def end(self, verdict: bytes, record: bytes | None) -> None:
        """Write how the dispute ended, for the parties too."""
        if record is not None:
            write_whole(self.path / "record.json", record)
        write_whole(self.path / VERDICT, verdict)
        ended, named = parse_verdict(verdict), hashlib.sha256(verdict).hexdigest()
        ruling = PostedRuling(
            self.exchange.id.hex(), ended.loser, ended.outcome, ended.reason, ended.step, named
        ).signed(self.exchange.run, self.signer)
        for party in PARTIES:
            self._deliver(party, VERDICT, (verdict,))
            self._deliver(party, RULING, (ruling,))

    def _holds(self, path: Path, posting: Posting) -> bool:
        """Whether the question lies in its place, and not something that somebody put there before."""
        try:
            with open_regular(path, "a question", folder=True) as file:
                pieces = map(bytes, posting.encode(self.signer))
                return all(file.read(len(piece)) == piece for piece in pieces) and not file.read(1)
        except (InvalidInput, StoreError):
            return False

    def spent(self) -> dict[Party, dict[str, int]]:
        """Return by party: questions asked, bytes it was sent and sent, seconds between question and answer."""
        found: dict[Party, dict[str, int]] = {}
        for party in PARTIES:
            asked = [held for held in self.rounds if party in held.asked]
            taken = [(held, held.taken[party]) for held in asked if party in held.taken]
            found[party] = {
                "questions": len(asked),
                "received_bytes": sum(held.asked[party][1] for held in asked),
                "seconds": sum(each.at - held.posted for held, each in taken),
                "sent_bytes": sum(each.nbytes for _, each in taken),
            }
        return found


def _head(path: Path) -> bytes:
    with open_regular(path, "an answer is awaited", folder=True) as file:
        line = file.readline(HEAD_LIMIT + 1)
    if not line.endswith(b"\n"):
        raise InvalidInput(f"{path.name}: must begin with a line of at most {HEAD_LIMIT} bytes")
    return line[:-1]


def _hash(text: str) -> bytes:
    return parse_hex(text, n_bytes=HASH_BYTES, what="docket")


def exchange_of(
    run: RunDirectory, claim: RunDirectory, level: str, keys: Mapping[Party, PublicKey]
) -> Exchange:
    """Return which dispute it is between two runs, whose documents are checked, under a new nonce.

    Raises:
        InvalidInput: a document is malformed, or the runs are not of one specification.
        Mismatch: one side's documents contradict each other, or the objection is to another run.
    """
    ours, theirs = run.load_transcript(), claim.load_transcript()
    verify_one_order(ours.specification, theirs.specification)
    if (objection := claim.load_objection()) is not None:
        objection.verify_about(ours.root().hex(), ours.num_steps)
    return Exchange(
        ours.root(), theirs.root(), level, dict(keys), objection_of(claim), secrets.token_bytes(HASH_BYTES)
    )
