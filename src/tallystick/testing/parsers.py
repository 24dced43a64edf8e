"""Every parser of bytes that another party may send, as one table; what fuzzing and its tests go through.

A target holds when, for every sequence of bytes, the parser either refuses with ``InvalidInput`` (or
``Mismatch``, for documents that contradict each other) or returns a value whose encoding is those bytes
again. Nothing else may escape: no other exception, no endless loop, no memory beyond the input's size.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from cryptography.hazmat.primitives.serialization import Encoding

from tallystick.commit.directory import MapProof
from tallystick.commit.encoding import canonical_json, frame, parse_canonical_json
from tallystick.commit.state import Entry, parse_chunk_proof, parse_state_summary
from tallystick.commit.tensor_file import check_tensor_file
from tallystick.dispute.exchange import (
    ANSWER_TYPE,
    Answer,
    Posting,
    Question,
    encode_answer,
    read_answer,
    read_question,
    unable,
)
from tallystick.dispute.record import parse_dispute
from tallystick.dispute.signed_moves import MoveClaim, Terms, read_move
from tallystick.dispute.verdict import LogObjection, parse_log_objection, parse_verdict
from tallystick.errors import InvalidInput, Mismatch
from tallystick.evidence.bundle import parse_bundle
from tallystick.evidence.policy import parse_evidence_policy
from tallystick.fleet.agent import chip_record, memory, probes
from tallystick.fleet.agent.chip_log import NumberedFinding
from tallystick.fleet.attestation import certificates, enrolment, revocation, spdm, tpm
from tallystick.fleet.compliance import rules
from tallystick.fleet.compliance.dossier import licence_statement, read_licence
from tallystick.fleet.enclave import neutral, neutral_result, sealed_job
from tallystick.fleet.inspection.custody import add_link, encode_chain, parse_chain
from tallystick.fleet.inspection.extraction import ChipLogReader
from tallystick.fleet.inspection.inspection import InspectionFinding, InspectionResult, WorkOrder, make_order
from tallystick.fleet.provenance import batch_opening, transcripts
from tallystick.fleet.provenance.owner_findings import OwnerFindings, SeenSnapshot
from tallystick.fleet.provenance.transcripts import even_shards
from tallystick.fleet.provenance.verification import OwnerVerdict, RunVerdict
from tallystick.fleet.registry.claims import RegistryProof, make_frame, parse_frame
from tallystick.fleet.registry.events import parse_entry
from tallystick.fleet.registry.facts import Chip
from tallystick.fleet.registry.heads import RegistryHead, sign_head
from tallystick.fleet.registry.industry import Industry
from tallystick.fleet.registry.reconcile import Stream
from tallystick.fleet.sampling.draw import parse_announcement
from tallystick.fleet.sampling.workload import parse_fleet
from tallystick.numerics import grid_table, log
from tallystick.numerics.dense import decode_dense, encode_dense
from tallystick.run import documents, proofs, sample, statements, transcript
from tallystick.run.calibration import CalibrationChoice, SiteChoice, parse_calibration
from tallystick.run.claims import read_claim
from tallystick.signing.dsse import Statement, Subject, parse_envelope, parse_statement, sign_statement
from tallystick.signing.keys import ed25519_key, parse_public_key, parse_signing_key
from tallystick.signing.model_signature import parse_model_signature
from tallystick.signing.note import NOTE, Note, NoteKey, NoteSigner, parse_note, parse_vkey
from tallystick.store import journal
from tallystick.store.files import RunDirectory
from tallystick.testing import devices, hostile_runs
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


def seeds(vectors: Path) -> list[bytes]:
    """Return every document and every hexadecimal string in the cases of the folder ``vectors``, each once.

    Among them are the lines of documents, short strings after each size that ``_sized`` reads, a
    transcript's three documents joined, a checkpoint, a calibration and a key.
    """
    found: dict[bytes, None] = dict.fromkeys(_made())
    for case in sorted(vectors.glob("*/*/input.json")):
        content = json.loads(case.read_text())
        for text in _texts(content):
            for data in _readings(text):
                found.update(dict.fromkeys((data, *data.splitlines())))
                if len(data) <= 32:
                    found.update(dict.fromkeys(bytes([which]) + data for which in range(len(_SIZES))))
        if isinstance(content, dict) and {"specification", "records", "statement"} <= content.keys():
            parts = [
                next(_texts(content[name])).encode() for name in ("specification", "records", "statement")
            ]
            found[b"\0".join(parts)] = None
    return list(found)


def _made() -> Iterator[bytes]:
    """Documents that no vector holds."""
    entries = [Entry("a", "F32", (2, 3), bytes(range(24))), Entry("b.step", "I64", (), bytes(8))]
    with tempfile.TemporaryDirectory(prefix="tallystick-fuzz-") as folder:
        directory = RunDirectory(Path(folder))
        directory.write_checkpoint(0, entries)
        yield directory.checkpoint_path(0).read_bytes()
    sites = (SiteChoice("gradient", "head.weight", -14, -5, {"jitter": 1e-6}),)
    choice = CalibrationChoice(
        policy="fp32",
        parameters={"gradient_floor": -4, "safety": 4},
        job="tallystick.jobs.digits",
        source_digest="ab" * 32,
        settings={"width": "8"},
        seed=3,
        steps=(0, 32),
        repeats=2,
        profiles=(),
        log_bits=0.25,
        freedom=2.0**-10,
        sites=sites,
    )
    yield choice.encode()
    yield b"""{"format": "tallystick/fleet/1", "losses_allowed": 2, "risks": {"spoof": 0.01, "tamper": 0.1},
 "strata": [{"name": "a", "chips": 100, "flop_per_chip_day": 1e19, "owner": "x", "exempt": false}],
 "rounds": [{"stratum": "a", "chips": 101, "drawn": 3, "inspected": 2, "refused": 1, "unreached": 0, "lost": 0}],
 "inspection": {"chips_per_inspector_year": 100, "cost_per_chip": 1.5, "cost_per_inspector_year": 2, "currency": "EUR"}}"""
    yield from _registry_documents()
    yield from _watched()
    yield from _neutral()
    key = ed25519_key(bytes(range(32)))
    yield from (key.pem(), key.public_key.pem(), key.public_key.spki)
    yield from _evidence()


def _evidence() -> Iterator[bytes]:
    """An announcement, an auditor's and a judge's claim, a log entry, a log's key and a reader's policy."""
    statement = documents.RunStatement(tree_size=13, root="11" * 32, steps=12, final_state="22" * 32)
    identity = statements.RunIdentity(statement, "33" * 32, "44" * 32)
    announcement = sample.announce(
        run_root=bytes.fromhex("11" * 32), tree_size=13, steps=12, checkpoint_every=2, fraction="0.5", detect="0.9",
        log=None, beacon=("drand/quicknet", 41, 1_800_000_000),
    )  # fmt: skip
    draw = sample.draw_segments(announcement, bytes(32))
    audit = statements.AuditClaim(
        identity, 1_800_000_100, "match", draw.segments, draw, "fp64", "avx2",
        statements.MeasuredFreedom(2.0**-20, 0.0, 0.0, math.inf, 0.5, 3, 7),
        statements.FirstState(64, statements.Uncompared(9, 1, ("model/w",)), statements.Uncompared(0, 0, ())),
    )  # fmt: skip
    verdict = statements.VerdictClaim(
        identity,
        1_800_000_200,
        "55" * 32,
        "fault",
        "auditor",
        3,
        "step 3: another batch",
        "66" * 32,
        None,
        "77" * 32,
    )
    key = ed25519_key(bytes(range(32)))
    log = NoteSigner(NoteKey("log.example/a", NOTE, key.public_key), key)
    yield announcement.encode()
    yield statements.audit_statement(audit, details={}, version="0").encode()
    yield statements.verdict_statement(verdict, version="0").encode()
    terms = Terms(bytes(32), bytes(32), 3, bytes(32), {"trainer": bytes(32), "auditor": bytes(32)})
    yield MoveClaim(terms, "trainer", "committed", terms.opening(), bytes(32)).statement().encode()
    yield _whole_question(_asked())
    file = b"".join(encode_answer(_asked(), Answer({"names": ["model/0.weight"]}, (b"ab", b"c")), key))
    yield file
    said = parse_statement(parse_envelope(file.partition(b"\n")[0]).payload).predicate
    yield canonical_json(dict(said)) + b"\nabc"
    yield LogObjection("11" * 32, 3, "gradient of weight", -1, "5 entries exceed the budget of 4").encode()
    yield tree.LogEntry("run", "11" * 32).encode()
    yield str(log.key).encode()
    yield log.sign(Note(tree.checkpoint_text("log.example/a", 7, bytes(32)))).encode()
    yield json.dumps(
        {
            "format": "tallystick/evidence-policy/2", "trainers": ["11" * 32], "auditors": ["22" * 32], "judges": [],
            "auditor_quorum": 1, "coverage": {"fraction": "0.1", "detect": "0.9"}, "rounding_policies": ["fp64"],
            "most_freedom": "0.01", "most_steer": "2", "most_fullest_step": "1", "most_path_steer": None, "most_moves": 9,
            "most_silenced": "0.5", "most_uncompared": 0, "most_age_days": 30, "log_policy": ["quorum none"],
            "model_signature": False, "judges_word": False, "job": "digits", "program": "33" * 32, "data": None,
            "settings": {"width": "8"}, "seed": 1, "steps": 4, "weights": "44" * 32,
        }
    ).encode()  # fmt: skip


def _registry_documents() -> Iterator[bytes]:
    """A proof, a stream, a frame, a work order, an inspection's result and its chain of custody."""
    industry, chip = (
        Industry(),
        Chip("01" * 8, "gx1", "fab", "SN", "", "", "north", "north", "active", 0, 0, 3),
    )
    signer = industry.keys["registry"]
    head = sign_head(RegistryHead("ab" * 32, 9, bytes(32), bytes(32), 7), signer)
    proof = MapProof(1, 9, bytes(32), 1, ((b"chip/a", chip.encode()),), (bytes(32),))
    yield RegistryProof(head, "chip/a", proof, head, (bytes(32),)).encode()
    yield Stream("maker", "line 3", "fab", "", 5, True, (chip.chip,), {"gx1": 1}).encode()
    yield make_frame([chip], now=0).encode()
    order = make_order(
        [chip], registry="ab" * 32, entries=9, draw=bytes(32), period=0, inspector="watch", custodian="north",
        issued=1, due=2, nonce=bytes(32),
    )  # fmt: skip
    yield order.encode()
    link = add_link((), "begin", {"watch": industry.keys["watch"]}, items=[order.digest()], time=1)
    yield encode_chain([link])
    finding = InspectionFinding(
        chip.chip, "seen", 1, "SN", bytes(32), bytes(32), b"key", (("case", "intact"),), (bytes(32),)
    )
    yield InspectionResult(order.digest(), "watch", 2, (finding,), (link,)).encode()


