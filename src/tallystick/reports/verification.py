"""What was checked without repeating anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from tallystick.reports.layout import BAD, GOOD, QUIET, UNSURE, Row, page
from tallystick.roles.verifier import Verification

MARKS: Mapping[str, tuple[str, str]] = {
    "passed": ("yes", "green"),
    "failed": ("NO", BAD),
    "not judged": ("not judged", UNSURE),
    "not reached": ("not reached", QUIET),
}


@dataclass(frozen=True)
class VerificationPage:
    """The numbered checks of one verification."""

    found: Verification

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "subject": self.found.subject,
            "verdict": self.found.verdict,
            "finding": self.found.finding,
            "root": self.found.root,
            "steps": self.found.steps,
            "checks": [
                {
                    "number": check.number,
                    "claim": check.claim,
                    "outcome": check.outcome,
                    "detail": check.detail,
                }
                for check in self.found.checks
            ],
            "shows_not": self.found.shows_not,
        }

    def __rich__(self) -> RenderableType:
        """Return the page that ``tally verify`` prints."""
        found = self.found
        if found.verdict == "match":
            headline, style = (
                f"{'consistent' if found.finding is None else 'accepted'}: {found.subject}",
                GOOD,
            )
        elif found.verdict == "unjudged":
            headline, style = f"consistent, not judged ({found.missing}): {found.subject}", UNSURE
        else:
            failed = next(check for check in found.checks if check.outcome == "failed")
            what = "malformed" if found.verdict == "malformed" else "does not fit together"
            headline, style = f"{what}: check {failed.number} failed for {found.subject}", BAD
        rows: list[Row] = [] if found.finding is None else [("", Text(f"finding: {found.finding}"))]
        for check in found.checks:
            mark, colour = MARKS[check.outcome]
            rows.append((f"{check.number}", Text.assemble(f"{check.claim}: ", (mark, colour))))
            if check.detail:
                rows.append(("", Text(check.detail, style=QUIET if check.outcome == "passed" else "")))
        return page(headline, style, rows, Text(f"This does not show {found.shows_not}."))
