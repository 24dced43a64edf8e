"""Steers a layer that every fourth step leaves out: the steps in which noise is measured (0, 4, 32, 100 ..) are among those.

The auditor has then no measurement of that layer's gradients, and holds their log against the bands that the trainer declares:
the widest of the policy. A trainer measures anew where a gradient appears; this one does not, and nobody asks it to.
"""

from pathlib import Path
from unittest.mock import patch

from steering import Limits, Scene, main, play, told

from tallystick.execution.session.session import Session

JOB = str(Path(__file__).with_name("layer_drop_job.py"))
LIMITS = Limits(audited=0.9, pull=30.0)


def attack(scene: Scene) -> str:
    scene = Scene(scene.folder, scene.policy, scene.steps, job=JOB)
    with patch.object(Session, "has_outgrown", lambda _: False):
        return told(play(scene, LIMITS))


if __name__ == "__main__":
    main(attack, __doc__)
