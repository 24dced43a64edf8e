"""Write the test vectors of chip registries: logs with their roots, and proofs of the committed map.

Deeds, signatures' messages, buckets and roots are put together here from hashlib and json, straight from
spec/registry.md; nothing here imports the package. Only the Ed25519 arithmetic is a library's.

    python scripts/vectors_registry.py vectors
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from vector_cases import Case, canonical, write_cases

A, B, C = ("0102030405060708a1", "0102030405060708b2", "0102030405060708c3")


def write(root: Path) -> None:
    """Write every case below ``root``, the vectors folder; what stood there goes."""
    write_cases(root / "registry", registry_cases())
    write_cases(root / "registry-map", map_cases())


def framed(tag: str, *parts: bytes) -> bytes:
    return (
        bytes([len(tag)]) + tag.encode() + b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    )


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def tree(leaves: list[bytes]) -> bytes:
    """The RFC 6962 root over leaf hashes, by its recursive definition."""
    if not leaves:
        return sha(b"")
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return sha(b"\x01" + tree(leaves[:split]) + tree(leaves[split:]))


def path(leaves: list[bytes], at: int) -> list[bytes]:
    if len(leaves) == 1:
        return []
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    if at < split:
        return [*path(leaves[:split], at), tree(leaves[split:])]
    return [*path(leaves[split:], at - split), tree(leaves[:split])]


# ---------------------------------------------------------------------------------------------------- maps


def prefix(key: bytes) -> int:
    return int.from_bytes(sha(framed("tallystick/map-key/1", key))[:4], "big")


def buckets_of(entries: dict[bytes, bytes]) -> tuple[int, list[list[tuple[bytes, bytes]]]]:
    depth = 0
    while len(entries) > 8 * 2**depth:
        depth += 1
    buckets: list[list[tuple[bytes, bytes]]] = [[] for _ in range(2**depth)]
    for key in sorted(entries):
        buckets[prefix(key) >> (32 - depth)].append((key, entries[key]))
    return depth, buckets


def leaf(items: list[tuple[bytes, bytes]]) -> bytes:
    return sha(b"\x00" + framed("tallystick/map-bucket/1", *(part for item in items for part in item)))


def root_of(depth: int, size: int, top: bytes) -> bytes:
    return sha(framed("tallystick/map/1", bytes([depth]), size.to_bytes(8, "little"), top))


def map_root(entries: dict[bytes, bytes]) -> bytes:
    depth, buckets = buckets_of(entries)
    return root_of(depth, len(entries), tree([leaf(bucket) for bucket in buckets]))


def lookup(entries: dict[bytes, bytes], key: bytes, **changes: Any) -> Case:
    depth, buckets = buckets_of(entries)
    leaves = [leaf(bucket) for bucket in buckets]
    at = prefix(key) >> (32 - depth)
    proof = {
        "depth": depth, "size": len(entries), "root": tree(leaves).hex(), "bucket": at,
        "items": [[k.hex(), v.hex()] for k, v in buckets[at]], "path": [node.hex() for node in path(leaves, at)],
    }  # fmt: skip
    value = entries.get(key)
    return {
        "key": key.hex(), "root": map_root(entries).hex(), "proof": {**proof, **changes},
        "value": None if value is None else value.hex(),
    }  # fmt: skip


def refused_lookup(reason: str, error: str, case: Case, **changes: Any) -> Case:
    found = {name: value for name, value in case.items() if name != "value"} | changes
    return {**found, "error": error, "reason": reason}


def map_cases() -> dict[str, tuple[str, Case]]:
    few = {f"key-{n}".encode(): f"value {n}".encode() for n in range(3)}
    many = {f"key-{n}".encode(): f"value {n}".encode() for n in range(40)}
    one, there = lookup(few, b"key-1"), lookup(many, b"key-7")
    items = there["proof"]["items"]
    nowhere = b"key-99"
    return {
        "one-bucket": ("Three entries: one bucket, no path.", one),
        "several-buckets": ("Forty entries: eight buckets.", there),
        "absent": ("The bucket in which the key would lie, without it.", lookup(many, nowhere)),
        "empty-map": ("No entry at all.", lookup({}, b"key-1")),
        "second-value_fail": (
            "One key with two values.",
            refused_lookup(
                "must be in ascending order, none twice", "InvalidInput", there,
                proof={**there["proof"], "items": sorted([*items, [b"key-7".hex(), b"another".hex()]])},
            ),
        ),
        "other-value_fail": (
            "Another value.",
            refused_lookup(
                "leads to root", "Mismatch", there,
                proof={**there["proof"], "items": [[k, v if k != b"key-7".hex() else b"x".hex()] for k, v in items]},
            ),
        ),
        "hidden_fail": (
            "A bucket without one of its keys.",
            refused_lookup(
                "leads to root", "Mismatch", there,
                proof={**there["proof"], "items": [item for item in items if item[0] != b"key-7".hex()]},
            ),
        ),
        "other-bucket_fail": (
            "The bucket of another key: absence shown in the wrong place.",
            refused_lookup("the key lies in", "InvalidInput", lookup(many, nowhere), key=b"key-7".hex()),
        ),
        "stray-key_fail": (
            "A bucket with a key that lies elsewhere.",
            refused_lookup(
                "holds a key of another bucket", "InvalidInput", there,
                proof={**there["proof"], "items": sorted([*items, [nowhere.hex(), ""]])},
            ),
        ),
        "other-size_fail": (
            "One entry more than the root says.",
            refused_lookup("map proof: leads to root", "Mismatch", there, proof={**there["proof"], "size": 41}),
        ),
        "other-depth_fail": (
            "A depth that the size does not have.",
            refused_lookup("40 entries have 3", "InvalidInput", there, proof={**there["proof"], "depth": 4}),
        ),
        "short-path_fail": (
            "A node is missing.",
            refused_lookup(
                "needs 3 nodes, got 2", "InvalidInput", there,
                proof={**there["proof"], "path": there["proof"]["path"][:-1]},
            ),
        ),
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------- registries


def key_of(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(sha(name.encode()))


def spki(name: str) -> str:
    return key_of(name).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo).hex()


class Log:
    """Deeds one after the other; each has its number as time and nonce."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.registry = ""
        self.number = 0
        opening = self.add("open", {"name": "example", "key": spki("registry")}, "registry")
        self.registry = sha(framed("tallystick/registry-deed/1", opening)).hex()
        for name, roles in (("maker", ["maker", "owner"]), ("north", ["owner"]), ("south", ["owner"])):
            self.add("party", {"name": name, "roles": roles, "key": spki(name)}, "registry")
        self.add(
            "model",
            {"name": "gx1", "vendor": "maker", "flop_per_chip_day": "86400000000000000000"},
            "registry",
        )
        self.add("fab", {"maker": "maker", "model": "gx1", "chips": [A, B, C]}, "maker")
        rows = [[A, "SN-1", "aa" * 32], [B, "SN-2", "bb" * 32]]
        self.add("package", {"maker": "maker", "chips": rows}, "maker")

    def deed(self, kind: str, body: Case, /, **changes: Any) -> Case:
        self.number += 1
        return {
            "format": "tallystick/registry-deed/1", "kind": kind, "time": self.number,
            "nonce": f"{self.number:032x}", "registry": self.registry, "body": body, **changes,
        }  # fmt: skip

    def line(self, deed: Case, *signers: str, **keys: str) -> bytes:
        payload, kind = canonical(deed), b"application/vnd.tallystick.registry-deed+json"
        message = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
        signed = [[name, key_of(keys.get(name, name)).sign(message).hex()] for name in sorted(signers)]
        return canonical({"deed": deed, "signatures": signed})

    def add(self, kind: str, body: Case, *signers: str) -> bytes:
        deed = self.deed(kind, body)
        self.lines.append(self.line(deed, *signers))
        return canonical(deed)


