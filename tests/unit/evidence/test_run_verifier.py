from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tallystick.commit.encoding import canonical_json
from tallystick.commit.state import Entry, open_chunk, summarise
from tallystick.dispute.terms import Party
from tallystick.errors import InvalidInput
from tallystick.evidence.run_verifier import site_sizes, verify_proof, verify_run
from tallystick.evidence.verification import Verification, quoted
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import (
    CALIBRATED,
    Frame,
    Kind,
    SiteAddress,
    SparseEntries,
    encode,
    encode_decision,
    encode_frame,
)
from tallystick.numerics.policy import BF16, FP32
from tallystick.reports.run import read_run
from tallystick.roles.statements import sign_run
from tallystick.run.documents import JobRecord, PolicyRecord, SiteRecord, Specification, StepRecord
from tallystick.run.transcript import Transcript, state_fingerprint
from tallystick.signing.keys import ED25519, PublicKey, generate_key, parse_public_key
from tallystick.store.files import RunDirectory, frame_digest

VECTORS = Path(__file__).resolve().parents[3] / "vectors"
STEPS, EVERY, SIZE = 4, 2, 64
GRADIENT = (int(Kind.GRADIENT), 0)
ENTRIES = encode(SparseEntries(SIZE, 1, np.array([3, 40]), np.array([0, 1])))


def grids(scale: int) -> GridTable:
    return GridTable({GRADIENT: SiteGrid(0, -10, -5, True, np.array([scale]))})


STATED = {**FP32.parameters(), "optimizer_arithmetic": "portable"}
STATED_BF16 = {**BF16.parameters(), "optimizer_arithmetic": "portable"}


@dataclass
class PaperRun:
    """A run written by hand, no step of it computed; each attribute may be made wrong before ``write``."""

    policy: PolicyRecord = field(default_factory=lambda: PolicyRecord("fp32", STATED))
    payloads: dict[int, dict[SiteAddress, bytes]] = field(default_factory=dict)
    tables: dict[int, GridTable] = field(default_factory=lambda: {0: grids(0), 2: grids(1), 4: grids(1)})
    cursors: dict[int, int] = field(default_factory=lambda: {0: 0, 2: 2, 4: 4})
    left_out: str = ""
    misstated: int = -1

    def __post_init__(self) -> None:
        self.payloads = {step: {SiteAddress(0, 0, *GRADIENT): ENTRIES} for step in range(STEPS)}
        self.payloads[1][SiteAddress(0, 0, Kind.GRID, 0)] = grids(0).diff(grids(1))
        self.payloads[2][SiteAddress(0, 1, Kind.DECISION, 7)] = encode_decision(
            -20, SparseEntries(9, 2, np.array([8]), np.array([3]))
        )

    def state(self, done: int) -> list[Entry]:
        documents = {
            "document/cursor": canonical_json({"step": self.cursors[done]}),
            "document/grids": self.tables[done].encode(),
        }
        entries = [Entry(name, "U8", (len(data),), data) for name, data in documents.items()]
        entries.append(Entry("model/weight", "F32", (SIZE,), np.full(SIZE, done, dtype="<f4").tobytes()))
        return [entry for entry in entries if entry.name != self.left_out]

    def fingerprint(self, done: int) -> str:
        if done not in (2, 4) or done == self.misstated:
            return "33" * 8
        return f"{state_fingerprint({entry.name: entry for entry in self.state(done)}):016x}"

    def write(self, path: Path) -> RunDirectory:
        directory = RunDirectory(path)
        directory.create()
        roots = {done: summarise(self.state(done)).root().hex() for done in (0, 2, 4)}
        specification = Specification(
            job=JobRecord("nowhere", "11" * 32, {}, None),
            policy=self.policy,
            seed=0,
            steps=STEPS,
            checkpoint_every=EVERY,
            accumulation=2,
            world_size=1,
            initial_state=roots[0],
            versions={},
            sites=(SiteRecord("loss", "loss", (), "F32"), SiteRecord("gradient", "weight", (8, 8), "F32")),
        )
        directory.write_checkpoint(0, self.state(0))
        records: list[StepRecord] = []
        for step in range(STEPS):
            frame = encode_frame(Frame.of(self.payloads[step]))
            root = roots[step + 1] if specification.is_checkpoint(step) else None
            record = StepRecord(
                step,
                0,
                1,
                "22" * 32,
                frame_digest(frame),
                len(frame),
                None,
                (),
                False,
                self.fingerprint(step + 1),
                root,
            )
            directory.append_step(step - step % EVERY, frame, record, durable=False)
            if root is not None:
                directory.write_checkpoint(step + 1, self.state(step + 1))
            records.append(record)
        statement = Transcript(specification, tuple(records)).statement()
        directory.write_document(directory.specification_path, specification.encode())
        directory.write_document(directory.statement_path, statement.encode())
        return directory


