"""Objects to an honest log: a claim that agrees with every state of the trainer's, and an objection made up."""

from dataclasses import replace

from stage import AT, Stage, audit, claim_path, dispute, main

from tallystick.dispute.verdict import LogObjection
from tallystick.roles.claim import write_claim
from tallystick.testing.attacks import must, must_refuse


def attack(stage: Stage) -> str:
    run = stage.honest_run()
    claim = claim_path(run)
    write_claim(run, stage.source, claim)
    must(claim.load_objection() is None, "an honest auditor objects to an honest log")
    honest = dispute(run, claim, stage.source)
    must((honest.loser, honest.outcome) == ("none", "agreement"), f"the control ends in {honest.reason}")
    root = run.load_transcript().root().hex()
    made_up = LogObjection(root, AT, "gradient of conv1.weight", 3, "1 of 1 entries lie too far away")
    said: list[str] = []
    for objection in (made_up, replace(made_up, site="nothing")):
        claim.write_document(claim.objection_path, objection.encode())
        ruling = dispute(run, claim, stage.source)
        must(
            (ruling.loser, ruling.step) == ("auditor", AT), f"the judge says {ruling.loser}: {ruling.reason}"
        )
        said.append(ruling.reason)
    claim.write_document(claim.objection_path, replace(made_up, site="log", element=-1).encode())
    spoilt = dispute(run, claim, stage.source)  # nobody can see whose copy was spoilt
    must((spoilt.loser, spoilt.clears) == ("none", False), f"the judge says {spoilt.loser}: {spoilt.reason}")
    claim.write_document(claim.objection_path, replace(made_up, run="00" * 32).encode())
    must_refuse(lambda: dispute(run, claim, stage.source), naming="objects to run")
    claim.write_document(claim.objection_path, replace(made_up, step=10**6).encode())
    must_refuse(lambda: dispute(run, claim, stage.source), naming="objects to step 1000000")
    other = audit(run, stage.source)
    must(other.verdict == "match", f"another, honest auditor says {other.verdict}")
    return f"judge: auditor loses, {said[0]}; another auditor still says {other.verdict}"


if __name__ == "__main__":
    main(attack, __doc__)
