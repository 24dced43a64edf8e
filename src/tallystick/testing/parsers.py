"""Every parser of bytes that another party may send, as one table; what fuzzing and its tests go through.

A target holds when, for every sequence of bytes, the parser either refuses with ``InvalidInput`` (or
``Mismatch``, for documents that contradict each other) or returns a value whose encoding is those bytes
again. Nothing else may escape: no other exception, no endless loop, no memory beyond the input's size.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from tallystick.commit.encoding import canonical_json, parse_canonical_json
from tallystick.commit.state import parse_chunk_proof, parse_state_summary
from tallystick.commit.tensor_file import check_tensor_file
from tallystick.dispute.exchange import (
    ANSWER_TYPE,
    QUESTION_TYPE,
    Answer,
    Posting,
    read_answer,
    read_question,
    unable,
)
from tallystick.dispute.record import parse_dispute
from tallystick.dispute.signed_moves import read_move
from tallystick.dispute.verdict import parse_log_objection, parse_verdict
from tallystick.errors import InvalidInput, Mismatch
from tallystick.evidence.bundle import parse_bundle
from tallystick.evidence.policy import parse_evidence_policy
from tallystick.fleet.agent import chip_record, memory, probes
from tallystick.fleet.attestation import certificates, enrolment, revocation, spdm, tpm
from tallystick.fleet.compliance import rules
from tallystick.fleet.compliance.dossier import read_licence
from tallystick.fleet.enclave import neutral, neutral_result, sealed_job
from tallystick.fleet.inspection.custody import encode_chain, parse_chain
from tallystick.fleet.inspection.extraction import ChipLogReader
from tallystick.fleet.inspection.inspection import InspectionResult, WorkOrder
from tallystick.fleet.provenance import batch_opening, transcripts
from tallystick.fleet.provenance.owner_findings import OwnerFindings
from tallystick.fleet.registry.claims import RegistryProof, parse_frame
from tallystick.fleet.registry.events import parse_entry
from tallystick.fleet.registry.reconcile import Stream
from tallystick.fleet.sampling.draw import DrawAnnouncement
from tallystick.fleet.sampling.workload import parse_fleet
from tallystick.numerics import grid_table, log
from tallystick.numerics.dense import decode_dense, encode_dense
from tallystick.run import documents, proofs, sample, statements, transcript
from tallystick.run.calibration import parse_calibration
from tallystick.run.claims import read_claim
from tallystick.signing.dsse import Statement, Subject, parse_envelope, parse_statement, sign_statement
from tallystick.signing.keys import Signer, ed25519_key, parse_public_key, parse_signing_key
from tallystick.signing.model_signature import parse_model_signature
from tallystick.signing.note import parse_note, parse_vkey
from tallystick.store import journal
from tallystick.store.files import RunDirectory
from tallystick.testing import hostile_runs
from tallystick.testing.parser_seeds import REFEREE, SIZES, asked_question, neutral_order
from tallystick.tlog import tree
from tallystick.tlog.policy import parse_log_policy

Encode = Callable[[Any], bytes]


@dataclass(frozen=True)
class Target:
    """One parser.

    Attributes:
        name: of the parser.
        parse: what is called with the bytes.
        encode: what must give them back; None where the format has many spellings.
        own_seeds: its own documents to begin with; None where those of all parsers serve.
    """

    name: str
    parse: Callable[[bytes], object]
    encode: Encode | None = None
    own_seeds: Callable[[], Iterable[bytes]] | None = None


class ParserDefect(AssertionError):
    """A parser let something through, or let something else than a refusal escape."""


def accepts(target: Target, data: bytes) -> bool:
    """Return whether the target's parser accepts ``data``.

    Raises:
        ParserDefect: it accepts bytes that are not the encoding of what it returns.
    """
    try:
        value = target.parse(data)
    except (InvalidInput, Mismatch):
        return False
    if target.encode is not None and (again := target.encode(value)) != data:
        raise ParserDefect(
            f"{target.name}: accepts {data[:64].hex()}.., whose encoding is {again[:64].hex()}.."
        )
    return True


def _chip_log(data: bytes) -> list[str]:
    """A reader of logs at inspections has words for whatever it is handed, as log and as evidence."""
    key, reader = ed25519_key(bytes(32)).public_key, ChipLogReader({"01" * 17: [data]})
    return reader(log=data, evidence=data, key=key, chip="01" * 17, nonce=bytes(32))


def _sized(decode: Callable[[bytes, int], object]) -> Callable[[bytes], tuple[int, object]]:
    """Take the number of elements, which a reader of logs knows beforehand, from the first byte."""

    def parse(data: bytes) -> tuple[int, object]:
        if not data:
            raise InvalidInput("nothing follows")
        return data[0], decode(data[1:], SIZES[data[0] % len(SIZES)])

    return parse


def _after_size(encode: Encode) -> Encode:
    return lambda value: bytes([value[0]]) + encode(value[1])


def _documents(data: bytes) -> transcript.Transcript:
    parts = (*data.split(b"\0", 2), b"", b"")
    return transcript.verify_transcript(*parts[:3])


def _transcript_bytes(found: transcript.Transcript) -> bytes:
    return b"\0".join((found.specification.encode(), found.encode_records(), found.statement().encode()))


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """One folder a process, gone when it ends."""
    folder = tempfile.TemporaryDirectory(prefix="tallystick-parsers-")
    (Path(folder.name) / "checkpoints").mkdir()
    return folder


def _checkpoint(data: bytes) -> object:
    directory = RunDirectory(Path(_scratch().name))
    directory.checkpoint_path(0).write_bytes(data)
    return directory.load_checkpoint(0)


def _frame_site(data: bytes) -> bytes:
    """The directory's reader and the whole frame's must agree on what is well formed, site by site."""
    address = log.SiteAddress(0, 0, log.Kind.GRADIENT, 0)
    found = log.find_site(data, address)
    frame = log.decode_frame(data)
    if frame.find(address) != found:
        raise ParserDefect(f"find_site and decode_frame disagree about {data[:64].hex()}")
    return log.encode_frame(frame)


def _encoded(value: Any) -> bytes:
    return value.encode()


def _as_is(value: Any) -> bytes:
    return value


def _json(data: bytes) -> object:
    return parse_canonical_json(data, what="document", limit=1 << 20)


def _vkey(data: bytes) -> object:
    try:
        return parse_vkey(data.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise InvalidInput("vkey: is not UTF-8") from problem


def _exchange(data: bytes) -> spdm.SpdmExchange:
    found = spdm.parse_exchange(data)
    found.fields()
    return found


def _question(data: bytes) -> Posting:
    """Read a question whose first line is as it is, or a question's content, which is then signed first."""
    file = _signed(data, QUESTION_TYPE, REFEREE)
    return read_question(BytesIO(file), len(file), REFEREE.public_key)


