"""Write the test vectors of chip logs.

CBOR, COSE and the chain are written out here, straight from spec/chip-log.md; nothing imports the package. Only
the curves are the library's, with signatures that are the same every time (Ed25519, RFC 6979).

    python scripts/vectors_chip.py vectors
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, utils
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from vector_cases import Case, write_cases

RECORD = "application/vnd.tallystick.chip-record+cbor"
TAG = b"tallystick/chip-record/1\0"
UEID = b"\x01" + bytes(range(16))
FIRMWARE = hashlib.sha256(b"firmware 1").digest()
OWNER = hashlib.sha256(b"owner").digest()
RUN = hashlib.sha256(b"run").digest()
DAY = 86_400_000
START = 1_700_000_000_000


def write(root: Path) -> None:
    """Write every case below ``root``, the vectors folder; what stood there goes."""
    write_cases(root / "chip-log", cases())


def head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes([major << 5 | code]) + number.to_bytes(size, "big")
    raise ValueError(number)


def cbor(value: Any) -> bytes:
    match value:
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int():
            return head(0, value) if value >= 0 else head(1, -1 - value)
        case bytes():
            return head(2, len(value)) + value
        case str():
            return head(3, len(value.encode())) + value.encode()
        case list():
            return head(4, len(value)) + b"".join(map(cbor, value))
        case dict():
            items = sorted((cbor(key), cbor(item)) for key, item in value.items())
            return head(5, len(items)) + b"".join(key + item for key, item in items)
    raise TypeError(value)


class Key:
    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        if name == "ed25519":
            self.private: Any = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
        else:
            self.private = ec.derive_private_key(seed + 10**30, ec.SECP384R1())
        self.spki = self.private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def sign1(self, payload: bytes, purpose: str = RECORD, **change: Any) -> bytes:
        algorithm = -8 if self.name == "ed25519" else -35
        key_id = hashlib.sha256(self.spki).digest()
        protected = change.get("protected", cbor({1: algorithm, 3: purpose, 4: key_id}))
        covered = cbor(["Signature1", protected, b"", payload])
        if self.name == "ed25519":
            signature = self.private.sign(covered)
        else:
            der = self.private.sign(covered, ec.ECDSA(hashes.SHA384(), deterministic_signing=True))
            signature = b"".join(part.to_bytes(48, "big") for part in utils.decode_dss_signature(der))
        signature = change.get("signature", signature)
        return b"\xd2" + cbor([protected, change.get("unprotected", {}), payload, signature])

    def digest(self, payload: bytes) -> bytes:
        protected = cbor(
            {1: -8 if self.name == "ed25519" else -35, 3: RECORD, 4: hashlib.sha256(self.spki).digest()}
        )
        return hashlib.sha384(TAG + cbor(["Signature1", protected, b"", payload])).digest()


class Log:
    """A chip that writes records; ``change`` replaces fields of one."""

    def __init__(self, key: Key, mode: str = "local", collector: bytes = b"") -> None:
        self.key, self.seq, self.previous, self.boots = key, 0, bytes(48), 0
        self.active, self.up, self.wall = 0, 0, START
        self.firmware: list[Any] = [FIRMWARE, 3, False]
        self.frames: list[bytes] = []
        self.digests: list[bytes] = []
        self.add(0, ["maker", "model", "simulated", OWNER, mode, collector])

    def add(self, kind: int, body: list[Any], after: int = 0, **change: Any) -> None:
        self.wall, self.active, self.up = self.wall + after, self.active + after, self.up + after
        if kind == 2:
            self.boots, self.up = self.boots + 1, 0
        fields = {
            1: self.seq, 2: self.previous, 3: UEID, 4: self.firmware,
            5: [self.boots, self.up, self.active, self.wall], 6: kind, 7: 100, 8: body,
        }  # fmt: skip
        fields |= {int(name[1:]): value for name, value in change.items()}
        payload = cbor(fields)
        self.frames.append(self.key.sign1(payload))
        self.previous = self.key.digest(payload)
        self.digests.append(self.previous)
        self.seq += 1

    def snapshot(self, after: int = 10 * DAY, run: bytes = b"", flags: int = 0, **change: Any) -> None:
        root = hashlib.sha256(b"root %d" % self.seq).digest()
        layout = hashlib.sha256(b"layout").digest()
        body = ["sha256-salted-pages/1", 4096, 3, 10000, root, layout, run, flags]
        self.add(1, body, after, **change)


def honest(key: Key) -> Log:
    log = Log(key)
    log.add(2, [bytes(16), 0, 0])
    log.add(7, [True, hashlib.sha256(b"self-test").digest()])
    log.add(3, [RUN])
    for _ in range(3):
        log.snapshot(run=RUN)
    update = hashlib.sha256(b"firmware 2").digest()
    log.add(4, [update, 4], DAY)
    log.firmware = [update, 4, False]
    log.add(2, [bytes(range(16)), 17, 0])
    log.add(5, [OWNER, hashlib.sha256(b"another owner").digest()], DAY)
    log.snapshot()
    return log


def case(log: Log, findings: list[list[Any]] | None = None, **more: Any) -> Case:
    return {
        "key": log.key.spki.hex(),
        "frames": [frame.hex() for frame in log.frames],
        "known": [],
        "findings": findings or [],
        **more,
    }


def payload_of(frame: bytes) -> bytes:
    """The payload of a frame: the third item of its array."""
    at = 2

    def item(at: int) -> tuple[bytes, int]:
        short = frame[at] & 31
        size = {24: 1, 25: 2}.get(short, 0)
        length = int.from_bytes(frame[at + 1 : at + 1 + size], "big") if size else short
        start = at + 1 + size
        return frame[start : start + length], start + length

    _, at = item(at)
    return item(at + 1)[0]


def cases() -> dict[str, tuple[str, Case]]:
    ed, es = Key("ed25519", 7), Key("es384", 7)
    found: dict[str, tuple[str, Case]] = {}
    log = honest(ed)
    found["honest"] = ("Every kind of record but an acknowledgement, signed with Ed25519.", case(log))
    heads = [[log.seq - 1, log.digests[-1].hex()], [4, log.digests[4].hex()]]
    found["honest_known"] = (
        "The same log, two of whose records are known from elsewhere.",
        case(log, known=heads),
    )
    found["honest_es384"] = ("The same events signed with ES384 (r and s, 48 bytes each).", case(honest(es)))
    remote = Log(ed, "remote", hashlib.sha256(b"collector").digest())
    remote.snapshot()
    remote.add(6, [1, hashlib.sha256(b"receipt").digest()])
    found["acknowledged"] = ("A chip in remote mode whose snapshot was acknowledged.", case(remote))

    cut = case(log, [[11, 10, "violation"]], known=[[10, log.digests[10].hex()]])
    cut["frames"] = cut["frames"][:-1]
    found["truncated"] = ("The last record is missing; an inspector has seen it.", cut)
    late = case(log, [[3, 2, "violation"]])
    late["frames"] = late["frames"][2:]
    found["beginning_missing"] = ("The first two records are missing.", late)
    gap = case(log, [[5, 6, "violation"]])
    del gap["frames"][5]
    found["gap"] = ("One record is missing in the middle.", gap)
    twice = case(log, [[5, 5, "violation"]])
    twice["frames"].insert(6, twice["frames"][5])
    found["repeated"] = ("One record stands there twice.", twice)
    other = Log(ed)
    other.add(2, [b"\1" * 16, 0, 0])
    found["fork"] = (
        "Another record 1 is known from elsewhere.",
        case(other, [[12, 1, "violation"]], known=[[1, log.digests[1].hex()]]),
    )
    broken = Log(ed)
    broken.add(2, [bytes(16), 0, 0], _2=bytes(48))
    found["broken_chain"] = (
        "Record 1 names zeros where the genesis record's digest belongs.",
        case(broken, [[6, 1, "violation"]]),
    )
    rebooted = Log(ed)
    rebooted.add(2, [bytes(16), 0, 0], _5=[3, 0, 0, START])
    found["boot_count"] = ("The boot count goes from 0 to 3.", case(rebooted, [[7, 1, "violation"]]))
    back = Log(ed)
    back.add(2, [bytes(16), 0, 0])
    back.snapshot(DAY)
    back.add(7, [True, bytes(32)], _5=[1, DAY // 2, DAY, START + DAY])
    found["uptime_back"] = ("Uptime falls without a boot.", case(back, [[8, 3, "violation"]]))
    fast = Log(ed)
    fast.add(2, [bytes(16), 0, 0])
    fast.add(7, [True, bytes(32)], _5=[1, 2 * DAY, 2 * DAY, START + DAY])
    found["clock"] = ("Two days of uptime in one day of wall clock.", case(fast, [[9, 2, "violation"]]))
    down = Log(ed)
    down.firmware = [FIRMWARE, 2, False]
    down.add(2, [bytes(16), 0, 0])
    found["firmware_rollback"] = (
        "The security version falls, without an update record.", case(down, [[10, 1, "violation"], [10, 1, "violation"]])
    )  # fmt: skip
    storm = Log(ed)
    for i in range(12):
        storm.add(2, [bytes([i]) * 16, 0, 0], 3_600_000)
    found["reboot_storm"] = ("Twelve boots in a day.", case(storm, [[13, None, "violation"]]))
    quiet = Log(ed)
    quiet.add(2, [bytes(16), 0, 0])
    quiet.add(7, [True, bytes(32)], 200 * DAY)
    found["suppressed"] = (
        "No snapshot in 200 days in use at 0.1 a day.",
        case(quiet, [[16, None, "violation"]]),
    )
    early = Log(ed)
    early.snapshot(DAY, run=RUN)
    found["run_not_committed"] = (
        "A snapshot names a run that was not committed to.",
        case(early, [[18, 1, "violation"]]),
    )
    alone = Log(ed, "remote", hashlib.sha256(b"collector").digest())
    alone.snapshot(DAY)
    alone.snapshot(DAY)
    found["unacknowledged"] = (
        "Remote mode, and a snapshot without a receipt.",
        case(alone, [[21, 1, "unknown"]]),
    )

    first = payload_of(log.frames[0])

    def refused(name: str, why: str, frame: bytes, reason: str) -> None:
        found[f"{name}_fail"] = (why, {"key": ed.spki.hex(), "frame": frame.hex(), "reason": reason})

    good = log.frames[0]
    refused("trailing", "A byte follows the record.", good + b"\0", "follow the value")
    refused("cut", "The last byte is missing.", good[:-1], "ends within")
    refused("untagged", "The COSE tag 18 is missing.", good[1:], "no COSE_Sign1")
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    refused("signature", "One bit of the signature is turned.", flipped, "signature is not of key")
    refused("other_key", "Signed with another chip's key.", Key("ed25519", 8).sign1(first), "must be of key")
    refused(
        "purpose",
        "Signed as a collector's receipt.",
        ed.sign1(first, "application/vnd.tallystick.receipt+cbor"),
        "was signed as",
    )
    refused(
        "unprotected",
        "Something stands in the unprotected header.",
        ed.sign1(first, unprotected={4: b"x"}),
        "must be [protected",
    )
    header = cbor({1: -35, 3: RECORD, 4: hashlib.sha256(ed.spki).digest()})
    refused(
        "algorithm",
        "The header names ES384, the key is Ed25519.",
        ed.sign1(first, protected=header),
        "is not that of the key",
    )
    long = first.replace(b"\x07\x18\x64", b"\x07\x19\x00\x64")
    assert long != first
    refused(
        "long_integer",
        "The rate 100 is written in three bytes instead of two.",
        ed.sign1(long),
        "deterministic encoding",
    )
    swapped = first[:1] + first[3:] + first[1:3]
    refused("key_order", "The map's first key stands last.", ed.sign1(swapped), "deterministic encoding")
    endless = b"\xbf" + first[1:] + b"\xff"
    refused("indefinite", "The map has an indefinite length.", ed.sign1(endless), "definite length")
    refused("huge", "An array declares 2**62 items.", ed.sign1(b"\x9b" + (2**62).to_bytes(8, "big")), "items")
    refused("deep", "Arrays nested 200 deep.", ed.sign1(b"\x81" * 200 + b"\0"), "nested deeper")
    refused(
        "float",
        "The rate is a floating-point number.",
        ed.sign1(first.replace(b"\x07\x18\x64", b"\x07\xf9\x56\x40")),
        "tag, float",
    )
    refused(
        "missing_field",
        "The rate is missing.",
        ed.sign1(b"\xa7" + first[1:].replace(b"\x07\x18\x64", b"")),
        "keys 1 to 8",
    )
    plain = {1: 0, 2: bytes(48), 3: UEID, 4: [FIRMWARE, 3, False], 5: [0, 0, 0, START], 6: 0, 7: 100,
             8: ["maker", "model", "simulated", OWNER, "local", b""]}  # fmt: skip
    assert cbor(plain) == first
    refused("agent", "The agent is of a kind that does not exist.",
            ed.sign1(cbor(plain | {8: ["maker", "model", "honest", OWNER, "local", b""]})), "agent must be one of")  # fmt: skip
    refused("kind", "Kind 8 does not exist.", ed.sign1(cbor(plain | {6: 8})), "kind 8 is unknown")
    refused(
        "not_genesis", "Counter 0 of another kind.", ed.sign1(cbor(plain | {6: 3, 8: [RUN]})), "go together"
    )
    refused("ueid", "A UEID of six bytes.", ed.sign1(cbor(plain | {3: UEID[:6]})), "7 to 33 bytes")
    snapshot = plain | {1: 1, 6: 1}
    body = ["sha256-salted-pages/1", 4096, 3, 10000, RUN, RUN, b"", 0]
    refused("pages", "10,000 bytes in two pages of 4,096.",
            ed.sign1(cbor(snapshot | {8: [*body[:2], 2, *body[3:]]})), "make no 2 pages")  # fmt: skip
    refused(
        "flags",
        "A flag that does not exist.",
        ed.sign1(cbor(snapshot | {8: [*body[:7], 64]})),
        "out of range",
    )
    refused(
        "flag_type",
        "The flags are true instead of 1.",
        ed.sign1(cbor(snapshot | {8: [*body[:7], True]})),
        "body of a snapshot",
    )
    refused("page_algorithm", "Pages hashed in a way that does not exist.",
            ed.sign1(cbor(snapshot | {8: ["md5-pages/1", *body[1:]]})), "page algorithm")  # fmt: skip
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]))
