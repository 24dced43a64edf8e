"""A party's end of a dispute by files: its mailbox (spec/dispute.md 15); the referee's is ``store.docket``."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tallystick.dispute.exchange import (
    Part,
    PostedRuling,
    Posting,
    read_answer,
    read_question,
    read_ruling,
)
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.signing.keys import PublicKey
from tallystick.store.files import RunDirectory, read_whole, write_pieces
from tallystick.store.regular import open_regular, verify_there

QUESTION_FILE_LIMIT = 1 << 31  # bytes of a question that a party reads
SETTLED_NS = 10**9
RULING, RULING_LIMIT = "ruling.json", 1 << 20  # a file, and its bytes


def question_name(number: int) -> str:
    """Return the name of a round's question in a mailbox."""
    return f"{number:04d}.question"


def objection_of(claim: RunDirectory) -> bytes | None:
    """Return the digest of the objection in an auditor's claim, or None."""
    objection = claim.load_objection()
    return None if objection is None else hashlib.sha256(objection.encode()).digest()


def mark_of(path: Path) -> tuple[int, ...]:
    """Return by what shows that a file is replaced by another; nothing if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_settled(mark: tuple[int, ...]) -> bool:
    """Whether a file has been as it is for so long that the next change of it has another mark: disks keep coarse time."""
    return bool(mark) and time.time_ns() - mark[-1] > SETTLED_NS


def answer_name(number: int) -> str:
    """Return the name of a round's answer in a mailbox."""
    return f"{number:04d}.answer"


class Mailbox:
    """A party's end of the exchange: questions of the referee with the key ``referee``, and the answers that it gave.

    Anybody may write there; what another key signed, or this one in another dispute than ``dispute`` (its id), is refused.
    """

    def __init__(self, path: Path, referee: PublicKey, dispute: bytes) -> None:
        self.path, self.referee, self.dispute = path, referee, dispute

    def numbers(self) -> list[int]:
        """Return the rounds of the questions that are there, in order."""
        try:
            names = [entry.name for entry in self.path.iterdir()]
        except OSError as problem:
            raise StoreError(f"{self.path}: cannot be read ({problem.strerror})") from problem
        found = [name.partition(".")[0] for name in names if name.endswith(".question")]
        return sorted(int(name) for name in found if name.isascii() and name.isdigit() and len(name) <= 8)

    def load(self, number: int) -> Posting:
        """Return a question.

        Raises:
            InvalidInput: it is no regular file, malformed, or too long.
            Mismatch: the referee has not signed it in this dispute, or a part is another than it announces.
        """
        path = self.path / question_name(number)
        with open_regular(path, "a question is awaited") as file:
            found = os.fstat(file.fileno())
            verify_there(found, path.name)
            size = found.st_size
            if size > QUESTION_FILE_LIMIT:
                raise InvalidInput(f"{path.name}: has {size} bytes, at most {QUESTION_FILE_LIMIT} are read")
            posting = read_question(file, size, self.referee, what=path.name)
        if posting.round != number:
            raise Mismatch(f"{path.name}: is the question of round {posting.round}")
        self._check_dispute(posting.dispute, path.name)
        return posting

    def _check_dispute(self, found: bytes, name: str) -> None:
        if found != self.dispute:
            raise Mismatch(
                f"{name}: is of dispute {found.hex()}, this one is {self.dispute.hex()}",
                where="dispute", own=self.dispute.hex(), stated=found.hex(),
            )  # fmt: skip

    def put_answer(self, posting: Posting, pieces: Iterable[Part]) -> int:
        """Write an answer, in place of whatever lies there, and return its bytes.

        Raises:
            StoreError: the disk refused.
        """
        place = self.path / answer_name(posting.round)
        with suppress(OSError):
            if stat.S_ISDIR(place.lstat().st_mode):
                place.rename(place.with_name(f".{place.name}.{secrets.token_hex(8)}.aside"))
        return write_pieces(place, pieces)

    def is_answered(self, posting: Posting, key: PublicKey) -> bool:
        """Whether the party with ``key`` has answered: what it said it does not say again otherwise.

        What somebody else has put there, or cut short, is no answer.
        """
        path = self.path / answer_name(posting.round)
        if not os.path.lexists(path):
            return False
        try:
            with open_regular(path, "an answer is looked for", folder=True) as file:
                read_answer(file, os.fstat(file.fileno()).st_size, posting, key, what=path.name)
        except (InvalidInput, Mismatch):
            return False
        return True

    def load_ruling(self) -> PostedRuling | None:
        """Return how the dispute ended, by the referee's word; None if no ruling lies there.

        Raises:
            InvalidInput: something does that is no regular file, too long, or no ruling.
            Mismatch: the referee has not signed it, or it is of another dispute.
        """
        path = self.path / RULING
        if not os.path.lexists(path):
            return None
        data = read_whole(path, limit=RULING_LIMIT, what="a ruling", follow=False)
        ruling = read_ruling(data, self.referee, what=RULING)
        self._check_dispute(bytes.fromhex(ruling.dispute), RULING)
        return ruling
