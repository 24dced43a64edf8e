"""Opens a chunk under a tree of other chunks than the specification's, so that one proof could open two texts."""

import numpy as np
from stage import Stage, main

from tallystick.commit import merkle
from tallystick.commit.state import (
    CHUNK_BYTES,
    Entry,
    open_chunk,
    parse_chunk_proof,
    state_root,
    verify_chunk,
)
from tallystick.testing.attacks import must_refuse


def attack(stage: Stage) -> str:
    del stage
    data = np.arange(CHUNK_BYTES, dtype="<f4").tobytes()  # four chunks
    entries = [Entry("model/w", "F32", (CHUNK_BYTES,), data)]
    root, proof = state_root(entries), open_chunk(entries, "model/w", 1)
    verify_chunk(proof, data[CHUNK_BYTES : 2 * CHUNK_BYTES], root)
    must_refuse(
        lambda: verify_chunk(proof, data[CHUNK_BYTES : CHUNK_BYTES + CHUNK_BYTES // 2], root), naming=""
    )
    must_refuse(lambda: verify_chunk(proof, data[CHUNK_BYTES : 3 * CHUNK_BYTES], root), naming="")
    # A node of the tree is no chunk, although its two halves hash to a node of the proof.
    leaves = [merkle.leaf_hash(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    must_refuse(lambda: verify_chunk(proof, b"".join(leaves[:2]), root), naming="")
    smaller = proof.encode().replace(b'"chunk_bytes":65536', b'"chunk_bytes":32768')
    said = must_refuse(lambda: parse_chunk_proof(smaller), naming="32768")
    return (
        f"the verifier: {said}; a shorter chunk, a longer one and a node in its place do not lead to the root"
    )


if __name__ == "__main__":
    main(attack, __doc__)
