"""The documents of a run: its specification, the record of each step, and the statement about the whole (spec/transcript.md).

Parsers take bytes and are strict: one value has one encoding. Whether documents agree with each other is decided by
``transcript``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tallystick.commit.codec import Document
from tallystick.commit.encoding import (
    digest,
    parse_hex_float,
)
from tallystick.commit.field_rules import HashText, Hex, Least, Positive, Whole
from tallystick.commit.state import check_tensor
from tallystick.errors import InvalidInput
from tallystick.run.program import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

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
UNANNOUNCED = 1 << 40  # steps of a run that has not ended, whose program has not said

ScheduledValue = tuple[Whole, str, str | bool | int | None]


@dataclass(frozen=True)
class JobRecord(Document, what="job"):
    """Which code ran on which data.

    Attributes:
        path: the job's file name or dotted path, for people; the digest decides. No reader looks for a job there.
        source_digest: hexadecimal digest over all files of the program; where none are stated, of whatever was run.
        settings: the job's arguments, as text.
        dataset_digest: hexadecimal SHA-256 over the data, or None if the job makes its own.
        program: the files themselves; one that states none can be repeated by nobody.
    """

    path: str
    source_digest: HashText
    settings: Mapping[str, str]
    dataset_digest: HashText | None
    program: Program = NO_FILES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.program.files and self.program.digest() != self.source_digest:
            raise InvalidInput(
                f"job: source_digest must be the digest over its program's files, {self.program.digest()}, "
                f"is {self.source_digest}"
            )


@dataclass(frozen=True)
class PolicyRecord(Document, what="policy"):
    """The name of the rounding policy and its parameters; real numbers as hexadecimal floats."""

    name: str
    parameters: Mapping[str, int | str]


@dataclass(frozen=True)
class SiteRecord(Document, what="site"):
    """One rounding site; its position among the sites of its kind is its ordinal in every log."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in SITE_KINDS:
            raise InvalidInput(
                f"site {self.name!r}: kind must be one of {', '.join(SITE_KINDS)}, is {self.kind!r}"
            )
        check_tensor(self.name, self.dtype, self.shape)


@dataclass(frozen=True)
class Notes(Document, what="notes"):
    """What the recorder changed in the job to make it repeatable, by name and in order."""

    lifted_casts: tuple[str, ...] = ()
    densified: tuple[str, ...] = ()


@dataclass(frozen=True)
class Specification(Document, form=SPECIFICATION_FORMAT, what="specification", limit=SPECIFICATION_LIMIT):
    """Everything that is fixed before the first step of a run.

    Raises:
        InvalidInput: a number out of its range, a malformed digest, or one site twice.
    """

    job: JobRecord
    policy: PolicyRecord
    seed: Whole
    steps: Positive
    checkpoint_every: Positive
    accumulation: Positive
    world_size: Positive
    initial_state: HashText
    versions: Mapping[str, str]
    sites: tuple[SiteRecord, ...]
    notes: Notes = Notes()

    def __post_init__(self) -> None:
        super().__post_init__()
        seen: set[tuple[str, str]] = set()
        for site in self.sites:
            if (site.kind, site.name) in seen:
                raise InvalidInput(f"specification: duplicate {site.kind} site {site.name!r}")
            seen.add((site.kind, site.name))

    def is_checkpoint(self, step: int) -> bool:
        """Return whether the state after ``step`` is committed: every so many steps, and at the end."""
        return (step + 1) % self.checkpoint_every == 0 or step + 1 == self.steps

    def digest(self) -> bytes:
        """Return the 32 bytes that stand for this specification in messages."""
        return digest(SPECIFICATION_TAG, self.encode())

    def leaf(self) -> bytes:
        """Return the bytes of leaf 0 of the run tree."""
        return SPECIFICATION_TAG.encode("ascii") + b"\0" + self.encode()


def verify_one_order(ours: Specification, theirs: Specification) -> None:
    """Return if two runs have one specification.

    Raises:
        InvalidInput: they have not; with the fields that differ.
    """
    mine, other = ours.fields(), theirs.fields()
    if apart := sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)):
        raise InvalidInput(
            f"dispute: the two runs are not about one order, their specifications differ in {', '.join(apart)}; an auditor's "
            "claim is written by tally audit --claim"
        )


@dataclass(frozen=True)
class StepRecord(Document, what="step record", limit=RECORD_LIMIT):
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

    step: Whole
    rank: Whole
    micro_batches: Positive
    batch: HashText
    log: HashText
    log_bytes: Whole
    loss: str | None
    schedule: tuple[ScheduledValue, ...]
    skipped: bool
    fingerprint: Annotated[str, Hex(FINGERPRINT_BYTES)]
    state_root: HashText | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss is not None:
            parse_hex_float(self.loss, what=f"{self.label()}: loss")
        _check_schedule(self.schedule, self.label())

    def label(self) -> str:
        """Return what errors call this one."""
        return f"step {self.step}"

    def leaf(self) -> bytes:
        """Return the bytes of the record's leaf in the run tree."""
        return STEP_TAG.encode("ascii") + b"\0" + self.encode()


@dataclass(frozen=True)
class RunStatement(Document, form=STATEMENT_FORMAT, what="run statement", limit=STATEMENT_LIMIT):
    """The trainer's short statement about a whole run; what is signed and paid for.

    Attributes:
        tree_size: leaves of the run tree, 1 + steps * world size.
        root: hexadecimal root of the run tree.
        steps: number of steps.
        final_state: hexadecimal root of the state after the last step.
    """

    tree_size: Annotated[int, Least(2)]
    root: HashText
    steps: Positive
    final_state: HashText


parse_specification = Specification.parse
parse_step_record = StepRecord.parse
parse_run_statement = RunStatement.parse


def parse_step_records(data: bytes) -> tuple[StepRecord, ...]:
    """Return the records of steps.jsonl, each on a line that ends in a newline; perhaps none.

    Raises:
        InvalidInput: a line is not a record (the message says which), or the last one has no newline.
    """
    if data and not data.endswith(b"\n"):
        raise InvalidInput("steps.jsonl: the last line must end in a newline")
    lines = enumerate(data.split(b"\n")[:-1])
    return tuple(StepRecord.parse(line, what=f"steps.jsonl: line {number}") for number, line in lines)


def _check_schedule(schedule: Sequence[ScheduledValue], what: str) -> None:
    for _, name, value in schedule:
        if isinstance(value, str):
            parse_hex_float(value, what=f"{what}: schedule: {name}")
    for (group, name, _), (next_group, next_name, _) in itertools.pairwise(schedule):
        if (group, name) >= (next_group, next_name):
            raise InvalidInput(
                f"{what}: schedule must be strictly ascending by group and name,"
                f" {next_name!r} of group {next_group} follows {name!r} of group {group}"
            )
