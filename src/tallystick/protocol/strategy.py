"""What an honest party does in a dispute; decided here, sent by the caller.

for move in next_moves(game, "auditor", trace):
    send(move)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tallystick.protocol.game import Claim, Game, Move

if TYPE_CHECKING:
    from tallystick.protocol.trace import Party, Trace


def next_moves(game: Game, party: Party, trace: Trace) -> list[Move]:
    """Return what ``party``, whose own computation is ``trace``, owes the game: one claim or nothing.

    Asks the trace for one commitment, at the midpoint, and only when an answer is owed.
    """
    if game.midpoint is None or party not in game.awaited:
        return []
    return [Claim(party, game.midpoint, trace.commitment_at(game.midpoint))]


def find_witness(game: Game, trace: Trace) -> object | None:
    """Return the witness that a party owes the judge, or None while the bisection goes on."""
    return None if game.position is None else trace.witness_at(game.position.agreed)