def failed(found: Verification) -> tuple[int, str]:
    """The number of the check that failed, and why; those after it were not reached."""
    outcomes = [check.outcome for check in found.checks]
    at = outcomes.index("failed")
    assert outcomes == ["passed"] * at + ["failed"] + ["not reached"] * (len(outcomes) - at - 1)
    return found.checks[at].number, found.checks[at].detail


@pytest.mark.parametrize("done", [2, 4])
def test_a_state_that_its_own_record_contradicts_is_a_mismatch(done: int, tmp_path: Path) -> None:
    found = verify_run(PaperRun(misstated=done).write(tmp_path / "run"))
    number, why = failed(found)
    assert (found.verdict, number) == ("mismatch", 4)
    assert f"step {done - 1}: the committed state's fingerprint is" in why


def residue_grids(bits: int = 1) -> GridTable:
    return GridTable({GRADIENT: SiteGrid(0, -4, -3, True, np.array([0]), residue_bits=bits)})


def residue_run(payload: bytes, table: GridTable, policy: PolicyRecord | None = None) -> PaperRun:
    """A run whose gradient is logged by ``payload`` in every step, on the grids of ``table`` throughout."""
    run = PaperRun(policy or PolicyRecord("bf16", STATED_BF16))
    run.payloads = {step: {SiteAddress(0, 0, *GRADIENT): payload} for step in range(STEPS)}
    run.tables = dict.fromkeys((0, 2, 4), table)
    return run


