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
from typing import Literal, cast

from tallystick.commit.encoding import (
    Fields,
    canonical_json,
    digest,
    parse_canonical_json,
    parse_document,
    parse_hex,
)
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
class Lineage:
    """Where the first weights come from: the job's own initialisation, or a state of another run.

    ``parent`` is that run's root and ``steps_done`` the steps after which its state was taken.
    """

    kind: LineageKind
    parent: str | None = None
    steps_done: int | None = None

    def __post_init__(self) -> None:
        given = self.parent is not None and self.steps_done is not None
        if self.kind not in ("initialised", "continued") or given != (self.kind == "continued"):
            raise InvalidInput(
                "lineage: a continued run names its parent's root and steps, an initialised one neither"
            )
        if self.parent is not None:
            parse_hex(self.parent, n_bytes=32, what="lineage: parent")
        if self.steps_done is not None and self.steps_done < 0:
            raise InvalidInput(f"lineage: steps must not be negative, are {self.steps_done}")

    def fields(self) -> dict[str, object]:
        """Return the lineage as JSON."""
        return {"kind": self.kind, "parent": self.parent, "steps_done": self.steps_done}


@dataclass(frozen=True)
class Slice:
    """A chip's region that holds a part of a state's entry: ``count`` elements from flat index ``start`` on."""

    region: str
    entry: str
    start: int
    count: int

    def __post_init__(self) -> None:
        if not (0 <= self.start < 2**63 and 0 <= self.count < 2**63):
            raise InvalidInput(f"shard map: region {self.region}: start or count is out of range")

    def fields(self) -> list[object]:
        """Return the slice as JSON."""
        return [self.region, self.entry, self.start, self.count]


@dataclass(frozen=True)
class Totals:
    """What the run is stated to have cost: FLOP counted from the operators, tokens (or records), and milliseconds on chips."""

    flop: int
    tokens: int
    chip_ms: int

    def fields(self) -> dict[str, object]:
        """Return the totals as JSON."""
        return {"chip_ms": self.chip_ms, "flop": self.flop, "tokens": self.tokens}


@dataclass(frozen=True)
class Precommit:
    """Stated before step 0; its digest is what chips log.

    Attributes:
        meta: commitment to the specification's bytes.
        data: root over the commitments to every step's batch digest, or None where data arrive during the run.
        ranks: the chip (UEID in hexadecimal) of each rank.
        shards: commitment to the shard map.
        lineage: where the weights come from.
    """

    meta: str
    data: str | None
    ranks: tuple[str, ...]
    shards: str
    lineage: Lineage

    def encode(self) -> bytes:
        """Return the canonical JSON of the pre-commitment."""
        return canonical_json(
            {
                "data": self.data,
                "format": PRECOMMIT_FORMAT,
                "lineage": self.lineage.fields(),
                "meta": self.meta,
                "ranks": list(self.ranks),
                "shards": self.shards,
            }
        )

    def digest(self) -> bytes:
        """Return the 32 bytes that chips log."""
        return digest(PRECOMMIT_TAG, self.encode())


@dataclass(frozen=True)
class Report:
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

    run: str
    steps: int
    precommit: Precommit
    data: str
    checkpoints: tuple[tuple[int, str], ...]
    totals: Totals
    snapshots: tuple[tuple[str, int, int], ...] = ()

    def encode(self) -> bytes:
        """Return the canonical JSON of the report."""
        return canonical_json(
            {
                "checkpoints": [list(item) for item in self.checkpoints],
                "data": self.data,
                "format": REPORT_FORMAT,
                "precommit": parse_canonical_json(
                    self.precommit.encode(), what="precommit", limit=DOCUMENT_LIMIT
                ),
                "run": self.run,
                "snapshots": [list(item) for item in self.snapshots],
                "steps": self.steps,
                "totals": {**self.totals.fields(), "flop": str(self.totals.flop)},
            }
        )


@dataclass(frozen=True)
class Opening:
    """What opens a report: the secret, and each rank's shard map. Shown in the neutral place only."""

    secret: bytes = field(repr=False)
    shards: tuple[tuple[Slice, ...], ...]

    def __post_init__(self) -> None:
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
        return canonical_json([[piece.fields() for piece in rank] for rank in self.shards])

    def encode(self) -> bytes:
        """Return the canonical JSON of the opening."""
        return canonical_json(
            {
                "format": OPENING_FORMAT,
                "secret": self.secret.hex(),
                "shards": [[piece.fields() for piece in rank] for rank in self.shards],
            }
        )


def commitment(salt: bytes, data: bytes) -> bytes:
    """Return the 32 bytes that commit to ``data`` and show nothing of it to whoever lacks the salt."""
    return digest(COMMITMENT_TAG, salt, data)


def data_root(opening: Opening, batches: Sequence[str]) -> bytes:
    """Return the root over the commitments to the steps' batch digests, in order."""
    leaves = [leaf_hash(opening.commit(f"data/{step}", bytes.fromhex(b))) for step, b in enumerate(batches)]
    return merkle_root(leaves)


