"""What a verification found of one owner, as the document that rules are judged by (spec/monitoring.md 5).

    owner_findings(*verify_owner(..)[:2]).encode()      ->  what `tally monitor verify --findings` writes
    OwnerFindings.parse(data)                           ->  what `tally rules judge` reads

It is the reader's own and is not signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import Whole
from tallystick.errors import InvalidInput
from tallystick.fleet.agent.chip_log import NumberedFinding, snapshots_of
from tallystick.fleet.provenance.verification import Answer, ChipView, OwnerVerdict, RunVerdict

FORMAT = "tallystick/owner-findings/1"
FINDINGS_LIMIT = 1 << 28  # bytes

SnapshotStatus = Literal["exact", "torn", "unexplained", "doubtful", "empty"]


@dataclass(frozen=True)
class SeenSnapshot(Document, what="snapshot"):
    """A snapshot as the verification found it: what it is, and which run's state after how many steps it holds."""

    seq: Whole
    status: SnapshotStatus
    run: str | None
    steps_done: Whole | None


@dataclass(frozen=True)
class OwnerFindings(Document, form=FORMAT, what="findings of an owner", limit=FINDINGS_LIMIT):
    """The verdict on an owner, and every snapshot of each of its chips, by UEID in hexadecimal.

    Raises:
        InvalidInput: two verdicts on one run.
    """

    verdict: OwnerVerdict
    chips: Mapping[str, tuple[SeenSnapshot, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.runs) != len(self.verdict.runs):
            raise InvalidInput(f"{self.label()}: two verdicts on one run")

    @cached_property
    def runs(self) -> Mapping[str, RunVerdict]:
        """The verdict on each run, by its root."""
        return {verdict.run: verdict for verdict in self.verdict.runs}

    def correctness_of(self, run: str) -> Answer:
        """Return whether a run took place as declared; unknown of one that was not verified."""
        return self.runs[run].correct if run in self.runs else "unknown"

    def findings_on(self, run: str) -> tuple[NumberedFinding, ...]:
        """Return the findings on a run."""
        return self.runs[run].findings if run in self.runs else ()


def owner_findings(verdict: OwnerVerdict, chips: Iterable[ChipView]) -> OwnerFindings:
    """Return what was found as the document for rules."""
    return OwnerFindings(
        verdict, {chip.ueid: tuple(_seen(chip, seq) for seq in sorted(chip.matches)) for chip in chips}
    )


def status_of(chip: ChipView, seq: int) -> SnapshotStatus:
    """Return what a snapshot was found to be."""
    found = chip.matches[seq]
    if found is not None:
        return found[1].status
    if any(logged.record.seq == seq and event.size == 0 for logged, event in snapshots_of(chip.log)):
        return "empty"
    return "doubtful" if seq in chip.doubtful else "unexplained"


def _seen(chip: ChipView, seq: int) -> SeenSnapshot:
    run, match = chip.matches[seq] or (None, None)
    return SeenSnapshot(seq, status_of(chip, seq), run, None if match is None else match.steps_done)
