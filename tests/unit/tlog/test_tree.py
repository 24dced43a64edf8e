from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.commit import merkle
from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.keys import ed25519_key
from tallystick.signing.note import COSIGNATURE, NOTE, Note, NoteKey, NoteSigner
from tallystick.tlog.policy import LogPolicy, parse_log_policy
from tallystick.tlog.tree import (
    Checkpoint,
    LogEntry,
    LogProof,
    Tile,
    TileTree,
    checkpoint_text,
    encode_entries,
    is_split_view,
    parse_checkpoint,
    parse_entries,
    parse_log_entry,
    parse_log_proof,
    tiles_of,
)

ORIGIN = "log.example/runs"


def signer(number: int, name: str = ORIGIN, kind: int = NOTE) -> NoteSigner:
    key = ed25519_key(bytes([number]) * 32)
    return NoteSigner(NoteKey(name, kind, key.public_key), key)


LOG = signer(1)
WITNESSES = {f"W{i}": signer(10 + i, f"w{i}.example", COSIGNATURE) for i in range(1, 4)}


def policy(quorum: str = "group two 2 W1 W2 W3\nquorum two") -> LogPolicy:
    lines = [f"log {LOG.key}", *(f"witness {name} {w.key}" for name, w in WITNESSES.items()), quorum]
    return parse_log_policy("\n".join(lines).encode())


def leaves_of(size: int) -> list[bytes]:
    return [merkle.leaf_hash(LogEntry("run", f"{i:064x}").encode()) for i in range(size)]


def tiles_from(leaves: Sequence[bytes]) -> dict[Tile, bytes]:
    """All tiles straight from their definition: hash i of level l is the root over 256**l leaves."""
    rows = {0: list(leaves)}
    for level in range(1, 3):
        rows[level] = [
            merkle.root(leaves[i : i + 256**level])
            for i in range(0, len(leaves) - 256**level + 1, 256**level)
        ]
    found: dict[Tile, bytes] = {}
    for level, row in rows.items():
        for index in range(-(-len(row) // 256)):
            part = row[index * 256 : (index + 1) * 256]
            found[Tile(level, index, len(part))] = b"".join(part)
    return found


def signed(size: int, root: bytes, seen: dict[str, int] | None = None, by: NoteSigner = LOG) -> Checkpoint:
    note = by.sign(Note(checkpoint_text(ORIGIN, size, root)))
    for name, when in (seen or {}).items():
        note = WITNESSES[name].sign(note, now=when)
    return parse_checkpoint(note.encode())


def test_paths_are_those_of_the_format() -> None:
    assert Tile(0, 1234067, 256).path == "tile/0/x001/x234/067"
    assert Tile(1, 5, 17).path == "tile/1/005.p/17"
    assert Tile(-1, 1000, 3).path == "tile/entries/x001/000.p/3"


def test_a_tree_of_70_000_has_the_tiles_that_the_format_counts() -> None:
    tiles = list(tiles_of(70_000))
    hashes = [tile for tile in tiles if tile.level >= 0]
    assert sum(tile.level == 0 and tile.width == 256 for tile in hashes) == 273
    assert [t for t in hashes if t.width < 256] == [Tile(0, 273, 112), Tile(1, 1, 17), Tile(2, 0, 1)]
    assert sum(tile.level == -1 for tile in tiles) == 274
    assert [t for t in tiles_of(256) if t.level >= 0] == [Tile(0, 0, 256), Tile(1, 0, 1)]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 255, 256, 257, 700])
def test_roots_and_proofs_from_tiles_are_those_of_the_tree(size: int) -> None:
    leaves = leaves_of(size)
    tree = TileTree(size, tiles_from(leaves).__getitem__)
    assert tree.root() == merkle.root(leaves)
    for index in {0, 1, 254, 255, 256, 257, 512, size - 1} & set(range(size)):
        assert tree.inclusion(index) == merkle.inclusion_proof(leaves, index)
    for old in {0, 1, 2, 255, 256, 257, size} & set(range(size + 1)):
        proof = tree.consistency(old)
        assert proof == merkle.consistency_proof(leaves, old)
        merkle.verify_consistency(
            old_size=old, size=size, old_root=merkle.root(leaves[:old]), root=tree.root(), proof=proof
        )


