"""Documents for fuzzing to begin with: those of the vectors, and one of every kind that no vector holds."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from tallystick.commit.directory import MapProof
from tallystick.commit.encoding import canonical_json, frame
from tallystick.commit.state import Entry
from tallystick.dispute.exchange import (
    Answer,
    Posting,
    Question,
    encode_answer,
)
from tallystick.dispute.signed_moves import MoveClaim, Terms
from tallystick.dispute.verdict import LogObjection
from tallystick.fleet.agent import chip_record, memory, probes
from tallystick.fleet.agent.chip_log import NumberedFinding
from tallystick.fleet.attestation import certificates, enrolment, spdm, tpm
from tallystick.fleet.compliance.dossier import licence_statement
from tallystick.fleet.enclave import neutral, neutral_result
from tallystick.fleet.inspection.custody import add_link, encode_chain
from tallystick.fleet.inspection.inspection import InspectionFinding, InspectionResult, make_order
from tallystick.fleet.provenance import batch_opening, transcripts
from tallystick.fleet.provenance.owner_findings import OwnerFindings, SeenSnapshot
from tallystick.fleet.provenance.transcripts import even_shards
from tallystick.fleet.provenance.verification import OwnerVerdict, RunVerdict
from tallystick.fleet.registry.claims import RegistryProof, make_frame
from tallystick.fleet.registry.facts import Chip
from tallystick.fleet.registry.heads import RegistryHead, sign_head
from tallystick.fleet.registry.industry import Industry
from tallystick.fleet.registry.reconcile import Stream
from tallystick.run import documents, sample, statements
from tallystick.run.calibration import CalibrationChoice, SiteChoice
from tallystick.signing.dsse import parse_envelope, parse_statement
from tallystick.signing.keys import ed25519_key
from tallystick.signing.note import NOTE, Note, NoteKey, NoteSigner
from tallystick.store import journal
from tallystick.store.files import RunDirectory
from tallystick.testing import devices
from tallystick.tlog import tree

SIZES = (0, 1, 2, 7, 63, 1000, 2**20, 2**31 + 5, 2**40, 2**62)


def seeds(vectors: Path) -> list[bytes]:
    """Return every document and every hexadecimal string in the cases of the folder ``vectors``, each once.

    Among them are the lines of documents, short strings after each size that a reader of logs knows beforehand, a
    transcript's three documents joined, a checkpoint, a calibration and a key.
    """
    found: dict[bytes, None] = dict.fromkeys(_made())
    for case in sorted(vectors.glob("*/*/input.json")):
        content = json.loads(case.read_text())
        for text in _texts(content):
            for data in _readings(text):
                found.update(dict.fromkeys((data, *data.splitlines())))
                if len(data) <= 32:
                    found.update(dict.fromkeys(bytes([which]) + data for which in range(len(SIZES))))
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
    yield whole_question(asked_question())
    yield canonical_json(dict(asked_question().statement().predicate)) + b"\npart"
    file = b"".join(
        encode_answer(asked_question(), Answer({"names": ["model/0.weight"]}, (b"ab", b"c")), key)
    )
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


def neutral_order() -> neutral.NeutralOrder:
    """Return an order of a neutral run, unsigned, with one output of each form."""
    return neutral.NeutralOrder(
        "00" * 16, "11" * 32, "22" * 32, "33" * 32, (neutral.NeutralInput("data", "file", "44" * 32),),
        (neutral.integer_output("count", -3, 9), neutral.scalar_output("share", -1.0, 1.0, 7), neutral.verdict_output("word")),
        64, 2, 1, 1 << 30, 1 << 20, False,
    )  # fmt: skip


def _neutral() -> Iterator[bytes]:
    """A signed order, a result, an index of a sealed job, an owner's findings and a licence."""
    order, key = neutral_order(), ed25519_key(bytes(32))
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
    columns = (transcripts.Slice("model/w", "model/w", 2, 6, 3, 9),)
    yield from (precommit.encode(), report.encode())
    yield transcripts.ReportOpening(bytes(32), (*slices, columns)).encode()
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


REFEREE = ed25519_key(b"\x03" * 32)


def whole_question(posting: Posting) -> bytes:
    """Return the bytes of a question's file."""
    return b"".join(posting.encode(REFEREE))


def asked_question() -> Posting:
    """A question that every answer here is to."""
    question = Question("trainer", "entries", {"index": 3, "names": ["model/0.weight"]}, (b"part",), 1 << 12)
    return Posting(bytes(32), bytes(range(32)), bytes(32), bytes(32), "11" * 32, 5, question, 1_800_000_000)
