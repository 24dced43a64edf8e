"""Questions and answers: what passes between the referee of a dispute and its two parties (spec/dispute.md 15).

    posting = Posting(terms, round, Question("auditor", "claim", {"index": 50}), deadline)
    for piece in posting.encode(key): file.write(piece)      # on the referee's machine
    posting = read_question(file, size, referee_key)         # on the party's
    for piece in encode_answer(posting, answer, key): file.write(piece)
    answer = read_answer(file, size, posting, public_key)    # on the referee's

Both files are one line, then the bulk data, *parts* whose lengths and digests that line states. The line is an envelope that
the referee signed, or the party. An answer names what the referee signed by its digest, so it fits no other dispute, round,
party or run. Nothing is read that the line does not announce, and no more than the question allows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, BinaryIO, Protocol, TypeVar

from tallystick.commit.codec import Document
from tallystick.commit.encoding import (
    HASH_BYTES,
    Fields,
    canonical_json,
    digest,
    is_same_json,
    parse_hex,
)
from tallystick.commit.field_rules import At, Hex
from tallystick.dispute.moves import items_in, party_in, whole_in
from tallystick.dispute.terms import PARTIES, Loser, Party
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.statements import RUN_DIGEST
from tallystick.signing.dsse import Statement, Subject, known_fields, parse_envelope, sign_statement
from tallystick.signing.keys import PublicKey, Signer

QUESTION_TYPE = "https://tallystick/dispute-question/v0.1"
ANSWER_TYPE = "https://tallystick/dispute-answer/v0.1"
RULING_TYPE = "https://tallystick/dispute-ruling/v0.1"
EXCHANGE_TAG = "tallystick/dispute-exchange/1"
HEAD_LIMIT = 1 << 23  # bytes of the line before the parts
MOST_PARTS = 1 << 16
ANSWER_LIMIT = 1 << 33  # bytes of parts that a referee asks for at once
LONGEST_REASON = 1 << 10  # characters with which a party says why it cannot answer
KINDS = ("claim", "summary", "entries", "frame", "list", "look", "show", "move")
Part = bytes | memoryview


@dataclass(frozen=True)
class Question:
    """What one party is asked.

    Attributes:
        party: who is asked.
        kind: one of ``KINDS``.
        body: the question's particulars, as JSON.
        parts: bulk data that the party needs and the other one gave.
        most: bytes that the parts of an answer may have, together.
    """

    party: Party
    kind: str
    body: Mapping[str, object]
    parts: tuple[Part, ...] = ()
    most: int = 0


@dataclass(frozen=True)
class Answer:
    """What the party says: ``body`` as JSON, or ``{"cannot": why}``, and bulk data."""

    body: Mapping[str, object]
    parts: tuple[Part, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the body's canonical JSON and of all parts."""
        return len(canonical_json(dict(self.body))) + self.nbytes_of_parts

    @property
    def nbytes_of_parts(self) -> int:
        """Bytes of all parts."""
        return sum(size_of(part) for part in self.parts)

    @property
    def cannot(self) -> str | None:
        """Why the party cannot answer, or None if it does.

        Raises:
            InvalidInput: that is no short text.
        """
        why = self.body.get("cannot")
        if why is not None and (not isinstance(why, str) or len(why) > LONGEST_REASON):
            raise InvalidInput(f"answer: cannot must be a text of at most {LONGEST_REASON} characters")
        return why

    def fields(self, *names: str) -> Fields:
        """Return the body, which must have exactly these fields.

        Raises:
            InvalidInput: it has others.
        """
        return Fields(dict(self.body), what="answer", names=names)

    def expect_parts(self, count: int) -> tuple[Part, ...]:
        """Return the parts, of which there must be ``count``.

        Raises:
            InvalidInput: there are more or fewer.
        """
        if len(self.parts) != count:
            raise InvalidInput(f"answer: must have {count} parts, has {len(self.parts)}")
        return self.parts


def unable(why: object) -> Answer:
    """Return the answer of a party that cannot do what it is asked."""
    return Answer({"cannot": str(why)[:LONGEST_REASON]})


def size_of(part: Part) -> int:
    """Return the length of a part in bytes."""
    return part.nbytes if isinstance(part, memoryview) else len(part)


