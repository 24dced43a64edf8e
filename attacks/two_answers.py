"""Signs two different answers: a trainer two runs of one order, an auditor a match and a mismatch, a judge two verdicts."""

from dataclasses import replace

from court import AUDITED, JUDGE, Court, must_fail
from stage import AT, Stage, claim_path, dispute, main

from tallystick.evidence.bundle import Member, named
from tallystick.roles.audit_report import Deviation, SegmentResult
from tallystick.roles.statements import sign_verdict
from tallystick.testing.cheats import LyingAuditor, OtherData


def attack(stage: Stage) -> str:
    court = Court(stage)
    honest = court.members()
    # The trainer: another run of the same order, with other data in one step.
    other = Court(stage, "other")
    OtherData(AT).run(stage.order(), stage.run("other"))
    trainer = must_fail([*honest, other.provenance()], check=4, naming="of one specification")
    # The auditor: what it found to match, it also accuses.
    found = Deviation(AT, "mismatch", "loss", None, "1", "2", "loss")
    segments = [SegmentResult(s.start, s.end, "mismatch", [found]) for s in court.report.segments]
    accusing = court.audited(report=replace(court.report, segments=segments))
    auditor = must_fail([*honest, accusing], check=4, naming="results match and mismatch for the same steps")
    # The judge: one dispute, two losers.
    lied = stage.run("lied")
    LyingAuditor(AT).run(stage.order(), lied)
    ruling = dispute(lied, claim_path(lied), stage.source)
    turned = replace(ruling, loser="trainer")
    about = Court(stage, "lied")
    verdicts: list[Member] = []
    for each in (ruling, turned):
        signed = sign_verdict(lied, claim_path(lied), each, JUDGE, AUDITED)
        verdicts += [named("statement", signed), named("verdict", each.encode())]
    keys = [member for member in honest if member.kind == "key"]
    claim = claim_path(lied).load_transcript().statement()
    held = [*keys, *about.about(), Member("run", claim.root, claim.encode()), about.provenance(), *verdicts]
    judge = must_fail(held, check=4, naming="on one dispute")
    return f"the reader of the bundle, each by the two signatures alone: {trainer}; {auditor}; {judge}"


if __name__ == "__main__":
    main(attack, __doc__)
