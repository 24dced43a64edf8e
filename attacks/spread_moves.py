"""Steers a little in every step, not as much as possible while the budget lasts, and takes what gives most for its size.

Under ``--job attacks/adamw_job.py`` what the aim asks for, and what is taken of it, is weighed as Adam weighs it. Under
``--job attacks/lender_job.py`` a parameter that never moves lends its gradient's size to all that is relative to the whole. With
``--from N`` nothing is taken before step N, and then all that the run's budgets have left, as soon as they allow it.
"""

import argparse
import sys
from pathlib import Path

from steering import Limits, Scene, play, told

from tallystick.testing.attacks import play_attack


def attack(scene: Scene, first: int) -> str:
    adaptive = Path(scene.job).stem == "adamw_job"
    limits = Limits(
        audited=0.9, buffers=True, gates=not adaptive, gate_band=2, pull=None, window=(first, scene.steps),
        adaptive=adaptive, burst=first > 0,
    )  # fmt: skip
    return told(play(scene, limits))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp64", "fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--job", default="digits", help="digits, or adamw_job.py or lender_job.py beside this script"
    )
    parser.add_argument(
        "--from", dest="first", type=int, default=0, help="step from which on moves are taken"
    )
    parser.add_argument("--rate", default="0.05", help="learning rate; 0.003 suits AdamW")
    sys.exit(
        play_attack(
            lambda folder, given: attack(
                Scene(folder, given.policy, given.steps, {"learning_rate": given.rate}, given.job),
                given.first,
            ),
            parser,
        )
    )
