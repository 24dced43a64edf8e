"""Merkle trees against their recursive definition, for all small sizes, and hostile proofs."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.commit.merkle import (
    EMPTY_ROOT,
    Accumulator,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    node_hash,
    root,
    verify_consistency,
    verify_inclusion,
)
from tallystick.errors import InvalidInput, Mismatch

# Up to one more than two powers of two, so that every right edge occurs, three depths included.
SIZES = range(34)


def leaves(size: int) -> list[bytes]:
    return [leaf_hash(bytes([n])) for n in range(size)]


def by_definition(hashes: list[bytes]) -> bytes:
    """Return the Merkle tree hash, read off RFC 9162 2.1.1."""
    if len(hashes) < 2:
        return hashes[0] if hashes else hashlib.sha256().digest()
    split = 1
    while split * 2 < len(hashes):
        split *= 2
    halves = by_definition(hashes[:split]) + by_definition(hashes[split:])
    return hashlib.sha256(b"\x01" + halves).digest()


def test_leaves_and_nodes_have_different_prefixes() -> None:
    assert leaf_hash(b"ab") == hashlib.sha256(b"\x00ab").digest()
    assert leaf_hash(memoryview(b"ab")) == leaf_hash(b"ab")
    assert node_hash(b"a" * 32, b"b" * 32) == hashlib.sha256(b"\x01" + b"a" * 32 + b"b" * 32).digest()


@pytest.mark.parametrize("size", SIZES)
def test_the_root_is_the_defined_one(size: int) -> None:
    assert root(leaves(size)) == by_definition(leaves(size))


@pytest.mark.parametrize("size", SIZES)
def test_an_accumulator_has_the_root_of_its_leaves(size: int) -> None:
    accumulator = Accumulator(leaves(size))

    assert accumulator.root() == root(leaves(size))
    assert accumulator.size == size


@pytest.mark.parametrize("size", SIZES)
def test_every_leaf_has_a_proof_that_verifies_nowhere_else(size: int) -> None:
    hashes, top = leaves(size), root(leaves(size))
    for index in range(size):
        proof = inclusion_proof(hashes, index)
        verify_inclusion(hashes[index], index=index, size=size, proof=proof, root=top)

        for other in range(size):
            if other != index:
                with pytest.raises((InvalidInput, Mismatch)):
                    verify_inclusion(hashes[index], index=other, size=size, proof=proof, root=top)


@pytest.mark.parametrize("size", SIZES)
def test_every_prefix_has_a_proof_that_no_other_prefix_has(size: int) -> None:
    hashes, top = leaves(size), root(leaves(size))
    for old in range(size + 1):
        proof = consistency_proof(hashes, old)
        verify_consistency(old_size=old, size=size, old_root=root(hashes[:old]), root=top, proof=proof)

        forged = leaf_hash(b"forged")
        with pytest.raises(Mismatch):
            verify_consistency(old_size=old, size=size, old_root=forged, root=top, proof=proof)
        if old > 0:
            with pytest.raises(Mismatch):
                verify_consistency(
                    old_size=old, size=size, old_root=root(hashes[:old]), root=forged, proof=proof
                )


@given(st.integers(1, 40), st.data())
def test_a_proof_with_one_changed_byte_leads_elsewhere(size: int, data: st.DataObject) -> None:
    hashes = leaves(size)
    index = data.draw(st.integers(0, size - 1))
    stated = [hashes[index], *inclusion_proof(hashes, index)]
    changed = bytearray(b"".join(stated))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    leaf, *proof = (bytes(changed[at : at + 32]) for at in range(0, len(changed), 32))

    with pytest.raises(Mismatch, match="leads to root"):
        verify_inclusion(leaf, index=index, size=size, proof=proof, root=root(hashes))


@given(st.integers(1, 40), st.data())
def test_a_longer_or_shorter_proof_is_refused(size: int, data: st.DataObject) -> None:
    hashes = leaves(size)
    index = data.draw(st.integers(0, size - 1))
    old = data.draw(st.integers(1, size))
    length = data.draw(st.integers(0, 8))
    inclusion, consistency = inclusion_proof(hashes, index), consistency_proof(hashes, old)

    if length != len(inclusion):
        with pytest.raises(InvalidInput, match=rf"needs {len(inclusion)} nodes, got {length}"):
            verify_inclusion(
                hashes[index], index=index, size=size, proof=[EMPTY_ROOT] * length, root=EMPTY_ROOT
            )
    if length != len(consistency):
        with pytest.raises(InvalidInput, match=rf"needs {len(consistency)} nodes, got {length}"):
            verify_consistency(
                old_size=old, size=size, old_root=EMPTY_ROOT, root=EMPTY_ROOT, proof=[EMPTY_ROOT] * length
            )


@given(
    st.integers(-2, 2**70),
    st.integers(-2, 2**70),
    st.lists(st.binary(min_size=31, max_size=33), max_size=4),
    st.binary(min_size=31, max_size=33),
)
def test_arbitrary_proofs_end_in_a_refusal(a: int, b: int, proof: list[bytes], stated: bytes) -> None:
    if not (a == 0 and b == 1 and not proof):
        with pytest.raises((InvalidInput, Mismatch)):
            verify_inclusion(EMPTY_ROOT, index=a, size=b, proof=proof, root=stated)
    try:
        verify_consistency(old_size=a, size=b, old_root=EMPTY_ROOT, root=stated, proof=proof)
    except (InvalidInput, Mismatch):
        return
    assert not proof
    assert a in (0, b)


def test_proofs_of_what_is_not_there_are_refused() -> None:
    with pytest.raises(InvalidInput, match="leaf index 3 is out of range for 3 leaves"):
        inclusion_proof(leaves(3), 3)
    with pytest.raises(InvalidInput, match="leaf index -1 is out of range"):
        inclusion_proof(leaves(3), -1)
    with pytest.raises(InvalidInput, match="old size 4 is out of range for 3 leaves"):
        consistency_proof(leaves(3), 4)
    with pytest.raises(InvalidInput, match="must be 32 bytes, got 3"):
        Accumulator().append(b"abc")


def test_a_mismatch_names_both_roots() -> None:
    stated = leaf_hash(b"stated")

    with pytest.raises(Mismatch) as refusal:
        verify_inclusion(leaves(1)[0], index=0, size=1, proof=[], root=stated)

    assert leaves(1)[0].hex() in str(refusal.value)
    assert stated.hex() in str(refusal.value)
