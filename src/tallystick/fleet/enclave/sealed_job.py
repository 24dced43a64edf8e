"""A sealed job: the signed order, its program and its inputs in one file; and how a neutral place carries it out.

    {"format":"tallystick/neutral-job/1","members":[[kind,name,size,sha256],..],"salts":{name:salt,..}}    one line
    the members' bytes, back to back, in that order: the order, the program, the inputs by name

Inputs are read into memory that nobody can change any more, matched there with what the order commits to, and shown to
the program from there: between the check and the use they cannot be swapped, and no copy of them reaches a disk.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import HashText, Hex, Whole
from tallystick.commit.state import summarise
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.enclave.neutral import NeutralInput, NeutralOrder, open_order, read_order
from tallystick.fleet.enclave.neutral_result import NeutralOutcome, judge, result_statement
from tallystick.fleet.enclave.sandbox import End, check_isolation, held_in_memory, run_isolated, versions
from tallystick.fleet.provenance.transcripts import ReportOpening, commitment
from tallystick.run.statements import time_text
from tallystick.signing.dsse import sign_statement
from tallystick.signing.keys import PublicKey, Signer
from tallystick.store.files import load_state_file, open_file, storing, sync_directory

FORMAT = "tallystick/neutral-job/1"
INDEX_LIMIT = 1 << 20
PROGRAM_LIMIT = 1 << 26
INPUT_LIMIT = 1 << 40
COMMITTED_LIMIT = (
    1 << 28
)  # bytes of an input that is committed to as a whole; states are committed to by their root
PIECE = 1 << 20
SALT_BYTES = 32

Progress = Callable[[int, int, str], None]  # seconds gone, seconds at most, which run


@dataclass(frozen=True)
class JobIndex(Document, form=FORMAT, what="job: index", limit=INDEX_LIMIT):
    """The first line of a sealed job: kind, name, size and SHA-256 of each member, and the inputs' salts."""

    members: tuple[tuple[str, str, Whole, HashText], ...]
    salts: Mapping[str, Annotated[bytes, Hex(SALT_BYTES)]]


@dataclass(frozen=True)
class JobMember:
    """One member of a sealed job and where its bytes lie."""

    kind: str
    name: str
    size: int
    sha256: str
    start: int


@dataclass(frozen=True)
class SealedJob:
    """A sealed job's file as its index describes it; bytes are read when they are asked for."""

    path: Path
    members: tuple[JobMember, ...]
    salts: Mapping[str, bytes]

    def pieces(self, kind: str, name: str) -> Iterator[bytes]:
        """Yield a member's bytes.

        Raises:
            InvalidInput: there is no such member.
            Mismatch: its bytes are not those that the index names; raised behind the last piece.
        """
        found = next((m for m in self.members if (m.kind, m.name) == (kind, name)), None)
        if found is None:
            raise InvalidInput(f"{self.path}: holds no {kind} {name}")
        hashed, left = hashlib.sha256(), found.size
        with open_file(self.path, what="a sealed job") as file:
            file.seek(found.start)
            while left and (piece := file.read(min(PIECE, left))):
                hashed.update(piece)
                left -= len(piece)
                yield piece
        if left or hashed.hexdigest() != found.sha256:
            raise Mismatch(f"{self.path}: {kind} {name} is not the one that the index names")

    def load(self, kind: str, name: str) -> bytes:
        """Return a member's bytes."""
        return b"".join(self.pieces(kind, name))


