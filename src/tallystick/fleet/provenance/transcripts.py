"""What a developer states about a run to those who watch chips: commitments that hide, and what opens them.

Three documents beside a run directory, all canonical JSON (spec/monitoring.md):

    pre-commitment   before step 0: what will be trained, on which data, from where; its digest is logged by the chips
    report           after the run: bound to the run's root; commitments to metadata, data and checkpoints; totals
    opening          secret: one key from which every salt follows, and the shard map

A commitment is SHA-256 over a tag, a salt of 32 bytes and the data. Salts follow from the secret by HMAC, one for each
thing, so that one of them can be shown without the others. A reader without salts learns nothing from guessing.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, cast

from tallystick.commit.codec import Document
from tallystick.commit.encoding import canonical_json, digest
from tallystick.commit.field_rules import HashText, Positive, Secret, Via, Whole
from tallystick.commit.merkle import leaf_hash
from tallystick.commit.merkle import root as merkle_root
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.documents import Specification
from tallystick.run.transcript import Transcript

PRECOMMIT_FORMAT = "tallystick/precommit/1"
REPORT_FORMAT = "tallystick/monitoring-report/1"
OPENING_FORMAT = "tallystick/monitoring-opening/1"
PRECOMMIT_TAG = "tallystick/precommit/1"
COMMITMENT_TAG = "tallystick/hiding/1"
SECRET_BYTES = 32
DOCUMENT_LIMIT = 1 << 26

_FLOP = re.compile(r"0|[1-9][0-9]{0,39}", re.ASCII)

LineageKind = Literal["initialised", "continued"]


@dataclass(frozen=True)
class Lineage(Document, what="lineage"):
    """Where the first weights come from: the job's own initialisation, or a state of another run.

    ``parent`` is that run's root and ``steps_done`` the steps after which its state was taken.
    """

    kind: LineageKind
    parent: HashText | None = None
    steps_done: Whole | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.parent is not None and self.steps_done is not None
        if given != (self.kind == "continued"):
            raise InvalidInput(
                "lineage: a continued run names its parent's root and steps, an initialised one neither"
            )


@dataclass(frozen=True)
class Slice(Document, what="slice"):
    """A chip's region that holds a part of a state's entry: ``count`` elements from flat index ``start`` on.

    With ``run`` they are that many at a time, ``stride`` apart: columns ``start`` to ``start + run`` of a matrix of ``stride``
    columns. In a list the two stand behind the others, and only where there is a gap.

    Raises:
        InvalidInput: runs that leave no gap, or that ``count`` is no multiple of.
    """

    region: str
    entry: str
    start: Whole
    count: Whole
    run: Whole = 0
    stride: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.run or self.stride) and not (
            0 < self.run < min(self.count, self.stride) and self.count % self.run == 0
        ):
            raise InvalidInput(
                f"slice: runs of {self.run} elements, {self.stride} apart, must be shorter than that and a part of {self.count}"
            )


def _slice_row(piece: Slice) -> list[object]:
    row = piece.row()
    return row if piece.run else row[:-2]


def _read_slice(value: object, what: str) -> Slice:
    items = cast("list[object]", value) if isinstance(value, list) else []
    if len(items) == 4:
        return Slice.read_row([*items, 0, 0], what=what)
    found = Slice.read_row(value, what=what)
    if not found.run:
        raise InvalidInput(f"{what}: a slice without runs is a list of 4")
    return found


def _read_flop(value: object, what: str) -> int:
    if not isinstance(value, str) or not _FLOP.fullmatch(value):  # a text: large runs exceed 63 bits
        raise InvalidInput(
            f"{what}: FLOP must be a decimal number of at most 40 digits, is {ascii(value)[:60]}"
        )
    return int(value)


@dataclass(frozen=True)
class Totals(Document, what="totals"):
    """What the run is stated to have cost: FLOP counted from the operators, tokens (or records), and milliseconds on chips."""

    flop: Annotated[int, Via(str, _read_flop)]
    tokens: Whole
    chip_ms: Whole


@dataclass(frozen=True)
class Precommit(Document, form=PRECOMMIT_FORMAT, what="pre-commitment", limit=DOCUMENT_LIMIT):
    """Stated before step 0; its digest is what chips log.

    Attributes:
        meta: commitment to the specification's bytes.
        data: root over the commitments to every step's batch digest, or None where data arrive during the run.
        ranks: the chip (UEID in hexadecimal) of each rank.
        shards: commitment to the shard map.
        lineage: where the weights come from.
    """

    meta: HashText
    data: HashText | None
    ranks: tuple[str, ...]
    shards: HashText
    lineage: Lineage

    def digest(self) -> bytes:
        """Return the 32 bytes that chips log."""
        return digest(PRECOMMIT_TAG, self.encode())


@dataclass(frozen=True)
class RunReport(Document, form=REPORT_FORMAT, what="report", limit=DOCUMENT_LIMIT):
    """Stated after the run; holds commitments only.

    Attributes:
        run: hexadecimal root of the run's transcript.
        steps: of the run.
        precommit: the pre-commitment.
        data: root over the commitments to every step's batch digest.
        checkpoints: (steps done, commitment to the state's root), in order.
        totals: what it cost.
        snapshots: (UEID, counter, steps done): at which step each snapshot was taken, as the developer says.
    """

    run: HashText
    steps: Positive
    precommit: Precommit
    data: HashText
    checkpoints: tuple[tuple[int, HashText], ...]
    totals: Totals
    snapshots: tuple[tuple[str, Whole, Whole], ...] = ()


@dataclass(frozen=True)
class ReportOpening(Document, form=OPENING_FORMAT, what="opening", limit=DOCUMENT_LIMIT):
    """What opens a report: the secret, and each rank's shard map. Shown in the neutral place only."""

    secret: Secret = field(repr=False)
    shards: tuple[tuple[Annotated[Slice, Via(_slice_row, _read_slice)], ...], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.secret) != SECRET_BYTES:
            raise InvalidInput(f"opening: the secret has {SECRET_BYTES} bytes, not {len(self.secret)}")

    def commit(self, label: str, data: bytes) -> bytes:
        """Return the commitment to ``data`` under the salt of ``label``."""
        return commitment(self.salt(label), data)

    def salt(self, label: str) -> bytes:
        """Return the salt of ``label``; showing it opens that one commitment alone."""
        return hmac.digest(self.secret, label.encode("utf-8"), "sha256")

    def shards_bytes(self) -> bytes:
        """Return the canonical JSON of the shard map."""
        return canonical_json([[_slice_row(piece) for piece in rank] for rank in self.shards])


def commitment(salt: bytes, data: bytes) -> bytes:
    """Return the 32 bytes that commit to ``data`` and show nothing of it to whoever lacks the salt."""
    return digest(COMMITMENT_TAG, salt, data)


def data_root(opening: ReportOpening, batches: Sequence[str]) -> bytes:
    """Return the root over the commitments to the steps' batch digests, in order."""
    leaves = [leaf_hash(opening.commit(f"data/{step}", bytes.fromhex(b))) for step, b in enumerate(batches)]
    return merkle_root(leaves)


def make_precommit(
    specification: Specification,
    opening: ReportOpening,
    *,
    ranks: Sequence[str],
    lineage: Lineage,
    batches: Sequence[str] | None,
) -> Precommit:
    """Return the pre-commitment of a run that is about to begin."""
    if len(ranks) != len(opening.shards):
        raise InvalidInput(f"pre-commitment: {len(ranks)} chips, and a shard map for {len(opening.shards)}")
    return Precommit(
        meta=opening.commit("meta", specification.encode()).hex(),
        data=None if batches is None else data_root(opening, batches).hex(),
        ranks=tuple(ranks),
        shards=opening.commit("shards", opening.shards_bytes()).hex(),
        lineage=lineage,
    )


def make_report(
    transcript: Transcript,
    opening: ReportOpening,
    precommit: Precommit,
    totals: Totals,
    snapshots: Sequence[tuple[str, int, int]] = (),
) -> RunReport:
    """Return the report of a finished run."""
    return RunReport(
        run=transcript.root().hex(),
        steps=transcript.num_steps,
        precommit=precommit,
        data=data_root(opening, [record.batch for record in transcript.records]).hex(),
        checkpoints=tuple(
            (c.steps_done, opening.commit(f"checkpoint/{c.steps_done}", bytes.fromhex(c.state_root)).hex())
            for c in transcript.checkpoints()
        ),
        totals=totals,
        snapshots=tuple(snapshots),
    )


def verify_report(report: RunReport, opening: ReportOpening, transcript: Transcript) -> None:
    """Return if the report is the one of ``transcript`` under ``opening``: done inside the neutral place.

    Raises:
        Mismatch: it commits to something else; the message names what.
    """
    made = make_precommit(
        transcript.specification,
        opening,
        ranks=report.precommit.ranks,
        lineage=report.precommit.lineage,
        batches=[record.batch for record in transcript.records],
    )
    again = make_report(transcript, opening, report.precommit, report.totals, report.snapshots)
    pairs = (
        ("run root", report.run, again.run),
        ("number of steps", report.steps, again.steps),
        ("metadata", report.precommit.meta, made.meta),
        ("shard map", report.precommit.shards, made.shards),
        ("data committed beforehand", report.precommit.data or made.data, made.data),
        ("data", report.data, again.data),
        ("checkpoints", report.checkpoints, again.checkpoints),
    )
    for what, stated, found in pairs:
        if stated != found:
            raise Mismatch(
                f"report: {what}: commits to {str(stated)[:24]}.., the transcript gives {str(found)[:24]}.."
            )


def even_shards(entries: Mapping[str, int], ranks: int) -> tuple[tuple[Slice, ...], ...]:
    """Return the shard map that cuts every entry (name to number of elements) into ``ranks`` equal runs of elements.

    With one rank a chip holds every entry whole, under the entry's own name: what a registered program shows.
    """
    return tuple(
        tuple(
            Slice(name, name, count * rank // ranks, count * (rank + 1) // ranks - count * rank // ranks)
            for name, count in sorted(entries.items())
        )
        for rank in range(ranks)
    )
