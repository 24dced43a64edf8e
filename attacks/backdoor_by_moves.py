"""Declares what honest parties declare, and plants a backdoor by moving every element that a follower lets it move."""

from steering import Limits, Scene, main, play, told


def attack(scene: Scene) -> str:
    return told(play(scene, Limits()))


if __name__ == "__main__":
    main(attack, __doc__)
