"""Pages and JSON of the registry's commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.text import Text

from tallystick.fleet.registry.facts import Chip, RegistryEvent
from tallystick.fleet.registry.heads import SignedHead
from tallystick.fleet.registry.reconcile import Disagreement
from tallystick.reports.layout import BAD, GOOD, QUIET, Row, counted, page

MOST_SHOWN = 50  # findings on a page; JSON has all


@dataclass(frozen=True)
class HeadPage:
    """A head, and how many chips of which status stand under it."""

    headline: str
    signed: SignedHead
    statuses: tuple[tuple[str, int], ...] = ()
    parties: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        head = self.signed.head
        return {
            "registry": head.registry,
            "entries": head.entries,
            "log": head.log_root.hex(),
            "state": head.state_root.hex(),
            "time": head.time,
            "signature": self.signed.signature.hex(),
            "chips": dict(self.statuses),
            "parties": list(self.parties),
            "unacknowledged": list(self.set_aside),
        }

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        head = self.signed.head
        rows: list[Row] = [
            ("registry", head.registry),
            ("entries", f"{head.entries:,}"),
            ("log", head.log_root.hex()),
            ("state", head.state_root.hex()),
            ("time", when(head.time)),
        ]
        if self.statuses:
            rows.append(("chips", ", ".join(f"{count:,} {status}" for status, count in self.statuses)))
        if self.parties:
            rows.append(("parties", ", ".join(self.parties)))
        if self.set_aside:
            rows.append(("set aside", f"{', '.join(self.set_aside)}: written by a process that was killed"))
        return page(self.headline, GOOD, rows)


@dataclass(frozen=True)
class ChipPage:
    """One chip as it stands, with its events where they were asked for."""

    chip: Chip
    headline: str
    events: tuple[tuple[int, RegistryEvent], ...] = ()

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        events = [{"entry": number, "kind": event.kind, "time": event.time} for number, event in self.events]
        return {**self.chip._asdict(), "deeds": events}

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        chip = self.chip
        rows: list[Row] = [
            ("model", f"{chip.model}, made by {chip.maker}"),
            ("serial", chip.serial or "not packaged"),
            ("device key", chip.key or "none registered"),
            ("board", chip.board or "none"),
            (
                "owner",
                chip.owner if chip.owner == chip.custodian else f"{chip.owner}, held by {chip.custodian}",
            ),
            ("status", chip.status),
            ("exempt", f"until {when(chip.exempt_until)}" if chip.exempt_until else "no"),
            ("inspected", when(chip.inspected) if chip.inspected else "never"),
            *((f"entry {number}", f"{event.kind}, {when(event.time)}") for number, event in self.events),
        ]
        return page(self.headline, GOOD, rows)


@dataclass(frozen=True)
class ReconciliationPage:
    """Findings of a reconciliation, or that there is none."""

    chips: int
    streams: int
    findings: Sequence[Disagreement]

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "agrees": not self.findings,
            "chips": self.chips,
            "streams": self.streams,
            "findings": [finding.fields() for finding in self.findings],
        }

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        rules = Counter(finding.rule for finding in self.findings)
        rows: list[Row] = [
            ("compared", f"{counted(self.chips, 'chip')} with {counted(self.streams, 'stream')}"),
            *((rule, counted(count, "finding")) for rule, count in sorted(rules.items())),
        ]
        lines = [
            Text(f"  {finding.rule}: {finding.chip or 'count'} ({finding.party}): {finding.words}")
            for finding in self.findings[:MOST_SHOWN]
        ]
        if len(self.findings) > MOST_SHOWN:
            lines.append(
                Text(f"  and {len(self.findings) - MOST_SHOWN:,} more; --json lists all", style=QUIET)
            )
        if self.findings:
            return page(f"{counted(len(self.findings), 'finding')} to be explained", BAD, rows, *lines)
        return page("registry and streams agree", GOOD, rows)


def when(seconds: int) -> str:
    """Return a time of day in UTC as people write it; a number that no calendar has stays one."""
    try:
        return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"second {seconds}"
