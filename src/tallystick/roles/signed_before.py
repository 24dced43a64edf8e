"""What a party signed in disputes about its run, kept beside the run: asked again, it says the same or nothing.

A step's list differs in its last bits between numbers of threads and instruction sets. A party that is started again under
others would sign a second list, or go on from one that it cannot open, and lose by it (spec/dispute.md 13). What it wants to
be shown follows from what it has been shown; its signature need not be the same twice. So answers are kept as well, by the
question's digest. Every move and answer is a file of its own that is made once: two processes of one party agree.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tallystick.commit.codec import Document
from tallystick.dispute.exchange import HEAD_LIMIT, Answer, Posting, stated_parts
from tallystick.dispute.signed_moves import MoveClaim
from tallystick.errors import Nondeterminism
from tallystick.execution.determinism import INSTRUCTION_SETS
from tallystick.store.files import read_whole, storing

FOLDER = "signed-before"
FORMAT = "tallystick/signed-before/2"
LIMIT = 1 << 16  # bytes of the file with the arithmetic
WHAT = "what was signed before"


@dataclass(frozen=True)
class SigningArithmetic(Document, form=FORMAT, what=WHAT, limit=LIMIT):
    """Under which arithmetic a party signed first."""

    arithmetic: Mapping[str, str]


@dataclass(frozen=True)
class KeptMove(Document, form=FORMAT, what=WHAT, limit=LIMIT):
    """Which move (its digest) was signed in a place."""

    move: str


@dataclass(frozen=True)
class KeptAnswer(Document, form=FORMAT, what=WHAT, limit=HEAD_LIMIT):
    """What was answered to a question: the body, and length and digest of each part."""

    body: Mapping[str, object]
    parts: tuple[tuple[int, str], ...]


class SignedBefore:
    """The memory of one run's party, in a folder of its own; nothing is signed that is not written there first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def verify_arithmetic(self) -> None:
        """Return if this process computes as the one that signed first.

        Raises:
            InvalidInput: the file is not one of these.
            Nondeterminism: it does not; with the settings to use.
        """
        file = self.path / "arithmetic.json"
        if not os.path.lexists(file):
            return
        before = SigningArithmetic.parse(_read(file, LIMIT)).arithmetic
        here = arithmetic()
        apart = [
            f"{name} was {before.get(name, 'not set')}, is {here.get(name, 'not set')}"
            for name in sorted(before.keys() | here.keys())
            if before.get(name) != here.get(name)
        ]
        if apart:
            raise Nondeterminism(
                f"{self.path}: moves about this run were signed under another arithmetic, and others would contradict them: "
                f"{'; '.join(apart)}; start again as before"
            )

    def keep(self, claim: MoveClaim) -> None:
        """Write down what is about to be signed.

        Raises:
            InvalidInput: a file is not one of these.
            Nondeterminism: another move was signed in its place before, or under another arithmetic.
            StoreError: it cannot be written.
        """
        self._make("arithmetic.json", SigningArithmetic(arithmetic()).encode(), LIMIT)
        self.verify_arithmetic()
        mine = KeptMove(claim.move.hex())
        for place in claim.places():
            kept = KeptMove.parse(self._make(f"{place.hex()}.move", mine.encode(), LIMIT))
            if kept != mine:
                raise Nondeterminism(
                    f"{self.path}: another {claim.kind} was signed in this place of the dispute, {kept.move[:16]}.., "
                    f"now it is {mine.move[:16]}..: this machine computes otherwise than then"
                )

    def answer_once(self, posting: Posting, answer: Answer) -> Answer:
        """Return what was answered to the question before, with the same parts; else ``answer``, which is kept.

        Raises:
            InvalidInput: a file is not one of these.
            Nondeterminism: what was answered had other parts.
            StoreError: it cannot be written.
        """
        mine = KeptAnswer(dict(answer.body), stated_parts(answer.parts))
        name = f"{posting.digest().hex()}.answer"
        kept = KeptAnswer.parse(self._make(name, mine.encode(), HEAD_LIMIT))
        if kept.parts not in ((), mine.parts):
            raise Nondeterminism(
                f"{self.path}: the question of round {posting.round} was answered before, with other data than this machine "
                "finds now"
            )
        return replace(answer, body=kept.body, parts=answer.parts if kept.parts else ())

    def _make(self, name: str, data: bytes, limit: int) -> bytes:
        """Return what is in a file, which is made with ``data`` if it is not there yet."""
        file = self.path / name
        if not os.path.lexists(file):
            with storing(f"{file}: cannot be written"):
                self.path.mkdir(exist_ok=True)
                descriptor, temporary = tempfile.mkstemp(prefix=".", dir=self.path)
                try:
                    with os.fdopen(descriptor, "wb") as opened:
                        opened.write(data)
                        opened.flush()
                        os.fsync(descriptor)
                    _make_once(file, temporary, data)
                except FileExistsError:
                    pass  # another process of this party was first
                finally:
                    Path(temporary).unlink(missing_ok=True)
        return _read(file, limit)


def _make_once(file: Path, temporary: str, data: bytes) -> None:
    """Make a file of what has been written already.

    Raises:
        FileExistsError: it is there.
    """
    try:
        os.link(temporary, file)
    except FileExistsError:
        raise
    except (
        OSError
    ):  # a disk without hard links: a file cut short by a crash is none that anything is signed after
        with file.open("xb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())


def _read(file: Path, limit: int) -> bytes:
    return read_whole(file, limit=limit, what=WHAT, follow=False)


def arithmetic() -> Mapping[str, str]:
    """Return what the last bits of this process's results hang on."""
    names = sorted({name for variables in INSTRUCTION_SETS.values() for name in variables})
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **{name: os.environ[name] for name in names if name in os.environ},
    }
