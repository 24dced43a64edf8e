"""Checks 12 and 13: the quorum of auditors, and what the run states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import cast

from tallystick.errors import Mismatch
from tallystick.evidence.bundle_checks.facts import Facts
from tallystick.evidence.policy import EvidencePolicy
from tallystick.evidence.verification import Audited, quoted
from tallystick.run.statements import AuditClaim, time_text


def check_quorum(facts: Facts) -> str | None:
    """12. As many different auditors as the policy asks for have found a match that meets its conditions."""
    if facts.policy is None:
        return None
    counted: dict[str, AuditClaim] = {}
    reasons: list[str] = []
    for audited in facts.audited():
        reason = _shortfall(audited, facts.policy, facts.now)
        if reason is None:
            counted[audited.key_id] = audited.claim
        else:
            reasons.append(f"{audited.key_id[:16]}..: {reason}")
    why = f"; not counted: {'; '.join(reasons)}" if reasons else ""
    if len(counted) < facts.policy.auditor_quorum:
        raise Mismatch(
            f"{len(counted)} auditors count, the policy asks for {facts.policy.auditor_quorum}{why}"
        )
    said = ", ".join(
        f"{key_id[:16]}.. ({claim.steps} of {claim.identity.run.steps} steps)"
        for key_id, claim in counted.items()
    )
    return f"{len(counted)} of {facts.policy.auditor_quorum} asked for: {said}{why}"


def check_stated(facts: Facts) -> str | None:
    """13. Job, program, data, settings, seed, steps and weights are those that the policy names, if it names any."""
    if facts.policy is None:
        return None
    assert facts.stated is not None
    stated = facts.stated.fields()
    for name, wanted in facts.policy.pins.items():
        if (found := stated[name]) != wanted:
            raise Mismatch(
                f"{name}: the run states {_shown(found)}, the policy asks for {_shown(wanted)}",
                where=name,
                own=_shown(wanted),
                stated=_shown(found),
            )
    if facts.stated.policy not in facts.policy.rounding_policies:
        asked = ", ".join(quoted(each) for each in facts.policy.rounding_policies) or "none"
        raise Mismatch(
            f"rounding_policies: the run states {quoted(facts.stated.policy)}, the policy asks for one of {asked}",
            where="rounding_policies",
            own=asked,
            stated=facts.stated.policy,
        )
    return f"{', '.join(facts.policy.pins) or 'nothing'} asked for beside the rounding policy"


def _shown(value: object) -> str:
    """Return what is stated, or asked for, as text: quoted where it is somebody's."""
    if isinstance(value, Mapping):
        pairs = sorted(cast("Mapping[str, str]", value).items())
        return ", ".join(f"{quoted(name)}: {quoted(text)}" for name, text in pairs) or "no settings"
    return "none" if value is None else quoted(value) if isinstance(value, str) else str(value)


def _shortfall(audited: Audited, policy: EvidencePolicy, now: int) -> str | None:
    """Return why an audit does not count, or None."""
    claim = audited.claim
    age = now - claim.at
    if claim.result != "match":
        return f"its result is {claim.result}"
    if claim.identity.weights is None:
        return "it names no weights"
    if claim.at > now + 300:
        return f"it is dated {time_text(claim.at)}, which is to come"
    if age > policy.most_age_days * 86400:
        return f"it is {age // 86400} days old, accepted are {policy.most_age_days}"
    if claim.policy not in policy.rounding_policies:
        return f"rounding policy {quoted(claim.policy)} is not accepted"
    for name, value in audited.measured().items():
        limit = policy.limits.get(name)
        if limit is None:
            continue
        if value is None:
            return f"it did not repeat the beginning, and the policy has most_{name} {limit}"
        if value == math.inf or Fraction(value) > limit:
            return f"{name} {float(value):.9g} exceeds most_{name} {float(limit):.9g}"
    return None if claim.is_whole else _weak_sample(claim, policy)


def _weak_sample(claim: AuditClaim, policy: EvidencePolicy) -> str | None:
    """Return why a partial audit does not count, or None."""
    if policy.coverage is None:
        return f"it covers {claim.steps} of {claim.identity.run.steps} steps, asked for is all"
    if claim.draw is None:
        return "its steps were chosen, not drawn"
    fraction, detect = policy.coverage
    power = claim.draw.announcement.power_for(fraction)
    if power < detect:
        return f"its sample finds a share {float(fraction):.3g} with probability {float(power):.4f}, asked is {float(detect):.4f}"
    return None
