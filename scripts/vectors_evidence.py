"""Write the test vectors of transparency-log, attestation, audit-draw, evidence-bundle, dispute-verdict and -exchange.

Everything comes from hashlib, json and an Ed25519 library used straight from the spec pages, or was published or made by
another implementation; nothing here imports the package.

    python scripts/vectors_evidence.py vectors
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from math import comb
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from vector_cases import Case, canonical, write_cases
from vectors_monitor import sha, tickets

# Documentation of golang.org/x/mod/sumdb/note, and C2SP signed-note.
GO_VKEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_NOTE = (
    "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n\n"
    "\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
# Made by model-signing 1.1.1 (its command `sign key`) over two small files with a P-256 key.
REFERENCE_SIGNATURE = (
    '{"mediaType":"application/vnd.dev.sigstore.bundle.v0.3+json","verificationMaterial":{"publicKey":{"h'
    'int":"932104aea50591dad9d4d922946d9d325d238af418108791fce3f2c2eb17a2a3"},"tlogEntries":[]},"dsseEnve'
    'lope":{"payload":"ewogICJfdHlwZSI6ICJodHRwczovL2luLXRvdG8uaW8vU3RhdGVtZW50L3YxIiwKICAic3ViamVjdCI6IF'
    "sKICAgIHsKICAgICAgIm5hbWUiOiAiZml4IiwKICAgICAgImRpZ2VzdCI6IHsKICAgICAgICAic2hhMjU2IjogIjllN2JhODE1ZW"
    "UxYzIwMzhkMGY0NDNlOTUyNWNkNjNhYzI5YTZmZDhmNzc4MDcwYjZjMDJjOTIwOTRjYTE1MmMiCiAgICAgIH0KICAgIH0KICBdLA"
    "ogICJwcmVkaWNhdGVUeXBlIjogImh0dHBzOi8vbW9kZWxfc2lnbmluZy9zaWduYXR1cmUvdjEuMCIsCiAgInByZWRpY2F0ZSI6IH"
    "sKICAgICJyZXNvdXJjZXMiOiBbCiAgICAgIHsKICAgICAgICAibmFtZSI6ICJzdWIvXHUwMGU0LnR4dCIsCiAgICAgICAgImFsZ2"
    "9yaXRobSI6ICJzaGEyNTYiLAogICAgICAgICJkaWdlc3QiOiAiOTgyZDllM2ViOTk2ZjU1OWU2MzNmNGQxOTRkZWYzNzYxZDkwOW"
    "Y1YTNiNjQ3ZDFhODUxZmVhZDY3YzMyYzlkMSIKICAgICAgfSwKICAgICAgewogICAgICAgICJuYW1lIjogIndlaWdodHMuYmluIi"
    "wKICAgICAgICAiYWxnb3JpdGhtIjogInNoYTI1NiIsCiAgICAgICAgImRpZ2VzdCI6ICI5YTEyOTAzOGQ5YTAwYWVkMGNmNmE3ZW"
    "EwNTljYTUwYTgxMzQ0OTA2MWFiODc4NDhjZjFhMTNlYWZkZjMzYjJjIgogICAgICB9CiAgICBdLAogICAgInNlcmlhbGl6YXRpb2"
    "4iOiB7CiAgICAgICJtZXRob2QiOiAiZmlsZXMiLAogICAgICAiaWdub3JlX3BhdGhzIjogWwogICAgICAgICIuZ2l0YXR0cmlidX"
    "RlcyIsCiAgICAgICAgIm1vZGVsLnNpZyIsCiAgICAgICAgIi5naXRodWIiLAogICAgICAgICIuZ2l0IiwKICAgICAgICAiLmdpdG"
    "lnbm9yZSIKICAgICAgXSwKICAgICAgImhhc2hfdHlwZSI6ICJzaGEyNTYiLAogICAgICAiYWxsb3dfc3ltbGlua3MiOiBmYWxzZQ"
    'ogICAgfQogIH0KfQ==","payloadType":"application/vnd.in-toto+json","signatures":[{"sig":"MEQCIG/MB6uCj'
    'U5o0AgFEAUM3P77ITk8uTy2vvZxyyOBJ0BNAiAgmvK5pOOUsl4cBL6v04pCj9tq8L606gG0D6hLP2Eycg==","keyid":""}]}}'
)
REFERENCE_KEY = (
    "-----BEGIN PUBLIC KEY-----\n"
    "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEjZdGhI2k+f416Q+uFdp15CIRPJOO\n"
    "QDhjBZwB9yJhG3oUg1bpxb1mVZYKNv/ek0tmtT/PRSx4PWkcMB1VdGGnnQ==\n"
    "-----END PUBLIC KEY-----\n"
)
REFERENCE_FILES = {"sub/\u00e4.txt": b"text", "weights.bin": b"weights"}


def write(root: Path) -> None:
    """Write every case below ``root``, the vectors folder; what stood there goes."""
    write_cases(root / "transparency-log", log_cases())
    write_cases(root / "attestation", attestation_cases())
    write_cases(root / "audit-draw", draw_cases())
    write_cases(root / "evidence-bundle", bundle_cases())
    write_cases(root / "dispute-verdict", verdict_cases())
    write_cases(root / "dispute-exchange", exchange_cases())


class Key:
    """An Ed25519 key under a name in notes."""

    def __init__(self, number: int, name: str, kind: int) -> None:
        self.private = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
        self.raw = self.private.public_key().public_bytes_raw()
        self.name, self.kind = name, kind
        self.id = hashlib.sha256(name.encode() + b"\n" + bytes([kind]) + self.raw).digest()[:4]

    @property
    def vkey(self) -> str:
        return f"{self.name}+{self.id.hex()}+{b64(bytes([self.kind]) + self.raw)}"

    def line(self, text: str, now: int = 0) -> str:
        if self.kind == 1:
            signature = self.private.sign(text.encode())
        else:
            signature = now.to_bytes(8, "big") + self.private.sign(
                f"cosignature/v1\ntime {now}\n{text}".encode()
            )
        return f"\u2014 {self.name} {b64(self.id + signature)}\n"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


LOG, W1, W2 = Key(1, "log.example/runs", 1), Key(2, "w1.example", 4), Key(3, "w2.example", 4)
POLICY = f"log {LOG.vkey}\nwitness A {W1.vkey}\nwitness B {W2.vkey}\ngroup both all A B\nquorum both\n"


def entry(number: int) -> bytes:
    return canonical({"digest": f"{number:064x}", "format": "tallystick/log-entry/1", "kind": "run"})


def refused(case: Case, error: str, reason: str) -> Case:
    return {**case, "error": error, "reason": reason}


def log_cases() -> dict[str, tuple[str, Case]]:
    leaves = [hashlib.sha256(b"\0" + entry(i)).digest() for i in range(3)]
    pair = hashlib.sha256(b"\1" + leaves[0] + leaves[1]).digest()
    tree = hashlib.sha256(b"\1" + pair + leaves[2]).digest()
    text = f"log.example/runs\n3\n{b64(tree)}\n"
    note = text + "\n" + LOG.line(text) + W1.line(text, 1_800_000_005) + W2.line(text, 1_800_000_001)
    one_witness = text + "\n" + LOG.line(text) + W1.line(text, 1_800_000_005)
    head = f"c2sp.org/tlog-proof@v1\nindex 1\n{b64(leaves[0])}\n{b64(leaves[2])}\n\n"
    proof = {
        "operation": "log-proof",
        "proof": head + note,
        "kind": "run",
        "digest": f"{1:064x}",
        "policy": POLICY,
    }
    go = {"operation": "note", "note": GO_NOTE, "vkeys": [GO_VKEY], "signed": {GO_VKEY: None}}
    late = W1.line(text, 1_800_000_006).split(" ")[2]
    shifted = b64(W1.id + (1_800_000_006).to_bytes(8, "big") + base64.b64decode(late)[12:-1] + b"\0")
    policy = {"operation": "log-policy"}
    return {
        "published-note": ("The worked example of golang.org/x/mod/sumdb/note.", go),
        "changed-text_fail": (
            "One letter of the text.",
            refused({**go, "note": GO_NOTE.replace("think", "thimk")}, "Mismatch", "is not of key"),
        ),
        "signature-twice_fail": (
            "A key with two lines.",
            refused(
                {**go, "note": GO_NOTE + GO_NOTE.split("\n\n")[1]}, "InvalidInput", "a key has two lines"
            ),
        ),
        "base64-other-spelling_fail": (
            "Padding bits that are not zero.",
            refused({**go, "note": GO_NOTE.replace("nAM=", "nAN=")}, "InvalidInput", "another spelling"),
        ),
        "no-signature_fail": (
            "A text alone.",
            refused({**go, "note": "text\n"}, "InvalidInput", "an empty line"),
        ),
        "control-character_fail": (
            "A carriage return.",
            refused({**go, "note": GO_NOTE.replace("\n", "\r\n", 1)}, "InvalidInput", "control characters"),
        ),
        "unknown-key": (
            "A line of a key that the reader does not know is ignored.",
            {**go, "vkeys": [LOG.vkey], "signed": {}},
        ),
        "cosigned-proof": (
            "Entry 1 of 3 under two witnesses; the later time counts.",
            {**proof, "seen_at": 1_800_000_005},
        ),
        "proof-of-another-entry_fail": (
            "The path is entry 1's.",
            refused({**proof, "digest": f"{2:064x}"}, "Mismatch", "leads to root"),
        ),
        "proof-of-another-kind_fail": (
            "The same digest as a statement's.",
            refused({**proof, "kind": "statement"}, "Mismatch", "leads to root"),
        ),
        "proof-policy-without-log_fail": (
            "A policy that names witnesses alone is well formed, and no checkpoint satisfies it.",
            refused(
                {**proof, "policy": POLICY.split("\n", 1)[1]},
                "Mismatch",
                "the policy has no log of that name",
            ),
        ),
        "proof-one-witness_fail": (
            "The quorum asks for two.",
            refused({**proof, "proof": head + one_witness}, "Mismatch", "quorum 'both' is not met"),
        ),
        "proof-cosignature-of-another-time_fail": (
            "A time that was not signed.",
            refused(
                {**proof, "proof": head + one_witness.replace(one_witness.split(" ")[-1].strip(), shifted)},
                "Mismatch",
                "w1.example",
            ),
        ),
        "proof-path-too-short_fail": (
            "A node is missing.",
            refused(
                {**proof, "proof": head.replace(b64(leaves[2]) + "\n", "") + note},
                "InvalidInput",
                "needs 2 nodes, got 1",
            ),
        ),
        "proof-with-extra-line_fail": (
            "Extra data, which nothing authenticates.",
            refused(
                {**proof, "proof": (head + note).replace("index", "extra AAAA\nindex", 1)},
                "InvalidInput",
                "must be an index",
            ),
        ),
        "proof-index-with-zero_fail": (
            "Index 01.",
            refused(
                {**proof, "proof": (head + note).replace("index 1", "index 01")},
                "InvalidInput",
                "must be an index",
            ),
        ),
        "checkpoint-with-extension_fail": (
            "A fourth line.",
            refused(
                {**proof, "proof": (head + note).replace("=\n\n\u2014", "=\nmore\n\n\u2014", 1)},
                "InvalidInput",
                "must have 3 lines",
            ),
        ),
        "checkpoint-size-with-zero_fail": (
            "Size 03.",
            refused(
                {**proof, "proof": (head + note).replace("\n3\n", "\n03\n")},
                "InvalidInput",
                "is no number below",
            ),
        ),
        "policy-key-twice_fail": (
            "One key as two witnesses.",
            refused(
                {**policy, "policy": POLICY.replace("group", f"witness C {W1.vkey}\ngroup")},
                "InvalidInput",
                "is there already",
            ),
        ),
        "policy-member-twice_fail": (
            "A witness that would count twice.",
            refused(
                {**policy, "policy": POLICY.replace("all A B", "2 A A")},
                "InvalidInput",
                "is a member already",
            ),
        ),
        "policy-log-key-as-witness_fail": (
            "A log that would witness itself.",
            refused(
                {**policy, "policy": POLICY.replace(W1.vkey, LOG.vkey)},
                "InvalidInput",
                "must not have type 0x01",
            ),
        ),
        "policy-without-log": (
            "A witness's own policy may name no log.",
            {**policy, "policy": POLICY.split("\n", 1)[1]},
        ),
        "policy-without-quorum_fail": (
            "Nothing is said about witnesses.",
            refused(
                {**policy, "policy": POLICY.replace("quorum both\n", "")}, "InvalidInput", "no quorum line"
            ),
        ),
    }


def envelope(payload: bytes, key: Ed25519PrivateKey, kind: str = "application/vnd.in-toto+json") -> str:
    signature = key.sign(b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload))
    signatures = [{"keyid": "", "sig": b64(signature)}]
    return json.dumps({"payload": b64(payload), "payloadType": kind, "signatures": signatures})


# SubjectPublicKeyInfo of the private key 7 on each curve, and its signature of the statement below by RFC 6979.
ON_CURVES = {
    "P-256": (
        "3059301306072a8648ce3d020106082a8648ce3d030107034200048e533b6fa0bf7b4625bb30667c01fb607ef9f8b8a80fef5b300628703187b2a373eb1dbde03318366d069f83a6f5900053c73633cb041b21c55e1a86c1f400b4",
        "3046022100d2b06c974f0217e4524d0862be809033546ea4353cc442d2fcaa182a1e8a2cb4022100e6cf87df370a290b6f0d23ebeed693a79e6f2f7286b93a0587f86293cd9247ed",
    ),
    "P-384": (
        "3076301006072a8648ce3d020106052b8104002203620004283c1d7365ce4788f29f8ebf234edffead6fe997fbea5ffa2d58cc9dfa7b1c508b05526f55b9ebb2040f05b48fb6d0e19475c99061e41b88ba52efdb8c1690471a61d867ed799729d9c92cd01dbd225630d84ede32a78f9e64664cdac512ef8c",
        "3065023100b2f2c42c733e13f11a49bffce1d1c7d9402858064d394ae8ea4d6234ea28703fedd37a5c851d6013c5deab177358989702306ad03e688080f42e272766dcbada8c4be4dc91cb4e5235c60444ed93aa81e4058a94b42a417fcdc45c35aaa17d973734",
    ),
    "P-521": (
        "30819b301006072a8648ce3d020106052b8104002303818600040056d5d1d99d5b7f6346eeb65fda0b073a0c5f22e0e8f5483228f018d2c2f7114c5d8c308d0abfc698d8c9a6df30dce3bbc46f953f50fdc2619a01cead882816ecd4003d2d1b7d9baaa2a110d1d8317a39d68478b5c582d02824f0dd71dbd98a26cbde556bd0f293cdec9e2b9523a34591ce1a5f9e76712a5ddefc7b5c6b8bc90525251b",
        "308188024200d3a3c55e56d4da7236caab6ccf24a883d74bb953c5fe05fe5a418280c5ef4e21ece7db638c250c6290ee29a08344fd33e21e968319982bf695dd394367a047f868024201476eeafb77d62c0d2aada7fee77df31e0ee9f2e21e2f3db2922f61fd73808d6c12383a4e2702abb0119e876fab5f9a0edfdc8e4bbbd993b3775c0e24b4990fb227",
    ),
}


def attestation_cases() -> dict[str, tuple[str, Case]]:
    key = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
    spki = bytes.fromhex("302a300506032b6570032100") + key.public_key().public_bytes_raw()
    statement: Case = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "run", "digest": {"tallystickRun": "11" * 32}}],
        "predicateType": "https://example.org/p",
        "predicate": {"result": "match"},
        "unknown": 1.5,
    }
    payload = json.dumps(statement).encode()
    good = {
        "operation": "envelope",
        "envelope": envelope(payload, key),
        "key": spki.hex(),
        "predicate": {"result": "match"},
    }
    other = Ed25519PrivateKey.from_private_bytes(bytes([8]) * 32)
    opened = json.loads(good["envelope"])
    by_curve: dict[str, Case] = {}
    for curve, (public, signature) in ON_CURVES.items():
        signatures = [{"keyid": "", "sig": b64(bytes.fromhex(signature))}]
        made = json.dumps({**opened, "signatures": signatures})
        by_curve[curve] = {**good, "envelope": made, "key": public}
    files = {name: hashlib.sha256(data).hexdigest() for name, data in REFERENCE_FILES.items()}
    model = {
        "operation": "model-signature",
        "signature": REFERENCE_SIGNATURE,
        "key": REFERENCE_KEY,
        "files": files,
    }
    digests = b"".join(bytes.fromhex(files[name]) for name in sorted(files))
    twice = payload.replace(b'"predicateType"', b'"predicateType": "https://example.org/q", "predicateType"')
    return {
        "statement": ("A signed statement in loose JSON, with a field that nobody knows.", good),
        "statement-p256": ("ECDSA on P-256 over SHA-256, in DER.", by_curve["P-256"]),
        "statement-p384": ("ECDSA on P-384 over SHA-384, in DER.", by_curve["P-384"]),
        "statement-p521_fail": (
            "A curve that is not one of the two.",
            refused(by_curve["P-521"], "InvalidInput", "must be one of"),
        ),
        "statement-without-keyid": (
            "A signature's key id is a hint, and may be missing.",
            {
                **good,
                "envelope": json.dumps({**opened, "signatures": [{"sig": opened["signatures"][0]["sig"]}]}),
            },
        ),
        "statement-envelope-with-another-field_fail": (
            "The envelope has three fields; the statement inside may have more.",
            refused(
                {**good, "envelope": json.dumps({**opened, "note": ""})},
                "InvalidInput",
                "field 'note' is unknown",
            ),
        ),
        "statement-without-signature_fail": (
            "An envelope that nobody signed.",
            refused({**good, "envelope": json.dumps({**opened, "signatures": []})}, "InvalidInput", "has 0"),
        ),
        "statement-other-key_fail": (
            "Signed by somebody else.",
            refused({**good, "envelope": envelope(payload, other)}, "Mismatch", "is not signed by"),
        ),
        "statement-changed-payload_fail": (
            "Another payload under the signature.",
            refused(
                {
                    **good,
                    "envelope": good["envelope"].replace(
                        b64(payload), b64(payload.replace(b"match", b"Match"))
                    ),
                },
                "Mismatch",
                "is not signed by",
            ),
        ),
        "statement-other-payload-type_fail": (
            "A signature over another type.",
            refused(
                {**good, "envelope": envelope(payload, key, "text/plain")},
                "InvalidInput",
                "payloadType must be",
            ),
        ),
        "statement-key-twice_fail": (
            "One field twice.",
            refused(
                {**good, "envelope": envelope(twice, key)}, "InvalidInput", "duplicate key 'predicateType'"
            ),
        ),
        "statement-without-subject_fail": (
            "About nothing.",
            refused(
                {**good, "envelope": envelope(json.dumps({**statement, "subject": []}).encode(), key)},
                "InvalidInput",
                "has no subject",
            ),
        ),
        "model-signature-of-the-reference": (
            "Two files signed by model-signing 1.1.1.",
            {**model, "root_digest": hashlib.sha256(digests).hexdigest()},
        ),
        "model-file-changed_fail": (
            "One file has another digest.",
            refused(
                {**model, "files": {**files, "weights.bin": "00" * 32}}, "Mismatch", "file 'weights.bin'"
            ),
        ),
        "model-file-added_fail": (
            "One file more.",
            refused({**model, "files": {**files, "z": "00" * 32}}, "Mismatch", "it was added"),
        ),
        "model-file-missing_fail": (
            "One file less.",
            refused({**model, "files": {"weights.bin": files["weights.bin"]}}, "Mismatch", "it is missing"),
        ),
        "model-signature-other-media-type_fail": (
            "A bundle of version 0.2.",
            refused(
                {**model, "signature": REFERENCE_SIGNATURE.replace("v0.3+json", "v0.2+json")},
                "InvalidInput",
                "mediaType must be",
            ),
        ),
    }


def announcement(**changes: Any) -> Case:
    fields: Case = {
        "beacon": {"round": 41, "source": "drand/quicknet", "time": 1_800_003_600},
        "checkpoint_every": 6,
        "detect": "0.9",
        "format": "tallystick/audit-announcement/1",
        "fraction": "0.1",
        "log": {"origin": "log.example/runs", "root": "22" * 32, "seen_at": 1_800_000_000, "size": 7},
        "run_root": "11" * 32,
        "samples": 15,
        "steps": 200,
        "tree_size": 201,
    }
    return {**fields, **changes}


def draw(fields: Case, value: bytes = b"\x33" * 32, **changes: Any) -> str:
    steps, every, samples = fields["steps"], fields["checkpoint_every"], fields["samples"]
    count = -(-steps // every)
    seed = sha("tallystick/draw-seed/1", canonical(fields), value)
    order = tickets(sha("tallystick/draw-stream/1", seed, b"segments"), count)
    chosen = sorted(range(count), key=lambda i: (order[i], i))[:samples]
    positions = b"".join(i.to_bytes(8, "little") for i in chosen)
    document = {
        "announcement": fields,
        "beacon_value": value.hex(),
        "digest": sha("tallystick/draw-sample/1", seed, b"segments", positions).hex(),
        "format": "tallystick/audit-draw/1",
        "segments": [[i * every, min(i * every + every, steps)] for i in sorted(chosen)],
    }
    return canonical({**document, **changes}).decode()


def draw_cases() -> dict[str, tuple[str, Case]]:
    def case(fields: Case, segments: int, marked: int) -> Case:
        misses, all_samples = comb(segments - marked, fields["samples"]), comb(segments, fields["samples"])
        return {"operation": "audit-draw", "draw": draw(fields), "power": [all_samples - misses, all_samples]}

    good = announcement()
    early = {"round": 41, "source": "drand/quicknet", "time": 1_800_000_000}
    segments = json.loads(draw(good))["segments"]
    failing = {"operation": "audit-draw"}
    return {
        "fifteen-of-thirty-four": (
            "200 steps in segments of 6, the last of 2; 20 false steps fit into four.",
            case(good, 34, 4),
        ),
        "unpublished": ("A run in no log.", case(announcement(log=None), 34, 4)),
        "every-segment": (
            "A share below one segment is found for certain by all.",
            case(announcement(fraction="0.001", samples=34), 34, 1),
        ),
        "beacon-not-later_fail": (
            "The beacon speaks in the second of the publication.",
            refused(
                {**failing, "draw": draw(announcement(beacon=early))},
                "InvalidInput",
                "it must speak after that",
            ),
        ),
        "segment-left-out_fail": (
            "One segment less than drawn.",
            refused({**failing, "draw": draw(good, segments=segments[1:])}, "Mismatch", "leads to digest"),
        ),
        "other-digest_fail": (
            "A digest of another draw.",
            refused({**failing, "draw": draw(good, digest="00" * 32)}, "Mismatch", "leads to digest"),
        ),
        "more-samples-than-segments_fail": (
            "35 of 34.",
            refused({**failing, "draw": draw(announcement(samples=35))}, "InvalidInput", "35 of 34 segments"),
        ),
        "share-with-exponent_fail": (
            "A share in another spelling.",
            refused(
                {**failing, "draw": draw(announcement(fraction="1e-1"))},
                "InvalidInput",
                "decimal number in (0, 1]",
            ),
        ),
        "short-beacon_fail": (
            "31 bytes.",
            refused({**failing, "draw": draw(good, b"\x33" * 31)}, "InvalidInput", "beacon_value"),
        ),
        "whitespace_fail": (
            "The same value, spelt with spaces.",
            refused(
                {**failing, "draw": json.dumps(json.loads(draw(good)), sort_keys=True)},
                "InvalidInput",
                "not the canonical encoding",
            ),
        ),
    }


def bundle(held: list[tuple[str, str, bytes]], rest: bytes | None = None, **changes: Any) -> str:
    lines = [[kind, name, len(data), hashlib.sha256(data).hexdigest()] for kind, name, data in held]
    body = b"".join(data for _, _, data in held) if rest is None else rest
    return (canonical({"format": "tallystick/bundle/1", "members": lines, **changes}) + b"\n" + body).hex()


def bundle_cases() -> dict[str, tuple[str, Case]]:
    def own(kind: str, data: bytes) -> tuple[str, str, bytes]:
        return kind, hashlib.sha256(data).hexdigest(), data

    members = [("run", "11" * 32, b"{}"), own("statement", b"a"), own("verdict", b"bc")]
    good = {
        "operation": "bundle",
        "bundle": bundle(members),
        "members": [[k, n, d.hex()] for k, n, d in members],
    }
    line = ["run", "11" * 32, 2, hashlib.sha256(b"{}").hexdigest()]

    def wrong(reason: str, data: str, error: str = "InvalidInput") -> Case:
        return refused({"operation": "bundle", "bundle": data}, error, reason)

    return {
        "three-members": ("Three members, back to back.", good),
        "empty": ("No member.", {"operation": "bundle", "bundle": bundle([]), "members": []}),
        "byte-left-over_fail": (
            "A byte behind the last member.",
            wrong("the index speaks of", good["bundle"] + "00"),
        ),
        "byte-missing_fail": ("A byte short.", wrong("the index speaks of", good["bundle"][:-2])),
        "members-out-of-order_fail": ("A verdict before a run.", wrong("must ascend", bundle(members[::-1]))),
        "member-twice_fail": ("One run twice.", wrong("must ascend", bundle([members[0], *members]))),
        "unknown-kind_fail": (
            "A kind of a later version.",
            wrong("kind 'pickle' is not one of", bundle([own("pickle", b"x")])),
        ),
        "name-not-its-digest_fail": (
            "A statement under another's name.",
            wrong("must be named by its SHA-256", bundle([("statement", "00" * 32, b"a")])),
        ),
        "path-as-name_fail": (
            "A name that leads elsewhere.",
            wrong("64 lower-case", bundle([("run", "../../etc/passwd", b"{}")])),
        ),
        "huge-size_fail": (
            "A size of 2^62 bytes.",
            wrong("the index speaks of", bundle([], members=[[*line[:2], 2**62, line[3]]])),
        ),
        "negative-size_fail": (
            "A size below zero.",
            wrong("a member must be", bundle([], members=[[*line[:2], -2, line[3]]])),
        ),
        "other-bytes_fail": (
            "A member's last bit.",
            wrong("the index says", bundle(members, b"{}" + b"a" + b"bb"), "Mismatch"),
        ),
        "other-format_fail": (
            "Version 2.",
            wrong("format must be", bundle([], format="tallystick/bundle/2")),
        ),
        "unknown-field_fail": (
            "A field that the page does not have.",
            wrong("field 'note' is unknown", bundle([], note=1)),
        ),
        "no-newline_fail": ("An index without an end.", wrong("has no index", bundle([])[:-2])),
    }


class LetterRun:
    """A run of eight steps, committed every two, whose states are hashes of letters; ``own`` are those of one side alone."""

    STEPS, EVERY = 8, 2

    def __init__(self, side: str, own: range, loss: str | None = None) -> None:
        def state(done: int) -> str:
            return hashlib.sha256(f"{side if done in own else 'both'} {done}".encode()).hexdigest()

        self.state = [state(done) for done in range(self.STEPS + 1)]
        self.specification: Case = {
            "accumulation": 1, "checkpoint_every": self.EVERY, "format": "tallystick/run/2", "initial_state": self.state[0],
            "job": {
                "dataset_digest": None, "path": "letters.py", "settings": {}, "source_digest": "11" * 32,
                "program": {"distributions": {}, "files": [], "main": ""},
            },
            "notes": {"densified": [], "lifted_casts": []}, "policy": {"name": "fp64", "parameters": {"precision": 24}},
            "seed": 1, "sites": [], "steps": self.STEPS, "versions": {"torch": "2.13.0"}, "world_size": 1,
        }  # fmt: skip
        self.records: list[Case] = [
            {
                "batch": "22" * 32, "fingerprint": self.state[step + 1][:16], "log": "33" * 32, "log_bytes": 0,
                "loss": loss if step == 3 else None, "micro_batches": 1, "rank": 0, "schedule": [], "skipped": False,
                "state_root": self.state[step + 1] if (step + 1) % self.EVERY == 0 else None, "step": step,
            }
            for step in range(self.STEPS)
        ]  # fmt: skip
        texts = [b"tallystick/specification/1\0" + canonical(self.specification)]
        texts += [b"tallystick/step/1\0" + canonical(record) for record in self.records]
        self.leaves = [hashlib.sha256(b"\0" + text).digest() for text in texts]
        self.root = merkle_root(self.leaves).hex()
        self.statement = canonical(
            {
                "final_state": self.state[-1], "format": "tallystick/run-statement/1", "root": self.root,
                "steps": self.STEPS, "tree_size": self.STEPS + 1,
            }
        ).decode()  # fmt: skip

    def proof(self, step: int) -> str:
        path = [node.hex() for node in merkle_path(1 + step, self.leaves)]
        document = {
            "format": "tallystick/step-proof/1", "index": 1 + step, "path": path, "record": self.records[step],
            "tree_size": len(self.leaves), "world_size": 1,
        }  # fmt: skip
        return canonical(document).decode()


def merkle_root(leaves: list[bytes]) -> bytes:
    """RFC 9162, section 2.1.1."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + merkle_root(leaves[:half]) + merkle_root(leaves[half:])).digest()