def write_job(
    path: Path, signed: bytes, program: bytes, files: Mapping[str, Path], salts: Mapping[str, bytes]
) -> NeutralOrder:
    """Write a sealed job, readable by its writer alone, if every input is what the order commits to; return the order.

    Raises:
        InvalidInput: inputs or salts that the order does not ask for, or some missing.
        Mismatch: the program or an input is another one.
        StoreError: a file cannot be read, or the job not written.
    """
    order = read_order(signed)
    _must_be_complete(order, set(files), set(salts))
    _must_be_program(order, program)
    for item in order.inputs:
        with open_file(files[item.name], what="an input") as file:
            match_input(item, file.fileno(), salts.get(item.name))
    temporary = path.with_name(f".{path.name}.part")
    lines: list[tuple[str, str, int, str]] = []
    with storing(f"{path}: cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with ExitStack() as stack:
            sources: list[tuple[str, str, bytes | BinaryIO]] = [
                ("order", "order", signed),
                ("program", "program", program),
            ]
            sources += [
                ("input", item.name, stack.enter_context(files[item.name].open("rb")))
                for item in order.inputs
            ]
            for kind, name, source in sources:
                hashed, size = hashlib.sha256(), 0
                for piece in _pieces(source):
                    hashed.update(piece)
                    size += len(piece)
                lines.append((kind, name, size, hashed.hexdigest()))
            index = JobIndex(tuple(lines), salts)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(index.encode() + b"\n")
                for _, _, source in sources:
                    for piece in _pieces(source):
                        out.write(piece)
                out.flush()
                os.fsync(out.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    return order


def open_job(path: Path) -> SealedJob:
    """Return what a sealed job's index says.

    Raises:
        StoreError: it cannot be read.
        InvalidInput: it is no sealed job, or its size is not the one its index makes.
    """
    with open_file(path, what="a sealed job") as file:
        head = file.readline(INDEX_LIMIT + 1)
        size = os.fstat(file.fileno()).st_size
    return parse_index(head, size, path)


def parse_index(head: bytes, size: int, path: Path) -> SealedJob:
    """Return the job whose index is the line ``head``, in a file of ``size`` bytes.

    Raises:
        InvalidInput: no such line, members out of order, or another size.
    """
    if not head.endswith(b"\n"):
        raise InvalidInput(f"{path}: has no index in its first {INDEX_LIMIT} bytes; is it a sealed job?")
    index = JobIndex.parse(head[:-1])
    members: list[JobMember] = []
    at = len(head)
    for kind, name, n_bytes, sha256 in index.members:
        members.append(JobMember(kind, name, n_bytes, sha256, at))
        at += n_bytes
    if at != size:
        raise InvalidInput(f"{path}: the index speaks of {at} bytes, there are {size}")
    kinds = [(member.kind, member.name) for member in members]
    inputs = [name for kind, name in kinds if kind == "input"]
    if kinds != [("order", "order"), ("program", "program"), *(("input", n) for n in sorted(set(inputs)))]:
        raise InvalidInput("job: index: must be the order, the program, then inputs by name, none twice")
    limits = {"order": INDEX_LIMIT << 1, "program": PROGRAM_LIMIT, "input": INPUT_LIMIT}
    for member in members:
        if member.size > limits[member.kind]:
            raise InvalidInput(
                f"job: {member.kind} {member.name} must have at most {limits[member.kind]} bytes"
            )
    return SealedJob(path, tuple(members), index.salts)


def carry_out(
    path: Path,
    verifier: PublicKey,
    owner: PublicKey,
    signer: Signer,
    *,
    now: int,
    progress: Progress = lambda _gone, _most, _what: None,
) -> tuple[NeutralOrder, NeutralOutcome, bytes]:
    """Return the order, what it came to, and the neutral place's signed statement of it.

    Nothing runs unless both parties signed the order and program and inputs are the ones it names. ``now`` is the second
    at which it starts.

    Raises:
        InvalidInput: malformed.
        Mismatch: a signature, the program or an input is not what was agreed; nothing was run.
        StoreError: this machine cannot isolate programs; nothing was run.
    """
    job = open_job(path)
    order = open_order(job.load("order", "order"), verifier, owner)
    program = job.load("program", "program")
    _must_be_program(order, program)
    _must_be_complete(order, {m.name for m in job.members if m.kind == "input"}, set(job.salts))
    refused = check_isolation()
    began = time.monotonic()
    with ExitStack() as stack:
        held: dict[str, int] = {}
        for item in order.inputs:
            pieces = job.pieces("input", item.name)
            descriptor = stack.enter_context(held_in_memory(pieces, most=INPUT_LIMIT, what=item.name))
            match_input(item, descriptor, job.salts.get(item.name))
            held[item.name] = descriptor
        ends: list[End] = []
        for at in range(order.repeats):
            which = f"seconds of run {at + 1} of {order.repeats}"
            ends.append(
                run_isolated(
                    program,
                    held,
                    order.bounds,
                    progress=lambda gone, which=which: progress(int(gone), order.bounds.seconds, which),
                )
            )
    outcome = judge(order, ends)
    if order.constant_time:
        # Reading and matching take as long as the inputs are large, which is no secret; the runs' own time is.
        time.sleep(max(0.0, began + order.repeats * (order.bounds.seconds + 1.0) - time.monotonic()))
    statement = result_statement(order, outcome, started=time_text(now), versions=versions(), refused=refused)
    return order, outcome, sign_statement(statement, signer)


def salts_for(order: NeutralOrder, opening: ReportOpening) -> dict[str, bytes]:
    """Return the salts that open the order's commitments, and no others."""
    return {item.name: opening.salt(item.salted) for item in order.inputs if item.binding != "file"}


def match_input(item: NeutralInput, descriptor: int, salt: bytes | None) -> None:
    """Return if the file behind ``descriptor`` is what ``item`` commits to.

    Raises:
        Mismatch: it is not.
        InvalidInput: it is no state where one is due, or larger than a committed file may be.
    """
    path = Path(f"/proc/self/fd/{descriptor}")
    if item.binding == "file":
        hashed = hashlib.sha256()
        at = 0
        while piece := os.pread(descriptor, PIECE, at):
            hashed.update(piece)
            at += len(piece)
        found = hashed.hexdigest()
    elif salt is None:
        raise InvalidInput(f"input {item.name}: is committed to, and no salt opens it")
    elif item.binding == "state":
        try:
            state = load_state_file(path)
        except InvalidInput as problem:
            raise InvalidInput(f"input {item.name}: {problem}") from None
        found = commitment(salt, summarise(state.values()).root()).hex()
    else:
        size = os.fstat(descriptor).st_size
        if size > COMMITTED_LIMIT:
            raise InvalidInput(f"input {item.name}: has {size} bytes; {COMMITTED_LIMIT} can be committed to")
        found = commitment(salt, os.pread(descriptor, COMMITTED_LIMIT, 0)).hex()
    if found != item.digest:
        raise Mismatch(f"input {item.name}: is {found[:16]}.., the order commits to {item.digest[:16]}..")


def _must_be_program(order: NeutralOrder, program: bytes) -> None:
    found = hashlib.sha256(program).hexdigest()
    if found != order.program:
        raise Mismatch(f"program: is {found[:16]}.., agreed was {order.program[:16]}..")


def _must_be_complete(order: NeutralOrder, files: set[str], salts: set[str]) -> None:
    for what, wanted, given in (
        ("input", {item.name for item in order.inputs}, files),
        ("salt", {item.name for item in order.inputs if item.binding != "file"}, salts),
    ):
        if odd := sorted(wanted ^ given):
            lacks = odd[0] in wanted
            raise InvalidInput(
                f"job: {what} {odd[0][:80]} {'is missing' if lacks else 'is not in the order'}"
            )


def _pieces(source: bytes | BinaryIO) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    source.seek(0)
    while piece := source.read(PIECE):
        yield piece