PARITIES = bytes(range(128, 128 + SIZE // 8))


def test_a_run_logged_by_parities_passes_every_check(tmp_path: Path) -> None:
    found = verify_run(residue_run(PARITIES, residue_grids()).write(tmp_path / "run"))
    assert [check.outcome for check in found.checks] == ["passed"] * 6


REFUSED_CODES: dict[str, tuple[bytes, GridTable, int, str]] = {
    "a byte short": (PARITIES[:-1], residue_grids(), 3, "entries: ends where count should be"),
    "entries on a grid for parities": (ENTRIES, residue_grids(), 4, "its grid is for residues of 1 bits"),
    "parities on a grid for entries": (PARITIES, residue_grids(0), 4, "its grid is for entries"),
}


@pytest.mark.parametrize("name", REFUSED_CODES)
def test_a_payload_in_another_code_than_its_grid_names_is_refused(name: str, tmp_path: Path) -> None:
    payload, table, number, reason = REFUSED_CODES[name]
    found = verify_run(residue_run(payload, table).write(tmp_path / "run"))
    assert found.verdict == "malformed"
    assert failed(found)[0] == number
    assert reason in failed(found)[1]


def test_parities_under_a_policy_without_them_are_refused(tmp_path: Path) -> None:
    policy = PolicyRecord("fp32", STATED)
    found = verify_run(residue_run(PARITIES, residue_grids(), policy).write(tmp_path / "run"))
    assert failed(found)[0] == 3


def test_a_run_that_fits_together_passes_every_check(tmp_path: Path) -> None:
    directory = PaperRun().write(tmp_path / "run")

    found = verify_run(directory)

    assert [check.outcome for check in found.checks] == ["passed"] * 6
    assert (found.verdict, found.steps) == ("match", STEPS)
    assert found.root == directory.load_transcript().root().hex()
    assert "tally audit" in found.shows_not


def test_sites_are_numbered_within_their_kind() -> None:
    directory_free = Specification(
        JobRecord("nowhere", "11" * 32, {}, None), PolicyRecord("fp32", {}), 0, 1, 1, 1, 1, "00" * 32, {},
        (
            SiteRecord("loss", "loss", (), "F32"),
            SiteRecord("gradient", "a", (2, 3), "F32"),
            SiteRecord("gradient", "b", (0, 5), "F32"),
            SiteRecord("state", "a", (6,), "F32"),
        ),
    )  # fmt: skip

    assert site_sizes(directory_free) == {
        (int(Kind.LOSS), 0): 1,
        (int(Kind.GRADIENT), 0): 6,
        (int(Kind.GRADIENT), 1): 0,
        (int(Kind.STATE), 0): 6,
    }


def test_a_run_passes_under_its_own_root_and_fails_under_another(tmp_path: Path) -> None:
    directory = PaperRun().write(tmp_path / "run")

    assert verify_run(directory, root=directory.load_transcript().root()).verdict == "match"
    found = verify_run(directory, root=bytes(32))
    assert found.verdict == "mismatch"
    assert failed(found)[0] == 2
    assert "expected is 0000" in failed(found)[1]


def test_records_of_ranks_without_logs_are_neither_passed_nor_signed(tmp_path: Path) -> None:
    directory = PaperRun().write(tmp_path / "run")
    honest = directory.load_transcript()
    records = [
        each
        for record in honest.records
        for each in (record, dataclasses.replace(record, rank=1, log="ab" * 32, log_bytes=1 << 40))
    ]
    forged = Transcript(dataclasses.replace(honest.specification, world_size=2), tuple(records))
    directory.specification_path.write_bytes(forged.specification.encode())
    directory.records_path.write_bytes(forged.encode_records())
    directory.statement_path.write_bytes(forged.statement().encode())

    found = verify_run(directory)

    assert (found.verdict, failed(found)[0]) == ("malformed", 3)
    assert "world_size: must be 1, is 2; a run directory holds the logs of rank 0 alone" in failed(found)[1]
    with pytest.raises(InvalidInput, match="world_size: must be 1, is 2"):
        sign_run(directory, generate_key(ED25519), 0)


@pytest.mark.parametrize("name", ["specification.json", "steps.jsonl", "run.json"])
def test_a_missing_document_fails_the_first_check(tmp_path: Path, name: str) -> None:
    directory = PaperRun().write(tmp_path / "run")
    (directory.path / name).unlink()

    found = verify_run(directory)

    assert found.verdict == "malformed"
    assert failed(found)[0] == 1
    assert name in failed(found)[1]


def test_a_record_out_of_order_fails_the_first_check(tmp_path: Path) -> None:
    directory = PaperRun().write(tmp_path / "run")
    lines = directory.records_path.read_bytes().splitlines(keepends=True)
    directory.records_path.write_bytes(lines[1] + lines[0] + lines[2] + lines[3])

    found = verify_run(directory)

    assert found.verdict == "malformed"
    assert failed(found) == (1, "transcript: record 0 must be step 0 rank 0, is step 1 rank 0")


def test_a_statement_about_another_run_fails_the_second_check(tmp_path: Path) -> None:
    directory = PaperRun().write(tmp_path / "run")
    statement = json.loads(directory.statement_path.read_bytes())
    directory.statement_path.write_bytes(canonical_json({**statement, "final_state": "ab" * 32}))

    found = verify_run(directory)

    assert found.verdict == "mismatch"
    assert failed(found)[0] == 2
    assert "final state" in failed(found)[1]


def test_a_frame_without_its_digest_fails_the_third_check(tmp_path: Path) -> None:
    directory = PaperRun().write(tmp_path / "run")
    log = directory.log_path(2)
    log.write_bytes(log.read_bytes()[:-1] + b"\x7f")

    found = verify_run(directory)

    assert found.verdict == "mismatch"
    assert failed(found)[0] == 3
    assert "step 3: the log's digest is" in failed(found)[1]


def test_a_log_with_bytes_left_over_fails_the_third_check(tmp_path: Path) -> None:
    directory = PaperRun().write(tmp_path / "run")
    with directory.log_path(0).open("ab") as file:
        file.write(b"\0")

    assert "at most 25 are allowed" in failed(verify_run(directory))[1]


WRONG_PAYLOADS: dict[str, tuple[SiteAddress, bytes, str]] = {
    "padding": (SiteAddress(0, 0, *GRADIENT), ENTRIES + b"\0", "bytes after the end"),
    "truncated": (SiteAddress(0, 0, *GRADIENT), ENTRIES[:-1], "step 3: gradient site 0"),
    "no entries": (SiteAddress(0, 0, *GRADIENT), b"\0", "is present and has no entries"),
    "unknown site": (SiteAddress(0, 0, Kind.GRADIENT, 1), ENTRIES, "gradient site 1: is not in the specification"),
    "unknown kind": (SiteAddress(0, 0, Kind.ACTIVATION, 0), ENTRIES, "is not in the specification"),
    "rank": (SiteAddress(1, 0, *GRADIENT), ENTRIES, "rank 1, micro-batch 0 are outside"),
    "micro-batch of a gradient": (SiteAddress(0, 1, *GRADIENT), ENTRIES, "micro-batch 1 are outside"),
    "micro-batch of a decision": (SiteAddress(0, 2, Kind.DECISION, 0), b"\0\1\1\1", "micro-batch 2 are outside"),
    "width of a decision": (SiteAddress(0, 0, Kind.DECISION, 0), b"\0\x21\1\1", "symbol width 33"),
    "second change of grids": (SiteAddress(0, 0, Kind.GRID, 1), b"\0", "one change of grids"),
    "calibration in other words": (SiteAddress(0, 0, Kind.CALIBRATION, 0), b"\2", "payload 01; this is 02"),
    "calibration in more words": (SiteAddress(0, 0, Kind.CALIBRATION, 0), b"\1\1", "this is 0101"),
    "second calibration": (SiteAddress(0, 0, Kind.CALIBRATION, 1), b"\1", "one note of a calibration, with ordinal 0"),
    "calibration of a micro-batch": (SiteAddress(0, 1, Kind.CALIBRATION, 0), b"\1", "micro-batch 1 are outside"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_PAYLOADS)
def test_a_payload_that_no_recorder_writes_fails_the_third_check(tmp_path: Path, case: str) -> None:
    address, payload, reason = WRONG_PAYLOADS[case]
    run = PaperRun()
    run.payloads[3][address] = payload

    found = verify_run(run.write(tmp_path / "run"))

    assert found.verdict == "malformed"
    assert failed(found)[0] == 3
    assert reason in failed(found)[1]


def test_an_early_calibration_is_noted_where_none_is_due_and_there_alone(tmp_path: Path) -> None:
    noted = SiteAddress(0, 0, Kind.CALIBRATION, 0), CALIBRATED
    run = PaperRun()
    run.payloads[3][noted[0]] = noted[1]
    directory = run.write(tmp_path / "early")
    assert verify_run(directory).verdict == "match"
    log = read_run(directory).log
    assert log is not None
    assert (log.kinds["calibration"].payloads, log.kinds["calibration"].entries) == (1, 0)

    for name, address, payload in (
        ("payload", noted[0], CALIBRATED + b"\x00"),
        ("ordinal", SiteAddress(0, 0, Kind.CALIBRATION, 1), CALIBRATED),
    ):
        other = PaperRun()
        other.payloads[3][address] = payload
        found = verify_run(other.write(tmp_path / name))
        assert (found.verdict, failed(found)[0]) == ("malformed", 3), name
        assert "a frame has one note of a calibration, with ordinal 0" in failed(found)[1], name

    due = PaperRun()
    due.payloads[0][noted[0]] = noted[1]
    found = verify_run(due.write(tmp_path / "due"))
    assert (found.verdict, failed(found)[0]) == ("malformed", 3)
    assert "step 0: calibration site 0: is for steps where no calibration is due" in failed(found)[1]


def _edited_checkpoint(directory: RunDirectory) -> None:
    entries = list(directory.load_checkpoint(2).values())
    entries[-1] = dataclasses.replace(entries[-1], data=bytes(len(entries[-1].data)))
    directory.write_checkpoint(2, entries)


@pytest.mark.parametrize(
    ("damage", "verdict", "reason"),
    [
        (_edited_checkpoint, "mismatch", "checkpoint after 2 steps: root is"),
        (
            lambda directory: directory.checkpoint_path(4).unlink(),
            "malformed",
            "000004.safetensors: not found",
        ),
        (
            lambda directory: directory.checkpoint_path(0).write_bytes(b"x"),
            "malformed",
            "not a safetensors file",
        ),
    ],
)
def test_a_checkpoint_that_is_not_the_committed_one_fails_the_fourth_check(
    tmp_path: Path, damage: Callable[[RunDirectory], None], verdict: str, reason: str
) -> None:
    directory = PaperRun().write(tmp_path / "run")
    damage(directory)

    found = verify_run(directory)

    assert found.verdict == verdict
    assert failed(found)[0] == 4
    assert reason in failed(found)[1]


def test_grids_that_the_log_does_not_lead_to_fail_the_fourth_check(tmp_path: Path) -> None:
    run = PaperRun()
    run.tables[4] = grids(2)

    found = verify_run(run.write(tmp_path / "run"))

    assert found.verdict == "mismatch"
    assert failed(found) == (
        4,
        "checkpoint after 4 steps: its grid table is not what the log's changes since step 2 lead to",
    )


def test_a_change_of_grids_that_is_none_fails_the_fourth_check(tmp_path: Path) -> None:
    run = PaperRun()
    run.payloads[0][SiteAddress(0, 0, Kind.GRID, 0)] = b"\x01\x09"

    found = verify_run(run.write(tmp_path / "run"))

    assert found.verdict == "malformed"
    assert failed(found)[0] == 4
    assert failed(found)[1].startswith("step 0: ")


def test_a_state_of_another_step_fails_the_fourth_check(tmp_path: Path) -> None:
    run = PaperRun()
    run.cursors[2] = 3

    found = verify_run(run.write(tmp_path / "run"))

    assert failed(found)[0] == 4
    assert "state after 2 steps: its cursor says" in failed(found)[1]


@pytest.mark.parametrize("name", ["document/grids", "document/cursor"])
def test_a_state_without_its_documents_fails_the_fourth_check(tmp_path: Path, name: str) -> None:
    found = verify_run(PaperRun(left_out=name).write(tmp_path / "run"))

    assert found.verdict == "malformed"
    assert failed(found) == (4, f"checkpoint after 0 steps: entry {name} is missing")


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (PolicyRecord("fp8", STATED), "policy fp8: unknown"),
        (PolicyRecord("fp32", {**STATED, "gradient_band_max": -1}), "gradient_band_max is -1"),
        (PolicyRecord("fp32", {}), "recalibrate_every must be a whole number"),
        (
            PolicyRecord("fp32", {**STATED, "optimizer_arithmetic": "auto"}),
            "must be portable or general, got 'auto'",
        ),
    ],
)
def test_numbers_that_are_not_the_policys_fail_the_fifth_check(
    tmp_path: Path, policy: PolicyRecord, reason: str
) -> None:
    found = verify_run(PaperRun(policy=policy).write(tmp_path / "run"))

    assert found.verdict == "malformed"
    assert failed(found)[0] == 5
    assert reason in failed(found)[1]


def test_interval_of_measuring_and_optimizer_arithmetic_are_the_trainers_choice(tmp_path: Path) -> None:
    policy = PolicyRecord("fp32", {**STATED, "recalibrate_every": 7, "optimizer_arithmetic": "general"})

    assert verify_run(PaperRun(policy=policy).write(tmp_path / "run")).verdict == "match"


def test_a_step_proof_passes_under_its_root_and_fails_under_another(tmp_path: Path) -> None:
    transcript = PaperRun().write(tmp_path / "run").load_transcript()
    proof = transcript.prove_step(2).encode()

    found = verify_proof(proof, transcript.root())
    assert found.verdict == "match"
    assert "step 2, rank 0, leaf 3 of 5" in found.subject
    assert verify_proof(proof, bytes(32)).verdict == "mismatch"


def test_a_chunk_proof_passes_with_its_bytes_and_fails_with_others(tmp_path: Path) -> None:
    state = PaperRun().state(2)
    proof, root = open_chunk(state, "model/weight", 0).encode(), summarise(state).root()
    data = bytes(next(entry.data for entry in state if entry.name == "model/weight"))

    assert verify_proof(proof, root, chunk=data).verdict == "match"
    assert verify_proof(proof, root, chunk=bytes(len(data))).verdict == "mismatch"
    assert verify_proof(proof, bytes(32), chunk=data).verdict == "mismatch"
    assert verify_proof(proof, root, chunk=data[:-1]).verdict == "malformed"
    with pytest.raises(InvalidInput, match="the bytes of the chunk are needed"):
        verify_proof(proof, root)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "proof: "),
        (b"{}", "format None is unknown"),
        (b'{"format":{}}', "is unknown"),
        (b"1", "must be an object"),
    ],
)
def test_bytes_that_are_no_proof_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        verify_proof(data, bytes(32))


