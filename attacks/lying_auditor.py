"""Accuses an honest trainer: the auditor claims other states from one step on."""

from stage import AT, Stage, audit, claim_path, dispute, main

from tallystick.testing.attacks import must
from tallystick.testing.cheats import LyingAuditor


def attack(stage: Stage) -> str:
    run = stage.run()
    LyingAuditor(AT).run(stage.order(), run)
    ruling = dispute(run, claim_path(run), stage.source)
    must((ruling.loser, ruling.step) == ("auditor", AT), f"the judge says {ruling.loser}, {ruling.step}")
    other = audit(run, stage.source)
    must(other.verdict == "match", f"another, honest auditor says {other.verdict}")
    return f"judge: auditor loses, {ruling.reason}; another auditor still says {other.verdict}"


if __name__ == "__main__":
    main(attack, __doc__)