def _neutral_order() -> neutral.NeutralOrder:
    return neutral.NeutralOrder(
        "00" * 16, "11" * 32, "22" * 32, "33" * 32, (neutral.NeutralInput("data", "file", "44" * 32),),
        (neutral.integer_output("count", -3, 9), neutral.scalar_output("share", -1.0, 1.0, 7), neutral.verdict_output("word")),
        64, 2, 1, 1 << 30, 1 << 20, False,
    )  # fmt: skip


def _neutral() -> Iterator[bytes]:
    """A signed order, a result, an index of a sealed job, an owner's findings and a licence."""
    order, key = _neutral_order(), ed25519_key(bytes(32))
    own = replace(order, owner=key.public_key.key_id)
    yield from (order.encode(), neutral.sign_order(own, key))
    yield b'{"count": 3, "share": 0.25, "word": "pass"}'
    outcome = neutral_result.NeutralOutcome("completed", {"count": 3, "share": 4, "word": "pass"})
    yield neutral_result.result_statement(
        order, outcome, started="x", versions={"a": "b"}, refused=("c",)
    ).encode()
    members = [
        ["order", "order", 1, "55" * 32],
        ["program", "program", 2, "55" * 32],
        ["input", "data", 3, "55" * 32],
    ]
    yield (
        canonical_json(
            {"format": "tallystick/neutral-job/1", "members": members, "salts": {"data": "66" * 32}}
        )
        + b"\n"
    )
    yield licence_statement(bytes(32), 10**25, "11" * 32).encode()
    finding = NumberedFinding(105, "segment", 3, "differs", "note")
    verdict = OwnerVerdict(
        "o", "pass", "unknown", "unknown", 1, (RunVerdict("77" * 32, "pass", (finding,)),), (), ("x",)
    )
    yield OwnerFindings(verdict, {"01" * 17: (SeenSnapshot(2, "exact", "77" * 32, 3),)}).encode()


