"""Steers on quanta so coarse that rounding makes the gradient longer: a steer relative to what came out looks small.

What the audit prints must be relative to the gradient before it was rounded.
"""

from steering import Limits, Scene, main, play, told

from tallystick.testing.attacks import must


def attack(scene: Scene) -> str:
    outcome = play(scene, Limits(widest=True, lift=True))
    if outcome.accepted:
        printed, true = outcome.report.freedom.largest_move, outcome.told.largest_steer
        must(
            true <= 1.01 * printed,
            f"a step's gradient was moved by {true:.3g}, the audit prints {printed:.3g}; {outcome}",
        )
    return told(outcome)


if __name__ == "__main__":
    main(attack, __doc__)
