"""States scales in the header that are as wide as a follower lets pass, and steers by the coarser quanta that follow."""

from steering import Limits, Scene, main, play, told


def attack(scene: Scene) -> str:
    return told(play(scene, Limits(lift=True)))


if __name__ == "__main__":
    main(attack, __doc__)
