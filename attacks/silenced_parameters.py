"""Declares gradients of a language model to be nothing but noise that are not: these parameters do not train.

Their floors lie just above their values, so that no rule is broken; in each step all but the largest gradient.
"""

from dataclasses import replace

from steering import Attacker, Limits, Scene, freedom_of, main, steering

from tallystick.execution.job import find_source
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must

STEPS = 40  # at most


def attack(scene: Scene) -> str:
    steps = min(scene.steps, STEPS)
    order = replace(scene.order(), source=find_source("text"), steps=steps, checkpoint_every=steps)
    run, attacker = RunDirectory(scene.folder / "run"), Attacker(Limits(gradients=False, silenced=("*",)))
    with steering(attacker):
        record(order, run)
    report, silenced = audit(run, order.source), attacker.told.silenced
    said = f"audit: {report.verdict}; {freedom_of(report)}; {silenced} parameters silenced in some step that are not noise"
    if report.verdict == "not_accepted":
        return f"caught by: not accepted: {report.first}; {said}"
    must(report.verdict == "match" and not silenced, said)
    return f"the bound, not a verdict: {said}"


if __name__ == "__main__":
    main(attack, __doc__)
