"""The transcript: what a trainer states about a run, committed step by step (spec/transcript.md).

A run is three documents. The specification says what was to be computed, one record per step
(and rank) says what was, and the statement names the root of the Merkle tree over both:

    transcript = verify_transcript(specification_json, steps_jsonl, run_json)
    proof = transcript.prove_step(41)
    verify_step_proof(parse_step_proof(proof.encode()), transcript.root())

This module decides whether the documents agree with each other. It does not decide whether
the training took place: that is for whoever repeats it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tallystick.commit.encoding import (
    HASH_BYTES,
    INTEGER_LIMIT,
    Fields,
    canonical_json,
    digest,
    parse_canonical_json,
    parse_document,
    parse_hex,
    parse_hex_float,
)
from tallystick.commit.merkle import (
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    verify_consistency,
    verify_inclusion,
)
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import check_tensor
from tallystick.errors import InvalidInput, Mismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SPECIFICATION_FORMAT = "tallystick/run/1"
STATEMENT_FORMAT = "tallystick/run-statement/1"
STEP_PROOF_FORMAT = "tallystick/step-proof/1"
SPECIFICATION_PROOF_FORMAT = "tallystick/specification-proof/1"
EXTENSION_PROOF_FORMAT = "tallystick/extension-proof/1"

SPECIFICATION_TAG = "tallystick/specification/1"
STEP_TAG = "tallystick/step/1"

SPECIFICATION_LIMIT = 2**26  # bytes; some 400,000 sites
RECORD_LIMIT = 2**20  # bytes; some 20,000 scheduled values
STATEMENT_LIMIT = 2**12  # bytes
_PATH_LIMIT = 2**13  # bytes of JSON for an envelope and 63 nodes

SITE_KINDS = ("decision", "loss", "gradient", "state", "buffer", "activation", "activation_gradient")
FINGERPRINT_BYTES = 8

_SPECIFICATION_FIELDS = (
    "accumulation",
    "checkpoint_every",
    "format",
    "initial_state",
    "job",
    "notes",
    "policy",
    "seed",
    "sites",
    "steps",
    "versions",
    "world_size",
)
_RECORD_FIELDS = (
    "batch",
    "fingerprint",
    "log",
    "log_bytes",
    "loss",
    "micro_batches",
    "rank",
    "schedule",
    "skipped",
    "state_root",
    "step",
)

ScheduledValue = tuple[int, str, str | bool | int | None]


@dataclass(frozen=True)
class JobRecord:
    """Which code ran on which data.

    Attributes:
        path: where the job is found, for people; the digest decides.
        source_digest: hexadecimal SHA-256 over the job's source.
        settings: the job's arguments, as text.
        dataset_digest: hexadecimal SHA-256 over the data, or None if the job makes its own.
    """

    path: str
    source_digest: str
    settings: Mapping[str, str]
    dataset_digest: str | None

    def __post_init__(self) -> None:
        _check_hash(self.source_digest, "job: source_digest")
        if self.dataset_digest is not None:
            _check_hash(self.dataset_digest, "job: dataset_digest")


@dataclass(frozen=True)
class PolicyRecord:
    """The name of the rounding policy and its parameters; real numbers as hexadecimal floats."""

    name: str
    parameters: Mapping[str, int | str]


@dataclass(frozen=True)
class SiteRecord:
    """One rounding site; its position among the sites of its kind is its ordinal in every log."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.kind not in SITE_KINDS:
            raise InvalidInput(
                f"site {self.name!r}: kind must be one of {', '.join(SITE_KINDS)}, is {self.kind!r}"
            )
        check_tensor(self.name, self.dtype, self.shape)


@dataclass(frozen=True)
class Notes:
    """What the recorder changed in the job to make it repeatable, by name and in order."""

    lifted_casts: tuple[str, ...] = ()
    densified: tuple[str, ...] = ()


