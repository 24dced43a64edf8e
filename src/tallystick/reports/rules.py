"""What the evidence says about rules: a page for a terminal, with the three claims above the rules."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tallystick.fleet.compliance.rules import Rules, shown
from tallystick.fleet.compliance.verdict import RulesVerdict
from tallystick.reports.layout import BAD, GOOD, QUIET, UNSURE, Row, counted, page, printable

STYLES = {"pass": GOOD, "fail": BAD, "unknown": UNSURE}
MOST_SHOWN = 8  # observations of a rule on the page; JSON has all


@dataclass(frozen=True)
class RulesVerdictPage:
    """The verdict, and the claims that were asked for: they decide the headline and the exit code."""

    verdict: RulesVerdict
    claims: tuple[str, ...]

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        asked = self.verdict.asked(self.claims)
        return {"verdict": asked, "asked": list(self.claims), **self.verdict.fields()}

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        verdict = self.verdict
        rows: list[Row] = [
            ("rules on what was declared", Text(verdict.kept, style=STYLES[verdict.kept])),
            ("declared-run correctness", Text(verdict.correct, style=STYLES[verdict.correct])),
            ("declared-run completeness", Text(verdict.complete, style=STYLES[verdict.complete])),
            ("fleet completeness", Text(verdict.fleet, style=STYLES[verdict.fleet])),
        ]
        rows += [("", Text(reason, style=QUIET)) for reason in verdict.reasons[:MOST_SHOWN]]
        rows += [
            ("assurance", f"{verdict.assurance}, the least of the chips shown"),
            ("rules", f"{verdict.rules.name}, digest {verdict.rules.digest[:16]}.."),
            ("not covered", "; ".join(verdict.excluded)),
        ]
        table = Table(box=None, padding=(0, 1))
        for heading in ("  rule", "kind", "answer", "about", "what"):
            table.add_column(heading, overflow="fold")
        for each in verdict.verdicts:
            name, kind = f"  {each.rule.id}", each.rule.kind
            if not each.observations:
                table.add_row(
                    name, kind, Text(each.answer, style=STYLES[each.answer]), "", "concerns no declared run"
                )
            for at, seen in enumerate(each.observations[:MOST_SHOWN]):
                first = (
                    (name, kind, Text(each.answer, style=STYLES[each.answer]))
                    if at == 0
                    else ("", "", Text(""))
                )
                table.add_row(
                    *first, printable(seen.subject), Text(printable(seen.text), style=STYLES[seen.answer])
                )
            if len(each.observations) > MOST_SHOWN:
                table.add_row("", "", "", "", f"and {len(each.observations) - MOST_SHOWN} more (--json)")
        asked = verdict.asked(self.claims)
        headline = f"{verdict.owner} under {verdict.rules.name}: {asked} ({', '.join(self.claims)})"
        return page(headline, STYLES[asked], rows, table)


@dataclass(frozen=True)
class RulesPage:
    """A file of rules as its reader understands it, with the evidence that each needs."""

    rules: Rules

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "rules": self.rules.name,
            "rules_digest": self.rules.digest,
            "list": [
                {
                    "id": rule.id,
                    "kind": rule.kind,
                    "above_flop": None if rule.above_flop is None else shown(rule.above_flop),
                    "needs": list(rule.needs),
                }
                for rule in self.rules.rules
            ],
        }

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        rows: list[Row] = [("digest", self.rules.digest)]
        for rule in self.rules.rules:
            above = "" if rule.above_flop is None else f", above {shown(rule.above_flop)} FLOP of lineage"
            rows.append((rule.id, f"{rule.kind}{above}; needs {'; '.join(rule.needs)}"))
        return page(f"{self.rules.name}: {counted(len(self.rules.rules), 'rule')}", GOOD, rows)
