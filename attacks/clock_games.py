"""Plays with the clock: silence at any time, an answer after the deadline, silence stated by a party, a verdict too early."""

from stage import Stage, main

from tallystick.dispute.bisection import Level, Silence, apply, receive
from tallystick.dispute.terms import Ruling
from tallystick.testing.attacks import must, must_refuse
from tallystick.testing.letters import (
    LettersTrace,
    Player,
    Silent,
    next_moves,
    open_letters,
    play,
    wrong_from,
)  # fmt: skip

LENGTH = 100


def attack(stage: Stage) -> str:
    del stage
    levels = [Level("checkpoints", range(0, LENGTH + 1, 10)), Level("steps", range(LENGTH + 1))]
    traces = {"trainer": wrong_from(LENGTH, 41), "auditor": LettersTrace(LENGTH)}
    game = open_letters(levels, traces)
    # Silence loses, whenever it begins.
    for rounds in range(3):
        over = play(
            game, {"trainer": Silent(traces["trainer"], rounds), "auditor": Player(traces["auditor"])}
        ).game
        must(
            over.outcome is not None and over.outcome.loser == "trainer",
            f"silence from round {rounds}: {over.outcome}",
        )
    # The honest side answers, the other comes after the referee has stated its silence.
    (mine,) = next_moves(game, "auditor", traces["auditor"])
    (late,) = next_moves(game, "trainer", traces["trainer"])
    waiting = receive(game, "auditor", mine)
    over = apply(waiting, Silence("noon"))
    must(
        over.outcome is not None and over.outcome.loser == "trainer",
        f"the late side does not lose: {over.outcome}",
    )
    must_refuse(lambda: receive(over, "trainer", late), naming="the game is over")
    must_refuse(lambda: receive(waiting, "trainer", Silence("now")), naming="claims only")
    must_refuse(lambda: apply(over, Silence("later")), naming="nobody does")
    must_refuse(lambda: receive(game, "trainer", Ruling("auditor", "late")), naming="claims only")
    must_refuse(lambda: apply(game, Ruling("auditor", "early")), naming="must wait")
    assert over.outcome is not None
    return f"the rules of the game ({over.outcome.reason})"


if __name__ == "__main__":
    main(attack, __doc__)
