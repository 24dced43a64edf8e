"""What an implementation can be asked about fleets of chips, neutral runs and opened data (spec/vectors.md 2)."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from tallystick.commit.directory import parse_map_proof, verify_lookup
from tallystick.errors import Mismatch
from tallystick.evidence.conformance import Json, Query
from tallystick.evidence.question_forms import (
    BOOLEAN,
    CONTENT,
    HASH,
    HASHES,
    HEX,
    HEXES,
    INTEGER,
    INTEGERS,
    OBJECT,
    TEXT,
    content,
    listed,
    optional,
)
from tallystick.fleet.agent.chip_log import ChipHead, read_log, verify_log
from tallystick.fleet.attestation.certificates import parse_chain, parse_root
from tallystick.fleet.attestation.credential import make_credential
from tallystick.fleet.attestation.enrolment import EnrolmentRequest, KeptChallenge, enrol
from tallystick.fleet.attestation.revocation import check_revocation, parse_revocation_list
from tallystick.fleet.attestation.spdm import (
    DeviceQuestion,
    MeasurementReference,
    parse_device_file,
    verify_device,
)
from tallystick.fleet.attestation.tpm import PcrReference, TpmEvidence
from tallystick.fleet.attestation.tpm_verification import TpmQuestion, verify_tpm
from tallystick.fleet.compliance.rules import parse_rules
from tallystick.fleet.enclave.neutral import NeutralOrder
from tallystick.fleet.enclave.neutral_result import read_values
from tallystick.fleet.provenance.batch_opening import open_batch, parse_batch_opening
from tallystick.fleet.provenance.transcripts import Lineage, Precommit, RunReport, Totals
from tallystick.fleet.registry.events import parse_entry
from tallystick.fleet.registry.ledger import RegistryLedger
from tallystick.fleet.sampling.draw import DrawAnnouncement, draw_sample
from tallystick.signing.keys import ed25519_key, parse_public_key

Values = Mapping[str, object]


# -------------------------------------------------------------------------------------- chips and their evidence


def _chip_log(key: str, frames: list[str], known: list[tuple[int, str]]) -> Values:
    records, malformed = read_log(
        [bytes.fromhex(frame) for frame in frames], parse_public_key(bytes.fromhex(key))
    )
    if malformed:
        raise Mismatch(f"chip log: {len(malformed)} records are malformed")
    heads = [ChipHead(seq, bytes.fromhex(digest), "who asks") for seq, digest in known]
    return {"findings": [[f.rule, f.seq, f.severity] for f in verify_log(records, known=heads)]}


def _with_frames(case: Json) -> Json:
    """A case of a malformed record has this one alone."""
    return {**case, "frames": [case["frame"]], "known": []} if "frame" in case else case


def _tpm_evidence(
    evidence: str, attestation_key: str, device_key: str, ueid: str, head: tuple[int, str], nonce: str, reference: str
) -> Values:  # fmt: skip
    question = TpmQuestion(
        parse_public_key(bytes.fromhex(attestation_key)),
        parse_public_key(bytes.fromhex(device_key)),
        bytes.fromhex(ueid),
        ChipHead(head[0], bytes.fromhex(head[1])),
        bytes.fromhex(nonce),
    )
    found = verify_tpm(TpmEvidence.parse(evidence.encode()), question, PcrReference.parse(reference.encode()))
    names = ("clock", "resets", "restarts", "safe", "firmware")
    return {"facts": {**{name: getattr(found, name) for name in names}, "compared": list(found.compared)}}


def _device_evidence(file: str, root: str, nonce: str, at: int, reference: str) -> Values:
    devices = parse_device_file(file.encode())
    if len(devices) != 1:
        raise Mismatch(f"device evidence: of {len(devices)} devices, asked is about one")
    question = DeviceQuestion(parse_root(root.encode()), bytes.fromhex(nonce), at)
    found = verify_device(devices[0], question, MeasurementReference.parse(reference.encode()))
    return {
        "facts": {
            "name": found.name,
            "serial": found.serial,
            "ueid": found.ueid.hex(),
            "measurements": {str(m.index): m.value.hex() for m in found.measurements},
            "compared": list(found.compared),
            "versions": dict(found.versions),
        }
    }


def _enrolment(request: str, root: str, at: int, ephemeral: str, secret: str, answer: str) -> Values:
    asked = EnrolmentRequest.parse(request.encode())
    kept = KeptChallenge(asked.digest(), bytes.fromhex(secret))
    found = enrol(
        asked, bytes.fromhex(answer), kept, [parse_root(root.encode())],
        at=at, revocation="not checked", enroller="11" * 32,
    )  # fmt: skip
    name = found.attestation_key.name()
    made = make_credential(
        asked.certificates[0].key, name, bytes.fromhex(secret),
        ephemeral=ec.derive_private_key(int(ephemeral, 16), ec.SECP256R1()),
    )  # fmt: skip
    return {
        "facts": {
            "certificate": found.certificate,
            "tpm": [found.tpm.manufacturer, found.tpm.model, found.tpm.version],
            "name": name.hex(),
            "credential": made.blob.hex(),
            "seed": made.seed.hex(),
        }
    }


def _revocation(chain: str, root: str, lists: list[str], at: int, required: bool) -> Values:
    given = [parse_revocation_list(bytes.fromhex(each)) for each in lists]
    found = check_revocation(
        parse_chain(chain.encode()), parse_root(root.encode()), given, at=at, required=required
    )
    return {"facts": {"status": found.status, "not_checked": list(found.unknown)}}


CHIPS: Mapping[str, Query] = {
    "chip-log": Query(
        "What is wrong with a log, beside what others know of it: [rule, number of the record, severity] each.",
        {"key": HEX, "frames": HEXES, "known": listed(listed({}, 2))}, _chip_log, {"findings": listed(listed({}, 3))},
        prepare=_with_frames,
    ),
    "tpm-evidence": Query(
        "What a TPM states about the head of a chip's log.",
        {
            "evidence": TEXT, "attestation_key": HEX, "device_key": HEX, "ueid": HEX, "head": listed({}, 2),
            "nonce": HEX, "reference": TEXT,
        },
        _tpm_evidence, {"facts": OBJECT},
    ),
    "device-evidence": Query(
        "What an accelerator states at a second since 1970.",
        {"file": TEXT, "root": TEXT, "nonce": HEX, "at": INTEGER, "reference": TEXT}, _device_evidence, {"facts": OBJECT},
    ),
    "tpm-enrolment": Query(
        "Whether an answer enrols a key, and the challenge's credential and seed with this ephemeral key.",
        {"request": TEXT, "root": TEXT, "at": INTEGER, "ephemeral": TEXT, "secret": HEX, "answer": HEX}, _enrolment,
        {"facts": OBJECT},
    ),
    "revocation": Query(
        "What is known of a chain's revocation.",
        {"chain": TEXT, "root": TEXT, "lists": HEXES, "at": INTEGER, "required": BOOLEAN}, _revocation, {"facts": OBJECT},
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------ registry, draws, rules, data


def _registry(lines: list[str]) -> Values:
    key = ed25519_key(hashlib.sha256(b"registry").digest())
    with tempfile.TemporaryDirectory() as folder, RegistryLedger(Path(folder) / "registry") as ledger:
        head = ledger.append([parse_entry(line.encode()) for line in lines], key, now=101).head
    return {"registry": head.registry, "log": head.log_root.hex(), "state": head.state_root.hex()}


def _registry_map(key: str, root: str, proof: Json) -> Values:
    value = verify_lookup(parse_map_proof(proof, what="proof"), bytes.fromhex(key), bytes.fromhex(root))
    return {"value": None if value is None else value.hex()}


def _draw(announcement: str, beacon: str) -> Values:
    drawn = draw_sample(DrawAnnouncement.parse(announcement.encode()), bytes.fromhex(beacon))
    return {
        "seed": drawn.seed.hex(),
        "samples": {name: sample.tolist() for name, sample in drawn.samples.items()},
        "digest": drawn.digest().hex(),
    }


def _rules(data: Json) -> Values:
    found = parse_rules(content(data))
    return {"digest": found.digest, "rules": [[rule.id, rule.kind] for rule in found.rules]}


def _with_data(case: Json) -> Json:
    form = "hex" if "hex" in case else "text"
    return {**case, "data": {form: case[form]}}


def _neutral_order(order: str) -> Values:
    found = NeutralOrder.parse(order.encode())
    return {"digest": found.digest(), "bits": found.bits}


def _neutral_output(order: str, printed: str) -> Values:
    return {"values": dict(read_values(NeutralOrder.parse(order.encode()), printed.encode()))}


def _batch_opening(opening: str, run: str, steps: int, data: str) -> Values:
    precommit = Precommit("0" * 64, data, (), "0" * 64, Lineage("initialised"))
    report = RunReport(run, steps, precommit, data, (), Totals(1, 1, 1))
    found = open_batch(parse_batch_opening(bytes.fromhex(opening)), report)
    return {"batch": found.digest, "form": found.form, "records": list(found.records)}


AGREED: Mapping[str, Query] = {
    "registry": Query(
        "The registry's name and both roots after these entries.", {"lines": listed(TEXT)}, _registry,
        {"registry": HASH, "log": HASH, "state": HASH},
    ),
    "registry-map": Query(
        "The value of a key, or null, under a map's root.", {"key": HEX, "root": HEX, "proof": OBJECT}, _registry_map,
        {"value": optional(HEX)},
    ),
    "draw": Query(
        "Which chips a beacon draws.", {"announcement": TEXT, "beacon": HEX}, _draw,
        {"seed": HASH, "samples": {"type": "object", "additionalProperties": INTEGERS}, "digest": HASH},
    ),
    "rules": Query(
        "The digest of a file of rules, and of each rule name and kind.", {"data": CONTENT}, _rules,
        {"digest": HASH, "rules": listed(listed(TEXT, 2))}, prepare=_with_data,
    ),
    "neutral-order": Query(
        "The digest of an order, and how many bits its output can tell.", {"order": TEXT}, _neutral_order,
        {"digest": HASH, "bits": INTEGER},
    ),
    "neutral-output": Query(
        "The values of a neutral run's output.", {"order": TEXT, "printed": TEXT}, _neutral_output, {"values": OBJECT}
    ),
    "batch-opening": Query(
        "The records of a batch of a run with these steps and this commitment to its data.",
        {"opening": HEX, "run": HASH, "steps": INTEGER, "data": HASH}, _batch_opening,
        {"batch": HASH, "form": optional(HASH), "records": HASHES},
    ),
}  # fmt: skip

FLEET_OPERATIONS: Mapping[str, Query] = {**CHIPS, **AGREED}
