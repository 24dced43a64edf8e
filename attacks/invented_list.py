"""Invents the list of an honest trainer: a judge plays its part over operators, alone, with the auditor, or in another's key."""

from dataclasses import replace

from court import AUDITOR, JUDGE, SECOND, TRAINER, convicted, must_fail, reads
from forgery import Forger, forging, outside_its_bound
from stage import STEPS, Stage, claim_path, dispute, main

from tallystick.dispute.objections import Objection
from tallystick.dispute.record import DisputeRecord, parse_dispute, signed_claims, verify_dispute
from tallystick.dispute.signed_moves import sign_move
from tallystick.dispute.terms import Party
from tallystick.roles.claim import write_claim
from tallystick.signing.keys import Signer
from tallystick.testing.attacks import must
from tallystick.testing.cheats import forge, honest_defence


def resigned(record: DisputeRecord, key: Signer) -> DisputeRecord:
    """Return the record with the trainer's moves signed by another key, under the name of the trainer's."""
    claims = [claim for claim, _, _ in signed_claims(record)]
    signatures = tuple(sign_move(claim, key if claim.party == "trainer" else AUDITOR) for claim in claims)
    return replace(record, signatures=signatures)


def attack(stage: Stage) -> str:
    # The control: a trainer who did make such a list, and signed it, is convicted before everybody.
    forger = Forger(stage)
    guilty = forger.convicted(outside_its_bound, naming="must be")
    found = reads(convicted(forger.run, forger.claim, guilty, guilty.record), published=False)
    must(
        found.finding is not None and "(by moves that the trainer signed)" in found.finding,
        f"the control: {found.finding}",
    )
    # An honest run, an auditor who claims another last state, and a judge who makes up what the trainer answered.
    run = stage.honest_run("honest")
    claim = claim_path(run)
    write_claim(run, stage.source, claim)
    forge(claim, lambda r: r if r.step != STEPS - 1 else replace(r, state_root="ab" * 32))

    def invented(signers: dict[Party, Signer]) -> str:
        with forging(outside_its_bound):
            ruling = dispute(run, claim, stage.source, defence=honest_defence(stage.source), signers=signers)
        must(ruling.loser == "trainer", f"the invention failed: {ruling.reason}")
        assert ruling.record is not None
        shown = [check.outcome for check in verify_dispute(parse_dispute(ruling.record))[:5]]
        must(shown == ["passed"] * 5, f"the invented record says {shown}")
        members = convicted(run, claim, ruling, ruling.record)
        said = must_fail(members, check=10, naming="not proven", published=False)
        finding = reads(members, published=False).finding
        must(finding == f"not proven: that the trainer is to blame for step {STEPS - 1}", str(finding))
        trusting = reads(members, published=False, judges_word=True).finding
        must(
            trusting is not None and "(the judge's word about who made the list)" in trusting,
            f"who takes the judge's word is told {trusting}",
        )
        return said

    hands: dict[str, dict[Party, Signer]] = {
        "unsigned": {},
        "with the auditor's signatures": {"auditor": AUDITOR},
        "in the judge's key": {"trainer": JUDGE, "auditor": AUDITOR},
        "in another auditor's key": {"trainer": SECOND, "auditor": AUDITOR},
    }
    said = [f"{what}: {invented(signers)}" for what, signers in hands.items()]
    # Under the trainer's own key, which the judge does not have.
    with forging(outside_its_bound):
        ruling = dispute(
            run, claim, stage.source, defence=honest_defence(stage.source),
            signers={"trainer": TRAINER, "auditor": AUDITOR},
        )  # fmt: skip
    assert ruling.record is not None
    named = resigned(parse_dispute(ruling.record), JUDGE).encode()
    refused = must_fail(
        convicted(run, claim, ruling, named),
        check=9,
        naming="the signature is not of the trainer's key",
        published=False,
    )
    # The trainer's own list, signed, and a judge who says that the job has another operator there: no record shows that.
    accused = dispute(
        run, claim, stage.source, defence=honest_defence(stage.source), objection=Objection(7, structure=True),
        signers={"trainer": TRAINER, "auditor": AUDITOR},
    )  # fmt: skip
    must(accused.loser == "auditor", f"a false objection to the structure ends in {accused.loser}")
    assert accused.record is not None
    turned = replace(parse_dispute(accused.record), loser="trainer").encode()
    structure = must_fail(
        convicted(run, claim, replace(accused, loser="trainer"), turned),
        check=10,
        naming="needs the job",
        published=False,
    )
    told = "; ".join((*said, refused, structure))
    return f"the reader of the bundle, to whom nothing shows that the trainer made the list: {told}"


if __name__ == "__main__":
    main(attack, __doc__)
