"""The verifier: checks what a trainer published without repeating a single step; needs no torch.

A run directory is checked as a numbered list; a proof against a root that the verifier has from elsewhere.
Each check says what it found; a failed one ends the list, because those after it would build on it.

Not promised: that any step was computed, or computed from the stated data. Only repeating shows that.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tallystick.commit.encoding import parse_canonical_json
from tallystick.commit.state import (
    PROOF_FORMAT,
    PROOF_LIMIT,
    Entry,
    parse_chunk_proof,
    verify_chunk,
)
from tallystick.dispute.record import DISPUTE_FORMAT, parse_dispute, verify_dispute
from tallystick.dispute.terms import Party
from tallystick.errors import InvalidInput, Mismatch
from tallystick.evidence.verification import (
    Check,
    CheckOutcome,
    Verification,
    quoted,
    stated_by,
    work_through,
)
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import (
    CALIBRATED,
    MOST_RESIDUE_BITS,
    Frame,
    Kind,
    SiteAddress,
    decode_frame,
    decode_residues,
    read_decision_head,
)
from tallystick.numerics.policy import is_measured_step, policy_of
from tallystick.run.documents import RECORD_LIMIT, Specification
from tallystick.run.proofs import STEP_PROOF_FORMAT, parse_step_proof, verify_step_proof
from tallystick.run.transcript import CURSOR, Transcript, check_cursor, check_fingerprint
from tallystick.signing.keys import PublicKey
from tallystick.store.files import RunDirectory
from tallystick.store.models import weights_manifest

RUN_SHOWS_NOT = (
    "that the steps were computed, that the data is what the digests suggest, or that the log is honest; "
    "tally audit repeats the run and shows that"
)
STEP_SHOWS_NOT = "that the step was computed, or that the root is the one the trainer is held to"
DISPUTE_SHOWS_NOT = "that the root is the one the trainer is held to, or anything about other steps"
CHUNK_SHOWS_NOT = "that training led to these bytes, or that the root is the one the trainer is held to"
GRIDS = "document/grids"  # entry of a state that holds the grid table (spec/state-commitment.md)


def verify_run(directory: RunDirectory, *, root: bytes | None = None) -> Verification:
    """Return the checks of a run directory; with ``root``, its statement must name that root.

    Raises:
        StoreError: a file is there and cannot be read.
    """
    found = Verification(f"run {directory.path}", RUN_SHOWS_NOT)
    run = _RunChecks(directory, root, found)
    work_through(
        found,
        [
            ("the documents parse", run.check_documents),
            ("the statement agrees with them", run.check_statement),
            ("every log frame has its digest and decodes", run.check_logs),
            ("every checkpoint has its root, and the log leads to its grids", run.check_checkpoints),
            ("the policy's numbers are the known policy's", run.check_policy),
            ("the program's files, where they are carried, have their digests", run.check_program),
        ],
    )
    return found


def verify_proof(
    data: bytes, root: bytes, *, chunk: bytes | None = None, keys: Mapping[Party, PublicKey] | None = None
) -> Verification:
    """Return the checks of a step proof or a dispute's record against a run root, or of a chunk against a state root.

    ``keys`` are those that the parties of a dispute are known by. What rests on another's word is not judged.

    Raises:
        InvalidInput: ``data`` is no document of a known format, or a chunk proof comes without its chunk.
    """
    proof_format = _format_of(data)
    if proof_format == DISPUTE_FORMAT:
        return _verify_dispute(data, root, keys or {})
    if proof_format == STEP_PROOF_FORMAT:
        return _verify_step(data, root)
    if proof_format == PROOF_FORMAT:
        if chunk is None:
            raise InvalidInput("chunk proof: the bytes of the chunk are needed beside the proof")
        return _verify_chunk(data, root, chunk)
    raise InvalidInput(
        f"proof: format {proof_format!r} is unknown; known are {STEP_PROOF_FORMAT}, {PROOF_FORMAT}, {DISPUTE_FORMAT}"
    )


def _verify_dispute(data: bytes, root: bytes, keys: Mapping[Party, PublicKey]) -> Verification:
    record = parse_dispute(data)
    step = record.step_proof.record.step
    known: dict[Party, list[str]] = {party: [key.key_id] for party, key in keys.items()}
    found = Verification(f"record of a dispute about step {step}", DISPUTE_SHOWS_NOT, root=root.hex())
    for check in verify_dispute(record, run_root=root, known=known):
        outcome: CheckOutcome = "not judged"
        if check.outcome in ("passed", "failed", "not reached"):
            outcome = check.outcome
        detail = check.detail if outcome != "not judged" else f"{check.outcome}: {check.detail}"
        found.checks.append(Check(check.number, check.claim, outcome, detail))
    outcomes = {check.outcome for check in found.checks}
    if outcomes & {"failed", "not reached"}:
        found.verdict = "mismatch"
    elif outcomes == {"passed"}:
        found.finding = f"the {record.loser} loses at step {step}; unchecked, the record's own words: {quoted(record.reason)}"
    else:
        found.verdict, found.missing = "unjudged", "the checks say why"
        if record.loser not in keys:
            found.missing = f"no key of the {record.loser}: --{record.loser}-signs"
        found.finding = f"not proven: that the {record.loser} is to blame for step {step}"
    return found


class _RunChecks:
    """The checks of one run directory; each returns what it saw and raises what is wrong."""

    def __init__(self, directory: RunDirectory, root: bytes | None, found: Verification) -> None:
        self.directory, self.root, self.found = directory, root, found
        self._contradiction: Mismatch | None = None
        self._transcript: Transcript | None = None
        self._updates: dict[int, bytes] = {}
        self._codings: dict[int, dict[tuple[int, int], frozenset[int]]] = {}

    @property
    def transcript(self) -> Transcript:
        """The transcript, once the statement agreed with it."""
        assert self._transcript is not None
        return self._transcript

    def check_documents(self) -> str:
        """1. Specification, records and statement are well formed and in order."""
        try:
            self._transcript = self.directory.load_transcript()
        except Mismatch as problem:
            self._contradiction = problem
            return "well formed"
        return f"{len(self.transcript.specification.sites)} sites, {len(self.transcript.records)} records"

    def check_statement(self) -> str:
        """2. The statement names the steps, the final state and the root of the tree over the documents."""
        if self._contradiction is not None:
            raise self._contradiction
        root = self.transcript.root()
        if self.root is not None and root != self.root:
            raise Mismatch(
                f"run: root is {root.hex()}, expected is {self.root.hex()}",
                where="root of the run",
                own=root.hex(),
                stated=self.root.hex(),
            )
        self.found.root, self.found.steps = root.hex(), self.transcript.num_steps
        self.found.stated = stated_by(self.transcript.specification, trainer=None, weights=None)
        return f"root {root.hex()}"

    def check_logs(self) -> str:
        """3. Each frame has the digest in its record, and every payload is the one encoding of something."""
        specification = self.transcript.specification
        sizes = site_sizes(specification)
        total = frames = 0
        for step, data in _frames_of(self.directory, self.transcript):
            frame = decode_frame(data)
            for address, payload in frame:
                codings = _check_payload(specification, sizes, step, frame, address, payload)
                if codings is not None and specification.policy.parameters.get("residue_bits"):
                    self._codings.setdefault(step, {})[(address.kind, address.ordinal)] = codings
                if address.kind == Kind.GRID:
                    self._updates[step] = payload
            total += len(data)
            frames += 1
        return f"{frames} frames, {total} bytes"

    def check_program(self) -> str:
        """6. Each file of the program that lies in the directory is the one committed to."""
        stated = self.transcript.specification.job.program.files
        if not os.path.lexists(self.directory.program_path):
            return f"{len(stated)} files are stated, none is carried"
        carried = self.directory.load_program()
        return f"{len(carried)} files, {sum(map(len, carried.values()))} bytes"

    def check_checkpoints(self) -> str:
        """4. Each committed state has its root and its step, and holds the grids that the log leads to."""
        table: GridTable | None = None
        done = 0
        checkpoints = self.transcript.checkpoints()
        for checkpoint in checkpoints:
            what = f"checkpoint after {checkpoint.steps_done} steps"
            entries = self.directory.load_committed(checkpoint.steps_done, checkpoint.state_root)
            if checkpoint.steps_done:
                check_fingerprint(self.transcript.record(checkpoint.steps_done - 1), entries)
            for name in (GRIDS, CURSOR):
                if name not in entries:
                    raise InvalidInput(f"{what}: entry {name} is missing")
            check_cursor(checkpoint.steps_done, entries)
            stated = GridTable.decode(bytes(entries[GRIDS].data))
            if table is not None:
                for step in range(done, checkpoint.steps_done):
                    table = _updated(table, self._updates.get(step), step)
                    self._check_codings(step, table)
                if table != stated:
                    raise Mismatch(
                        f"{what}: its grid table is not what the log's changes since step {done} lead to"
                    )
            table, done = stated, checkpoint.steps_done
            if done == self.transcript.num_steps and self.found.stated is not None:
                self.found.stated = replace(self.found.stated, weights=_weights_of(entries))
        return f"{len(checkpoints)} checkpoints, {len(self._updates)} changes of grids"

    def _check_codings(self, step: int, table: GridTable) -> None:
        """Return if every payload of ``step`` is in the code that its grid names.

        Raises:
            InvalidInput: one is not.
        """
        for place, codings in self._codings.pop(step, {}).items():
            grid = table.sites.get(place)
            bits = 0 if grid is None else grid.residue_bits
            if bits not in codings:
                code = f"residues of {bits} bits" if bits else "entries"
                raise InvalidInput(
                    f"step {step}: {Kind(place[0]).name.lower()} site {place[1]}: its grid is for {code}, its payload holds none"
                )

    def check_policy(self) -> str:
        """5. The specification's policy exists under this name with these numbers."""
        stated = self.transcript.specification.policy
        policy = policy_of(stated.name, stated.parameters)
        return f"{policy.name}, noise measured every {policy.recalibrate_every} steps"