def _chip_log(data: bytes) -> list[str]:
    """A reader of logs at inspections has words for whatever it is handed, as log and as evidence."""
    key, reader = ed25519_key(bytes(32)).public_key, ChipLogReader({"01" * 17: [data]})
    return reader(log=data, evidence=data, key=key, chip="01" * 17, nonce=bytes(32))


def _watched() -> Iterator[bytes]:
    """Documents of chips and declared runs."""
    hexed, slices = "ab" * 32, even_shards({"model/w": 10}, 1)
    precommit = transcripts.Precommit(
        hexed, None, ("01" * 17,), hexed, transcripts.Lineage("continued", hexed, 3)
    )
    checkpoints, taken = ((0, hexed), (2, hexed)), (("01" * 17, 3, 2),)
    report = transcripts.RunReport(
        hexed, 2, precommit, hexed, checkpoints, transcripts.Totals(1, 2, 3), taken
    )
    yield from (precommit.encode(), report.encode(), transcripts.ReportOpening(bytes(32), slices).encode())
    head = canonical_json(["uint8", [2, 3]])
    batch = frame(batch_opening.BATCH_TAG, b"batch", head, b"abcdef")
    yield batch_opening.BatchOpening(hexed, 1, 2, bytes(32), (bytes(32),), batch).encode()
    region = memory.Region("model/w", "F32", "weights", 100)
    yield memory.SnapshotOpening(bytes(17), 3, bytes(16), 64, (region,), (bytes(32), bytes(32)), 2).encode()
    yield b'{"control":"/c","format":"tallystick/observed/1","pid":7,"regions":[["w","F32","weights"]],"started":1}'
    yield probes.CONTROL_HEAD.pack(probes.CONTROL_MAGIC, 2, 1, 1) + probes.CONTROL_ENTRY.pack(64, 8)
    genesis = chip_record.Genesis("maker", "model", "simulated", bytes(32), "local")
    place = chip_record.Clocks(0, 0, 0, 1)
    firmware = chip_record.Firmware(bytes(32), 1)
    record = chip_record.Record(0, chip_record.NO_RECORD, bytes(17), firmware, place, 100, genesis)
    yield record.encode()
    yield chip_record.sign_record(record, ed25519_key(bytes(32))).signed
    device = devices.FakeMaker("maker").device("0001").answer(bytes(32))
    yield devices.encode_device_file((device,))
    yield device.exchange.encode()
    yield certificates.encode_chain(device.chain)
    yield devices.revoke("maker line", [1, 2**64]).public_bytes(Encoding.DER)
    point = devices.key_of("maker root").public_key().public_numbers()
    key = tpm.TpmPublic(0x0B, tpm.BOUND, b"", 4, point.x.to_bytes(48, "big"), point.y.to_bytes(48, "big"))
    quote = tpm.TpmStatement(key.name(), bytes(32), 1, 2, 3, True, 4, tpm.Quoted(0x0B, (0, 7), bytes(32)))
    certified = replace(quote, content=tpm.Certified(key.name(), key.name()))
    values = ((0, bytes(32)), (7, bytes(32)))
    yield from (key.encode(), quote.encode(), certified.encode())
    yield tpm.TpmEvidence(key, key, (certified, bytes(96)), (quote, bytes(96)), values).encode()
    yield tpm.PcrReference("sha256", values).encode()
    yield spdm.MeasurementReference(((1, (bytes(48),)),)).encode()
    request = enrolment.EnrolmentRequest(key, device.chain)
    challenge = enrolment.Challenge(bytes(32), bytes(68), bytes(68))
    yield from (request.encode(), challenge.encode(), enrolment.KeptChallenge(bytes(32), bytes(32)).encode())
    yield enrolment.TpmAnswer(bytes(32)).encode()
    named = enrolment.TpmIdentity("id:54414C59", "model", "1")
    yield enrolment.Enrolment(key, hexed, named, hexed, 1, "not checked", "11" * 32).statement().encode()
    yield journal.MAGIC + bytes.fromhex("00000000df3f619804a92fdb")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _readings(text: str) -> Iterable[bytes]:
    data = text.encode()
    try:
        return (data, bytes.fromhex(text)) if len(text) >= 2 else (data,)
    except ValueError:
        return (data,)


