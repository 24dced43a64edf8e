"""The page of a chip's log: its records, its findings and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tallystick.cli.fleet.chip_evidence import (
    Shown,
)
from tallystick.fleet.agent.chip_log import NumberedFinding, active_days, snapshots_of
from tallystick.fleet.agent.chip_record import FLAGS, KINDS, Boot, Genesis, LoggedRecord, Snapshot
from tallystick.fleet.attestation.assurance import (
    Assurance,
)
from tallystick.reports.layout import BAD, GOOD, QUIET, UNSURE, Row, counted, page
from tallystick.signing.keys import PublicKey

STYLES = {"violation": BAD, "unknown": UNSURE, "note": QUIET}


@dataclass(frozen=True)
class LogPage:
    """A chip's log, its findings and what it is worth."""

    log: Sequence[LoggedRecord]
    findings: Sequence[NumberedFinding]
    assurance: Assurance
    key: PublicKey
    shown: Shown = field(default_factory=Shown)

    @property
    def verdict(self) -> str:
        """``consistent``, ``unknown`` or ``violation``."""
        worst = {finding.severity for finding in self.findings}
        return "violation" if "violation" in worst else "unknown" if "unknown" in worst else "consistent"

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        head = self.log[-1] if self.log else None
        return {
            "verdict": self.verdict,
            "assurance": self.assurance.fields(),
            "ueid": None if head is None else head.record.ueid.hex(),
            "key_id": self.key.key_id,
            "records": len(self.log),
            "snapshots": len(snapshots_of(self.log)),
            "active_days": active_days(self.log),
            "head": None if head is None else {"seq": head.record.seq, "digest": head.digest.hex()},
            "evidence": self.shown.fields(),
            "findings": [finding.fields() for finding in self.findings],
            "log": [
                {"seq": r.record.seq, "kind": KINDS[r.record.kind], "digest": r.digest.hex(), "what": said(r)}
                for r in self.log
            ],
        }

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        style = {"consistent": GOOD, "unknown": UNSURE, "violation": BAD}[self.verdict]
        rows: list[Row] = []
        if self.log:
            head = self.log[-1]
            rows += [
                ("chip", head.record.ueid.hex()),
                ("assurance", str(self.assurance)),
                ("next level", f"lacks {', '.join(self.assurance.lacks)}" if self.assurance.lacks else "there is none"),
                ("records", f"{len(self.log)}, {counted(len(snapshots_of(self.log)), 'snapshot')} "
                            f"in {active_days(self.log):.3g} days in use"),
                ("head", f"record {head.record.seq} {head.digest.hex()}"),
            ]  # fmt: skip
        rows += self.shown.rows()
        rows += [
            (f"finding {f.rule}", Text(f"{f.name}: {f.text}", style=STYLES[f.severity]))
            for f in self.findings
        ]
        headline = f"chip log: {self.verdict}" + ("" if self.findings else " up to its last record")
        return page(headline, style, rows, self._table())

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1))
        for heading in ("  record", "when", "boot", "kind", "what"):
            table.add_column(heading)
        shown = self.log if len(self.log) <= 24 else [*self.log[:4], *self.log[-20:]]
        for before, logged in zip((None, *shown[:-1]), shown, strict=True):
            record = logged.record
            if before is not None and record.seq > before.record.seq + 1:
                table.add_row("  ..")
            wall = record.clocks.wall
            moment = (
                ""
                if wall is None
                else datetime.fromtimestamp(wall / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
            )
            table.add_row(
                f"  {record.seq}", moment, str(record.clocks.boots), KINDS[record.kind], said(logged)
            )
        return table


def said(logged: LoggedRecord) -> str:
    """Return a record's event in a few words."""
    match logged.record.event:
        case Snapshot() as event:
            flags = "".join(f", {name}" for bit, name in FLAGS.items() if event.flags & bit)
            return f"root {event.root.hex()[:16]}.. over {event.size:,} bytes in {event.pages} pages{flags}"
        case Genesis() as event:
            return f"{event.maker} {event.model}, {event.agent} agent, {event.mode} mode"
        case Boot() as event:
            return f"{event.cut} bytes cut, {event.lost} records lost"
        case event:
            values = (v.hex()[:16] + ".." if isinstance(v, bytes) else str(v) for v in vars(event).values())
            return " ".join(values)