def test_a_proof_reads_few_tiles() -> None:
    size = 100_000
    read: list[Tile] = []

    def zeros(tile: Tile) -> bytes:
        read.append(tile)
        return bytes(32 * tile.width)

    TileTree(size, zeros).inclusion(77_777)
    assert len(read) <= 6


def test_a_tile_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"tile/0/000\.p/3: must have 96 bytes, has 64"):
        TileTree(3, lambda _: bytes(64)).root()


def test_the_published_checkpoint_parses_and_its_neighbours_do_not() -> None:
    # The example of C2SP tlog-checkpoint.
    text = (
        "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
        "\u2014 example.com/behind-the-sofa "
        "Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
    )
    found = parse_checkpoint(text.encode())
    assert (found.origin, found.size) == ("example.com/behind-the-sofa", 20852163)
    for changed, reason in (
        (text.replace("20852163", "020852163"), "no number below"),
        (text.replace("20852163", "-1"), "no number below"),
        (text.replace("20852163", "9223372036854775808"), "no number below"),
        (text.replace("q2I=\n", "q2I=\nextension\n", 1), "must have 3 lines"),
        (text.replace("q2I=", "q2J="), "another spelling"),
        (text.replace("CsUY", ""), "out of range"),
        (text.replace("20852163", "0"), "not that of an empty tree"),
        (text.replace("example.com/behind-the-sofa\n2", "a b\n2"), "no space"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            parse_checkpoint(changed.encode())


def test_a_quorum_is_met_by_the_witnesses_it_names_and_no_others() -> None:
    root = merkle.root(leaves_of(3))
    both = signed(3, root, {"W1": 100, "W3": 50})
    witnessed = both.verify(policy())
    assert (witnessed.witnesses, witnessed.seen_at) == ({"W1": 100, "W3": 50}, 100)
    with pytest.raises(Mismatch, match="quorum 'two' is not met by W1"):
        signed(3, root, {"W1": 100}).verify(policy())
    with pytest.raises(Mismatch, match="not met by no witness"):
        signed(3, root).verify(policy("quorum W2"))
    assert signed(3, root).verify(policy("quorum none")).seen_at is None


def test_groups_of_groups_count_each_witness_once() -> None:
    rules = policy("group a any W1 W2\ngroup b all a W3\nquorum b")
    assert rules.quorum_time({"W2": 5, "W3": 9}) == 9
    assert rules.quorum_time({"W1": 7, "W2": 5, "W3": 1}) == 5
    with pytest.raises(Mismatch, match="not met"):
        rules.quorum_time({"W1": 1, "W2": 2})


def test_another_log_and_a_forged_witness_are_refused() -> None:
    root = merkle.root(leaves_of(3))
    with pytest.raises(Mismatch, match="not signed by the policy's key"):
        signed(3, root, {"W1": 1, "W2": 1}, by=signer(9)).verify(policy())
    honest, other = signed(3, root, {"W1": 1, "W2": 1}), signed(4, root, {"W2": 1})
    line = other.note.find(WITNESSES["W2"].key)
    assert line is not None
    forged = parse_checkpoint(honest.note.with_signature(line).encode())
    with pytest.raises(Mismatch, match=r"signature of w2\.example"):
        forged.verify(policy())


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("", "has no quorum line"),
        ("quorum none\nquorum none", "second quorum"),
        ("quorum W9", "is no witness or group of the lines before"),
        ("group g 4 W1 W2 W3\nquorum g", "4.*of 3 members"),
        ("group g 0 W1\nquorum g", "must be any, all or 1 to 1"),
        ("group g any W1 W1\nquorum g", "is a member already"),
        ("group a any W1\ngroup b any W1\nquorum b", "is a member already"),
        ("group W1 any W2\nquorum W1", "is taken"),
        ("group none any W2\nquorum none", "is taken"),
        ("group g any\nquorum none", "no line of a log policy"),
        (f"witness again {WITNESSES['W1'].key}\nquorum none", "is there already"),
        (f"witness log {LOG.key}\nquorum none", "must not have type 0x01"),
        (f"log {WITNESSES['W1'].key}\nquorum none", "must not have type 0x04"),
        ("quorum none\r", "control character"),
        ("trust everyone\nquorum none", "no line of a log policy"),
    ],
)
def test_a_malformed_policy_is_refused(lines: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        policy(lines)


def test_comments_tabs_and_urls_are_allowed() -> None:
    text = f"# logs\n\tlog {LOG.key} https://log.example/runs\n\n  quorum\tnone \n"
    assert parse_log_policy(text.encode()).logs == (LOG.key,)


def test_an_offline_proof_shows_the_entry_and_no_other() -> None:
    entries = [LogEntry("run", f"{i:064x}") for i in range(5)]
    leaves = [merkle.leaf_hash(entry.encode()) for entry in entries]
    tree = signed(5, merkle.root(leaves), {"W1": 1, "W2": 2})
    proof = LogProof(3, tuple(merkle.inclusion_proof(leaves, 3)), tree)
    parsed = parse_log_proof(proof.encode())
    assert parsed == proof
    assert parsed.verify(entries[3], policy()).seen_at == 2
    with pytest.raises(Mismatch, match="leads to root"):
        parsed.verify(entries[2], policy())
    with pytest.raises(Mismatch, match="leads to root"):
        parsed.verify(LogEntry("statement", entries[3].digest), policy())
    with pytest.raises(InvalidInput, match="needs 3 nodes"):
        LogProof(3, proof.path[:-1], tree).verify(entries[3], policy())


def test_a_proof_in_another_spelling_is_refused() -> None:
    data = LogProof(0, (), signed(1, leaves_of(1)[0])).encode()
    for changed, reason in (
        (data.replace(b"@v1", b"@v2"), "must begin with"),
        (data.replace(b"index 0", b"index 00"), "second line must be an index"),
        (data.replace(b"index 0", b"extra AAAA\nindex 0"), "second line must be an index"),
        (data.replace(b"index 0\n", b"index 0\nAAAA\n"), "32 bytes"),
        (data.replace(b"\n\n", b"\n", 1), "must have 3 lines|no empty line|second line|node|must begin"),
        (b"", "no empty line"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            parse_log_proof(changed)


def test_two_trees_of_one_size_under_one_signature_are_a_split_view() -> None:
    one, other = signed(3, merkle.root(leaves_of(3))), signed(3, leaves_of(1)[0])
    keys = [LOG.key]
    assert is_split_view(one, other, keys)
    assert not is_split_view(one, one, keys)
    assert not is_split_view(one, signed(4, other.root), keys)
    assert not is_split_view(one, signed(3, other.root, by=signer(9)), keys)


def test_bundles_of_entries_round_trip_and_end_where_they_must() -> None:
    entries = [b"", b"a", b"b" * 65535]
    data = encode_entries(entries)
    assert data[:5].hex() == "0000000161"
    assert parse_entries(data, what="x") == entries
    for cut in (data[:-1], data[:4], data + b"\0"):
        with pytest.raises(InvalidInput, match="ends within entry"):
            parse_entries(cut, what="x")
    with pytest.raises(InvalidInput, match="65536 bytes reach the limit"):
        encode_entries([b"b" * 65536])


def test_an_entry_has_one_encoding() -> None:
    entry = LogEntry("draw", "ab" * 32)
    assert parse_log_entry(entry.encode()) == entry
    with pytest.raises(InvalidInput, match="kind must be one of"):
        LogEntry("joke", "ab" * 32)
    with pytest.raises(InvalidInput, match="canonical"):
        parse_log_entry(entry.encode() + b"\n")


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_growing_a_tree_writes_each_tile_it_needs_once(old: int, more: int) -> None:
    new = set(tiles_of(old + more)) - set(tiles_of(old))
    assert set(tiles_of(old + more, since=old)) == new
    assert all(a != b for a, b in itertools.pairwise(tiles_of(old + more, since=old)))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    for parse in (parse_checkpoint, parse_log_proof, parse_log_entry, parse_log_policy):
        try:
            parse(data)
        except InvalidInput:
            continue
        raise AssertionError(f"{parse.__name__} took {data!r}")
