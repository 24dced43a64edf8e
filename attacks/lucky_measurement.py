"""Measure the noise when one margin's gradient is more than noise and the other's is not: from there on each stays what it was.

By another interval, that of 15 which did it, and by one measurement out of schedule. No code but the schedule is dishonest.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest.mock import patch

from last_silence import wins
from scanner_job import Scorer
from stage import Stage, audit, told

from tallystick.execution.job import find_source
from tallystick.execution.session.session import Session
from tallystick.numerics.policy import find_policy
from tallystick.roles.trainer import Order, record
from tallystick.testing.attacks import must, play_attack

JOB, STEPS, LUCKY, POINTS = Path(__file__).with_name("scanner_job.py"), 516, 63, 0.02


def attack(stage: Stage) -> str:
    source, said, shares = find_source(str(JOB)), list[str](), list[float]()
    asks = Session.has_outgrown
    for name, every, once in (
        ("honest", None, False),
        ("interval", LUCKY, False),
        ("measurement", None, True),
    ):

        def outgrown(session: Session, doubt: int = 0, once: bool = once) -> bool:
            return (once and session.step == LUCKY) or asks(session, doubt)

        run = stage.run(name)
        policy = find_policy(stage.policy, recalibrate_every=every)
        with patch.object(Session, "has_outgrown", outgrown):
            record(Order(source, {}, policy, steps=STEPS, checkpoint_every=STEPS), run)
        report, share = audit(run, source), wins(run, STEPS, Scorer())
        shares.append(share)
        said.append(f"{name}: {share:.1%} of the images win, {told(report)}")
        gained = share > shares[0] + POINTS
        must(not gained or report.verdict != "match", f"the audit says {report.verdict}: {'; '.join(said)}")
    return f"the policy's own schedule, which decides what is noise whatever the run's is: {'; '.join(said)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
