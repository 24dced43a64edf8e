"""Checks 9 to 11: what verdicts rest on, who signed the moves of a dispute, who stands accused."""

from __future__ import annotations

import hashlib

from tallystick.dispute.record import SIGNATURES_CHECK, DisputeRecord, verify_dispute
from tallystick.dispute.terms import Party
from tallystick.dispute.verdict import FORFEIT, parse_verdict, verify_verdict
from tallystick.errors import Mismatch
from tallystick.evidence.bundle import Member
from tallystick.evidence.bundle_checks.facts import Facts, JudgedDispute, Signed
from tallystick.evidence.verification import quoted
from tallystick.run.statements import VerdictClaim


def check_verdicts(facts: Facts) -> str:
    """9. What each verdict rests on leads to its step, and an operator's record to its loser."""
    checked: list[str] = []
    records = {member.digest: member for kind in ("verdict", "dispute") for member in facts.bundle.of(kind)}
    for signed, claim in facts.verdicts():
        if claim.outcome in ("fault", FORFEIT) and claim.record not in records:
            raise Mismatch(f"statement {signed.name}: the record it names is not in the bundle")
        if (record := records.pop(claim.record, None)) is not None:
            why = _check_record(facts, signed.name, claim, record)
            checked.append(f"{claim.outcome}: {why}")
        if claim.dispute is not None:
            if (member := records.pop(claim.dispute, None)) is None or member.kind != "dispute":
                raise Mismatch(f"statement {signed.name}: the dispute record it names is not in the bundle")
            checked.append(_check_dispute(facts, member.name, signed, claim))
    if records:
        left = next(iter(records.values()))
        raise Mismatch(f"{left.kind} {left.name}: no verdict in the bundle names it")
    return "; ".join(checked) or "no verdict"


def _check_dispute(facts: Facts, name: str, signed: Signed, claim: VerdictClaim) -> str:
    """Return what the record of a dispute down to one operator shows, in words."""
    record = facts.records[name]
    root = bytes.fromhex(claim.identity.run.root)
    checks = verify_dispute(record, run_root=root, known=_known_keys(facts, claim, record))
    for check in checks:
        if check.outcome in ("failed", "not reached"):
            raise Mismatch(f"dispute {name}: check {check.number} ({check.claim}): {check.detail}")
    if record.loser != claim.loser:
        raise Mismatch(
            f"dispute {name}: the {record.loser} loses, the verdict says {claim.loser}",
            where=f"dispute {name}: loser",
            own=record.loser,
            stated=claim.loser,
        )
    if record.auditor_run.hex() != claim.auditor_run:
        raise Mismatch(
            f"dispute {name}: is with claim {record.auditor_run.hex()}, the verdict about {claim.auditor_run}",
            where=f"dispute {name}: claim",
            own=record.auditor_run.hex(),
            stated=claim.auditor_run,
        )
    if record.step_proof.record.step != claim.step:
        raise Mismatch(
            f"dispute {name}: is about step {record.step_proof.record.step}, the verdict about {claim.step}",
            where=f"dispute {name}: step",
            own=record.step_proof.record.step,
            stated=claim.step,
        )
    needed = tuple(check for check in checks if check.outcome == "needs the job")
    facts.disputes.append(JudgedDispute(name, signed, record, checks[SIGNATURES_CHECK - 1], needed))
    return f"one operator: {record.loser} loses" + (f", {len(needed)} checks need the job" if needed else "")


def _known_keys(facts: Facts, claim: VerdictClaim, record: DisputeRecord) -> dict[Party, list[str]]:
    """Return whose keys may have signed the moves of a dispute.

    The trainer's is the key that signed the run's provenance; the auditor's the one that signed the accusation which
    the verdict answers, so that nobody loses in its place; where it answers none, any auditor's of the policy.
    """
    trainers = [signed.key_id for signed in facts.signed if signed.claim is facts.trainer]
    accusers = [
        signed.key_id
        for signed, _ in facts.audits()
        if hashlib.sha256(signed.document).hexdigest() == claim.accusation
    ]
    if facts.policy is not None:
        auditors = [key_id for key_id, role in facts.policy.roles.items() if role == "auditor"]
    else:
        auditors = [record.keys["auditor"].key_id] if "auditor" in record.keys else []
    return {"trainer": trainers, "auditor": accusers or auditors}


