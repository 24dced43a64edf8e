"""Steers by everything at once and stays below every limit of an auditor who measures the noise: it knows what he will find.

Moves of gradients and running statistics, gates, bands and scales as wide as accepted, gradients against its aim silenced where
that is accepted; 0.9 of every budget, and of the path.
"""

from steering import Limits, Scene, main, play, told

STRONGEST = Limits(audited=0.9, lift=True, silenced=("*",), gates=True, gate_band=2, buffers=True, pull=30.0)


def attack(scene: Scene) -> str:
    return told(play(scene, STRONGEST))


if __name__ == "__main__":
    main(attack, __doc__)
