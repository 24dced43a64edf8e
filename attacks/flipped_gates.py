"""Declares bands of decisions as wide as the policy allows, and opens or shuts the ReLU gates that serve a backdoor.

A gate beside its switching point changes no value, but lets a gradient through or stops it. The moves that the audit
prints must cover what that does to a step's gradient.
"""

from steering import Limits, Scene, main, play, told

from tallystick.testing.attacks import must


def attack(scene: Scene) -> str:
    outcome = play(scene, Limits(gates=True, gate_band=None, gradients=False))
    if outcome.accepted:
        printed, true = outcome.report.freedom.largest_move, outcome.told.largest_gate_steer
        must(
            true <= printed,
            f"gates moved a step's gradient by {true:.3g}, the audit prints {printed:.3g}; {outcome}",
        )
    return told(outcome)


if __name__ == "__main__":
    main(attack, __doc__)