@dataclass(frozen=True)
class Exchange:
    """Which dispute it is: two runs, whose keys answer for them, what the auditor objects to, and how far down it goes.

    Attributes:
        run, auditor_run: roots of both runs.
        level: ``operators`` or ``steps``.
        keys: of both parties.
        objection: SHA-256 of the auditor's objection to a log, or None.
        nonce: 32 bytes that the referee drew: a question or ruling of one docket is none of another.
    """

    run: bytes
    auditor_run: bytes
    level: str
    keys: Mapping[Party, PublicKey]
    objection: bytes | None
    nonce: bytes

    @property
    def id(self) -> bytes:
        """The digest that names the dispute."""
        return digest(
            EXCHANGE_TAG,
            canonical_json(
                {
                    "auditor_run": self.auditor_run.hex(),
                    "keys": {party: self.keys[party].key_id for party in PARTIES},
                    "level": self.level,
                    "nonce": self.nonce.hex(),
                    "objection": None if self.objection is None else self.objection.hex(),
                    "run": self.run.hex(),
                }
            ),
        )


@dataclass(frozen=True)
class Posting:
    """A question as it is posted.

    Attributes:
        dispute, run, auditor_run, objection: the dispute's id, the roots of both runs and the objection's digest.
        key: id of the key that answers, hexadecimal.
        round: number of the round, from 0.
        question: what is asked.
        deadline: UTC second since 1970 by the referee's clock after which silence loses, or None.
    """

    dispute: bytes
    run: bytes
    auditor_run: bytes
    objection: bytes | None
    key: str
    round: int
    question: Question
    deadline: int | None = None

    def statement(self) -> Statement:
        """Return what the referee signs: everything about the question, its parts by length and digest."""
        asked = self.question
        said = {
            "auditorRun": self.auditor_run.hex(),
            "body": dict(asked.body),
            "deadline": self.deadline,
            "dispute": self.dispute.hex(),
            "key": self.key,
            "kind": asked.kind,
            "most": asked.most,
            "objection": None if self.objection is None else self.objection.hex(),
            "parts": stated_parts(asked.parts),
            "party": asked.party,
            "round": self.round,
        }
        return Statement((Subject("run", {RUN_DIGEST: self.run.hex()}),), QUESTION_TYPE, said)

    def digest(self) -> bytes:
        """Return the SHA-256 of the statement, by which an answer names the question."""
        return hashlib.sha256(self.statement().encode()).digest()

    def encode(self, signer: Signer) -> Iterator[Part]:
        """Yield the bytes of the file, which the referee signs, piece by piece."""
        yield sign_statement(self.statement(), signer) + b"\n"
        yield from self.question.parts


def encode_answer(posting: Posting, answer: Answer, signer: Signer) -> Iterator[Part]:
    """Yield the file of a signed answer, piece by piece."""
    said = {
        "body": dict(answer.body),
        "dispute": posting.dispute.hex(),
        "parts": stated_parts(answer.parts),
        "party": posting.question.party,
        "question": posting.digest().hex(),
        "round": posting.round,
    }
    about = (Subject("run", {RUN_DIGEST: posting.run.hex()}),)
    yield sign_statement(Statement(about, ANSWER_TYPE, said), signer) + b"\n"
    yield from answer.parts


