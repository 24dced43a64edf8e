"""The documents of a run: its specification, the record of each step, and the statement about the whole (spec/transcript.md).

Parsers take bytes and are strict: one value has one encoding. Whether documents agree with each other is decided by
``transcript``.
"""

from __future__ import annotations

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
from tallystick.commit.state import check_tensor
from tallystick.errors import InvalidInput
from tallystick.run.program import Program, parse_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SPECIFICATION_FORMAT = "tallystick/run/2"
STATEMENT_FORMAT = "tallystick/run-statement/1"

SPECIFICATION_TAG = "tallystick/specification/1"
STEP_TAG = "tallystick/step/1"

SPECIFICATION_LIMIT = 2**26  # bytes; some 400,000 sites
RECORD_LIMIT = 2**20  # bytes; some 20,000 scheduled values
STATEMENT_LIMIT = 2**12  # bytes

NO_FILES = Program()
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
        path: the job's file name or dotted path, for people; the digest decides. No reader looks for a job there.
        source_digest: hexadecimal digest over all files of the program; where none are stated, of whatever was run.
        settings: the job's arguments, as text.
        dataset_digest: hexadecimal SHA-256 over the data, or None if the job makes its own.
        program: the files themselves; one that states none can be repeated by nobody.
    """

    path: str
    source_digest: str
    settings: Mapping[str, str]
    dataset_digest: str | None
    program: Program = NO_FILES

    def __post_init__(self) -> None:
        _check_hash(self.source_digest, "job: source_digest")
        if self.program.files and self.program.digest() != self.source_digest:
            raise InvalidInput(
                f"job: source_digest must be the digest over its program's files, {self.program.digest()}, "
                f"is {self.source_digest}"
            )
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
        check_range(self.seed, 0, "specification: seed")
        check_range(self.steps, 1, "specification: steps")
        check_range(self.checkpoint_every, 1, "specification: checkpoint_every")
        check_range(self.accumulation, 1, "specification: accumulation")
        check_range(self.world_size, 1, "specification: world_size")
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
                    "program": self.job.program.fields(),
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
        check_range(self.step, 0, f"{what}: step")
        check_range(self.rank, 0, f"{what}: rank")
        check_range(self.micro_batches, 1, f"{what}: micro_batches")
        _check_hash(self.batch, f"{what}: batch")
        _check_hash(self.log, f"{what}: log")
        check_range(self.log_bytes, 0, f"{what}: log_bytes")
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
        check_range(self.tree_size, 2, "run statement: tree_size")
        _check_hash(self.root, "run statement: root")
        check_range(self.steps, 1, "run statement: steps")
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


def parse_specification(data: bytes) -> Specification:
    """Return the specification that ``data`` encodes.

    Raises:
        InvalidInput: ``data`` is not what ``Specification.encode`` returns.
    """
    what = "specification"
    fields = parse_document(
        data, SPECIFICATION_FORMAT, what=what, limit=SPECIFICATION_LIMIT, names=_SPECIFICATION_FIELDS
    )
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
    return record_of(parse_canonical_json(data, what="step record", limit=RECORD_LIMIT), "step record")


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
        records.append(record_of(parse_canonical_json(line, what=what, limit=RECORD_LIMIT), what))
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


def _parse_job(value: object) -> JobRecord:
    names = ("dataset_digest", "path", "program", "settings", "source_digest")
    fields = Fields(value, what="specification: job", names=names)
    return JobRecord(
        path=fields.text("path"),
        source_digest=fields.text("source_digest"),
        settings=fields.text_mapping("settings"),
        dataset_digest=fields.optional_text("dataset_digest"),
        program=parse_program(fields.value("program"), what="specification: job: program"),
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


def record_of(value: object, what: str) -> StepRecord:
    """Return the record that a JSON value states. Raises InvalidInput, with ``what`` before the reason."""
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
        check_range(group, 0, f"{what}: schedule: parameter group")
        if isinstance(value, str):
            parse_hex_float(value, what=f"{what}: schedule: {name}")
    for (group, name, _), (next_group, next_name, _) in itertools.pairwise(schedule):
        if (group, name) >= (next_group, next_name):
            raise InvalidInput(
                f"{what}: schedule must be strictly ascending by group and name,"
                f" {next_name!r} of group {next_group} follows {name!r} of group {group}"
            )


def _check_hash(text: str, what: str) -> None:
    parse_hex(text, n_bytes=HASH_BYTES, what=what)


def check_range(value: int, minimum: int, what: str) -> None:
    """Return if ``value`` is from ``minimum`` to what canonical JSON holds."""
    if not minimum <= value < INTEGER_LIMIT:
        raise InvalidInput(f"{what} must be {minimum} to 2**63 - 1, is {value}")
