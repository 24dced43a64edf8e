"""Looks up hashes in a dictionary: which of the known documents was trained on, and with which seed?"""

import hashlib

from scene import BEACON, Scene, caught, main

from tallystick.commit.encoding import digest
from tallystick.fleet.agent.memory import Observation, Region, hash_memory, reader_of
from tallystick.fleet.provenance.transcripts import COMMITMENT_TAG, ReportOpening, data_root, even_shards
from tallystick.testing.attacks import must

DOCUMENTS, SECRETS = 5000, 40


def attack(scene: Scene) -> str:
    del scene
    known = [hashlib.sha256(b"public document %d" % at).digest() for at in range(DOCUMENTS)]
    used = known[17 :: DOCUMENTS // SECRETS][:SECRETS]
    dictionary = {digest(COMMITMENT_TAG, b"", document): document for document in known}
    plain = [digest(COMMITMENT_TAG, b"", document) for document in used]
    must(all(found in dictionary for found in plain), "the dictionary does not even open plain hashes")
    opening = ReportOpening(hashlib.sha256(BEACON).digest(), even_shards({"w": 8}, 1))
    reported = [opening.commit(f"data/{at}", document) for at, document in enumerate(used)]
    hits = sum(found in dictionary for found in reported)
    salts = [opening.salt(f"data/{at}") for at in range(SECRETS)]
    one = {digest(COMMITMENT_TAG, salts[0], document): document for document in known}
    opened = [one.get(found) for found in reported]
    must(hits == 0 and opened[0] == used[0] and not any(opened[1:]), f"{hits} commitments were guessed")
    must(
        data_root(opening, [d.hex() for d in used]) != data_root(opening, [d.hex() for d in used[::-1]]),
        "order is not bound",
    )

    def page(salt: bytes) -> bytes:
        memory = Observation((Region("w", "U8", "weights", 4096),), (reader_of(bytes(4096)),))
        return hash_memory(memory, page_size=4096, salt=salt, ueid=bytes(17), seq=1)[0].leaves[0]

    must(page(bytes(16)) != page(b"\1" * 16), "two snapshots of the same zeros have the same page hash")
    return caught(
        f"salts: of {SECRETS} documents out of a dictionary of {DOCUMENTS}, plain hashes give away {len(plain)}, "
        f"commitments {hits}; one salt shown opens one document; pages of zeros hash differently in every snapshot. "
        "Limit: counters and times of snapshots are not hidden"
    )


if __name__ == "__main__":
    main(attack, __doc__)
