"""Pages and JSON of the registry's commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from tallystick.fleet.registry.facts import Chip, RegistryEvent
from tallystick.fleet.registry.heads import SignedHead
from tallystick.fleet.registry.reconcile import Disagreement
from tallystick.reports.layout import BAD, DonePage, Row, Table, counted

MOST_SHOWN = 50  # findings on a page; JSON has all


def head_page(
    headline: str,
    signed: SignedHead,
    statuses: Mapping[str, int] | None = None,
    parties: Sequence[str] = (),
    set_aside: Sequence[str] = (),
) -> DonePage:
    """Return a head, and how many chips of which status stand under it."""
    head = signed.head
    values = {
        "registry": head.registry,
        "entries": head.entries,
        "log": head.log_root.hex(),
        "state": head.state_root.hex(),
        "time": head.time,
        "signature": signed.signature.hex(),
        "chips": dict(statuses or {}),
        "parties": list(parties),
        "unacknowledged": list(set_aside),
    }
    rows: list[Row] = [
        ("registry", head.registry),
        ("entries", f"{head.entries:,}"),
        ("log", head.log_root.hex()),
        ("state", head.state_root.hex()),
        ("time", when(head.time)),
    ]
    if statuses:
        rows.append(("chips", ", ".join(f"{count:,} {status}" for status, count in statuses.items())))
    if parties:
        rows.append(("parties", ", ".join(parties)))
    if set_aside:
        rows.append(("set aside", f"{', '.join(set_aside)}: written by a process that was killed"))
    return DonePage(headline, values, rows)


def chip_page(chip: Chip, headline: str, events: Sequence[tuple[int, RegistryEvent]] = ()) -> DonePage:
    """Return one chip as it stands, with its events where they were asked for."""
    values = {
        **chip._asdict(),
        "deeds": [{"entry": number, "kind": event.kind, "time": event.time} for number, event in events],
    }
    held = "" if chip.owner == chip.custodian else f", held by {chip.custodian}"
    rows: list[Row] = [
        ("model", f"{chip.model}, made by {chip.maker}"),
        ("serial", chip.serial or "not packaged"),
        ("device key", chip.key or "none registered"),
        ("board", chip.board or "none"),
        ("owner", chip.owner + held),
        ("status", chip.status),
        ("exempt", f"until {when(chip.exempt_until)}" if chip.exempt_until else "no"),
        ("inspected", when(chip.inspected) if chip.inspected else "never"),
        *((f"entry {number}", f"{event.kind}, {when(event.time)}") for number, event in events),
    ]
    return DonePage(headline, values, rows)


def reconciliation_page(chips: int, streams: int, findings: Sequence[Disagreement]) -> DonePage:
    """Return the findings of a reconciliation, or that there is none."""
    values = {
        "agrees": not findings,
        "chips": chips,
        "streams": streams,
        "findings": [finding.fields() for finding in findings],
    }
    rules = Counter(finding.rule for finding in findings)
    rows: list[Row] = [
        ("compared", f"{counted(chips, 'chip')} with {counted(streams, 'stream')}"),
        *((rule, counted(count, "finding")) for rule, count in sorted(rules.items())),
    ]
    if not findings:
        return DonePage("registry and streams agree", values, rows)
    lines = [(finding.rule, finding.chip or "count", finding.party, finding.words) for finding in findings]
    table = Table(("rule", "chip", "party", "what"), lines, things="finding", most=MOST_SHOWN)
    return DonePage(f"{counted(len(findings), 'finding')} to be explained", values, rows, BAD, [table])


def when(seconds: int) -> str:
    """Return a time of day in UTC as people write it; a number that no calendar has stays one."""
    try:
        return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"second {seconds}"