@dataclass(frozen=True)
class Specification:
    """Everything that is fixed before the first step of a run.

    Raises:
        InvalidInput: a number out of its range, a malformed digest, or one site twice.
    """

    job: JobRecord
    policy: PolicyRecord
    seed: int
    steps: int
    checkpoint_every: int
    accumulation: int
    world_size: int
    initial_state: str
    versions: Mapping[str, str]
    sites: tuple[SiteRecord, ...]
    notes: Notes = Notes()

    def __post_init__(self) -> None:
        _check_range(self.seed, 0, "specification: seed")
        _check_range(self.steps, 1, "specification: steps")
        _check_range(self.checkpoint_every, 1, "specification: checkpoint_every")
        _check_range(self.accumulation, 1, "specification: accumulation")
        _check_range(self.world_size, 1, "specification: world_size")
        _check_hash(self.initial_state, "specification: initial_state")
        seen: set[tuple[str, str]] = set()
        for site in self.sites:
            if (site.kind, site.name) in seen:
                raise InvalidInput(f"specification: duplicate {site.kind} site {site.name!r}")
            seen.add((site.kind, site.name))

    def is_checkpoint(self, step: int) -> bool:
        """Return whether the state after ``step`` is committed: every so many steps, and at the end."""
        return (step + 1) % self.checkpoint_every == 0 or step + 1 == self.steps

    def encode(self) -> bytes:
        """Return the canonical JSON of the specification."""
        return canonical_json(
            {
                "accumulation": self.accumulation,
                "checkpoint_every": self.checkpoint_every,
                "format": SPECIFICATION_FORMAT,
                "initial_state": self.initial_state,
                "job": {
                    "dataset_digest": self.job.dataset_digest,
                    "path": self.job.path,
                    "settings": dict(self.job.settings),
                    "source_digest": self.job.source_digest,
                },
                "notes": {
                    "densified": list(self.notes.densified),
                    "lifted_casts": list(self.notes.lifted_casts),
                },
                "policy": {"name": self.policy.name, "parameters": dict(self.policy.parameters)},
                "seed": self.seed,
                "sites": [
                    {"dtype": site.dtype, "kind": site.kind, "name": site.name, "shape": list(site.shape)}
                    for site in self.sites
                ],
                "steps": self.steps,
                "versions": dict(self.versions),
                "world_size": self.world_size,
            }
        )

    def digest(self) -> bytes:
        """Return the 32 bytes that stand for this specification in messages."""
        return digest(SPECIFICATION_TAG, self.encode())

    def leaf(self) -> bytes:
        """Return the bytes of leaf 0 of the run tree."""
        return SPECIFICATION_TAG.encode("ascii") + b"\0" + self.encode()


@dataclass(frozen=True)
class StepRecord:
    """What one rank states about one step.

    Attributes:
        step, rank: from 0.
        micro_batches: how many were accumulated, 1 or more.
        batch: hexadecimal digest of the step's data.
        log, log_bytes: hexadecimal digest and length of the step's rounding-log frame.
        loss: hexadecimal float, or None where the job reports none.
        schedule: (parameter group, name, value) for each scheduled value, strictly ascending by
            group and name; a real value is a hexadecimal float.
        skipped: whether a gradient scaler skipped the optimizer.
        fingerprint: 16 hexadecimal digits of a 64-bit fingerprint of the state after the step.
        state_root: hexadecimal root of the state after the step at a checkpoint, else None.

    Raises:
        InvalidInput: a field breaks its rule.
    """

    step: int
    rank: int
    micro_batches: int
    batch: str
    log: str
    log_bytes: int
    loss: str | None
    schedule: tuple[ScheduledValue, ...]
    skipped: bool
    fingerprint: str
    state_root: str | None

    def __post_init__(self) -> None:
        what = f"step {self.step}"
        _check_range(self.step, 0, f"{what}: step")
        _check_range(self.rank, 0, f"{what}: rank")
        _check_range(self.micro_batches, 1, f"{what}: micro_batches")
        _check_hash(self.batch, f"{what}: batch")
        _check_hash(self.log, f"{what}: log")
        _check_range(self.log_bytes, 0, f"{what}: log_bytes")
        if self.loss is not None:
            parse_hex_float(self.loss, what=f"{what}: loss")
        _check_schedule(self.schedule, what)
        parse_hex(self.fingerprint, n_bytes=FINGERPRINT_BYTES, what=f"{what}: fingerprint")
        if self.state_root is not None:
            _check_hash(self.state_root, f"{what}: state_root")

    def fields(self) -> dict[str, object]:
        """Return the record as a JSON object."""
        return {
            "batch": self.batch,
            "fingerprint": self.fingerprint,
            "log": self.log,
            "log_bytes": self.log_bytes,
            "loss": self.loss,
            "micro_batches": self.micro_batches,
            "rank": self.rank,
            "schedule": [list(value) for value in self.schedule],
            "skipped": self.skipped,
            "state_root": self.state_root,
            "step": self.step,
        }

    def encode(self) -> bytes:
        """Return the canonical JSON of the record: one line, without its newline."""
        return canonical_json(self.fields())

    def leaf(self) -> bytes:
        """Return the bytes of the record's leaf in the run tree."""
        return STEP_TAG.encode("ascii") + b"\0" + self.encode()