def check_signed_moves(facts: Facts) -> str | None:
    """10. Whoever loses a dispute over operators signed the moves that convict it, and the record shows that they do."""
    said: list[str] = []
    for dispute in facts.disputes:
        step = dispute.record.step_proof.record.step
        if not (missing := "; ".join(dispute.not_proven())):
            said.append(f"step {step}: {dispute.signatures.detail}")
        elif facts.policy is not None and facts.policy.judges_word:
            said.append(f"step {step}: {missing}, which the policy accepts")
        elif facts.policy is not None:
            facts.finding = f"not proven: that the {dispute.record.loser} is to blame for step {step}"
            raise Mismatch(f"dispute {dispute.name}: not proven: {missing}")
    if facts.policy is None and facts.disputes:
        return None
    return "; ".join(said) or "no dispute ended at an operator"


def _check_record(facts: Facts, name: str, claim: VerdictClaim, record: Member) -> str:
    what = f"verdict {record.name}"
    verdict = parse_verdict(record.data)
    stated = (verdict.loser, verdict.outcome, verdict.reason, verdict.step)
    if stated != (claim.loser, claim.outcome, claim.reason, claim.step):
        raise Mismatch(f"{what}: says other things than statement {name}")
    own, theirs = facts.claimed.identity.run, facts.runs.get(claim.auditor_run)
    specification = facts.specification
    if theirs is None or specification is None:
        raise Mismatch(f"{what}: the auditor's run statement {claim.auditor_run} is missing")
    try:
        return verify_verdict(verdict, own, theirs, specification)
    except Mismatch as problem:
        raise Mismatch(f"{what}: {problem}") from None


def check_accusations(facts: Facts) -> str:
    """11. No accepted judge found the trainer at fault, and no auditor's finding is left unanswered."""
    answered: set[str] = set()
    seen_alike: set[str] = set()
    for signed, claim in facts.verdicts():
        if claim.loser in ("trainer", "both"):
            basis = _basis_of(facts, signed, claim)
            words = quoted(claim.reason)
            fault = (
                "trainer forfeited" if claim.outcome == FORFEIT else f"trainer at fault at step {claim.step}"
            )
            facts.finding = f"{fault} ({basis}); unchecked, the judge's own words: {words}"
            raise Mismatch(f"judge {signed.key_id[:16]}.. ruled against the trainer: {words}")
        if claim.finds_out and claim.accusation is not None:
            (seen_alike if claim.outcome == "agreement" else answered).add(claim.accusation)
    accusing = [(s, c) for s, c in facts.audits() if c.result in ("mismatch", "log_violation")]
    for signed, claim in accusing:
        # Runs whose states agree say nothing of a log: that judge was shown no objection.
        ruled = answered if claim.result == "log_violation" else answered | seen_alike
        if hashlib.sha256(signed.document).hexdigest() not in ruled:
            facts.finding = f"accused by auditor {signed.key_id}: {claim.result}"
            raise Mismatch(
                f"auditor {signed.key_id[:16]}.. found a {claim.result}, and no judge has ruled on it"
            )
    return f"{len(accusing)} accusations, each answered by a judge" if accusing else "none was made"


def _basis_of(facts: Facts, verdict: Signed, claim: VerdictClaim) -> str:
    """Return in words what a verdict against a party rests on beside the judge's signature."""
    if claim.outcome == FORFEIT:
        return "the judge's word about who was silent or contradicted itself"
    dispute = next((each for each in facts.disputes if each.verdict is verdict), None)
    if dispute is None:
        return "the judge's word, which repeating the step tests"
    if dispute.signatures.outcome != "passed":
        return "the judge's word about who made the list"
    if dispute.needed:
        return "the judge's word about what the job asks for, which the job tests"
    return f"by moves that the {dispute.record.loser} signed"