def _answer(data: bytes) -> Answer:
    """Read an answer whose first line is as it is, or an answer's content, which is then signed first."""
    posting, signer = asked_question(), ed25519_key(bytes(range(32)))
    file = _signed(data, ANSWER_TYPE, signer)
    found, _ = read_answer(BytesIO(file), len(file), posting, signer.public_key)
    return found if found.cannot is None else unable(found.cannot)


def _signed(data: bytes, kind: str, signer: Signer) -> bytes:
    line, newline, parts = data.partition(b"\n")
    try:
        said = parse_canonical_json(line, what="line", limit=1 << 20)
    except InvalidInput:
        said = None
    if isinstance(said, dict) and newline and "payload" not in said:
        about = (Subject("run", {statements.RUN_DIGEST: asked_question().run.hex()}),)
        line = sign_statement(Statement(about, kind, cast("dict[str, object]", said)), signer)
    return line + newline + parts


def _batch_opening(data: bytes) -> batch_opening.BatchOpening:
    found = batch_opening.parse_batch_opening(data)
    batch_opening.take_apart(found.batch)
    return found


def _claim(data: bytes) -> object:
    return read_claim(parse_statement(data))


def _tensor_file(data: bytes) -> None:
    check_tensor_file(BytesIO(data), len(data), what="file")


def _tensor_files() -> Iterator[bytes]:
    one = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    for header in ("{}", f"{{{one}}}", f'{{"__metadata__":{{"format":"pt"}},{one}}}  '):
        yield len(header).to_bytes(8, "little") + header.encode() + bytes(8 if one in header else 0)


