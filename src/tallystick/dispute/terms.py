"""The words of a dispute: who plays, where a bisection ends, what a judge finds.

A trace is a computation cut into positions. A replay on torch is one, letters of the alphabet
are another; the game cannot tell them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Party = Literal["trainer", "auditor"]
Loser = Literal["trainer", "auditor", "both", "none"]

PARTIES: tuple[Party, Party] = ("trainer", "auditor")


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
