"""What a party signed in disputes about its run, kept beside the run: asked again, it says the same or nothing.

A step's list differs in its last bits between numbers of threads and instruction sets. A party that is started again under
others would sign a second list, or go on from one that it cannot open, and lose by it (spec/dispute.md 13).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tallystick.commit.codec import Document
from tallystick.dispute.signed_moves import MoveClaim
from tallystick.errors import Nondeterminism
from tallystick.execution.determinism import INSTRUCTION_SETS
from tallystick.store.files import read_whole, write_whole

FILE = "signed-before.json"
FORMAT = "tallystick/signed-before/1"
LIMIT = 1 << 24  # bytes of the file


@dataclass(frozen=True)
class SignedMoves(Document, form=FORMAT, what=FILE, limit=LIMIT):
    """What the file holds: under which arithmetic, and which move (its digest) in which place."""

    arithmetic: Mapping[str, str]
    moves: Mapping[str, str]


class SignedBefore:
    """The memory of one run's party, in a file of its own; nothing is signed that is not written there first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def verify_arithmetic(self) -> None:
        """Return if this process computes as the one that signed first.

        Raises:
            InvalidInput: the file is not one of these.
            Nondeterminism: it does not; with the settings to use.
        """
        before = self._load().arithmetic
        here = arithmetic()
        apart = [
            f"{name} was {before.get(name, 'not set')}, is {here.get(name, 'not set')}"
            for name in sorted(before.keys() | here.keys())
            if before.get(name) != here.get(name)
        ]
        if before and apart:
            raise Nondeterminism(
                f"{self.path}: moves about this run were signed under another arithmetic, and others would contradict them: "
                f"{'; '.join(apart)}; start again as before"
            )

    def keep(self, claim: MoveClaim) -> None:
        """Write down what is about to be signed.

        Raises:
            InvalidInput: the file is not one of these.
            Nondeterminism: another move was signed in its place before.
            StoreError: it cannot be written.
        """
        held = self._load()
        moves = held.moves
        places = [place.hex() for place in claim.places()]
        for place in places:
            if moves.get(place, claim.move.hex()) != claim.move.hex():
                raise Nondeterminism(
                    f"{self.path}: another {claim.kind} was signed in this place of the dispute, {moves[place][:16]}.., "
                    f"now it is {claim.move.hex()[:16]}..: this machine computes otherwise than then"
                )
        kept = {**moves, **dict.fromkeys(places, claim.move.hex())}
        if kept != moves:
            write_whole(self.path, SignedMoves(held.arithmetic or arithmetic(), kept).encode())

    def _load(self) -> SignedMoves:
        if not os.path.lexists(self.path):
            return SignedMoves({}, {})
        return SignedMoves.parse(
            read_whole(self.path, limit=LIMIT, what="what was signed before", follow=False)
        )


def arithmetic() -> Mapping[str, str]:
    """Return what the last bits of this process's results hang on."""
    names = sorted({name for variables in INSTRUCTION_SETS.values() for name in variables})
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **{name: os.environ[name] for name in names if name in os.environ},
    }