def merkle_path(index: int, leaves: list[bytes]) -> list[bytes]:
    """RFC 9162, section 2.1.3.1."""
    if len(leaves) == 1:
        return []
    half = 1 << (len(leaves) - 1).bit_length() - 1
    if index < half:
        return [*merkle_path(index, leaves[:half]), merkle_root(leaves[half:])]
    return [*merkle_path(index - half, leaves[half:]), merkle_root(leaves[:half])]


def verdict_cases() -> dict[str, tuple[str, Case]]:
    """Both sides end in one state and differ after four to six steps; the game of bisection is written out by hand."""
    t, a = LetterRun("trainer", range(4, 7)), LetterRun("auditor", range(4, 7))
    moves = [
        [party, at, run.state[at]] for at in (2, 4, 3) for party, run in (("trainer", t), ("auditor", a))
    ]  # of checkpoints 0 to 6 they agree on 2 and not on 4; after step 3 they agree, so it is the one from 3 to 4
    document: Case = {
        "ends": [t.proof(5), a.proof(5)], "format": "tallystick/dispute-verdict/1", "loser": "trainer", "moves": moves,
        "objection": None, "operator": None, "outcome": "fault", "reason": "step 3: another batch", "records": None,
        "rounds": 3, "rounds_per_level": {"checkpoints": 2, "steps": 1}, "step": 3,
    }  # fmt: skip
    sides = {
        "run": t.statement,
        "auditor_run": a.statement,
        "specification": canonical(t.specification).decode(),
    }

    def case(**changes: Any) -> Case:
        return {
            "operation": "verdict",
            "verdict": canonical({**document, **changes}).decode(),
            **sides,
        }

    def wrong(reason: str, error: str = "Mismatch", **changes: Any) -> Case:
        return refused(case(**changes), error, reason)

    told, said = (
        LetterRun("both", range(0), loss) for loss in ("0x1.0000000000000p+0", "0x1.8000000000000p+0")
    )
    unplayed: Case = {"ends": None, "moves": [], "rounds": 0, "rounds_per_level": {}}
    objection: Case = {
        "element": 3, "format": "tallystick/log-objection/1", "rule": "1 of 1 entries lie farther than twice the band",
        "run": t.root, "site": "gradient of weight", "step": 1,
    }  # fmt: skip
    logged = {**unplayed, "objection": objection, "step": 1}
    recorded = {
        **case(**unplayed, records=[told.proof(3), said.proof(3)]),
        "run": told.statement,
        "auditor_run": said.statement,
    }
    other = LetterRun("other", range(4, 7))
    silent: Case = {"outcome": "forfeit", "step": None}
    return {
        "forfeit": (
            "The trainer fell silent after two rounds: the moves keep the rules and lead to no step.",
            case(**silent, moves=moves[:4]),
        ),
        "forfeit-within-a-round": (
            "Both were asked, and the auditor alone answered.",
            case(**silent, moves=[*moves[:4], moves[5]]),
        ),
        "forfeit-before-the-game": (
            "Nobody had claimed anything; both were silent.",
            case(**{**unplayed, **silent}, loser="none"),
        ),
        "forfeit-names-a-step_fail": (
            "Somebody was silent, and a step is ruled on.",
            wrong("what a ruling on a step would rest on", **{**silent, "step": 3}),
        ),
        "forfeit-and-an-objection_fail": (
            "Somebody was silent, and there is an objection.",
            wrong("what a ruling on a step would rest on", **{**silent, **unplayed}, objection=objection),
        ),
        "forfeit-of-the-judge_fail": (
            "A judge who was silent.",
            wrong("is said to have forfeited", **silent, loser="judge"),
        ),
        "forfeit-after-other-moves_fail": (
            "The first claims are missing.",
            wrong("claim must be at the midpoint", **silent, moves=moves[2:]),
        ),
        "forfeit-without-its-opening_fail": (
            "Moves, and not what the game began with.",
            wrong("not what the game began with", **silent, ends=None),
        ),
        "false-state-in-the-middle": (
            "Both sides end in one state; the game opens at the last checkpoint on which they differ.",
            case(),
        ),
        "records-differ": ("The states agree, the loss of step 3 does not.", recorded),
        "log-objection": ("The states agree, and the auditor objects to the log of step 1.", case(**logged)),
        "log-objection-before-the-game": (
            "The game leads to step 3, and the log of step 1 is ruled on.",
            case(objection=objection, step=1),
        ),
        "chain-behind-the-game": (
            "The game leads to step 3, which convicts nobody, and the trainer's own step 5 does.",
            case(chain=t.proof(5), step=5),
        ),
        "chain-without-a-game": (
            "The auditor did not follow a log; the trainer's own step 2 is false.",
            case(**unplayed, chain=t.proof(2), step=2),
        ),
        "chain-of-another-step_fail": (
            "The proof is of step 4, ruled on is step 5.",
            wrong("is of step 4", chain=t.proof(4), step=5),
        ),
        "chain-of-the-auditor_fail": (
            "The proof leads to the auditor's run.",
            wrong("stated root is", chain=a.proof(5), step=5),
        ),
        "chain-blames-the-auditor_fail": (
            "The auditor has claimed none of these steps.",
            wrong("convict the trainer or nobody", chain=t.proof(5), step=5, loser="auditor"),
        ),
        "chain-and-an-objection_fail": (
            "Two things that it may rest on.",
            wrong("one of them decided", chain=t.proof(5), step=5, objection=objection),
        ),
        "chain-null_fail": (
            "What is not there is left out.",
            wrong("chain", "InvalidInput", chain=None),
        ),
        "nothing-in-dispute": (
            "No step.",
            case(**unplayed, loser="none", outcome="agreement", reason="one state", step=None),
        ),
        "no-step-and-nothing-found-out": (
            "The auditor did not follow a log, and the judge finds nothing false.",
            case(
                **unplayed, loser="none", outcome="cannot_reproduce", reason="it went its own way", step=None
            ),
        ),
        "agreement-on-two-final-states_fail": (
            "Nothing is said to be in dispute, and the two runs end in different states.",
            {
                **wrong("says agreement", **unplayed, loser="none", outcome="agreement", step=None),
                "auditor_run": LetterRun("auditor", range(4, 9)).statement,
            },
        ),
        "fault-of-nobody_fail": (
            "Somebody is at fault, and nobody loses.",
            wrong("no ruling says 'none' and 'fault'", loser="none"),
        ),
        "acceptable-and-a-loser_fail": (
            "Honest arithmetic leads to either state, and the auditor loses.",
            wrong(
                "no ruling says 'auditor' and 'both_acceptable'", loser="auditor", outcome="both_acceptable"
            ),
        ),
        "agreement-on-a-step_fail": (
            "Nothing is in dispute, and a step is ruled on.",
            wrong("no ruling says 'none' and 'agreement'", loser="none", outcome="agreement"),
        ),
        "both-lose-by-records_fail": (
            "Neither side is said to have opened a state, and records are ruled on.",
            {
                **recorded,
                **refused(
                    case(**unplayed, records=[told.proof(3), said.proof(3)], loser="both"),
                    "Mismatch",
                    "both lose where",
                ),
                "run": told.statement,
                "auditor_run": said.statement,
            },
        ),
        "neither-opens-the-state": (
            "The game leads to step 3, and neither side opens the state before it.",
            case(loser="both", reason="nobody opens the state before step 3"),
        ),
        "first-state": (
            "The state in which both runs begin is not the job's: nothing is played, the trainer loses at step 0.",
            case(**unplayed, reason="the first state is not the job's", step=0),
        ),
        "first-state-blames-the-auditor_fail": (
            "Both runs begin in one state, which the trainer committed to.",
            wrong("nothing shows why", **unplayed, loser="auditor", step=0),
        ),
        "no-step-and-a-loser_fail": (
            "Nobody disputes anything, and the trainer loses.",
            wrong("names no step", **unplayed, step=None),
        ),
        "order-of-two-ranks_fail": (
            "The order is of two ranks, the proofs of one.",
            {
                **wrong("number of ranks"),
                "specification": canonical({**t.specification, "world_size": 2}).decode(),
            },
        ),
        "no-step-and-an-objection_fail": (
            "Nobody disputes anything, and there is an objection.",
            wrong(
                "holds what one would rest on",
                **unplayed,
                loser="none",
                outcome="agreement",
                step=None,
                objection=objection,
            ),
        ),
        "objection-beyond-the-run_fail": (
            "An objection to the log of step 8 of a run of eight steps.",
            wrong("rules on step 8 of 8", **{**logged, "objection": {**objection, "step": 8}, "step": 8}),
        ),
        "records-of-another-step_fail": (
            "The records of step 3 differ, and step 2 is ruled on.",
            {
                **recorded,
                **refused(
                    case(**unplayed, records=[told.proof(3), said.proof(3)], step=2),
                    "Mismatch",
                    "or step 2 is another",
                ),
                "run": told.statement,
                "auditor_run": said.statement,
            },
        ),
        "another-step_fail": ("Step 2.", wrong("its moves lead to step 3", step=2)),
        "no-ground_fail": ("A step, and nothing that leads to it.", wrong("nothing shows why", **unplayed)),
        "move-missing_fail": ("One answer less.", wrong("do not lead to one step", moves=moves[:-1])),
        "another-runs-end_fail": (
            "The proof of another run's record.",
            wrong("leads to root", ends=[other.proof(5), a.proof(5)]),
        ),
        "ends-agree_fail": (
            "The game opens at a checkpoint on which both agree.",
            wrong("nothing is disputed", ends=[t.proof(1), a.proof(1)]),
        ),
        "end-is-no-checkpoint_fail": (
            "The record of a step after which nothing is committed.",
            wrong("no checkpoint", ends=[t.proof(4), a.proof(4)]),
        ),
        "records-agree_fail": (
            "Two records that say the same.",
            wrong("do not differ", **unplayed, records=[t.proof(0), a.proof(0)], step=0),
        ),
        "objection-to-another-run_fail": (
            "An objection to the log of another run.",
            wrong(
                "the objection is to step 1 of run", **{**logged, "objection": {**objection, "run": a.root}}
            ),
        ),
        "objection-after-the-states-part_fail": (
            "The states before step 4 are not agreed on.",
            wrong("agree on states up to step 3", objection={**objection, "step": 4}, step=4),
        ),
        "two-grounds_fail": (
            "Records and an objection.",
            wrong("one of them decided", **logged, records=[t.proof(1), a.proof(1)]),
        ),
        "objection-with-empty-site_fail": (
            "A site without a name.",
            wrong("site must have", "InvalidInput", **{**logged, "objection": {**objection, "site": ""}}),
        ),
        "field-missing_fail": (
            "A verdict that does not say where its game began.",
            refused(
                {
                    "operation": "verdict",
                    "verdict": canonical({k: v for k, v in document.items() if k != "ends"}).decode(),
                    **sides,
                },
                "InvalidInput",
                "field 'ends' is missing",
            ),
        ),
    }