def chip(name: str, entry: int, owner: str = "maker", **changes: Any) -> bytes:
    record = {
        "chip": name, "model": "gx1", "maker": "maker", "serial": "", "key": "", "board": "", "owner": owner,
        "custodian": owner, "status": "fabricated", "exempt_until": 0, "inspected": 0, "entry": entry,
    }  # fmt: skip
    return canonical({**record, **changes})


def state(chips: dict[str, bytes]) -> bytes:
    entries = {f"chip/{name}".encode(): record for name, record in chips.items()}
    for serial, key, name in (("SN-1", "aa" * 32, A), ("SN-2", "bb" * 32, B)):
        entries |= {f"serial/{serial}".encode(): name.encode(), f"key/{key}".encode(): name.encode()}
    parties = {"registry": ["authority"], "maker": ["maker", "owner"], "north": ["owner"], "south": ["owner"]}
    for name, roles in parties.items():
        entries[f"party/{name}".encode()] = canonical({"roles": roles, "key": spki(name)})
    entries[b"model/gx1"] = canonical({"vendor": "maker", "flop_per_chip_day": "86400000000000000000"})
    return map_root(entries)


def accepted(log: Log, chips: dict[str, bytes]) -> Case:
    return {
        "lines": [line.decode() for line in log.lines],
        "registry": log.registry,
        "log": tree([sha(b"\x00" + line) for line in log.lines]).hex(),
        "state": state(chips).hex(),
    }


def refused(error: str, reason: str, line: bytes, log: Log | None = None) -> Case:
    lines = [*(log or Log()).lines, line]
    return {"lines": [each.decode() for each in lines], "error": error, "reason": reason}