def make_precommit(
    specification: Specification,
    opening: Opening,
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
    opening: Opening,
    precommit: Precommit,
    totals: Totals,
    snapshots: Sequence[tuple[str, int, int]] = (),
) -> Report:
    """Return the report of a finished run."""
    return Report(
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


def verify_report(report: Report, opening: Opening, transcript: Transcript) -> None:
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


def parse_precommit(data: bytes, *, what: str = "pre-commitment") -> Precommit:
    """Return the pre-commitment whose encoding is exactly ``data``.

    Raises:
        InvalidInput: malformed.
    """
    return _precommit(parse_canonical_json(data, what=what, limit=DOCUMENT_LIMIT))


def parse_report(data: bytes) -> Report:
    """Return the report whose encoding is exactly ``data``.

    Raises:
        InvalidInput: malformed.
    """
    names = ("checkpoints", "data", "format", "precommit", "run", "snapshots", "steps", "totals")
    fields = parse_document(data, REPORT_FORMAT, what="report", limit=DOCUMENT_LIMIT, names=names)
    totals = Fields(fields.value("totals"), what="report: totals", names=("chip_ms", "flop", "tokens"))
    numbers = {name: totals.integer(name) for name in ("tokens", "chip_ms")}
    if min(numbers.values()) < 0:
        raise InvalidInput("report: totals must not be negative")
    flop = totals.text("flop")  # a text: large runs exceed 63 bits
    if not _FLOP.fullmatch(flop):
        raise InvalidInput(
            f"report: FLOP must be a decimal number of at most 40 digits, is {ascii(flop)[:60]}"
        )
    checkpoints: list[tuple[int, str]] = []
    for item in fields.items("checkpoints"):
        match item:
            case [int(steps_done), str(text)] if type(steps_done) is int:
                parse_hex(text, n_bytes=32, what="report: checkpoint")
                checkpoints.append((steps_done, text))
            case _:
                raise InvalidInput("report: a checkpoint must be [steps done, commitment]")
    snapshots: list[tuple[str, int, int]] = []
    for item in fields.items("snapshots"):
        match item:
            case [str(ueid), int(seq), int(step)] if (
                type(seq) is int and type(step) is int and min(seq, step) >= 0
            ):
                snapshots.append((ueid, seq, step))
            case _:
                raise InvalidInput("report: a snapshot must be [chip, counter, steps done]")
    if fields.integer("steps") < 1:
        raise InvalidInput(f"report: must have at least one step, has {fields.integer('steps')}")
    run, committed = fields.text("run"), fields.text("data")
    for name, text in (("run", run), ("data", committed)):
        parse_hex(text, n_bytes=32, what=f"report: {name}")
    return Report(
        run=run,
        steps=fields.integer("steps"),
        precommit=_precommit(fields.value("precommit")),
        data=committed,
        checkpoints=tuple(checkpoints),
        totals=Totals(int(flop), **numbers),
        snapshots=tuple(snapshots),
    )


def parse_opening(data: bytes) -> Opening:
    """Return the opening whose encoding is exactly ``data``.

    Raises:
        InvalidInput: malformed; the secret never stands in the message.
    """
    names = ("format", "secret", "shards")
    fields = parse_document(data, OPENING_FORMAT, what="opening", limit=DOCUMENT_LIMIT, names=names)
    text = fields.text("secret")
    if len(text) != 2 * SECRET_BYTES or text.strip("0123456789abcdef"):
        raise InvalidInput("opening: the secret must be 64 lower-case hexadecimal digits")
    ranks: list[tuple[Slice, ...]] = []
    for rank in fields.items("shards"):
        if not isinstance(rank, list):
            raise InvalidInput("opening: a rank's shard map must be a list")
        ranks.append(tuple(_slice(item) for item in cast("list[object]", rank)))
    return Opening(bytes.fromhex(text), tuple(ranks))


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


def _precommit(value: object) -> Precommit:
    what = "pre-commitment"
    fields = Fields(value, what=what, names=("data", "format", "lineage", "meta", "ranks", "shards"))
    fields.constant("format", PRECOMMIT_FORMAT)
    lineage = Fields(fields.value("lineage"), what=f"{what}: lineage", names=("kind", "parent", "steps_done"))
    done = None if lineage.value("steps_done") is None else lineage.integer("steps_done")
    meta, shards, data = fields.text("meta"), fields.text("shards"), fields.optional_text("data")
    for name, text in (("meta", meta), ("shards", shards), ("data", data)):
        if text is not None:
            parse_hex(text, n_bytes=32, what=f"{what}: {name}")
    kind = lineage.text("kind")
    if kind not in ("initialised", "continued"):
        raise InvalidInput(f"{what}: lineage must be initialised or continued, is {kind[:40]!r}")
    return Precommit(
        meta, data, fields.texts("ranks"), shards, Lineage(kind, lineage.optional_text("parent"), done)
    )


def _slice(item: object) -> Slice:
    match item:
        case [str(region), str(entry), int(start), int(count)] if type(start) is int and type(count) is int:
            return Slice(region, entry, start, count)
        case _:
            raise InvalidInput("opening: a slice must be [region, entry, start, count]")