def exchange_cases() -> dict[str, tuple[str, Case]]:
    """One question with a part, for the state after four steps, and the trainer's signed answer with one."""
    keys = {
        party: Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)
        for party, n in (("trainer", 2), ("auditor", 1), ("referee", 3))
    }
    public = {
        party: bytes.fromhex("302a300506032b6570032100") + key.public_key().public_bytes_raw()
        for party, key in keys.items()
    }
    named: Case = {
        "auditor_run": "22" * 32,
        "keys": {party: hashlib.sha256(public[party]).hexdigest() for party in ("auditor", "trainer")},
        "level": "operators", "nonce": "44" * 32, "objection": "55" * 32, "run": "11" * 32,
    }  # fmt: skip
    dispute = sha("tallystick/dispute-exchange/1", canonical(named)).hex()
    brought, answered = b"what the other party gave", b"bytes of an entry"

    def parts(*each: bytes) -> list[Any]:
        return [[len(part), hashlib.sha256(part).hexdigest()] for part in each]

    asked: Case = {
        "auditorRun": "22" * 32, "body": {"index": 4, "names": ["model/w"]}, "deadline": 1_800_000_000, "dispute": dispute,
        "key": hashlib.sha256(public["trainer"]).hexdigest(), "kind": "entries", "most": len(answered), "objection": "55" * 32,
        "parts": parts(brought), "party": "trainer", "round": 3,
    }  # fmt: skip

    def about_run(kind: str, predicate: Case, **more: Any) -> bytes:
        return canonical({
            "_type": "https://in-toto.io/Statement/v1", "predicate": predicate,
            "predicateType": f"https://tallystick/{kind}/v0.1",
            "subject": [{"digest": {"tallystickRun": "11" * 32}, "name": "run"}], **more,
        })  # fmt: skip

    said: Case = {
        "body": {}, "dispute": dispute, "parts": parts(answered), "party": "trainer",
        "question": hashlib.sha256(about_run("dispute-question", asked)).hexdigest(), "round": 3,
    }  # fmt: skip

    def question(
        given: bytes = brought,
        key: str = "referee",
        form: str = "dispute-question",
        more: Case | None = None,
        **changes: Any,
    ) -> bytes:
        signed = envelope(about_run(form, {**asked, **changes}, **(more or {})), keys[key])
        return signed.encode() + b"\n" + given

    def answer(
        given: bytes = answered, key: str = "trainer", kind: str = "dispute-answer", **changes: Any
    ) -> bytes:
        return envelope(about_run(kind, {**said, **changes}), keys[key]).encode() + b"\n" + given

    def case(asking: bytes | None = None, answering: bytes | None = None) -> Case:
        return {
            "operation": "exchange", "question": (question() if asking is None else asking).hex(),
            "answer": (answer() if answering is None else answering).hex(),
            "key": public["trainer"].hex(), "referee": public["referee"].hex(),
        }  # fmt: skip

    def wrong(reason: str, error: str = "InvalidInput", **files: bytes) -> Case:
        return refused(case(**files), error, reason)

    later = hashlib.sha256(about_run("dispute-question", {**asked, "deadline": None})).hexdigest()
    twice = {
        "subject": [
            {"digest": {"tallystickRun": digit * 32}, "name": name}
            for digit, name in (("11", "run"), ("33", "x"))
        ]
    }
    return {
        "entries": ("A question that brings a part, and its answer with one.", {**case(), "dispute": named}),
        "cannot": (
            "The party says why it cannot answer.",
            case(answering=answer(b"", body={"cannot": "the file is missing"}, parts=[])),
        ),
        "question-of-unknown-kind_fail": ("A question for a key.", wrong("kind 'key'", asking=question(kind="key"))),
        "question-cut-short_fail": ("The part lacks a byte.", wrong("25 bytes of parts, 24", asking=question(brought[:-1]))),
        "question-with-another-part_fail": (
            "A part of the same length.", wrong("part 0", "Mismatch", asking=question(brought[::-1])),
        ),
        "question-without-line_fail": ("No line feed.", wrong("must begin with a line", asking=b"{}")),
        "question-of-the-other-party_fail": (
            "The auditor's key.", wrong("is not signed by", "Mismatch", asking=question(key="auditor")),
        ),
        "question-of-another-type_fail": (
            "A ruling is no question.", wrong("predicateType must be", asking=question(form="dispute-ruling")),
        ),
        "question-about-more_fail": (
            "Beside the run another subject, which no answer would name.",
            wrong("about the run alone", asking=question(more=twice)),
        ),
        "answer-of-the-other-party_fail": (
            "The auditor's key.", wrong("is not signed by", "Mismatch", answering=answer(key="auditor")),
        ),
        "answer-to-another-question_fail": (
            "The same question without a deadline.", wrong("is to question", "Mismatch", answering=answer(question=later)),
        ),
        "answer-to-another-round_fail": (
            "It names the question, and another round.", wrong("is to round '4'", "Mismatch", answering=answer(round=4)),
        ),
        "answer-to-a-round-that-is-no-integer_fail": (
            "3.0 is not 3, though some languages hold them for equal.",
            wrong("is to round '3.0'", "Mismatch", answering=answer(round=3.0)),
        ),
        "answer-in-another-dispute_fail": (
            "It names the question, and another dispute.",
            wrong("is to dispute", "Mismatch", answering=answer(dispute="33" * 32)),
        ),
        "answer-of-another-type_fail": (
            "A signed move is no answer.", wrong("predicateType must be", answering=answer(kind="dispute-move")),
        ),
        "answer-longer-than-asked_fail": (
            "One byte more than was asked for.",
            wrong("at most 17 were asked for", answering=answer(answered + b"x", parts=parts(answered + b"x"))),
        ),
        "answer-with-more-bytes_fail": (
            "A byte that is not announced.", wrong("announces 17 bytes of parts, 18", answering=answer(answered + b"x")),
        ),
        "answer-of-terabytes_fail": (
            "It announces what is not there.",
            wrong("at most 17 were asked for", answering=answer(parts=[[1 << 50, "00" * 32]])),
        ),
        "answer-with-another-part_fail": (
            "A part of the same length.", wrong("part 0", "Mismatch", answering=answer(answered[::-1])),
        ),
    }  # fmt: skip


if __name__ == "__main__":
    write(Path(sys.argv[1]))