def _weights_of(state: Mapping[str, Entry]) -> str | None:
    try:
        return weights_manifest(state.values()).root_digest()
    except InvalidInput:
        return None  # a state without a model, or with two tensors of one name: there is no such file


def site_sizes(specification: Specification) -> dict[tuple[int, int], int]:
    """Return the number of elements of each listed site by (kind, ordinal)."""
    sizes: dict[tuple[int, int], int] = {}
    counts: dict[int, int] = {}
    for site in specification.sites:
        kind = int(Kind[site.kind.upper()])
        ordinal = counts.get(kind, 0)
        counts[kind] = ordinal + 1
        sizes[(kind, ordinal)] = math.prod(site.shape)
    return sizes


def _frames_of(directory: RunDirectory, transcript: Transcript) -> Iterator[tuple[int, bytes]]:
    """Every frame in order, one segment in memory at a time."""
    borders = [checkpoint.steps_done for checkpoint in transcript.checkpoints()]
    for start, end in itertools.pairwise(borders):
        yield from directory.load_frames(transcript, start, end).items()


def _check_payload(
    specification: Specification,
    sizes: dict[tuple[int, int], int],
    step: int,
    frame: Frame,
    address: SiteAddress,
    payload: bytes,
) -> frozenset[int] | None:
    """Return the codes that ``payload`` may be in, as ``_codings_of``; None for grids, decisions and calibrations.

    Only whoever repeats the step knows the size of a decision site or of an activation, so their entries are not
    decoded here.

    Raises:
        InvalidInput: it may not stand at ``address``.
    """
    kind = Kind(address.kind)
    what = f"step {step}: {kind.name.lower()} site {address.ordinal}"
    in_step = kind in (Kind.DECISION, Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT)
    micro_batches = specification.accumulation if in_step else 1
    if address.rank >= specification.world_size or address.micro_batch >= micro_batches:
        raise InvalidInput(
            f"{what}: rank {address.rank}, micro-batch {address.micro_batch} are outside the specification's "
            f"{specification.world_size} and {micro_batches}"
        )
    if kind == Kind.GRID:
        if address.ordinal:
            raise InvalidInput(f"{what}: a frame has one change of grids, with ordinal 0")
    elif kind == Kind.CALIBRATION:
        _check_calibration(specification, step, address, payload, what)
    elif kind == Kind.DECISION:
        try:
            read_decision_head(payload)
        except InvalidInput as problem:
            raise InvalidInput(f"{what}: {problem}") from None
    elif in_step:
        if "b_r" not in specification.policy.parameters:
            raise InvalidInput(
                f"{what}: is not in the specification, policy {specification.policy.name} has none"
            )
    else:
        size = sizes.get((address.kind, address.ordinal))
        if size is None:
            raise InvalidInput(f"{what}: is not in the specification")
        return _codings_of(specification, frame, address, payload, size, what)
    return None


