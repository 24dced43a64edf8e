"""The port of a dispute: what the game needs from a computation.

A trace is a computation cut into positions. A replay on torch is one, letters of the alphabet
are another; the game cannot tell them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

Party = Literal["trainer", "auditor"]
Loser = Literal["trainer", "auditor", "both", "none"]

PARTIES: tuple[Party, Party] = ("trainer", "auditor")


class Trace(Protocol):
    """One party's view of the computation."""

    def commitment_at(self, index: int) -> bytes:
        """Return the 32-byte commitment to the state at ``index``; 0 is the state before anything ran."""
        ...

    def witness_at(self, index: int) -> object:
        """Return what a judge needs to repeat the computation from ``index`` on.

        It opens ``commitment_at(index)``: the witness at 10 is the pre-image of the commitment
        at 10 and the input of the step whose result is committed at 11.
        """
        ...


@dataclass(frozen=True)
class DisputedPosition:
    """Where a bisection ends: both parties stand by one state and part over a later one.

    Attributes:
        level: name of the level on which the bisection ended.
        agreed: trace index of the last state that both committed to.
        disputed: trace index of the next state of that level, on which they differ.
        agreed_commitment: 32 bytes that both stated at ``agreed``.
        claims: the 32 bytes that each party stated at ``disputed``.
    """

    level: str
    agreed: int
    disputed: int
    agreed_commitment: bytes
    claims: Mapping[Party, bytes]


@dataclass(frozen=True)
class Ruling:
    """What the judge found; ``none`` if honest arithmetic can give both claims, ``both`` if neither."""

    loser: Loser
    reason: str
