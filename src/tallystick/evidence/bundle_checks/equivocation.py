"""Check 4: nobody says two different things."""

from __future__ import annotations

import itertools
from bisect import bisect_right

from tallystick.errors import Mismatch
from tallystick.evidence.bundle_checks.facts import ROLE_OF, Facts, SignedMove
from tallystick.run.statements import AuditClaim, Claim, TrainerClaim, VerdictClaim
from tallystick.tlog.tree import is_split_view


def check_equivocation(facts: Facts) -> str:
    """4. No key signed two claims that cannot both be meant, no log two trees of one size."""
    for one, other in itertools.combinations(facts.signed, 2):
        if one.key_id == other.key_id and (what := _contradiction(one.claim, other.claim)) is not None:
            who = ROLE_OF[type(one.claim)]
            facts.finding = f"equivocation: {who} {one.key_id} signed two answers"
            raise Mismatch(f"{who} {one.key_id[:16]}.. contradicts itself: {what} ({one.name}, {other.name})")
    _check_moves(facts)
    logs = () if facts.policy is None or facts.policy.log is None else facts.policy.log.logs
    for one, other in itertools.combinations(facts.checkpoints, 2):
        if is_split_view(one, other, logs):
            facts.finding = f"equivocation: log {one.origin} signed two trees of {one.size} entries"
            raise Mismatch(
                f"log {one.origin}: signed two trees of {one.size} entries, {one.root.hex()} and {other.root.hex()}"
            )
    return f"{len(facts.signed)} statements, {len(facts.checkpoints)} checkpoints"


def _check_moves(facts: Facts) -> None:
    """No key made two moves in one place of one dispute, in statements or records."""
    places: dict[tuple[str, bytes], dict[bytes, list[SignedMove]]] = {}
    for move in facts.all_moves():
        for place in move.claim.places():
            at = places.setdefault((move.key.key_id, place), {})
            at.setdefault(move.claim.move, []).append(move)
    for (key_id, _), found in places.items():
        # A signature in a record counts from check 9 on: where two moves meet, both are verified here.
        signed = (
            [next((m for m in same if m.is_signed()), None) for same in found.values()]
            if len(found) > 1
            else []
        )
        meant = [move for move in signed if move is not None]
        if len(meant) > 1:
            one, other = meant[:2]
            who, step = one.claim.party, one.claim.terms.step
            facts.finding = f"equivocation: {who} {key_id} signed two answers"
            raise Mismatch(
                f"{who} {key_id[:16]}.. contradicts itself: two different moves ({one.claim.kind}) in one place "
                f"of the dispute over step {step} ({one.name}, {other.name})"
            )


def _contradiction(one: Claim, other: Claim) -> str | None:
    """Return in words why one party cannot mean both claims, or None."""
    a, b = one.identity, other.identity
    match one, other:
        case TrainerClaim(), TrainerClaim() if a.specification == b.specification:
            if a.run != b.run:
                return f"runs {a.run.root} and {b.run.root} of one specification"
            return None if a.weights == b.weights else f"weights {a.weights} and {b.weights} of one run"
        case AuditClaim(), AuditClaim() if a.run == b.run:
            # What is not accepted followed from the log in every byte, as a match did; the limits may have been others.
            held = ("match", "not_accepted")
            if one.result in held and other.result in held:
                return None
            results = {one.result, other.result} - {"cannot_reproduce"}
            if len(results) < 2 or not _overlap(one, other):
                return None
            return f"results {' and '.join(sorted(results))} for the same steps"
        case VerdictClaim(), VerdictClaim() if (a.run, one.auditor_run) == (b.run, other.auditor_run):
            if not (one.finds_out and other.finds_out):
                return None
            same = (one.outcome, one.loser, one.step) == (other.outcome, other.loser, other.step)
            return None if same else f"verdicts {one.loser} and {other.loser} on one dispute"
        case _:
            return None


def _overlap(one: AuditClaim, other: AuditClaim) -> bool:
    """Whether a match of one claim and a finding of the other speak of the same steps: one covers all of the other's."""
    return _covers(one, other) or _covers(other, one)


def _covers(one: AuditClaim, other: AuditClaim) -> bool:
    # Ascending and without overlap, so the last that begins before a segment is the one that may cover it.
    starts = [start for start, _ in one.segments]
    last = ((bisect_right(starts, start) - 1, end) for start, end in other.segments)
    return all(at >= 0 and end <= one.segments[at][1] for at, end in last)