def _check_calibration(
    specification: Specification, step: int, address: SiteAddress, payload: bytes, what: str
) -> None:
    """Return if ``payload`` is the one note of a calibration before a step where none was due.

    Raises:
        InvalidInput: it is another, stands elsewhere, or one was due by the interval that the specification states.
    """
    if address.ordinal or payload != CALIBRATED:
        raise InvalidInput(
            f"{what}: a frame has one note of a calibration, with ordinal 0 and payload {CALIBRATED.hex()}; "
            f"this is {payload[:8].hex()}"
        )
    policy = policy_of(specification.policy.name, specification.policy.parameters)
    if is_measured_step(policy, step):
        raise InvalidInput(
            f"{what}: is for steps where no calibration is due; here one is, every {policy.recalibrate_every} steps"
        )


def _codings_of(
    specification: Specification, frame: Frame, address: SiteAddress, payload: bytes, size: int, what: str
) -> frozenset[int]:
    """Return the codes that ``payload`` is well formed in: the bits of residues, 0 for entries; at least one."""
    bits = (
        len(payload) // max((size + 7) // 8, 1) if specification.policy.parameters.get("residue_bits") else 0
    )
    found: set[int] = set()
    refused: list[InvalidInput] = []
    try:
        frame.entries(address, size, 1)
        found.add(0)
    except InvalidInput as problem:
        refused.append(problem)
    try:
        if 1 <= bits <= MOST_RESIDUE_BITS:
            decode_residues(payload, size, bits)
            found.add(bits)
    except InvalidInput as problem:
        refused.append(problem)
    if not found:
        raise InvalidInput(f"{what}: {'; '.join(map(str, refused))}")
    return frozenset(found)