@dataclass(frozen=True)
class RunStatement:
    """The trainer's short statement about a whole run; what is signed and paid for.

    Attributes:
        tree_size: leaves of the run tree, 1 + steps * world size.
        root: hexadecimal root of the run tree.
        steps: number of steps.
        final_state: hexadecimal root of the state after the last step.
    """

    tree_size: int
    root: str
    steps: int
    final_state: str

    def __post_init__(self) -> None:
        _check_range(self.tree_size, 2, "run statement: tree_size")
        _check_hash(self.root, "run statement: root")
        _check_range(self.steps, 1, "run statement: steps")
        _check_hash(self.final_state, "run statement: final_state")

    def encode(self) -> bytes:
        """Return the canonical JSON of the statement."""
        return canonical_json(
            {
                "final_state": self.final_state,
                "format": STATEMENT_FORMAT,
                "root": self.root,
                "steps": self.steps,
                "tree_size": self.tree_size,
            }
        )


@dataclass(frozen=True)
class StepProof:
    """A step record and its path to a run root; self-contained.

    Not promised: that no other leaf speaks of the same step; ``verify_transcript`` shows that.
    """

    record: StepRecord
    world_size: int
    tree_size: int
    path: tuple[bytes, ...]

    @property
    def index(self) -> int:
        """The record's leaf number: its place in the order of steps and ranks, after leaf 0."""
        return 1 + self.record.step * self.world_size + self.record.rank

    def encode(self) -> bytes:
        """Return the canonical JSON of the proof."""
        return canonical_json(
            {
                "format": STEP_PROOF_FORMAT,
                "index": self.index,
                "path": [node.hex() for node in self.path],
                "record": self.record.fields(),
                "tree_size": self.tree_size,
                "world_size": self.world_size,
            }
        )


@dataclass(frozen=True)
class SpecificationProof:
    """The path of leaf 0 to a run root; the specification itself travels beside it."""

    tree_size: int
    path: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Return the canonical JSON of the proof."""
        return canonical_json(
            {
                "format": SPECIFICATION_PROOF_FORMAT,
                "path": [node.hex() for node in self.path],
                "tree_size": self.tree_size,
            }
        )


@dataclass(frozen=True)
class ExtensionProof:
    """That a run tree of ``tree_size`` leaves begins with the one of ``old_size`` leaves."""

    old_size: int
    tree_size: int
    path: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Return the canonical JSON of the proof."""
        return canonical_json(
            {
                "format": EXTENSION_PROOF_FORMAT,
                "old_size": self.old_size,
                "path": [node.hex() for node in self.path],
                "tree_size": self.tree_size,
            }
        )


