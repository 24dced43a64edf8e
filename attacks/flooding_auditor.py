"""Floods the game with claims: everywhere, twice, malformed, on the other side's behalf, and rulings of its own."""

from stage import Stage, main

from tallystick.dispute.bisection import Claim, Level, apply, receive
from tallystick.testing.attacks import must, must_refuse
from tallystick.testing.letters import (
    Equivocator,
    Flooder,
    LettersTrace,
    Player,
    open_letters,
    play,
    wrong_from,
)

LENGTH = 1024


def attack(stage: Stage) -> str:
    del stage
    levels = [Level("steps", range(LENGTH + 1))]
    honest, lying = LettersTrace(LENGTH), wrong_from(LENGTH, 700)
    sizes: list[int] = []
    game = open_letters(levels, {"trainer": honest, "auditor": lying})
    match = play(
        game,
        {"trainer": Player(honest), "auditor": Flooder(lying)},
        check=lambda now: sizes.append(len(now.log)),
    )
    outcome = match.game.outcome
    must(outcome is not None and outcome.loser == "auditor", f"the flood ends in {outcome}")
    must(match.game.rounds <= 10, f"{match.game.rounds} rounds, ceil(log2 1024) is 10")
    must(max(sizes) <= 4 * 10 + 2, f"the referee keeps {max(sizes)} moves of a game of 10 rounds")
    must(match.refused["trainer"] == 0, "the honest side was refused")
    twice = play(game, {"trainer": Player(honest), "auditor": Equivocator(lying, at_round=3)}).game
    must(
        twice.outcome is not None and "equivocation" in twice.outcome.reason, f"two answers: {twice.outcome}"
    )
    must_refuse(lambda: receive(game, "auditor", Claim("trainer", 512, bytes(32))), naming="speak for itself")
    must_refuse(lambda: apply(game, Claim("auditor", 512, b"short")), naming="32 bytes")
    assert outcome is not None
    return (
        f"the rules of the game: {match.refused['auditor']} of its moves refused, {match.game.rounds} rounds, "
        f"auditor loses ({outcome.reason})"
    )


if __name__ == "__main__":
    main(attack, __doc__)
