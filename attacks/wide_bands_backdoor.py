"""Declares bands as wide as the policy allows, and plants a backdoor through the roundings that this leaves to choose."""

from steering import Limits, Scene, main, play, told


def attack(scene: Scene) -> str:
    return told(play(scene, Limits(widest=True, pull=0.3)))


if __name__ == "__main__":
    main(attack, __doc__)
