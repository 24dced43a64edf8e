"""Write the test vectors of merkle, state-commitment and transcript.

Every expected value comes from hashlib, struct and json used straight from the spec pages, or
was published with the RFC 6962 reference implementation; nothing here imports the package. The
vectors so test the package against a second reading of its specification.

    python scripts/vectors_commit.py vectors
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

from vector_cases import Case, write_cases

CHUNK = 2**16

# The tree of the reference implementation's tests (certificate-transparency, merkle_tree_test):
# eight leaves, and the roots of the trees over the first 0 to 8 of them.
PUBLISHED_LEAVES = [
    "",
    "00",
    "10",
    "2021",
    "3031",
    "40414243",
    "5051525354555657",
    "606162636465666768696a6b6c6d6e6f",
]
PUBLISHED_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
PUBLISHED_INCLUSION = {  # (index, size): path
    (0, 1): [],
    (0, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (5, 8): [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 3): ["fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"],
    (1, 5): [
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}
PUBLISHED_CONSISTENCY = {  # (old size, size): path
    (1, 1): [],
    (1, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (6, 8): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 5): [
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}


def write(root: Path) -> None:
    """Write every case of the three rooms below ``root``, the vectors folder; what stood there goes."""
    write_cases(root / "merkle", merkle_cases())
    write_cases(root / "state-commitment", state_cases())
    write_cases(root / "transcript", transcript_cases())


# The Merkle tree, by its recursive definition (RFC 9162 2.1).


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def leaf(data: bytes) -> bytes:
    return sha256(b"\x00" + data)


def split(n: int) -> int:
    k = 1
    while 2 * k < n:
        k *= 2
    return k


def mth(leaves: list[bytes]) -> bytes:
    if not leaves:
        return sha256(b"")
    if len(leaves) == 1:
        return leaf(leaves[0])
    k = split(len(leaves))
    return sha256(b"\x01" + mth(leaves[:k]) + mth(leaves[k:]))


def path(m: int, leaves: list[bytes]) -> list[bytes]:
    if len(leaves) == 1:
        return []
    k = split(len(leaves))
    if m < k:
        return [*path(m, leaves[:k]), mth(leaves[k:])]
    return [*path(m - k, leaves[k:]), mth(leaves[:k])]


def proof(m: int, leaves: list[bytes]) -> list[bytes]:
    def sub(m: int, leaves: list[bytes], whole: bool) -> list[bytes]:
        if m == len(leaves):
            return [] if whole else [mth(leaves)]
        k = split(len(leaves))
        if m <= k:
            return [*sub(m, leaves[:k], whole), mth(leaves[k:])]
        return [*sub(m - k, leaves[k:], False), mth(leaves[:k])]

    return sub(m, leaves, True)


def hexes(values: list[bytes]) -> list[str]:
    return [value.hex() for value in values]


def painted(n: int) -> bytes:
    """Return n bytes with period 251, a prime, so that no two aligned blocks are equal."""
    return (bytes(range(251)) * (n // 251 + 1))[:n]


def refused(case: Case, error: str, reason: str, **changes: Any) -> Case:
    return {**copy.deepcopy(case), **changes, "error": error, "reason": reason}


def merkle_cases() -> dict[str, tuple[str, Case]]:
    leaves = [bytes.fromhex(item) for item in PUBLISHED_LEAVES]
    assert [mth(leaves[:n]).hex() for n in range(9)] == PUBLISHED_ROOTS
    assert all(hexes(path(m, leaves[:n])) == p for (m, n), p in PUBLISHED_INCLUSION.items())
    assert all(hexes(proof(m, leaves[:n])) == p for (m, n), p in PUBLISHED_CONSISTENCY.items())
    cases: dict[str, tuple[str, Case]] = {}
    cases["published-roots"] = (
        "The eight leaves and nine roots published with the RFC 6962 reference implementation.",
        {"operation": "roots", "leaves": PUBLISHED_LEAVES, "roots": PUBLISHED_ROOTS},
    )
    many = [painted(n) for n in range(17)]
    cases["three-depths"] = (
        "Sizes 0 to 17: every shape around the powers of two, and 11, the first with leaves at three depths.",
        {"operation": "roots", "leaves": hexes(many), "roots": [mth(many[:n]).hex() for n in range(18)]},
    )
    for (index, size), nodes in PUBLISHED_INCLUSION.items():
        cases[f"published-inclusion-{index}-of-{size}"] = (
            f"Published inclusion path of leaf {index} in the tree of {size} leaves.",
            {
                "operation": "inclusion",
                "leaves": PUBLISHED_LEAVES[:size],
                "index": index,
                "size": size,
                "proof": nodes,
                "root": PUBLISHED_ROOTS[size],
            },
        )
    for (old, size), nodes in PUBLISHED_CONSISTENCY.items():
        cases[f"published-consistency-{old}-to-{size}"] = (
            f"Published consistency path from {old} to {size} leaves.",
            {
                "operation": "consistency",
                "leaves": PUBLISHED_LEAVES[:size],
                "old_size": old,
                "size": size,
                "old_root": PUBLISHED_ROOTS[old],
                "root": PUBLISHED_ROOTS[size],
                "proof": nodes,
            },
        )
    cases.update(_refused_inclusions(cases["published-inclusion-5-of-8"][1], leaves))
    cases.update(_refused_consistencies(cases["published-consistency-6-to-8"][1]))
    return cases


def _refused_inclusions(good: Case, leaves: list[bytes]) -> dict[str, tuple[str, Case]]:
    nodes = good["proof"]
    verify = {**good, "operation": "verify-inclusion", "leaf": PUBLISHED_LEAVES[5]}
    del verify["leaves"]
    needs = "leaf 5 of 8 needs 3 nodes"
    other = "stated root is"
    return {
        "inclusion-truncated_fail": (
            "A path without its last node.",
            refused(verify, "InvalidInput", f"{needs}, got 2", proof=nodes[:-1]),
        ),
        "inclusion-extra-node_fail": (
            "A path with one node more.",
            refused(verify, "InvalidInput", f"{needs}, got 4", proof=[*nodes, PUBLISHED_ROOTS[8]]),
        ),
        "inclusion-index-out-of-range_fail": (
            "The first index that is not a leaf.",
            refused(verify, "InvalidInput", "leaf index 8 is out of range for 8 leaves", index=8),
        ),
        "inclusion-negative-index_fail": (
            "An index that would count from the end.",
            refused(verify, "InvalidInput", "leaf index -3 is out of range", index=-3),
        ),
        "inclusion-empty-tree_fail": (
            "The empty tree has no leaf to include.",
            refused(
                verify,
                "InvalidInput",
                "out of range for 0 leaves",
                index=0,
                size=0,
                proof=[],
                root=PUBLISHED_ROOTS[0],
            ),
        ),
        "inclusion-other-index_fail": (
            "The right path under another leaf's number.",
            refused(verify, "Mismatch", other, index=4),
        ),
        "inclusion-swapped-nodes_fail": (
            "The path with its first two nodes exchanged.",
            refused(verify, "Mismatch", other, proof=[nodes[1], nodes[0], nodes[2]]),
        ),
        "inclusion-other-leaf_fail": (
            "Another leaf's data.",
            refused(verify, "Mismatch", other, leaf="40414244"),
        ),
        "inclusion-node-as-leaf_fail": (
            "The two children of an inner node given as a leaf: the prefixes keep them apart.",
            refused(
                verify,
                "Mismatch",
                other,
                leaf=(leaf(leaves[4]) + leaf(leaves[5])).hex(),
                index=2,
                size=4,
                proof=nodes[1:],
            ),
        ),
        "inclusion-short-node_fail": (
            "A node of 31 bytes.",
            refused(verify, "InvalidInput", "must be 32 bytes, got 31", proof=[nodes[0][2:], *nodes[1:]]),
        ),
        "inclusion-other-root_fail": (
            "The root of the smaller tree.",
            refused(verify, "Mismatch", other, root=PUBLISHED_ROOTS[7]),
        ),
    }


def _refused_consistencies(good: Case) -> dict[str, tuple[str, Case]]:
    nodes = good["proof"]
    verify = {**good, "operation": "verify-consistency"}
    del verify["leaves"]
    same = {**verify, "old_size": 8, "old_root": PUBLISHED_ROOTS[8], "proof": []}
    return {
        "consistency-truncated_fail": (
            "A path without its last node.",
            refused(verify, "InvalidInput", "6 to 8 leaves needs 3 nodes, got 2", proof=nodes[:-1]),
        ),
        "consistency-extra-node_fail": (
            "A path with one node more.",
            refused(verify, "InvalidInput", "needs 3 nodes, got 4", proof=[*nodes, PUBLISHED_ROOTS[8]]),
        ),
        "consistency-old-size-beyond_fail": (
            "An old tree larger than the new one.",
            refused(verify, "InvalidInput", "old size 9 is out of range for 8 leaves", old_size=9),
        ),
        "consistency-roots-exchanged_fail": (
            "Old and new root exchanged.",
            refused(verify, "Mismatch", "old tree", old_root=PUBLISHED_ROOTS[8], root=PUBLISHED_ROOTS[6]),
        ),
        "consistency-rewritten-history_fail": (
            "An old root that the new tree does not extend.",
            refused(verify, "Mismatch", "old tree", old_root=PUBLISHED_ROOTS[5]),
        ),
        "consistency-other-root_fail": (
            "A new root that the path does not lead to.",
            refused(verify, "Mismatch", "new tree", root=PUBLISHED_ROOTS[7]),
        ),
        "consistency-same-size-other-root_fail": (
            "Two roots for one size.",
            refused(same, "Mismatch", "stated root is", root=PUBLISHED_ROOTS[7]),
        ),
        "consistency-same-size-with-path_fail": (
            "One size needs no path, so a path is a second encoding.",
            refused(same, "InvalidInput", "needs 0 nodes, got 1", proof=nodes[:1]),
        ),
        "consistency-from-empty-with-path_fail": (
            "The empty tree is a prefix of every tree, and a path is a second encoding.",
            refused(
                verify,
                "InvalidInput",
                "needs 0 nodes, got 1",
                old_size=0,
                old_root=PUBLISHED_ROOTS[0],
                proof=nodes[:1],
            ),
        ),
    }


# The state commitment, from spec/state-commitment.md.


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def chunks(data: bytes, size: int = CHUNK) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def entry_leaf(entry: Case, chunk_bytes: int = CHUNK) -> bytes:
    data = content(entry["data"])
    parts = [
        entry["name"].encode("utf-8"),
        entry["dtype"].encode("ascii"),
        b"".join(struct.pack("<Q", size) for size in entry["shape"]),
        struct.pack("<Q", len(data)),
        struct.pack("<Q", chunk_bytes),
        mth(chunks(data, chunk_bytes)),
    ]
    tag = b"tallystick/state-entry/1"
    return bytes([len(tag)]) + tag + b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def content(data: Case) -> bytes:
    return painted(data["painted"]) if "painted" in data else bytes.fromhex(data["hex"])


def in_order(entries: list[Case]) -> list[Case]:
    return sorted(entries, key=lambda entry: entry["name"].encode("utf-8"))


def root_of(entries: list[Case], chunk_bytes: int = CHUNK) -> str:
    return mth([entry_leaf(entry, chunk_bytes) for entry in in_order(entries)]).hex()


def entry_fields(entry: Case) -> Case:
    data = content(entry["data"])
    return {
        "chunk_bytes": CHUNK,
        "dtype": entry["dtype"],
        "name": entry["name"],
        "nbytes": len(data),
        "shape": entry["shape"],
        "tensor_root": mth(chunks(data)).hex(),
    }


def summary_of(entries: list[Case]) -> str:
    fields = [entry_fields(entry) for entry in in_order(entries)]
    return canonical({"entries": fields, "format": "tallystick/state-summary/1"})


def state(entries: list[Case]) -> Case:
    ordered = in_order(entries)
    return {
        "operation": "state",
        "entries": entries,
        "tensor_roots": [mth(chunks(content(entry["data"]))).hex() for entry in ordered],
        "entry_leaves": hexes([entry_leaf(entry) for entry in ordered]),
        "summary": {"text": summary_of(entries)},
        "root": root_of(entries),
    }


def tensor(name: str, dtype: str, shape: list[int], data: str | int) -> Case:
    stored = {"painted": data} if isinstance(data, int) else {"hex": data}
    return {"name": name, "dtype": dtype, "shape": shape, "data": stored}


WEIGHT = tensor("layer.weight", "F32", [2, 3], struct.pack("<6f", 1, 2, 3, 4, 5, 6).hex())
STEP = tensor("step", "I64", [], struct.pack("<q", 7).hex())
EXAMPLE = [WEIGHT, STEP]

ONE_BYTE, TWO_BYTES, FOUR_BYTES, EIGHT_BYTES = "BOOL U8 I8", "I16 U16 F16 BF16", "I32 U32 F32", "F64 I64 U64"
SIZES = {
    name: size
    for size, names in ((1, ONE_BYTE), (2, TWO_BYTES), (4, FOUR_BYTES), (8, EIGHT_BYTES))
    for name in names.split()
}


def state_cases() -> dict[str, tuple[str, Case]]:
    cases: dict[str, tuple[str, Case]] = {}
    cases["worked-example"] = ("The two entries drawn in spec/state-commitment.md.", state(EXAMPLE))
    cases["any-order-in"] = (
        "The same entries handed over in the other order are the same state.",
        state([STEP, WEIGHT]),
    )
    cases["empty-state"] = ("No entry at all: the root of the empty tree.", state([]))
    cases["empty-tensor"] = (
        "A tensor without elements has no chunks; its shape still counts.",
        state([tensor("none", "F32", [3, 0, 2], "")]),
    )
    cases["every-dtype"] = (
        "One tensor of each dtype, all with the bytes 00 01 00 01 ...",
        state([tensor(name.lower(), name, [8 // size], "0001" * 4) for name, size in SIZES.items()]),
    )
    cases["name-order"] = (
        "Names in the order of their UTF-8 bytes; UTF-16 would put the last two the other way round.",
        state(
            [tensor(name, "U8", [1], "00") for name in ("a", "B", "a.b", "\u00e9", "\uffee", "\U0001f600")]
        ),
    )
    sizes = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)
    cases["chunk-boundaries"] = (
        "One byte less than a chunk, a chunk, one byte more, and three chunks; painted with period 251.",
        state([tensor(f"{size}", "U8", [size], size) for size in sizes]),
    )
    cases.update(_refused_states())
    cases.update(_summaries())
    cases.update(_chunk_proofs())
    return cases


def _refused_states() -> dict[str, tuple[str, Case]]:
    good = {"operation": "verify-state", "entries": EXAMPLE, "root": root_of(EXAMPLE)}
    other = "stated root is"

    def changed(**changes: Any) -> list[Case]:
        return [{**WEIGHT, **changes}, STEP]

    flipped = struct.pack("<6f", 1, 2, 3, 4, 5, 6)[:-1] + b"\x41"
    swapped = [tensor("big", "U8", [2 * CHUNK], 2 * CHUNK)]
    halves = chunks(painted(2 * CHUNK))
    return {
        "transposed-shape_fail": (
            "The same bytes under the transposed shape.",
            refused(good, "Mismatch", other, entries=changed(shape=[3, 2])),
        ),
        "other-dtype_fail": (
            "The same bytes under another dtype of the same size.",
            refused(good, "Mismatch", other, entries=changed(dtype="I32")),
        ),
        "other-name_fail": (
            "The same bytes under another name.",
            refused(good, "Mismatch", other, entries=changed(name="layer.bias")),
        ),
        "flipped-bit_fail": (
            "One bit of the last element.",
            refused(good, "Mismatch", other, entries=changed(data={"hex": flipped.hex()})),
        ),
        "missing-entry_fail": ("One entry left out.", refused(good, "Mismatch", other, entries=[WEIGHT])),
        "duplicate-name_fail": (
            "One name twice.",
            refused(good, "InvalidInput", "duplicate name 'step'", entries=[WEIGHT, STEP, STEP]),
        ),
        "other-chunk-size_fail": (
            "The root that chunks of half the size would give.",
            refused(good, "Mismatch", other, entries=swapped, root=root_of(swapped, CHUNK // 2)),
        ),
        "chunks-exchanged_fail": (
            "The root of the tensor whose two chunks are exchanged.",
            refused(
                good,
                "Mismatch",
                other,
                entries=swapped,
                root=mth([_leaf_over(swapped[0], [halves[1], halves[0]])]).hex(),
            ),
        ),
        "short-data_fail": (
            "Five elements where the shape has six.",
            refused(
                good,
                "InvalidInput",
                "F32 of shape [2, 3] needs 24 bytes, got 20",
                entries=changed(data={"hex": WEIGHT["data"]["hex"][:-8]}),
            ),
        ),
        "unknown-dtype_fail": (
            "A dtype that the format does not have.",
            refused(good, "InvalidInput", "dtype 'F8_E4M3' is unknown", entries=changed(dtype="F8_E4M3")),
        ),
        "negative-dimension_fail": (
            "Two negative dimensions whose product fits.",
            refused(good, "InvalidInput", "dimension out of range", entries=changed(shape=[-2, -3])),
        ),
        "empty-name_fail": (
            "An entry without a name.",
            refused(good, "InvalidInput", "name must be 1 to 1024 bytes", entries=changed(name="")),
        ),
        "bool-of-two_fail": (
            "A BOOL byte that is neither 0 nor 1 would be a second encoding of true.",
            refused(
                good,
                "InvalidInput",
                "a BOOL byte must be 0 or 1",
                entries=[tensor("mask", "BOOL", [3], "000102")],
            ),
        ),
    }


def _leaf_over(entry: Case, parts: list[bytes]) -> bytes:
    return entry_leaf(entry)[:-32] + mth(parts)


def _summaries() -> dict[str, tuple[str, Case]]:
    text = summary_of(EXAMPLE)
    good = {"operation": "summary", "document": {"text": text}, "root": root_of(EXAMPLE)}
    backwards = {**json.loads(text), "entries": json.loads(text)["entries"][::-1]}

    def edited(reason: str, old: str, new: str) -> Case:
        assert text.count(old) >= 1
        return refused(good, "InvalidInput", reason, document={"text": text.replace(old, new, 1)})

    return {
        "summary": ("The summary of the worked example.", good),
        "summary-wrong-order_fail": (
            "Entries in descending order of their names.",
            refused(good, "InvalidInput", "must come before 'step'", document={"text": canonical(backwards)}),
        ),
        "summary-other-chunk-size_fail": (
            "A chunk size that is not the format's.",
            edited("chunk_bytes must be 65536, is 32768", "65536", "32768"),
        ),
        "summary-byte-length_fail": (
            "A byte length that contradicts dtype and shape.",
            edited("needs 24 bytes, states 20", '"nbytes":24', '"nbytes":20'),
        ),
        "summary-upper-case-hash_fail": (
            "A digest in upper case.",
            refused(
                good,
                "InvalidInput",
                "64 lower-case hexadecimal digits",
                document={"text": text.replace(entry_fields(STEP)["tensor_root"], "AB" * 32)},
            ),
        ),
    }


def chunk_proof(entries: list[Case], name: str, chunk_index: int) -> Case:
    ordered = in_order(entries)
    at = [entry["name"] for entry in ordered].index(name)
    return {
        "chunk_index": chunk_index,
        "chunk_path": hexes(path(chunk_index, chunks(content(ordered[at]["data"])))),
        "entry": entry_fields(ordered[at]),
        "entry_count": len(ordered),
        "entry_index": at,
        "entry_path": hexes(path(at, [entry_leaf(entry) for entry in ordered])),
        "format": "tallystick/chunk-proof/1",
    }


def _chunk_proofs() -> dict[str, tuple[str, Case]]:
    size = 2 * CHUNK + 5
    entries = [tensor("big", "U8", [size], size), WEIGHT, STEP]
    fields = chunk_proof(entries, "big", 2)
    text = canonical(fields)
    last = painted(size)[2 * CHUNK :]
    opened = {
        "operation": "open-chunk",
        "entries": entries,
        "name": "big",
        "chunk_index": 2,
        "proof": {"text": text},
        "chunk": {"hex": last.hex()},
        "root": root_of(entries),
    }
    good = {key: opened[key] for key in ("proof", "chunk", "root")} | {"operation": "verify-chunk"}

    def edited(error: str, reason: str, **changes: Any) -> Case:
        return refused(good, error, reason, proof={"text": canonical({**fields, **changes})})

    def spelled(reason: str, other: str) -> Case:
        return refused(good, "InvalidInput", reason, proof={"text": other})

    out_of_range = "is out of range for"
    whitespace = json.dumps(fields, sort_keys=True)
    key_order = json.dumps(dict(reversed(fields.items())), separators=(",", ":"))
    return {
        "chunk-opened": ("The last and shortest of three chunks, opened under the state root.", opened),
        "chunk-other-bytes_fail": (
            "Another chunk of the same length.",
            refused(good, "Mismatch", "inclusion proof of leaf 2 of 3", chunk={"hex": painted(5).hex()}),
        ),
        "chunk-swapped_fail": (
            "The first chunk presented with the path of the second.",
            refused(
                good,
                "Mismatch",
                "inclusion proof of leaf 1 of 3",
                proof={"text": canonical(chunk_proof(entries, "big", 1))},
                chunk={"painted": CHUNK},
            ),
        ),
        "chunk-short_fail": (
            "The chunk without its last byte.",
            refused(good, "InvalidInput", "chunk 2 must be 5 bytes, got 4", chunk={"hex": last[:-1].hex()}),
        ),
        "chunk-index-out-of-range_fail": (
            "The first index that is not a chunk.",
            edited("InvalidInput", f"chunk index 3 {out_of_range} 3 chunks", chunk_index=3),
        ),
        "chunk-entry-index-out-of-range_fail": (
            "The first index that is not an entry.",
            edited("InvalidInput", f"leaf index 3 {out_of_range} 3 leaves", entry_index=3),
        ),
        "chunk-truncated-path_fail": (
            "The chunk path without its last node.",
            edited("InvalidInput", "leaf 2 of 3 needs 1 nodes, got 0", chunk_path=fields["chunk_path"][:-1]),
        ),
        "chunk-extra-node_fail": (
            "The entry path with one node more.",
            edited("InvalidInput", "needs 2 nodes, got 3", entry_path=[*fields["entry_path"], "00" * 32]),
        ),
        "chunk-other-shape_fail": (
            "The entry under a shape that it was not committed with.",
            edited(
                "Mismatch", "inclusion proof of leaf 0 of 3", entry={**fields["entry"], "shape": [1, size]}
            ),
        ),
        "chunk-other-state_fail": (
            "The root of another state.",
            refused(good, "Mismatch", "stated root is", root=root_of(EXAMPLE)),
        ),
        "chunk-other-chunk-size_fail": (
            "A proof that cuts the tensor into chunks of half the size.",
            edited(
                "InvalidInput", "chunk_bytes must be", entry={**fields["entry"], "chunk_bytes": CHUNK // 2}
            ),
        ),
        "chunk-whitespace_fail": (
            "The same JSON with spaces.",
            spelled("not the canonical encoding", whitespace),
        ),
        "chunk-key-order_fail": (
            "The same JSON with a key moved.",
            spelled("not the canonical encoding", key_order),
        ),
        "chunk-duplicate-key_fail": (
            "The same JSON with a key twice.",
            spelled("duplicate key 'chunk_index'", '{"chunk_index":0,' + text[1:]),
        ),
        "chunk-float_fail": (
            "An index written as a float.",
            spelled("float '2.0'", text.replace('"chunk_index":2', '"chunk_index":2.0')),
        ),
        "chunk-escape_fail": (
            "A letter written as an escape.",
            spelled("not the canonical encoding", text.replace('"big"', '"b\\u0069g"')),
        ),
        "chunk-trailing-bytes_fail": (
            "A second document behind the first.",
            spelled("Extra data", text + "{}"),
        ),
        "chunk-trailing-newline_fail": (
            "A newline at the end.",
            spelled("not the canonical encoding", text + "\n"),
        ),
        "chunk-unknown-field_fail": (
            "A field that the format does not have.",
            edited("InvalidInput", "field 'note' is unknown", note="hello"),
        ),
        "chunk-missing-field_fail": (
            "A field left out.",
            spelled(
                "field 'entry_count' is missing",
                canonical({key: value for key, value in fields.items() if key != "entry_count"}),
            ),
        ),
    }


# The transcript, from spec/transcript.md.


def program() -> Case:
    texts = {
        "letters.py": b"import pieces.helper\n",
        "pieces/__init__.py": b"",
        "pieces/helper.py": b"x = 1\n",
    }
    return {
        "distributions": {"torch": "2.13.0+cpu"},
        "files": [
            {"name": name, "sha256": sha256(text).hex(), "size": len(text)} for name, text in texts.items()
        ],
        "main": "letters.py",
    }


def program_digest(stated: Case) -> str:
    """Section 2 of spec/transcript.md."""
    tag = b"tallystick/program/1"
    text = canonical({"files": stated["files"], "main": stated["main"]}).encode()
    return sha256(bytes([len(tag)]) + tag + struct.pack("<Q", len(text)) + text).hex()


def changed_helper(**fields: object) -> Case:
    stated = program()
    return {
        **stated,
        "files": [*stated["files"][:-1], {**stated["files"][-1], "sha256": "00" * 32, **fields}],
    }


def other_programs() -> list[tuple[str, str, str, Case]]:
    name = "name must be a relative path"
    files = program()["files"]
    return [
        ("absolute-name", "A file's name that is an absolute path.", name, changed_helper(name="/pieces/helper.py")),
        ("name-upwards", "A file's name that leads out of the program.", name, changed_helper(name="pieces/../x.py")),
        ("hidden-name", "A part of a name that begins with a dot.", name, changed_helper(name="pieces/.helper.py")),
        ("long-file", "A file of 16 MiB and a byte.", "must have at most 16777216", changed_helper(size=2**24 + 1)),
        ("no-main", "A main file that is not listed.", "main must be one of its files", {**program(), "main": "x.py"}),
        ("order", "Files not in order.", "strictly ascending", {**program(), "files": files[::-1]}),
        ("variable", "A name of an environment variable with = in it.", "environment variable's name must",
         {**program(), "environment": {"A=B": "absent"}}),
        ("variable-value", "The value of an environment variable in place of its digest.", "environment variable RATE",
         {**program(), "environment": {"RATE": "0.125"}}),
        ("no-variables", "An empty list of environment variables.", "must be left out", {**program(), "environment": {}}),
        ("many-variables", "65 environment variables.", "at most 64 environment variables",
         {**program(), "environment": {f"V{n}": "absent" for n in range(65)}}),
        ("version", "A version of no characters.", "not a distribution", {**program(), "distributions": {"torch": ""}}),
    ]  # fmt: skip


def stating(stated: Case) -> Case:
    spec = specification()
    return {**spec, "job": {**spec["job"], "program": stated, "source_digest": program_digest(stated)}}


def specification() -> Case:
    stated = program()
    return {
        "accumulation": 2,
        "checkpoint_every": 2,
        "format": "tallystick/run/2",
        "initial_state": sha256(b"state 0").hex(),
        "job": {
            "dataset_digest": None,
            "path": "letters.py",
            "program": stated,
            "settings": {"batch": "8"},
            "source_digest": program_digest(stated),
        },
        "notes": {"densified": [], "lifted_casts": []},
        "policy": {"name": "fp64", "parameters": {"precision": 24, "safety": (16.0).hex()}},
        "seed": 1,
        "sites": [
            {"dtype": "F64", "kind": "gradient", "name": "weight", "shape": [2, 3]},
            {"dtype": "F32", "kind": "state", "name": "weight", "shape": [2, 3]},
        ],
        "steps": 3,
        "versions": {"torch": "2.13.0"},
        "world_size": 1,
    }


def record(step: int, rank: int = 0, *, checkpoint: bool) -> Case:
    return {
        "batch": sha256(f"batch {step} {rank}".encode()).hex(),
        "fingerprint": sha256(f"state {step + 1}".encode())[:8].hex(),
        "log": sha256(f"log {step} {rank}".encode()).hex(),
        "log_bytes": 36 + step,
        "loss": (2.0 - step / 10).hex(),
        "micro_batches": 2,
        "rank": rank,
        "schedule": [
            [0, "betas.0", (0.9).hex()],
            [0, "foreach", False],
            [0, "lr", (0.001).hex()],
            [0, "t", step],
        ],
        "skipped": False,
        "state_root": sha256(f"state {step + 1}".encode()).hex() if checkpoint else None,
        "step": step,
    }


def run_leaves(spec: Case, records: list[Case]) -> list[bytes]:
    first = b"tallystick/specification/1\0" + canonical(spec).encode()
    return [first, *(b"tallystick/step/1\0" + canonical(item).encode() for item in records)]


def statement(spec: Case, records: list[Case]) -> Case:
    return {
        "final_state": records[-1]["state_root"],
        "format": "tallystick/run-statement/1",
        "root": mth(run_leaves(spec, records)).hex(),
        "steps": spec["steps"],
        "tree_size": 1 + len(records),
    }


def documents(spec: Case, records: list[Case], stated: Case | None = None) -> Case:
    stated = statement(spec, records) if stated is None else stated
    return {
        "specification": {"text": canonical(spec)},
        "records": {"text": "".join(canonical(item) + "\n" for item in records)},
        "statement": {"text": canonical(stated)},
    }


def transcript_cases() -> dict[str, tuple[str, Case]]:
    spec = specification()
    records = [record(0, checkpoint=False), record(1, checkpoint=True), record(2, checkpoint=True)]
    cases: dict[str, tuple[str, Case]] = {}
    cases["worked-example"] = (
        "The run of three steps drawn in spec/transcript.md; a checkpoint every two steps and at the end.",
        _good_transcript(spec, records),
    )
    two_ranks = {**spec, "world_size": 2}
    ranks = [record(step, rank, checkpoint=step > 0) for step in range(3) for rank in range(2)]
    cases["two-ranks"] = (
        "Two ranks: records in order of step, then rank; both state one root.",
        _good_transcript(two_ranks, ranks),
    )
    plain = {"loss": None, "schedule": [], "skipped": True, "micro_batches": 1}
    bare = [{**item, **plain} for item in records]
    cases["nothing-optional"] = (
        "No loss, no schedule, a skipped step, fewer micro-batches than allowed.",
        _good_transcript(spec, bare),
    )
    cases.update(_refused_runs(spec, records))
    cases.update(_refused_spellings(spec, records))
    cases.update(_refused_ranks(two_ranks, ranks))
    cases.update(_run_proofs(spec, records))
    return cases


def _good_transcript(spec: Case, records: list[Case]) -> Case:
    leaves = run_leaves(spec, records)
    tag, text = b"tallystick/specification/1", canonical(spec).encode()
    framed = bytes([len(tag)]) + tag + struct.pack("<Q", len(text)) + text
    return {
        "operation": "transcript",
        **documents(spec, records),
        "specification_digest": sha256(framed).hex(),
        "leaf_hashes": hexes([leaf(item) for item in leaves]),
        "root": mth(leaves).hex(),
    }


def _refused_runs(spec: Case, records: list[Case]) -> dict[str, tuple[str, Case]]:
    first, second, third = records

    def run(
        error: str, reason: str, *, spec: Case = spec, records: list[Case] = records, **stated: Any
    ) -> Case:
        case = {"operation": "verify-transcript"}
        return refused(
            case, error, reason, **documents(spec, records, {**statement(spec, records), **stated})
        )

    return {
        "records-out-of-order_fail": (
            "Two records exchanged; the statement is made for them.",
            run("InvalidInput", "record 0 must be step 0 rank 0, is step 1", records=[second, first, third]),
        ),
        "missing-step_fail": (
            "A step left out; the statement is made for what is left.",
            run("Mismatch", "number of records is 2, specification says 3", records=[first, third]),
        ),
        "missing-step-full-size_fail": (
            "A step left out; the statement still speaks of all.",
            run(
                "Mismatch", "number of records is 3, steps.jsonl says 2", records=[first, third], tree_size=4
            ),
        ),
        "shortened-run_fail": (
            "The last step left out of records and statement, but not of the specification.",
            run("Mismatch", "steps is 2, specification says 3", records=[first, second], steps=2),
        ),
        "repeated-step_fail": (
            "A record twice, in place of the next one.",
            run("InvalidInput", "record 1 must be step 1 rank 0, is step 0", records=[first, first, third]),
        ),
        "extra-step_fail": (
            "A record beyond the last step.",
            run("Mismatch", "number of records is 4", records=[*records, record(3, checkpoint=True)]),
        ),
        "statement-other-root_fail": (
            "The statement of another run.",
            run("Mismatch", "root is " + "ab" * 32, root="ab" * 32),
        ),
        "statement-other-final-state_fail": (
            "A final state that the last record does not have.",
            run("Mismatch", "final state is " + "ab" * 32, final_state="ab" * 32),
        ),
        "statement-other-tree-size_fail": (
            "A tree with one leaf more than there are documents.",
            run("Mismatch", "number of records is 4", tree_size=5),
        ),
        "changed-record_fail": (
            "One loss edited after the statement was made.",
            run(
                "Mismatch",
                "tree over the documents says",
                records=[first, {**second, "loss": (1.0).hex()}, third],
                root=statement(spec, records)["root"],
            ),
        ),
        "changed-specification_fail": (
            "The seed edited after the statement was made.",
            run(
                "Mismatch",
                "tree over the documents says",
                spec={**spec, "seed": 2},
                root=statement(spec, records)["root"],
            ),
        ),
        "checkpoint-without-root_fail": (
            "No state root where the specification has a checkpoint.",
            run(
                "InvalidInput",
                "step 1: a checkpoint must have a state root",
                records=[first, {**second, "state_root": None}, third],
            ),
        ),
        "root-off-checkpoint_fail": (
            "A state root where the specification has no checkpoint.",
            run(
                "InvalidInput",
                "step 0: is no checkpoint",
                records=[{**first, "state_root": "ab" * 32}, second, third],
            ),
        ),
        "too-many-micro-batches_fail": (
            "Three micro-batches where the specification allows two.",
            run(
                "InvalidInput",
                "step 0: 3 micro-batches exceed the specification's 2",
                records=[{**first, "micro_batches": 3}, second, third],
            ),
        ),
        "specification-no-steps_fail": (
            "A run of no steps.",
            run("InvalidInput", "specification: steps must be 1 to", spec={**spec, "steps": 0}, steps=1),
        ),
        "specification-duplicate-site_fail": (
            "One site twice.",
            run(
                "InvalidInput",
                "duplicate gradient site 'weight'",
                spec={**spec, "sites": [spec["sites"][0], spec["sites"][0]]},
            ),
        ),
        "specification-other-format_fail": (
            "A format that this page does not describe.",
            run(
                "InvalidInput",
                "format must be 'tallystick/run/2'",
                spec={**spec, "format": "tallystick/run/1"},
            ),
        ),
        **{
            f"program-{name}_fail": (text, run("InvalidInput", reason, spec=stating(stated)))
            for name, text, reason, stated in other_programs()
        },
        "program-other-digest_fail": (
            "A changed helper under the digest of the program as it was.",
            run(
                "InvalidInput",
                "source_digest must be the digest over its program's files",
                spec={**spec, "job": {**spec["job"], "program": changed_helper()}},
            ),
        ),
        "schedule-order_fail": (
            "Scheduled values out of order.",
            run(
                "InvalidInput",
                "schedule must be strictly ascending",
                records=[{**first, "schedule": first["schedule"][::-1]}, second, third],
            ),
        ),
        "loss-second-spelling_fail": (
            "A loss in a second spelling of the same float.",
            run(
                "InvalidInput",
                "loss: '0x1p+1' must be written 0x1.0000000000000p+1",
                records=[{**first, "loss": "0x1p+1"}, second, third],
            ),
        ),
        "loss-as-number_fail": (
            "A loss as a JSON number.",
            run("InvalidInput", "float '0.5'", records=[{**first, "loss": 0.5}, second, third]),
        ),
        "flag-as-number_fail": (
            "0 is not false.",
            run(
                "InvalidInput",
                "skipped must be true or false, is 0",
                records=[{**first, "skipped": 0}, second, third],
            ),
        ),
    }


def _refused_spellings(spec: Case, records: list[Case]) -> dict[str, tuple[str, Case]]:
    good: Case = {"operation": "verify-transcript", **documents(spec, records)}
    lines, text = good["records"]["text"], good["statement"]["text"]

    def spelled(reason: str, **changes: str) -> Case:
        return refused(
            good, "InvalidInput", reason, **{key: {"text": value} for key, value in changes.items()}
        )

    return {
        "last-line-without-newline_fail": (
            "The last record without its newline.",
            spelled("the last line must end in a newline", records=lines[:-1]),
        ),
        "blank-line_fail": ("A blank line at the end.", spelled("line 3", records=lines + "\n")),
        "carriage-return_fail": (
            "Lines ended as on other systems.",
            spelled("line 0: not the canonical encoding", records=lines.replace("\n", "\r\n")),
        ),
        "record-whitespace_fail": (
            "A space after a colon in the second record.",
            spelled("line 1: not the canonical encoding", records=lines.replace('"step":1', '"step": 1')),
        ),
        "record-duplicate-key_fail": (
            "A key twice in the first record.",
            spelled("line 0: duplicate key 'batch'", records='{"batch":null,' + lines[1:]),
        ),
        "statement-trailing-newline_fail": (
            "A newline behind the statement.",
            spelled("run statement: not the canonical encoding", statement=text + "\n"),
        ),
        "statement-not-json_fail": (
            "Half a statement.",
            spelled("run statement: ", statement=text[: len(text) // 2]),
        ),
        "statement-array_fail": (
            "A list where an object belongs.",
            spelled("run statement: must be an object, is a list", statement="[]"),
        ),
    }


def _refused_ranks(spec: Case, records: list[Case]) -> dict[str, tuple[str, Case]]:
    case = {"operation": "verify-transcript"}
    exchanged = [records[1], records[0], *records[2:]]
    parted = [*records[:3], {**records[3], "state_root": "ab" * 32}, *records[4:]]
    return {
        "ranks-out-of-order_fail": (
            "The two ranks of a step exchanged.",
            refused(case, "InvalidInput", "record 0 must be step 0 rank 0", **documents(spec, exchanged)),
        ),
        "ranks-disagree_fail": (
            "Two roots for one state.",
            refused(case, "InvalidInput", "step 1: ranks state different", **documents(spec, parted)),
        ),
    }


def _run_proofs(spec: Case, records: list[Case]) -> dict[str, tuple[str, Case]]:
    leaves = run_leaves(spec, records)
    root = mth(leaves).hex()
    step: Case = {
        "format": "tallystick/step-proof/1",
        "index": 2,
        "path": hexes(path(2, leaves)),
        "record": records[1],
        "tree_size": 4,
        "world_size": 1,
    }
    first: Case = {
        "format": "tallystick/specification-proof/1",
        "path": hexes(path(0, leaves)),
        "tree_size": 4,
    }
    extension: Case = {
        "format": "tallystick/extension-proof/1",
        "old_size": 3,
        "path": hexes(proof(3, leaves)),
        "tree_size": 4,
    }
    good_step = {"operation": "step-proof", "proof": {"text": canonical(step)}, "root": root}
    good_first = {
        "operation": "specification-proof",
        "proof": {"text": canonical(first)},
        "specification": {"text": canonical(spec)},
        "root": root,
    }
    good_extension = {
        "operation": "extension-proof",
        "proof": {"text": canonical(extension)},
        "old_root": mth(leaves[:3]).hex(),
        "root": root,
    }

    def edited(good: Case, fields: Case, error: str, reason: str, **changes: Any) -> Case:
        return refused(good, error, reason, proof={"text": canonical({**fields, **changes})})

    return {
        "step-proof": ("The second record of the worked example, opened under its root.", good_step),
        "step-proof-other-record_fail": (
            "Another loss in the opened record.",
            edited(good_step, step, "Mismatch", "leaf 2 of 4", record={**records[1], "loss": (1.0).hex()}),
        ),
        "step-proof-other-step_fail": (
            "The record under another step's leaf number.",
            edited(good_step, step, "InvalidInput", "index must be 2, is 3", index=3),
        ),
        "step-proof-renumbered_fail": (
            "The record renumbered to fit another leaf number.",
            edited(good_step, step, "Mismatch", "leaf 3 of 4", index=3, record={**records[1], "step": 2}),
        ),
        "step-proof-beyond-tree_fail": (
            "A tree too small for the step.",
            edited(good_step, step, "InvalidInput", "leaf index 2 is out of range for 2 leaves", tree_size=2),
        ),
        "step-proof-truncated_fail": (
            "The path without its last node.",
            edited(good_step, step, "InvalidInput", "needs 2 nodes, got 1", path=step["path"][:-1]),
        ),
        "step-proof-extra-node_fail": (
            "The path with one node more.",
            edited(good_step, step, "InvalidInput", "needs 2 nodes, got 3", path=[*step["path"], root]),
        ),
        "step-proof-rank-beyond-world_fail": (
            "A rank that the world does not have.",
            edited(
                good_step,
                step,
                "InvalidInput",
                "rank 1 is out of range for world size 1",
                index=3,
                record={**records[1], "rank": 1},
            ),
        ),
        "step-proof-other-root_fail": (
            "The root of another run.",
            refused(good_step, "Mismatch", "stated root is", root="ab" * 32),
        ),
        "specification-proof": (
            "The specification of the worked example, opened under its root.",
            good_first,
        ),
        "specification-proof-other-seed_fail": (
            "Another seed in the opened specification.",
            refused(
                good_first, "Mismatch", "leaf 0 of 4", specification={"text": canonical({**spec, "seed": 2})}
            ),
        ),
        "extension-proof": ("The tree after two steps is a prefix of the tree after three.", good_extension),
        "extension-proof-other-past_fail": (
            "An old root that is not the prefix's.",
            refused(good_extension, "Mismatch", "old tree", old_root=mth(leaves[:2]).hex()),
        ),
        "extension-proof-from-nothing_fail": (
            "A run tree always holds its specification, so no proof starts from the empty tree.",
            edited(good_extension, extension, "InvalidInput", "old_size must be 1 to", old_size=0, path=[]),
        ),
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]))