@dataclass(frozen=True)
class Checkpoint:
    """A committed state: the hexadecimal root after ``steps_done`` steps."""

    steps_done: int
    state_root: str


@dataclass(frozen=True)
class Transcript:
    """A specification and the records that follow it, in order; perhaps of a run still going.

    Raises:
        InvalidInput: a record out of order or beyond the run, more micro-batches than the
            specification allows, a state root off a checkpoint or none at one, or ranks that
            state different roots.
    """

    specification: Specification
    records: tuple[StepRecord, ...]

    def __post_init__(self) -> None:
        for position, record in enumerate(self.records):
            _check_record(self.specification, position, record)
        by_step = itertools.groupby(self.records, key=lambda record: record.step)
        for step, records in by_step:
            if len({record.state_root for record in records}) > 1:
                raise InvalidInput(f"step {step}: ranks state different state roots")

    @functools.cached_property
    def leaf_hashes(self) -> tuple[bytes, ...]:
        """The leaf hashes of the run tree: the specification's, then one for each record."""
        return (leaf_hash(self.specification.leaf()), *(leaf_hash(record.leaf()) for record in self.records))

    @property
    def num_steps(self) -> int:
        """The number of steps that every rank has recorded."""
        return len(self.records) // self.specification.world_size

    def root(self) -> bytes:
        """Return the root of the run tree."""
        return merkle_root(self.leaf_hashes)

    def record(self, step: int, rank: int = 0) -> StepRecord:
        """Return the record of ``step`` by ``rank``.

        Raises:
            InvalidInput: there is none.
        """
        return self.records[self._position(step, rank)]

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the committed states in order, the initial state first."""
        first = Checkpoint(0, self.specification.initial_state)
        return (
            first,
            *(
                Checkpoint(record.step + 1, record.state_root)
                for record in self.records
                if record.rank == 0 and record.state_root is not None
            ),
        )

    def statement(self) -> RunStatement:
        """Return the statement of the finished run.

        Raises:
            InvalidInput: records are missing.
        """
        expected = self.specification.steps * self.specification.world_size
        if len(self.records) != expected:
            raise InvalidInput(f"transcript: the run has {expected} records, there are {len(self.records)}")
        return RunStatement(
            tree_size=1 + len(self.records),
            root=self.root().hex(),
            steps=self.num_steps,
            final_state=self.checkpoints()[-1].state_root,
        )

    def encode_records(self) -> bytes:
        """Return the bytes of steps.jsonl: each record and a newline."""
        return b"".join(record.encode() + b"\n" for record in self.records)

    def prove_step(self, step: int, rank: int = 0) -> StepProof:
        """Return the proof that the record of ``step`` by ``rank`` lies under the root.

        Raises:
            InvalidInput: there is no such record.
        """
        position = self._position(step, rank)
        return StepProof(
            record=self.records[position],
            world_size=self.specification.world_size,
            tree_size=len(self.leaf_hashes),
            path=tuple(inclusion_proof(self.leaf_hashes, 1 + position)),
        )

    def prove_specification(self) -> SpecificationProof:
        """Return the proof that the specification is leaf 0 under the root."""
        return SpecificationProof(len(self.leaf_hashes), tuple(inclusion_proof(self.leaf_hashes, 0)))

    def prove_extension(self, old_size: int) -> ExtensionProof:
        """Return the proof that this tree begins with its own first ``old_size`` leaves.

        Raises:
            InvalidInput: ``old_size`` is 0 or exceeds the number of leaves.
        """
        _check_range(old_size, 1, "extension proof: old_size")
        return ExtensionProof(
            old_size, len(self.leaf_hashes), tuple(consistency_proof(self.leaf_hashes, old_size))
        )

    def _position(self, step: int, rank: int) -> int:
        position = step * self.specification.world_size + rank
        if step < 0 or not 0 <= rank < self.specification.world_size or position >= len(self.records):
            raise InvalidInput(f"transcript: there is no record of step {step} by rank {rank}")
        return position


def verify_transcript(specification: bytes, records: bytes, statement: bytes) -> Transcript:
    """Return the transcript that the three documents make up, if they agree in everything.

    Not promised: that the steps were computed, or that the data is what the digests suggest.

    Raises:
        InvalidInput: a document is malformed, or a record is out of order or against the specification.
        Mismatch: the statement says something else than the documents.
    """
    # 1. The statement is well formed.
    stated = parse_run_statement(statement)
    # 2. The specification is well formed.
    specified = parse_specification(specification)
    # 3. Each record is well formed and stands on its own line.
    parsed = parse_step_records(records)
    # 4. The statement speaks of as many steps as the specification.
    _must_equal("steps", stated.steps, specified.steps, "specification")
    # 5. There is one record for each step and rank.
    _must_equal(
        "number of records", stated.tree_size - 1, specified.steps * specified.world_size, "specification"
    )
    _must_equal("number of records", stated.tree_size - 1, len(parsed), "steps.jsonl")
    # 6. Records are in order, within the specification, and hold a state root at checkpoints only.
    transcript = Transcript(specified, parsed)
    # 7. The last committed state is the stated final state.
    _must_equal("final state", stated.final_state, transcript.checkpoints()[-1].state_root, "last record")
    # 8. The root over the specification and all records is the stated root.
    _must_equal("root", stated.root, transcript.root().hex(), "tree over the documents")
    return transcript


def verify_step_proof(proof: StepProof, root: bytes) -> None:
    """Return if the record lies under ``root`` at the leaf that its step and rank demand.

    Raises:
        InvalidInput: a rank beyond the world, a tree that cannot be a run's, or a malformed path.
        Mismatch: the path leads to another root.
    """
    if proof.record.rank >= proof.world_size:
        raise InvalidInput(
            f"step proof: rank {proof.record.rank} is out of range for world size {proof.world_size}"
        )
    verify_inclusion(
        leaf_hash(proof.record.leaf()), index=proof.index, size=proof.tree_size, proof=proof.path, root=root
    )


def verify_specification_proof(proof: SpecificationProof, specification: Specification, root: bytes) -> None:
    """Return if ``specification`` is leaf 0 under ``root``.

    Raises:
        InvalidInput: a malformed path.
        Mismatch: the path leads to another root.
    """
    verify_inclusion(
        leaf_hash(specification.leaf()), index=0, size=proof.tree_size, proof=proof.path, root=root
    )


def verify_extension(proof: ExtensionProof, *, old_root: bytes, root: bytes) -> None:
    """Return if the tree under ``root`` begins with the tree under ``old_root``.

    Raises:
        InvalidInput: a malformed path.
        Mismatch: the path leads to another old or new root.
    """
    verify_consistency(
        old_size=proof.old_size, size=proof.tree_size, old_root=old_root, root=root, proof=proof.path
    )


def parse_specification(data: bytes) -> Specification:
    """Return the specification that ``data`` encodes.

    Raises:
        InvalidInput: ``data`` is not what ``Specification.encode`` returns.
    """
    what = "specification"
    value = parse_canonical_json(data, what=what, limit=SPECIFICATION_LIMIT)
    fields = Fields(value, what=what, names=_SPECIFICATION_FIELDS)
    fields.constant("format", SPECIFICATION_FORMAT)
    notes = Fields(fields.value("notes"), what=f"{what}: notes", names=("densified", "lifted_casts"))
    return Specification(
        job=_parse_job(fields.value("job")),
        policy=_parse_policy(fields.value("policy")),
        seed=fields.integer("seed"),
        steps=fields.integer("steps"),
        checkpoint_every=fields.integer("checkpoint_every"),
        accumulation=fields.integer("accumulation"),
        world_size=fields.integer("world_size"),
        initial_state=fields.text("initial_state"),
        versions=fields.text_mapping("versions"),
        sites=tuple(_parse_site(value) for value in fields.items("sites")),
        notes=Notes(lifted_casts=notes.texts("lifted_casts"), densified=notes.texts("densified")),
    )


def parse_step_record(data: bytes) -> StepRecord:
    """Return the record that ``data``, one line without its newline, encodes.

    Raises:
        InvalidInput: ``data`` is not what ``StepRecord.encode`` returns.
    """
    return _parse_record(parse_canonical_json(data, what="step record", limit=RECORD_LIMIT), "step record")


def parse_step_records(data: bytes) -> tuple[StepRecord, ...]:
    """Return the records of steps.jsonl, each on a line that ends in a newline; perhaps none.

    Raises:
        InvalidInput: a line is not a record (the message says which), or the last one has no newline.
    """
    if data and not data.endswith(b"\n"):
        raise InvalidInput("steps.jsonl: the last line must end in a newline")
    records: list[StepRecord] = []
    for number, line in enumerate(data.split(b"\n")[:-1]):
        what = f"steps.jsonl: line {number}"
        records.append(_parse_record(parse_canonical_json(line, what=what, limit=RECORD_LIMIT), what))
    return tuple(records)


def parse_run_statement(data: bytes) -> RunStatement:
    """Return the statement that ``data`` encodes.

    Raises:
        InvalidInput: ``data`` is not what ``RunStatement.encode`` returns.
    """
    what = "run statement"
    names = ("final_state", "format", "root", "steps", "tree_size")
    fields = parse_document(data, STATEMENT_FORMAT, what=what, limit=STATEMENT_LIMIT, names=names)
    return RunStatement(
        tree_size=fields.integer("tree_size"),
        root=fields.text("root"),
        steps=fields.integer("steps"),
        final_state=fields.text("final_state"),
    )


def parse_step_proof(data: bytes) -> StepProof:
    """Return the proof that ``data`` encodes; it is not verified.

    Raises:
        InvalidInput: ``data`` is not what ``StepProof.encode`` returns.
    """
    what = "step proof"
    names = ("format", "index", "path", "record", "tree_size", "world_size")
    fields = parse_document(data, STEP_PROOF_FORMAT, what=what, limit=RECORD_LIMIT + _PATH_LIMIT, names=names)
    proof = StepProof(
        record=_parse_record(fields.value("record"), what),
        world_size=fields.integer("world_size"),
        tree_size=fields.integer("tree_size"),
        path=fields.hashes("path"),
    )
    _check_range(proof.world_size, 1, f"{what}: world_size")
    fields.constant("index", proof.index)
    return proof


def parse_specification_proof(data: bytes) -> SpecificationProof:
    """Return the proof that ``data`` encodes; it is not verified.

    Raises:
        InvalidInput: ``data`` is not what ``SpecificationProof.encode`` returns.
    """
    what = "specification proof"
    fields = parse_document(
        data, SPECIFICATION_PROOF_FORMAT, what=what, limit=_PATH_LIMIT, names=("format", "path", "tree_size")
    )
    return SpecificationProof(fields.integer("tree_size"), fields.hashes("path"))


def parse_extension_proof(data: bytes) -> ExtensionProof:
    """Return the proof that ``data`` encodes; it is not verified.

    Raises:
        InvalidInput: ``data`` is not what ``ExtensionProof.encode`` returns.
    """
    what = "extension proof"
    names = ("format", "old_size", "path", "tree_size")
    fields = parse_document(data, EXTENSION_PROOF_FORMAT, what=what, limit=_PATH_LIMIT, names=names)
    old_size = fields.integer("old_size")
    _check_range(old_size, 1, f"{what}: old_size")
    return ExtensionProof(old_size, fields.integer("tree_size"), fields.hashes("path"))


def _parse_job(value: object) -> JobRecord:
    names = ("dataset_digest", "path", "settings", "source_digest")
    fields = Fields(value, what="specification: job", names=names)
    return JobRecord(
        path=fields.text("path"),
        source_digest=fields.text("source_digest"),
        settings=fields.text_mapping("settings"),
        dataset_digest=fields.optional_text("dataset_digest"),
    )


def _parse_policy(value: object) -> PolicyRecord:
    fields = Fields(value, what="specification: policy", names=("name", "parameters"))
    parameters: dict[str, int | str] = {}
    for name, parameter in fields.mapping("parameters").items():
        if isinstance(parameter, bool) or not isinstance(parameter, int | str):
            raise InvalidInput(
                f"specification: policy: parameter {name[:80]!r} must be an integer or a string"
            )
        parameters[name] = parameter
    return PolicyRecord(fields.text("name"), parameters)


def _parse_site(value: object) -> SiteRecord:
    fields = Fields(value, what="specification: site", names=("dtype", "kind", "name", "shape"))
    return SiteRecord(
        fields.text("kind"), fields.text("name"), fields.integers("shape"), fields.text("dtype")
    )


def _parse_record(value: object, what: str) -> StepRecord:
    fields = Fields(value, what=what, names=_RECORD_FIELDS)
    return StepRecord(
        step=fields.integer("step"),
        rank=fields.integer("rank"),
        micro_batches=fields.integer("micro_batches"),
        batch=fields.text("batch"),
        log=fields.text("log"),
        log_bytes=fields.integer("log_bytes"),
        loss=fields.optional_text("loss"),
        schedule=tuple(_parse_scheduled(item, what) for item in fields.items("schedule")),
        skipped=fields.boolean("skipped"),
        fingerprint=fields.text("fingerprint"),
        state_root=fields.optional_text("state_root"),
    )


def _parse_scheduled(value: object, what: str) -> ScheduledValue:
    match value:
        case [int(group), str(name), (str() | int() | None) as scheduled] if not isinstance(group, bool):
            return group, name, scheduled
        case _:
            raise InvalidInput(f"{what}: a scheduled value must be a list of group, name and value")


def _check_schedule(schedule: Sequence[ScheduledValue], what: str) -> None:
    for group, name, value in schedule:
        _check_range(group, 0, f"{what}: schedule: parameter group")
        if isinstance(value, str):
            parse_hex_float(value, what=f"{what}: schedule: {name}")
    for (group, name, _), (next_group, next_name, _) in itertools.pairwise(schedule):
        if (group, name) >= (next_group, next_name):
            raise InvalidInput(
                f"{what}: schedule must be strictly ascending by group and name,"
                f" {next_name!r} of group {next_group} follows {name!r} of group {group}"
            )


def _check_record(specification: Specification, position: int, record: StepRecord) -> None:
    step, rank = divmod(position, specification.world_size)
    if (record.step, record.rank) != (step, rank):
        raise InvalidInput(
            f"transcript: record {position} must be step {step} rank {rank},"
            f" is step {record.step} rank {record.rank}"
        )
    if step >= specification.steps:
        raise InvalidInput(f"step {step}: the specification ends after {specification.steps} steps")
    if record.micro_batches > specification.accumulation:
        raise InvalidInput(
            f"step {step}: {record.micro_batches} micro-batches exceed the specification's"
            f" {specification.accumulation}"
        )
    if specification.is_checkpoint(step) and record.state_root is None:
        raise InvalidInput(f"step {step}: a checkpoint must have a state root")
    if not specification.is_checkpoint(step) and record.state_root is not None:
        raise InvalidInput(f"step {step}: is no checkpoint and must not have a state root")


def _check_hash(text: str, what: str) -> None:
    parse_hex(text, n_bytes=HASH_BYTES, what=what)


def _check_range(value: int, minimum: int, what: str) -> None:
    if not minimum <= value < INTEGER_LIMIT:
        raise InvalidInput(f"{what} must be {minimum} to 2**63 - 1, is {value}")


def _must_equal(what: str, stated: object, found: object, where: str) -> None:
    if stated != found:
        raise Mismatch(f"run statement: {what} is {stated}, {where} says {found}")