def read_question(file: BinaryIO, size: int, key: PublicKey, *, what: str = "question") -> Posting:
    """Return the question in a file of ``size`` bytes, which the referee with ``key`` signed.

    Raises:
        InvalidInput: it is malformed, or longer or shorter than it says.
        Mismatch: not signed by ``key``, or a part is another than was signed.
    """
    head = _line(file, size, what)
    envelope = parse_envelope(head, what=what)
    asked = envelope.open([key], what=what)
    if asked.predicate_type != QUESTION_TYPE:
        raise InvalidInput(f"{what}: predicateType must be {QUESTION_TYPE}")
    names = (
        "auditorRun",
        "body",
        "deadline",
        "dispute",
        "key",
        "kind",
        "most",
        "objection",
        "parts",
        "party",
        "round",
    )
    fields = Fields(dict(asked.predicate), what=what, names=names)
    canonical_json(dict(asked.predicate))  # raises where it holds a float or a lone surrogate
    deadline, number, most = fields.value("deadline"), fields.integer("round"), fields.integer("most")
    if number < 0 or most < 0:
        raise InvalidInput(f"{what}: round {number} and most {most} must be 0 or more")
    if (kind := fields.text("kind")) not in KINDS:
        raise InvalidInput(f"{what}: kind {kind[:40]!r} must be one of {', '.join(KINDS)}")
    stated = _parse_stated(fields.value("parts"), what)
    question = Question(
        party_in(fields.text("party")),
        kind,
        fields.mapping("body"),
        tuple(_parts(file, stated, size - len(head) - 1, what)),
        most,
    )
    run = parse_hex(asked.digest_of("run", RUN_DIGEST) or "", n_bytes=HASH_BYTES, what=f"{what}: subject run")
    objection = None if fields.value("objection") is None else _hash(fields, "objection", what)
    posting = Posting(
        _hash(fields, "dispute", what), run, _hash(fields, "auditorRun", what), objection, fields.text("key"), number, question,
        None if deadline is None else whole_in(deadline, "a deadline"),
    )  # fmt: skip
    if envelope.payload != posting.statement().encode():
        raise InvalidInput(f"{what}: must be canonical JSON, and about the run alone")
    return posting


def read_answer(
    file: BinaryIO, size: int, posting: Posting, key: PublicKey, *, what: str = "answer"
) -> tuple[Answer, bytes]:
    """Return the answer to ``posting`` in a file of ``size`` bytes, and the digest of what was signed.

    Checked in this order, each before more is read: length of the line, signature, that it answers this question and no
    other, the announced length against what the question allows and what is there, each part's digest.

    Raises:
        InvalidInput: malformed, too long, or not as long as it says.
        Mismatch: not signed by ``key``, to another question, or a part is another than was signed.
    """
    head = _line(file, size, what)
    fields, payload = _opened(head, posting.digest().hex(), key, what)
    wanted = {
        "dispute": posting.dispute.hex(), "party": posting.question.party, "round": posting.round,
    }  # fmt: skip
    for name, asked in wanted.items():
        if not is_same_json(found := fields.value(name), asked):
            raise Mismatch(f"{what}: is to {name} {str(found)[:64]!r}, asked was {asked!r}")
    stated = _parse_stated(fields.value("parts"), what)
    if (total := sum(nbytes for nbytes, _ in stated)) > posting.question.most:
        raise InvalidInput(
            f"{what}: announces {total} bytes of parts, at most {posting.question.most} were asked for"
        )
    parts = tuple(_parts(file, stated, size - len(head) - 1, what))
    canonical_json(dict(fields.mapping("body")))  # raises where it holds a float or a lone surrogate
    return Answer(fields.mapping("body"), parts), payload


def signed_payload(head: bytes, question: str, key: PublicKey, *, what: str) -> bytes:
    """Return the digest of what ``key`` signed in an answer's first line, if it answers ``question`` (a digest).

    Raises:
        InvalidInput, Mismatch: it does not, or it is malformed.
    """
    return _opened(head, question, key, what)[1]


def _opened(head: bytes, question: str, key: PublicKey, what: str) -> tuple[Fields, bytes]:
    envelope = parse_envelope(head, what=what)
    statement = envelope.open([key], what=what)
    if statement.predicate_type != ANSWER_TYPE:
        raise InvalidInput(f"{what}: predicateType must be {ANSWER_TYPE}")
    names = ("body", "dispute", "parts", "party", "question", "round")
    fields = known_fields(statement.predicate, names, what=what)
    if (found := fields.text("question")) != question:
        raise Mismatch(
            f"{what}: is to question {found[:64]!r} of round {str(fields.value('round'))[:20]}, asked was {question}"
        )
    return fields, hashlib.sha256(envelope.payload).digest()


def _line(file: BinaryIO, size: int, what: str) -> bytes:
    line = file.readline(min(size, HEAD_LIMIT) + 1)
    if not line.endswith(b"\n"):
        raise InvalidInput(f"{what}: must begin with a line of at most {HEAD_LIMIT} bytes")
    return line[:-1]