def registry_cases() -> dict[str, tuple[str, Case]]:
    packaged = {
        A: chip(A, 6, serial="SN-1", key="aa" * 32, status="active"),
        B: chip(B, 6, serial="SN-2", key="bb" * 32, status="active"),
        C: chip(C, 5),
    }
    sold = Log()
    sold.add("transfer", {"from": "maker", "to": "north", "chips": [A]}, "maker", "north")
    after_sale = {**packaged, A: chip(A, 7, "north", serial="SN-1", key="aa" * 32, status="active")}
    lost = Log()
    lost.lines = list(sold.lines)
    lost.number = sold.number
    lost.add("loss", {"owner": "north", "chips": [A], "reason": "a pallet is gone"}, "north")
    after_loss = {**after_sale, A: chip(A, 8, "north", serial="SN-1", key="aa" * 32, status="lost")}

    def sale(log: Log, chips: list[str], giver: str = "maker", taker: str = "north", **changes: Any) -> Case:
        return log.deed("transfer", {"from": giver, "to": taker, "chips": chips}, **changes)

    def refuse(
        reason: str,
        error: str = "ProtocolViolation",
        *,
        base: Log | None = None,
        signers: str = "maker north",
        chips: tuple[str, ...] = (A,),
        giver: str = "maker",
        taker: str = "north",
        keys: dict[str, str] | None = None,
        **changes: Any,
    ) -> Case:
        log = base or Log()
        deed = sale(log, list(chips), giver, taker, **changes)
        return refused(error, reason, log.line(deed, *signers.split(), **(keys or {})), log)

    fresh = Log()
    again = fresh.deed("fab", {"maker": "maker", "model": "gx1", "chips": [A]})
    doubled = fresh.deed("package", {"maker": "maker", "chips": [[C, "SN-1", ""]]})
    clone = fresh.deed("package", {"maker": "maker", "chips": [[C, "SN-3", "aa" * 32]]})
    return {
        "made-and-packaged": ("Three chips made, two packaged.", accepted(Log(), packaged)),
        "sold": ("A transfer signed by both.", accepted(sold, after_sale)),
        "lost": ("The new owner reports it lost.", accepted(lost, after_loss)),
        "not-the-owner_fail": (
            "South sells what the maker has.",
            refuse("is held by maker, not by south", giver="south", signers="north south"),
        ),
        "one-signature_fail": (
            "The taker did not sign.",
            refuse("must be signed by maker, north", signers="maker"),
        ),
        "a-third-signature_fail": (
            "Somebody signed who has no part in it.",
            refuse("must be signed by maker, north", signers="maker north south"),
        ),
        "other-key_fail": (
            "North's name, south's key.",
            refuse("transfer: north: the signature is not of key", "Mismatch", keys={"north": "south"}),
        ),
        "other-registry_fail": (
            "A deed meant for another registry.",
            refuse("is meant for registry", registry="00" * 32),
        ),
        "unknown-chip_fail": (
            "A chip that nobody made.",
            refuse("is not registered", chips=("0102030405060708dd",)),
        ),
        "unpackaged_fail": (
            "A bare die is not sold.",
            refuse("is fabricated; transfer is for chips", chips=(C,)),
        ),
        "sold-while-lost_fail": (
            "A lost chip.",
            refuse(
                "is lost; transfer is for chips",
                base=lost,
                giver="north",
                taker="south",
                signers="north south",
            ),
        ),
        "made-twice_fail": (
            "One die, two births.",
            refused("ProtocolViolation", "is registered already", fresh.line(again, "maker")),
        ),
        "serial-twice_fail": (
            "One serial number on two chips.",
            refused("ProtocolViolation", "is that of chip", fresh.line(doubled, "maker")),
        ),
        "key-twice_fail": (
            "One device key on two chips.",
            refused("ProtocolViolation", "is that of chip", fresh.line(clone, "maker")),
        ),
        "deed-twice_fail": (
            "The same line once more.",
            refused("ProtocolViolation", "is held by north, not by maker", sold.lines[-1], sold),
        ),
        "chip-twice_fail": ("A chip twice in one lot.", refuse("named twice", "InvalidInput", chips=(A, A))),
        "no-chips_fail": (
            "A lot of nothing.",
            refuse("0 chips; must be 1 to 10000", "InvalidInput", chips=()),
        ),
        "unknown-kind_fail": (
            "A kind that the page does not have.",
            refuse("kind 'gift' is unknown", "InvalidInput", kind="gift"),
        ),
        "unknown-field_fail": ("A field more.", refuse("field 'note' is unknown", "InvalidInput", note=1)),
        "whitespace_fail": (
            "The same value, spelt with spaces.",
            refused("InvalidInput", "not the canonical encoding", sold.lines[-1].replace(b",", b", ")),
        ),
        "short-nonce_fail": (
            "Fifteen bytes.",
            refuse("must be 32 lower-case hexadecimal digits", "InvalidInput", nonce="00" * 15),
        ),
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]))
