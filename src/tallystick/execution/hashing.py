"""Leaf hashes of large data, by the kernels where the processor has instructions for them."""

from __future__ import annotations

from tallystick.commit import merkle
from tallystick.numerics.kernels import measures


def leaf_hashes(data: memoryview, chunk: int) -> list[bytes]:
    """Return what ``merkle.leaf_hashes`` gives, at about twice the rate where four chunks or more have one length."""
    found = measures.leaf_hashes(data, chunk) if data.nbytes >= 4 * chunk else None
    return merkle.leaf_hashes(data, chunk) if found is None else found