def stated_parts(parts: Sequence[Part]) -> tuple[tuple[int, str], ...]:
    """Return length and SHA-256, in hexadecimal, of each part."""
    return tuple((size_of(part), hashlib.sha256(part).hexdigest()) for part in parts)


def _parse_stated(value: object, what: str) -> list[tuple[int, bytes]]:
    items = items_in(value, "parts")
    if len(items) > MOST_PARTS:
        raise InvalidInput(f"{what}: {len(items)} parts exceed the limit of {MOST_PARTS}")
    found: list[tuple[int, bytes]] = []
    for item in items:
        nbytes, text = items_in(item, "a part", 2)
        number = whole_in(nbytes, "a part's length")
        if number < 0 or not isinstance(text, str):
            raise InvalidInput(f"{what}: a part must be [length, digest]")
        found.append((number, parse_hex(text, n_bytes=HASH_BYTES, what=f"{what}: part")))
    return found


def _parts(file: BinaryIO, stated: Sequence[tuple[int, bytes]], left: int, what: str) -> Iterator[bytes]:
    total = sum(nbytes for nbytes, _ in stated)
    if total != left:
        raise InvalidInput(f"{what}: announces {total} bytes of parts, {left} are there")
    for number, (nbytes, named) in enumerate(stated):
        data = file.read(nbytes)
        if len(data) != nbytes or hashlib.sha256(data).digest() != named:
            raise Mismatch(f"{what}: part {number} is not the one that was announced")
        yield data


def _hash(fields: Fields, name: str, what: str) -> bytes:
    return parse_hex(fields.text(name), n_bytes=HASH_BYTES, what=f"{what}: {name}")


# -- the end --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PostedRuling(Document, what="ruling"):
    """What a referee tells both parties at the end, signed like its questions.

    Attributes:
        dispute: id of the dispute, hexadecimal.
        loser, outcome, reason, step: of the verdict.
        verdict: SHA-256 of the verdict's document, hexadecimal.
    """

    dispute: Annotated[str, Hex(HASH_BYTES)]
    loser: str
    outcome: str
    reason: str
    step: int | None
    verdict: Annotated[str, At("verdict", "sha256"), Hex(HASH_BYTES)]

    def signed(self, run: bytes, signer: Signer) -> bytes:
        """Return the ruling as a file for the parties to the dispute about ``run``, its root."""
        about = (Subject("run", {RUN_DIGEST: run.hex()}),)
        return sign_statement(Statement(about, RULING_TYPE, self.fields()), signer)


def read_ruling(data: bytes, key: PublicKey, *, what: str = "ruling") -> PostedRuling:
    """Return the ruling in a file.

    Raises:
        InvalidInput: it is malformed.
        Mismatch: not signed by ``key``.
    """
    statement = parse_envelope(data, what=what).open([key], what=what)
    if statement.predicate_type != RULING_TYPE:
        raise InvalidInput(f"{what}: predicateType must be {RULING_TYPE}")
    return PostedRuling.read(dict(statement.predicate), what=what)


# -- the table ------------------------------------------------------------------------------------

Value = TypeVar("Value")


class QuestionChannel(Protocol):
    """Where the referee asks. In one process the parties answer at once; between machines files pass.

    ``deadline`` says in words when the last question had to be answered.
    """

    deadline: str

    def ask(
        self, questions: Mapping[Party, Question], read: Callable[[Party, Answer], Value]
    ) -> Mapping[Party, Value]:
        """Ask both parties, or one; return what ``read`` made of the answers. Who let the deadline pass is missing.

        An answer at which ``read`` raises a ``TallyError`` was not given.
        """
        ...


class ForfeitError(Exception):
    """A party lost at the table: it did not answer in time, or contradicted itself."""

    def __init__(self, loser: Loser, reason: str) -> None:
        super().__init__(reason)
        self.loser: Loser = loser


def ask_one(table: QuestionChannel, question: Question, read: Callable[[Answer], Value]) -> Value:
    """Return what one party answers.

    Raises:
        ForfeitError: nothing, until the deadline.
    """
    party = question.party
    replies = table.ask({party: question}, lambda _, answer: read(answer))
    if party not in replies:
        raise ForfeitError(party, f"no answer: {party} owed {question.kind} by {table.deadline}")
    return replies[party]
