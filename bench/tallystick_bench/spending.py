"""What a dispute's ledger adds up to, and how it passes between processes."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import get_args

from tallystick.roles.costs import Activity, Ledger, Spender, Spent


def step_of(ledger: Ledger) -> Spent:
    """Return what a plain repeated step takes, the median; nothing if none was repeated."""
    if not ledger.steps:
        return Spent()
    return Spent(median(each.wall for each in ledger.steps), median(each.cpu for each in ledger.steps))


def beyond_segment(ledger: Ledger) -> Spent:
    """Return what the dispute took beyond repeating one segment, the parties on machines of their own.

    The slower party's share of what both do at once, plus everything that one does while the other waits. The disputed
    step belongs to the segment: where it was repeated operator by operator, a plain step is taken off. Sending is
    left out.
    """
    both = _beside(ledger, "trainer"), _beside(ledger, "auditor")
    slower = Spent(max(each.wall for each in both), max(each.cpu for each in both))
    turns = ledger.of("trainer", "list", "moves") + ledger.of("auditor", "examination", "moves")
    return slower + turns + ledger.of("judge")


def _beside(ledger: Ledger, who: Spender) -> Spent:
    spent, step = ledger.of(who, "again", "roots", "traced"), step_of(ledger)
    known = (who, "traced") in ledger.spent
    return Spent(spent.wall - step.wall, spent.cpu - step.cpu) if known else spent


def spent_fields(spent: Spent) -> dict[str, float]:
    """Return both seconds as a JSON object."""
    return {"cpu": spent.cpu, "wall": spent.wall}


def ledger_fields(ledger: Ledger) -> dict[str, dict[str, dict[str, float]]]:
    """Return everything as JSON objects by party and activity."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (who, activity), spent in sorted(ledger.spent.items()):
        found.setdefault(who, {})[activity] = spent_fields(spent)
    return found


def parse_ledger(
    fields: Mapping[str, Mapping[str, Mapping[str, float]]], step: Mapping[str, float]
) -> Ledger:
    """Return the ledger whose ``ledger_fields`` are these and whose median step is ``step``."""
    found = Ledger([_parse_spent(step)])
    for who in get_args(Spender):
        for activity in get_args(Activity):
            if activity in fields.get(who, {}):
                found.spent[(who, activity)] = _parse_spent(fields[who][activity])
    return found


def _parse_spent(fields: Mapping[str, float]) -> Spent:
    return Spent(fields["wall"], fields["cpu"])
