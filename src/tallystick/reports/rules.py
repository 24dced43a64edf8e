"""What the evidence says about rules: the three claims above the rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from tallystick.fleet.compliance.rules import Rules, shown
from tallystick.fleet.compliance.verdict import RulesVerdict
from tallystick.reports.layout import ANSWERS, QUIET, Cell, DonePage, Row, Table, answered, counted

MOST_SHOWN = 8  # observations of a rule on the page; JSON has all


def rules_verdict_page(verdict: RulesVerdict, claims: Sequence[str]) -> DonePage:
    """Return the verdict; the claims that were asked for decide the headline and the exit code."""
    asked = verdict.asked(claims)
    values = {"verdict": asked, "asked": list(claims), **verdict.fields()}
    rows: list[Row] = [
        ("rules on what was declared", answered(verdict.kept)),
        ("declared-run correctness", answered(verdict.correct)),
        ("declared-run completeness", answered(verdict.complete)),
        ("fleet completeness", answered(verdict.fleet)),
        *(("", Text(reason, style=QUIET)) for reason in verdict.reasons[:MOST_SHOWN]),
        ("assurance", f"{verdict.assurance}, the least of the chips shown"),
        ("rules", f"{verdict.rules.name}, digest {verdict.rules.digest[:16]}.."),
        ("not covered", "; ".join(verdict.excluded)),
    ]
    table = Table(("rule", "kind", "answer", "about", "what"), list(_answers(verdict)))
    headline = f"{verdict.owner} under {verdict.rules.name}: {asked} ({', '.join(claims)})"
    return DonePage(headline, values, rows, ANSWERS[asked], [table])


def _answers(verdict: RulesVerdict) -> Iterator[tuple[Cell, ...]]:
    """Return a row for each observation of each rule; what belongs to the rule stands in its first row."""
    for each in verdict.verdicts:
        said: list[tuple[Cell, Cell]] = [
            (seen.subject, Text(seen.text, style=ANSWERS[seen.answer]))
            for seen in each.observations[:MOST_SHOWN]
        ]
        if len(each.observations) > MOST_SHOWN:
            said.append(("", f"and {len(each.observations) - MOST_SHOWN} more (--json)"))
        first, *others = said or [("", "concerns no declared run")]
        yield (each.rule.id, each.rule.kind, answered(each.answer), *first)
        for other in others:
            yield ("", "", "", *other)


def rules_page(rules: Rules) -> DonePage:
    """Return a file of rules as its reader understands it, with the evidence that each needs."""
    values = {
        "rules": rules.name,
        "rules_digest": rules.digest,
        "list": [
            {
                "id": rule.id,
                "kind": rule.kind,
                "above_flop": None if rule.above_flop is None else shown(rule.above_flop),
                "needs": list(rule.needs),
            }
            for rule in rules.rules
        ],
    }
    rows: list[Row] = [("digest", rules.digest)]
    for rule in rules.rules:
        above = "" if rule.above_flop is None else f", above {shown(rule.above_flop)} FLOP of lineage"
        rows.append((rule.id, f"{rule.kind}{above}; needs {'; '.join(rule.needs)}"))
    return DonePage(f"{rules.name}: {counted(len(rules.rules), 'rule')}", values, rows)
