"""Checks 6 to 8: the weights' files, the log that the run lies in, the samples drawn."""

from __future__ import annotations

from tallystick.errors import Mismatch
from tallystick.evidence.bundle_checks.facts import Facts
from tallystick.evidence.verification import FileAnswer
from tallystick.run.statements import TrainerClaim, time_text
from tallystick.signing.model_signature import parse_model_signature
from tallystick.store.models import check_result, compare_model
from tallystick.tlog.publication import entry_of


def check_model(facts: Facts) -> str | None:
    """6. model.sig is the trainer's, its root digest is the one all statements name, and the files at hand have it."""
    member = facts.only("model-signature")
    weights = facts.claimed.identity.weights
    if facts.model is not None:
        check_result(facts.model, str(weights), "model")
    if facts.path is not None:
        if weights is None:
            raise Mismatch(f"{facts.path}: the statements name no weights to compare it with")
        final_state = facts.claimed.identity.run.final_state
        facts.file = FileAnswer(str(facts.path), *compare_model(facts.path, weights, final_state))
        if not facts.file.is_result:
            raise Mismatch(f"{facts.path}: is not the result that the bundle speaks of: {facts.file.why}")
    given = facts.model is not None or facts.path is not None
    at_hand = "the files at hand are these" if given else "no files were given to compare"
    if facts.unread:
        at_hand += f"; not looked at: {', '.join(facts.unread)}"
    if member is None:
        if facts.policy is None:
            return None
        if facts.policy.model_signature:
            raise Mismatch("model.sig is missing, and the policy asks for it")
        return f"not asked for; {at_hand}"
    if facts.policy is None:
        return None
    keys = [key for key_id, key in facts.keys.items() if facts.policy.roles.get(key_id) == "trainer"]
    manifest = parse_model_signature(member.data).manifest(keys)
    check_result(manifest, str(weights), "model.sig")
    return f"{len(manifest.files)} files, root digest {weights}; {at_hand}"


def check_published(facts: Facts) -> str | None:
    """7. The run lies in a log that the policy knows, seen by its quorum before any statement about it."""
    if facts.policy is None:
        return None
    run = facts.claimed.identity.run.encode()
    if facts.policy.log is None:
        return "not asked for"
    entry = entry_of(run)
    proof = facts.proofs.get(entry.digest)
    if proof is None:
        raise Mismatch("the run's log proof is missing, and the policy asks for publication")
    for digest, other in facts.proofs.items():
        other.verify(facts.entries[digest], facts.policy.log)
    seen = proof.verify(entry, facts.policy.log)
    if seen.seen_at is not None:
        early = [
            s for s in facts.signed if not isinstance(s.claim, TrainerClaim) and s.claim.at < seen.seen_at
        ]
        if early:
            raise Mismatch(
                f"statement {early[0].name}: is of {time_text(early[0].claim.at)}, the run was published at "
                f"{time_text(seen.seen_at)}"
            )
    when = (
        "no witness asked for" if seen.seen_at is None else f"seen by a quorum at {time_text(seen.seen_at)}"
    )
    return f"{seen.origin}, entry {proof.index} of {seen.size}, {when}"


def check_draws(facts: Facts) -> str | None:
    """8. Each sample is what announcement and beacon lead to, announced for this log before the beacon spoke."""
    drawn = [(signed, claim.draw) for signed, claim in facts.audits() if claim.draw is not None]
    if not drawn:
        return "no audit was by sample"
    if facts.policy is None:
        return None
    for signed, draw in drawn:
        announcement = draw.announcement
        what = f"statement {signed.name}"
        own = facts.claimed.identity.run
        assert facts.specification is not None
        every = facts.specification.checkpoint_every
        if (announcement.tree_size, announcement.steps, announcement.checkpoint_every) != (
            own.tree_size,
            own.steps,
            every,
        ):
            raise Mismatch(f"{what}: the draw is about a run of {announcement.steps} steps in other segments")
        if signed.claim.at < announcement.beacon_time:
            raise Mismatch(f"{what}: is older than its beacon, {time_text(announcement.beacon_time)}")
        if facts.policy.log is None:
            continue
        entry = entry_of(announcement.encode())
        proof = facts.proofs.get(entry.digest)
        if announcement.log is None or proof is None:
            raise Mismatch(f"{what}: nothing shows that run and draw were published before the beacon spoke")
        seen = proof.verify(entry, facts.policy.log)
        if seen.seen_at is not None and seen.seen_at >= announcement.beacon_time:
            raise Mismatch(
                f"{what}: was announced at {time_text(seen.seen_at)}, its beacon spoke at "
                f"{time_text(announcement.beacon_time)}"
            )
    return f"{len(drawn)} drawn again; the beacons' own signatures are for the reader to check"
