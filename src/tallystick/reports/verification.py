"""What was checked without repeating anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rich.text import Text

from tallystick.evidence.verification import Audited, Stated, Verification, quoted
from tallystick.reports.layout import BAD, GOOD, QUIET, UNSURE, DonePage, Row, Words, picked, share
from tallystick.run.statements import FirstState, Uncompared, time_text

MARKS: Mapping[str, tuple[str, str]] = {
    "passed": ("yes", "green"),
    "failed": ("NO", BAD),
    "not judged": ("not judged", UNSURE),
    "not reached": ("not reached", QUIET),
}


_ANSWERS: Mapping[bool | None, str] = {
    True: "yes, this is the result that the bundle speaks of",
    False: "NO, this is not the result that the bundle speaks of",
    None: "cannot be told",
}


def verification_page(found: Verification) -> DonePage:
    """Return the numbered checks of one verification, what was stated, and what auditors signed."""
    values = {
        **picked(found, "subject verdict finding root steps shows_not"),
        "stated": None if found.stated is None else found.stated.fields(),
        "file": None if found.file is None else asdict(found.file),
        "audits": [_audit_fields(audited) for audited in found.audits],
        "checks": [picked(check, "number claim outcome detail") for check in found.checks],
    }
    rows: list[Row] = [] if found.finding is None else [("", f"finding: {found.finding}")]
    if found.file is not None:
        rows.append(("file", f"{_ANSWERS[found.file.is_result]}: {found.file.why}"))
    if found.stated is not None:
        rows += _stated_rows(found.stated)
    for audited in found.audits:
        rows += _audit_rows(audited)
    for check in found.checks:
        mark, colour = MARKS[check.outcome]
        rows.append((f"{check.number}", Text.assemble(f"{check.claim}: ", (mark, colour))))
        if check.detail:
            rows.append(("", Text(check.detail, style=QUIET if check.outcome == "passed" else "")))
    headline, style = _headline(found)
    end = Words(f"This does not show {found.shows_not}.")
    return DonePage(headline, values, rows, style, [end])


def _headline(found: Verification) -> tuple[str, str]:
    if found.verdict == "match":
        words = f"{'consistent' if found.finding is None else 'accepted'}: {found.subject}"
        return words, GOOD
    if found.verdict == "unjudged":
        return f"consistent, not judged ({found.missing}): {found.subject}", UNSURE
    failed = next(check for check in found.checks if check.outcome == "failed")
    what = "malformed" if found.verdict == "malformed" else "does not fit together"
    return f"{what}: check {failed.number} failed for {found.subject}", BAD


def _stated_rows(stated: Stated) -> list[Row]:
    """What the run states, by the names that evidence policies pin; names and settings are somebody's text."""
    settings = ", ".join(f"{quoted(name)} = {quoted(text)}" for name, text in sorted(stated.settings.items()))
    rows: list[Row] = [
        ("job", f"{quoted(stated.job)}, a name that nobody checked; the program's digest decides"),
        ("program", stated.program),
        ("data", stated.data or "none stated: the program makes or fetches its own"),
        ("settings", settings or "none: the job's own"),
        ("seed", str(stated.seed)),
        ("steps", f"{stated.steps:,}"),
        ("policy", quoted(stated.policy)),
    ]
    rows += [] if stated.trainer is None else [("trainer", stated.trainer)]
    return rows + ([] if stated.weights is None else [("weights", stated.weights)])


def _audit_rows(audited: Audited) -> list[Row]:
    """What one auditor signed; all of it is its word."""
    claim, freedom = audited.claim, audited.claim.freedom
    drawn = "" if claim.draw is None else ", drawn"
    rows: list[Row] = [
        (
            "audit",
            f"{claim.result}, {claim.steps:,} of {claim.identity.run.steps:,} steps{drawn}, by auditor {audited.key_id[:16]}.., "
            f"{time_text(claim.at)}",
        )
    ]
    rows.append(
        (
            "",
            f"freedom {share(freedom.fraction)}, steer {share(freedom.steer)}, fullest step {share(freedom.fullest_step)}, "
            f"path {share(freedom.path_steer)}, {freedom.moves:,} moves, {share(float(audited.silenced))} silenced",
        )
    )
    begin = claim.beginning
    rows.append(("", "first state: not repeated" if begin is None else f"first state: {_beginning(begin)}"))
    rows.append(("", f"unchecked, the auditor's own words: profile {quoted(claim.profile)}"))
    return [(label, Text(str(text), style=QUIET if not label else "")) for label, text in rows]


def _beginning(begin: FirstState) -> str:
    parts = [f"{begin.uncompared:,} parameters are not, bit for bit, what the job builds"]
    for what, found in (("trained", begin.other), ("not trained, to their last bits", begin.rounded)):
        if found.tensors:
            parts.append(f"{what}: {found.parameters:,} in {_names(found)}")
    return "; ".join(parts)


def _names(found: Uncompared) -> str:
    rest = found.tensors - len(found.names[:3])
    return ", ".join(quoted(name) for name in found.names[:3]) + (f" and {rest:,} more" if rest else "")


def _audit_fields(audited: Audited) -> dict[str, object]:
    claim = audited.claim
    return {
        "auditor": audited.key_id,
        **picked(claim, "result at steps policy"),
        "drawn": claim.draw is not None,
        "measured": {name: None if v is None else float(v) for name, v in audited.measured().items()},
        "beginning": None if claim.beginning is None else claim.beginning.fields(),
        "unchecked": {"profile": claim.profile},
    }