TARGETS: tuple[Target, ...] = (
    Target("canonical-json", _json, canonical_json),
    Target("specification", documents.parse_specification, _encoded),
    Target("step-record", documents.parse_step_record, _encoded),
    Target("step-records", documents.parse_step_records, lambda r: b"".join(x.encode() + b"\n" for x in r)),
    Target("run-statement", documents.parse_run_statement, _encoded),
    Target("transcript", _documents, _transcript_bytes),
    Target("step-proof", proofs.parse_step_proof, _encoded),
    Target("specification-proof", proofs.parse_specification_proof, _encoded),
    Target("extension-proof", proofs.parse_extension_proof, _encoded),
    Target("state-summary", parse_state_summary, _encoded),
    Target("chunk-proof", parse_chunk_proof, _encoded),
    Target("tensor-file", _tensor_file, own_seeds=_tensor_files),
    Target("checkpoint", _checkpoint),
    Target("run-directory", hostile_runs.read_without_torch, own_seeds=hostile_runs.seeds),
    Target("run-directory-audited", hostile_runs.read_with_torch, own_seeds=hostile_runs.seeds),
    Target("calibration", parse_calibration, _encoded),
    Target("log-frame", log.decode_frame, log.encode_frame),
    Target("log-frame-site", _frame_site, _as_is),
    Target("log-entries-1", _sized(lambda d, n: log.decode(d, n, 1)), _after_size(log.encode)),
    Target("log-entries-5", _sized(lambda d, n: log.decode(d, n, 5)), _after_size(log.encode)),
    Target(
        "log-decision",
        _sized(lambda d, n: log.decode_decision(d, n, 1)),
        _after_size(lambda found: log.encode_decision(*found)),
    ),
    Target(
        "log-parities", _sized(lambda d, n: log.decode_residues(d, n, 1)), _after_size(log.encode_residues)
    ),
    Target(
        "log-residues", _sized(lambda d, n: log.decode_residues(d, n, 3)), _after_size(log.encode_residues)
    ),
    Target("log-dense", _sized(decode_dense), _after_size(encode_dense)),
    Target("grid-table", grid_table.GridTable.decode, _encoded),
    Target("grid-change", grid_table.GridTable().apply, lambda table: grid_table.GridTable().diff(table)),
    Target("draw", DrawAnnouncement.parse, _encoded),
    Target("fleet-file", parse_fleet),
    Target("registry-entry", parse_entry, _encoded),
    Target("registry-proof", RegistryProof.parse, _encoded),
    Target("registry-stream", Stream.parse, _encoded),
    Target("draw-frame", parse_frame, _encoded),
    Target("work-order", WorkOrder.parse, _encoded),
    Target("inspection-result", InspectionResult.parse, _encoded),
    Target("custody-chain", parse_chain, encode_chain),
    Target("signed-note", parse_note, _encoded),
    Target("vkey", _vkey, lambda key: str(key).encode()),
    Target("log-checkpoint", tree.parse_checkpoint, lambda found: found.note.encode()),
    Target("log-proof", tree.parse_log_proof, _encoded),
    Target("log-entry", tree.parse_log_entry, _encoded),
    Target("log-policy", parse_log_policy),
    Target("audit-announcement", sample.parse_announcement, _encoded),
    Target("audit-draw", sample.parse_draw, _encoded),
    Target("envelope", parse_envelope),
    Target("claim", _claim),
    Target("model-signature", parse_model_signature),
    Target("evidence-policy", parse_evidence_policy),
    Target("bundle", parse_bundle, _encoded),
    Target("verdict", parse_verdict, _encoded),
    Target("dispute-record", parse_dispute, _encoded),
    Target("dispute-move", lambda d: read_move(parse_statement(d))),
    Target("dispute-question", _question),
    Target("dispute-answer", _answer),
    Target("log objection", parse_log_objection, _encoded),
    Target("public-key", parse_public_key),
    Target("private-key", parse_signing_key),
    Target("chip-record", chip_record.parse_payload, _encoded),
    Target(
        "chip-record-signed",
        lambda d: chip_record.parse_record(d, ed25519_key(bytes(32)).public_key).signed,
        _as_is,
    ),
    Target("chip-journal", journal.parse_journal),
    Target("tpm-public", tpm.parse_tpm_public, _encoded),
    Target("tpm-statement", tpm.parse_tpm_statement, _encoded),
    Target("tpm-evidence", tpm.TpmEvidence.parse, _encoded),
    Target("revocation-list", revocation.parse_revocation_list),
    Target("tpm-enrolment-request", enrolment.EnrolmentRequest.parse, _encoded),
    Target("tpm-challenge", enrolment.Challenge.parse, _encoded),
    Target("tpm-challenge-kept", enrolment.KeptChallenge.parse, _encoded),
    Target("tpm-answer", enrolment.TpmAnswer.parse, _encoded),
    Target("tpm-enrolment", lambda d: enrolment.read_enrolment(parse_statement(d), "11" * 32)),
    Target("pcr-reference", tpm.PcrReference.parse, _encoded),
    Target("spdm-exchange", _exchange, _encoded),
    Target("device-file", spdm.parse_device_file),
    Target("measurement-reference", spdm.MeasurementReference.parse, _encoded),
    Target("certificates", certificates.parse_chain),
    Target("snapshot-opening", memory.SnapshotOpening.parse, _encoded),
    Target("observed-program", probes.Observed.parse),
    Target("control-block", lambda d: probes.parse_control(d, 1, what="control")),
    Target("rules", rules.parse_rules),
    Target("batch-opening", _batch_opening, _encoded),
    Target("owner-findings", OwnerFindings.parse, _encoded),
    Target("licence", lambda d: read_licence(parse_statement(d), "11" * 32)),
    Target("neutral-order", neutral.NeutralOrder.parse, _encoded),
    Target("neutral-order-signed", neutral.read_order),
    Target("neutral-output", lambda d: neutral_result.read_values(neutral_order(), d)),
    Target("neutral-result", lambda d: neutral_result.read_result(parse_statement(d))),
    Target("neutral-job", lambda d: sealed_job.parse_index(d, len(d) + 6, Path("job"))),
    Target("chip-log", _chip_log),
    Target("precommit", transcripts.Precommit.parse, _encoded),
    Target("monitoring-report", transcripts.RunReport.parse, _encoded),
    Target("monitoring-opening", transcripts.ReportOpening.parse, _encoded),
)


def find_target(name: str) -> Target:
    """Return the target called ``name``.

    Raises:
        InvalidInput: there is none.
    """
    for target in TARGETS:
        if target.name == name:
            return target
    raise InvalidInput(f"parser {name!r}: must be one of {', '.join(target.name for target in TARGETS)}")
