"""Single data records of a declared run: one step's batch opened under its report, and the digest of each record in it; pure.

    opened = open_batch(parse_batch_opening(data), report)     # bound to the report's salted commitment of that step
    opened.records[3], opened.form                             # what rules of unit "record" are about

The opening of a batch is the bytes that its digest hashes, with the salt of its commitment and its place under the report's
``data`` root. A record is one index of the first dimension of all of a batch's tensors; its digest is that of a batch with it
alone, whatever stood beside it. Opening a batch shows all of it, and nothing of any other. Format: spec/rules.md 5.

Not seen: a record changed by one bit, cut, padded or tokenised otherwise, has another digest. The **form** (names, dtypes and
shapes of one record, plain values) says for which layout a list of digests was made; in another layout absence says nothing.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, cast

from tallystick.commit.codec import Document
from tallystick.commit.encoding import canonical_json, digest, frame, parse_canonical_json
from tallystick.commit.field_rules import At, Elsewhere, Hash, HashText
from tallystick.commit.merkle import inclusion_ranges, leaf_hash, node_hash, range_root, verify_inclusion
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.provenance.transcripts import ReportOpening, RunReport, commitment
from tallystick.run.transcript import Transcript

BATCH_TAG = "tallystick/batch/1"
FORM_TAG = "tallystick/record-form/1"
OPENING_TAG = "tallystick/batch-opening/1"
OPENING_LIMIT = 1 << 30  # bytes of one batch's opening
HEAD_LIMIT, WHERE_LIMIT, MOST_PARTS, MOST_PROOF = 1 << 16, 4096, 4096, 64
MOST_PIECES = 1 << 22  # records of a batch times its tensors and plain values
ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class BatchPart:
    """One thing in a batch: a tensor (``dtype``, ``shape``, ``data``) or a plain value (``dtype`` None, ``data`` its text)."""

    where: str
    dtype: str | None
    shape: tuple[int, ...]
    data: memoryview

    def encode(self, rows: slice | None = None) -> bytes:
        """Return the bytes that a digest hashes of it, of some records alone where ``rows`` says so."""
        where = self.where.encode("utf-8")
        if self.dtype is None:
            return frame(BATCH_TAG, where, self.data)
        if rows is None:
            return frame(BATCH_TAG, where, canonical_json([self.dtype, list(self.shape)]), self.data)
        each = len(self.data) // self.shape[0]
        shape = [rows.stop - rows.start, *self.shape[1:]]
        cut = self.data[each * rows.start : each * rows.stop]
        return frame(BATCH_TAG, where, canonical_json([self.dtype, shape]), cut)


@dataclass(frozen=True)
class OpenedBatch(Document, what="opened batch"):
    """One batch, taken apart.

    Attributes:
        digest: hexadecimal, as the step's record has it.
        form: digest of the form of one record; None where the batch has no records of one form.
        records: digest of each, in order; empty where ``form`` is None.
        problem: why it could not be taken apart, or None.
    """

    digest: Annotated[str, At("batch")]
    form: str | None
    records: tuple[str, ...]
    problem: str | None = None


def take_apart(data: bytes) -> OpenedBatch:
    """Return the records of the batch whose digest hashes ``data``.

    Raises:
        InvalidInput: no batch hashes to these bytes.
    """
    parts = tuple(_parts(memoryview(data)))
    named = hashlib.sha256(data).hexdigest()
    tensors = [part for part in parts if part.dtype is not None]
    sizes = {part.shape[0] if part.shape else 0 for part in tensors}
    if len(sizes) != 1 or 0 in sizes:
        return OpenedBatch(named, None, (), f"its tensors have {sorted(sizes)} records")
    size = sizes.pop()
    if size > sum(len(part.data) for part in tensors):
        return OpenedBatch(named, None, (), "its records are empty")
    if size * len(parts) > MOST_PIECES:
        return OpenedBatch(named, None, (), f"its {size} records of {len(parts)} parts exceed {MOST_PIECES}")
    heads: list[bytes] = []
    for part in parts:
        shape = canonical_json([part.dtype, [1, *part.shape[1:]]])
        heads += [part.where.encode("utf-8"), bytes(part.data) if part.dtype is None else shape]
    records: list[str] = []
    for at in range(size):
        hashed = hashlib.sha256()
        for part in parts:
            hashed.update(part.encode(slice(at, at + 1)))
        records.append(hashed.hexdigest())
    return OpenedBatch(named, digest(FORM_TAG, *heads).hex(), tuple(records))


@dataclass(frozen=True)
class BatchOpening(Document, what="batch opening"):
    """What opens one step's batch under a run's report: the salt of its commitment, its place, and its bytes.

    Attributes:
        run: hexadecimal root of the run.
        step, steps: which of how many.
        salt: of the commitment ``data/step``; opens no other.
        proof: hashes from the commitment to the report's ``data`` root, lowest first.
        batch: the bytes that the batch's digest hashes.
    """

    run: HashText
    step: int
    steps: int
    salt: Hash
    proof: tuple[Hash, ...]
    batch: Annotated[bytes, Elsewhere()] = b""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.step < self.steps or len(self.proof) > MOST_PROOF:
            raise InvalidInput(
                f"batch opening: step {self.step} of {self.steps}, {len(self.proof)} nodes: out of range"
            )

    def encode(self) -> bytes:
        """Return the one encoding."""
        return frame(OPENING_TAG, canonical_json(self.fields()), self.batch)


def parse_batch_opening(data: bytes, *, what: str = "batch opening") -> BatchOpening:
    """Return the opening whose encoding is exactly ``data``.

    Raises:
        InvalidInput: malformed, too large, or with bytes that no batch hashes to.
    """
    if len(data) > OPENING_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {OPENING_LIMIT}")
    reader = _Reader(memoryview(data), what)
    reader.tag(OPENING_TAG)
    head = bytes(reader.item("its head", HEAD_LIMIT))
    batch = bytes(reader.item("its batch", OPENING_LIMIT))
    if reader.at != len(data):
        raise InvalidInput(f"{what}: {len(data) - reader.at} bytes follow")
    found = BatchOpening.read(parse_canonical_json(head, what=what, limit=HEAD_LIMIT), what=what)
    for _ in _parts(memoryview(batch), what):
        pass
    return replace(found, batch=batch)


def open_batch(opening: BatchOpening, report: RunReport) -> OpenedBatch:
    """Return the records of a step's batch: the very one that ``report`` commits to for it.

    Raises:
        Mismatch: another run, number of steps, salt, batch or place than the report commits to.
        InvalidInput: a proof of the wrong length.
    """
    if (opening.run, opening.steps) != (report.run, report.steps):
        raise Mismatch(
            f"batch opening: is of run {opening.run[:16]}.. with {opening.steps} steps, the report of "
            f"{report.run[:16]}.. with {report.steps}"
        )
    found = take_apart(opening.batch)
    leaf = leaf_hash(commitment(opening.salt, bytes.fromhex(found.digest)))
    verify_inclusion(
        leaf, index=opening.step, size=opening.steps, proof=opening.proof, root=bytes.fromhex(report.data)
    )
    return found


def batch_openings(transcript: Transcript, opening: ReportOpening) -> Callable[[int, bytes], BatchOpening]:
    """Return what makes the opening of a step from the bytes of its batch.

    That function raises Mismatch where the bytes are not those of the step's record.
    """
    batches = [record.batch for record in transcript.records]
    leaves = [leaf_hash(opening.commit(f"data/{at}", bytes.fromhex(b))) for at, b in enumerate(batches)]
    run = transcript.root().hex()

    @functools.cache
    def subtree(level: int, index: int) -> bytes:
        if level == 0:
            return leaves[index]
        return node_hash(subtree(level - 1, 2 * index), subtree(level - 1, 2 * index + 1))

    def made(step: int, batch: bytes) -> BatchOpening:
        if not 0 <= step < len(batches):
            raise InvalidInput(f"step {step}: the run has steps 0 to {len(batches) - 1}")
        found = hashlib.sha256(batch).hexdigest()
        if found != batches[step]:
            raise Mismatch(f"step {step}: the data are {found[:16]}.., the record has {batches[step][:16]}..")
        proof = tuple(range_root(a, b, subtree) for a, b in inclusion_ranges(step, len(batches)))
        return BatchOpening(run, step, len(batches), opening.salt(f"data/{step}"), proof, batch)

    return made


class _Reader:
    """Takes tags and items of ``frame`` off the front of bytes that somebody sent."""

    def __init__(self, data: memoryview, what: str) -> None:
        self.data, self.what, self.at = data, what, 0

    def tag(self, tag: str) -> None:
        wanted = bytes([len(tag)]) + tag.encode("ascii")
        if bytes(self.data[self.at : self.at + len(wanted)]) != wanted:
            raise InvalidInput(f"{self.what}: byte {self.at} does not begin a {tag}")
        self.at += len(wanted)

    def item(self, name: str, limit: int) -> memoryview:
        if self.at + 8 > len(self.data):
            raise InvalidInput(f"{self.what}: ends before the length of {name}")
        size = int.from_bytes(self.data[self.at : self.at + 8], "little")
        if size > min(limit, len(self.data) - self.at - 8):
            left = len(self.data) - self.at - 8
            raise InvalidInput(f"{self.what}: {name} has {size} bytes, {min(limit, left)} are possible")
        self.at += 8 + size
        return self.data[self.at - size : self.at]


def _parts(data: memoryview, what: str = "batch") -> Iterator[BatchPart]:
    reader = _Reader(data, what)
    for _ in range(MOST_PARTS):
        if reader.at == len(data):
            break
        reader.tag(BATCH_TAG)
        try:
            where = bytes(reader.item("a name", WHERE_LIMIT)).decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidInput(f"{what}: a name is not UTF-8") from None
        head = reader.item(f"the head of {where[:60]!a}", HEAD_LIMIT)
        value = parse_canonical_json(bytes(head), what=f"{what}: {where[:60]!a}", limit=HEAD_LIMIT)
        if not isinstance(value, list):
            if isinstance(value, dict):
                raise InvalidInput(f"{what}: {where[:60]!a} is neither a tensor nor a plain value")
            yield BatchPart(where, None, (), head)
            continue
        dtype, shape = _tensor(cast("list[object]", value), f"{what}: {where[:60]!a}")
        content = reader.item(f"the tensor {where[:60]!a}", OPENING_LIMIT)
        if len(content) != ITEM_BYTES[dtype] * math.prod(shape):
            raise InvalidInput(
                f"{what}: {where[:60]!a} has {len(content)} bytes, {dtype}{list(shape)} has "
                f"{ITEM_BYTES[dtype] * math.prod(shape)}"
            )
        yield BatchPart(where, dtype, shape, content)
    if reader.at != len(data):
        raise InvalidInput(f"{what}: has more than {MOST_PARTS} parts")


def _tensor(head: list[object], what: str) -> tuple[str, tuple[int, ...]]:
    match head:
        case [str(dtype), list(sizes)] if dtype in ITEM_BYTES:
            shape = cast("list[object]", sizes)
        case _:
            raise InvalidInput(f"{what}: must be a dtype that has a digest, and a shape")
    if len(shape) > 64 or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidInput(f"{what}: a shape has at most 64 sizes, none negative")
    return dtype, tuple(cast("list[int]", shape))
