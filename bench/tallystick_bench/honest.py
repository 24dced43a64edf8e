"""Honest runs, recorded and audited on arithmetic that differs: how many are falsely accused must be none.

Each run is recorded once and audited under every profile, each in a process of its own. An audit that does not match goes
on as its auditor would: a claim, then a dispute. A false accusation is an audit that says ``mismatch`` or
``log_violation``, or a dispute that anybody loses. ``cannot_reproduce`` accuses nobody, and is shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tallystick.cli.profiles import Child, run_child
from tallystick.errors import TallyError
from tallystick.execution.determinism import Profile, parse_profile

# ResNet-50's real size takes seconds a step; its blocks, batch norm and functional ReLU stay at this one.
JOBS: Mapping[str, Mapping[str, str]] = {
    "digits": {},
    "text": {},
    "resnet50": {"width": "8", "blocks": "1,1,1,1", "batch": "16"},
}
POLICIES = ("fp64", "fp32", "bf16")
PROFILES = ("avx2,threads=1", "sse4,threads=1", "native,jitter")
STEPS, CHECKPOINT_EVERY = 200, 20
ACCUSATIONS = ("mismatch", "log_violation")


@dataclass(frozen=True)
class HonestAudit:
    """One audit of one honest run.

    Attributes:
        job, policy, profile: what was audited, and under which arithmetic; it was recorded under ``native``.
        steps: how many were recorded and repeated.
        verdict: the audit's, or None if it gave none.
        moved: roundings that the log took from the auditor's own: above zero the two machines really differ.
        budget: of those, by the auditor's own measurement.
        steer: the largest that the budget allows of one step's gradient.
        loser, outcome: of the dispute that followed, None if there was none.
        first: what the audit saw first, in words.
        error: why there is no verdict.
        seconds: of the audit.
    """

    job: str
    policy: str
    profile: str
    steps: int
    verdict: str | None = None
    moved: int = 0
    budget: int = 0
    steer: float | None = None
    loser: str | None = None
    outcome: str | None = None
    first: str | None = None
    error: str | None = None
    seconds: float = 0.0

    @property
    def is_false_accusation(self) -> bool:
        """Whether somebody honest was accused."""
        return self.verdict in ACCUSATIONS or self.loser not in (None, "none")


@dataclass(frozen=True)
class HonestMatrix:
    """All audits that were asked for."""

    audits: tuple[HonestAudit, ...]

    @property
    def false_accusations(self) -> int:
        """How many audits or disputes accuse somebody."""
        return sum(audit.is_false_accusation for audit in self.audits)

    @property
    def is_met(self) -> bool:
        """Whether every audit gave a verdict and none accuses."""
        whole = all(audit.verdict is not None and audit.error is None for audit in self.audits)
        return self.false_accusations == 0 and self.not_accepted == 0 and whole

    @property
    def not_accepted(self) -> int:
        """How many audits accuse nobody and do not accept either."""
        return sum(audit.verdict == "not_accepted" for audit in self.audits)

    def fields(self) -> dict[str, Any]:
        """Return the matrix as JSON."""
        return {
            "audits": [
                {**asdict(audit), "false_accusation": audit.is_false_accusation} for audit in self.audits
            ],
            "false_accusations": self.false_accusations,
            "not_accepted": self.not_accepted,
            "met": self.is_met,
        }


def measure_honest(
    place: Path,
    *,
    jobs: Sequence[str] | None = None,
    policies: Sequence[str] = POLICIES,
    profiles: Sequence[str] = PROFILES,
    steps: int = STEPS,
    settings: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda line: None,
    child: Child = run_child,
) -> HonestMatrix:
    """Record every job under every policy in ``place``, audit it under every profile, and return what was said.

    A job takes its settings from ``JOBS``, then from ``settings``, which are every job's. A command that fails becomes an
    audit without a verdict.
    """
    audits: list[HonestAudit] = []
    for job in jobs or tuple(JOBS):
        for policy in policies:
            run = place / f"{len(audits):03d}-{Path(job).stem}-{policy}"
            say(f"{job}, {policy}: record {steps} steps")
            chosen = {**JOBS.get(job, {}), **(settings or {})}
            problem = _record(child, run, job, policy, steps, chosen)
            for profile in profiles:
                found = HonestAudit(job, policy, profile, steps, error=problem)
                if problem is None:
                    say(f"{job}, {policy}: audit under {profile}")
                    found = _audit(child, run, found)
                say(
                    f"  {found.verdict or found.error}"
                    + ("" if found.outcome is None else f", {found.outcome}")
                )
                audits.append(found)
    return HonestMatrix(tuple(audits))


def _record(
    child: Child, run: Path, job: str, policy: str, steps: int, settings: Mapping[str, str]
) -> str | None:
    """Record a run; return why that failed, or None."""
    arguments = ["record", job, "--run", str(run), "--policy", policy, "--steps", str(steps)]
    arguments += ["--checkpoint-every", str(CHECKPOINT_EVERY), "--profile", "native"]
    for name, value in settings.items():
        arguments += ["--set", f"{name}={value}"]
    try:
        child(arguments, Profile())
    except TallyError as problem:
        return str(problem)
    return None


def _audit(child: Child, run: Path, asked: HonestAudit) -> HonestAudit:
    profile = parse_profile(asked.profile)
    repeat = ["audit", str(run), "--job", asked.job, "--profile", asked.profile]
    facts: dict[str, Any] = {}
    try:
        answer = child([*repeat, "--effort", "0"], profile)
        freedom = answer["freedom"]
        facts |= {"verdict": answer["verdict"], "moved": freedom["moved"], "budget": freedom["move_budget"]}
        facts |= {"steer": freedom["largest_steer"]}
        facts |= {"seconds": answer["seconds"]["total"], "first": _first(answer["first"])}
        if answer["verdict"] not in ("match", "not_accepted"):
            claim = run.with_name(f"{run.name}-{asked.profile.replace(',', '-')}")
            child([*repeat, "--claim", str(claim)], profile)
            ruling = child(["dispute", str(run), str(claim), "--job", asked.job], Profile())
            facts |= {"loser": ruling["loser"], "outcome": ruling["outcome"]}
    except TallyError as problem:
        facts |= {"error": str(problem)}
    return HonestAudit(asked.job, asked.policy, asked.profile, asked.steps, **facts)


def _first(deviation: Mapping[str, Any] | None) -> str | None:
    if deviation is None:
        return None
    return f"step {deviation['step']}: {deviation['subject']} is {deviation['own']}, stated {deviation['stated']}"