def _sized(decode: Callable[[bytes, int], object]) -> Callable[[bytes], tuple[int, object]]:
    """Take the number of elements, which a reader of logs knows beforehand, from the first byte."""

    def parse(data: bytes) -> tuple[int, object]:
        if not data:
            raise InvalidInput("nothing follows")
        return data[0], decode(data[1:], _SIZES[data[0] % len(_SIZES)])

    return parse


def _after_size(encode: Encode) -> Encode:
    return lambda value: bytes([value[0]]) + encode(value[1])


_SIZES = (0, 1, 2, 7, 63, 1000, 2**20, 2**31 + 5, 2**40, 2**62)


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
    return read_question(BytesIO(data), len(data))


def _whole_question(posting: Posting) -> bytes:
    return b"".join(posting.encode())


def _asked() -> Posting:
    """A question that every answer here is to."""
    question = Question("trainer", "entries", {"index": 3, "names": ["model/0.weight"]}, (b"part",), 1 << 12)
    return Posting(bytes(32), bytes(range(32)), bytes(32), 5, question, 1_800_000_000)


def _answer(data: bytes) -> Answer:
    """Read an answer whose first line is as it is, or an answer's content, which is then signed first."""
    posting, signer = _asked(), ed25519_key(bytes(range(32)))
    line, newline, parts = data.partition(b"\n")
    try:
        said = parse_canonical_json(line, what="answer", limit=1 << 20)
    except InvalidInput:
        said = None
    if isinstance(said, dict) and newline and "payload" not in said:
        about = (Subject("run", {statements.RUN_DIGEST: posting.run.hex()}),)
        line = sign_statement(Statement(about, ANSWER_TYPE, cast("dict[str, object]", said)), signer)
    file = line + newline + parts
    found, _ = read_answer(BytesIO(file), len(file), posting, signer.public_key)
    return found if found.cannot is None else unable(found.cannot)


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
    Target("draw", parse_announcement, _encoded),
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
    Target("dispute-question", _question, _whole_question),
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
    Target("neutral-output", lambda d: neutral_result.read_values(_neutral_order(), d)),
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