def test_a_disputes_record_blames_only_with_the_losers_key() -> None:
    vector = json.loads((VECTORS / "dispute" / "worked-example" / "input.json").read_bytes())
    data = vector["record"].encode()
    fields = json.loads(data)
    root = bytes.fromhex(fields["run_root"])
    held = {party: parse_public_key(bytes.fromhex(key)) for party, key in fields["keys"].items()}
    trainer: dict[Party, PublicKey] = {"trainer": held["trainer"]}

    found = verify_proof(data, root, keys=trainer)
    assert found.verdict == "match"
    assert found.finding is not None and found.finding.startswith("the trainer loses at step")
    for keys in ({}, {"trainer": held["auditor"]}, {"auditor": held["auditor"]}):
        unsure = verify_proof(data, root, keys=keys)
        assert (unsure.verdict, unsure.checks[-1].outcome) == ("unjudged", "not judged")
        assert unsure.finding is not None and unsure.finding.startswith("not proven")
    assert verify_proof(data, bytes(32), keys=trainer).verdict == "mismatch"
    fields["ruling"]["loser"] = "auditor"
    forged = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    assert verify_proof(forged, root, keys=trainer).verdict == "mismatch"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("why", '"why"'),
        ('accepted"\n\x1b[32mtrained as stated', '"accepted\\"\\n\\x1b[32mtrained as stated"'),
        ("x" * 201, '"' + "x" * 200 + '.."'),
        ("\u202egnitaehc", '"\\u202egnitaehc"'),
    ],
)
def test_free_text_is_quoted_on_one_line_escaped_and_cut(text: str, shown: str) -> None:
    assert quoted(text) == shown