def _updated(table: GridTable, change: bytes | None, step: int) -> GridTable:
    if change is None:
        return table
    try:
        return table.apply(change)
    except InvalidInput as problem:
        raise InvalidInput(f"step {step}: {problem}") from None


def _format_of(data: bytes) -> object:
    value = parse_canonical_json(data, what="proof", limit=max(PROOF_LIMIT, 2 * RECORD_LIMIT))
    if not isinstance(value, dict):
        raise InvalidInput("proof: must be an object")
    return value.get("format")


def _verify_step(data: bytes, root: bytes) -> Verification:
    proof = parse_step_proof(data)
    record = proof.record
    subject = f"step proof: step {record.step}, rank {record.rank}, leaf {proof.index} of {proof.tree_size}"
    found = Verification(subject, STEP_SHOWS_NOT, root=root.hex())

    def check() -> str:
        verify_step_proof(proof, root)
        return f"{len(proof.path)} nodes lead from the record to {root.hex()}"

    work_through(found, [("the record lies under the run root", check)])
    return found


def _verify_chunk(data: bytes, root: bytes, chunk: bytes) -> Verification:
    proof = parse_chunk_proof(data)
    entry = proof.entry
    subject = (
        f"chunk proof: chunk {proof.chunk_index} of {entry.num_chunks} of {entry.name}, {len(chunk)} bytes"
    )
    found = Verification(subject, CHUNK_SHOWS_NOT, root=root.hex())

    def check() -> str:
        verify_chunk(proof, chunk, root)
        return f"{len(proof.chunk_path) + len(proof.entry_path)} nodes lead from the bytes to {root.hex()}"

    work_through(found, [("the bytes lie under the state root", check)])
    return found
