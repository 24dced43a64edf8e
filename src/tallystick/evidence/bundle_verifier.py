"""Whoever holds a bundle and a policy checks it alone: offline, without torch, as the list of spec/evidence-bundle.md 4.

Each check says what it saw or why it failed; the first that fails ends the list. Without a policy the checks that need
one are not judged, and then nothing is accepted, however consistent it is. What is missing is never a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tallystick.evidence.bundle_checks.acceptance import check_quorum, check_stated
from tallystick.evidence.bundle_checks.equivocation import check_equivocation
from tallystick.evidence.bundle_checks.facts import Facts
from tallystick.evidence.bundle_checks.publication import check_draws, check_model, check_published
from tallystick.evidence.bundle_checks.statements import (
    check_documents,
    check_one_run,
    check_roles,
    check_signatures,
)
from tallystick.evidence.bundle_checks.verdicts import check_accusations, check_signed_moves, check_verdicts
from tallystick.evidence.policy import EvidencePolicy
from tallystick.evidence.verification import FileAnswer, Verification, work_through
from tallystick.signing.model_signature import Manifest

SHOWS_NOT = (
    "that the data is good, that an auditor's machine was honest beyond the quorum asked for, or what the auditors "
    "measured; with [torch], tally audit repeats the run"
)
CHECKS: tuple[tuple[str, Callable[[Facts], str | None]], ...] = (
    ("the bundle is whole and its documents parse", check_documents),
    ("every statement is signed with a key in the bundle", check_signatures),
    ("every signer has the role that its statement needs", check_roles),
    ("nobody says two different things", check_equivocation),
    ("all statements are about one run of one specification", check_one_run),
    ("the trainer signed the weights' files", check_model),
    ("the run was published before it was challenged", check_published),
    ("drawn samples are the beacon's", check_draws),
    ("every verdict follows from what it rests on", check_verdicts),
    ("whoever loses at an operator loses by what it signed, not by the judge's word", check_signed_moves),
    ("no accusation stands", check_accusations),
    ("enough auditors found a match, recently, within the freedom accepted", check_quorum),
    ("what the run states is what is asked for", check_stated),
)


def verify_bundle(
    data: bytes,
    policy: EvidencePolicy | None,
    *,
    now: int,
    model: Manifest | None = None,
    file: Path | None = None,
    unread: Sequence[str] = (),
    name: str = "bundle",
) -> Verification:
    """Return the numbered checks of a bundle; ``now`` in seconds since 1970, ``model`` the files that are at hand.

    ``unread`` are files beside those that were not looked at. With ``file`` it is also answered whether that is
    the very result that the bundle speaks of.

    ``verdict`` is ``match`` only if a policy was given and every check passed; ``unjudged`` if no policy was given and
    none failed. ``finding`` says in words what the evidence shows.
    """
    found = Verification(name, SHOWS_NOT)
    facts = Facts(data, policy, now, model, file, unread)
    work_through(found, [(claim, partial(check, facts)) for claim, check in CHECKS])
    if facts.trainer is not None:
        found.root, found.steps = facts.trainer.identity.run.root, facts.trainer.identity.run.steps
    found.stated, found.file = facts.stated, facts.file
    found.audits = facts.audited() if facts.stated is not None else []
    if file is not None and found.file is None:
        found.file = FileAnswer(str(file), None, "the bundle's own checks failed before it was compared")
    accepted = "trained as stated" if found.verdict == "match" else "nothing is accepted"
    found.finding = facts.finding or accepted
    return found
