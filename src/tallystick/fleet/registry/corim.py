"""A registry's chips as reference values for attestation verifiers: a CoRIM-shaped CBOR document.

Shape: draft-ietf-rats-corim (unsigned corim, tag 501; CoMID, tag 506). Each chip is an environment with class (vendor,
model) and instance (UEID, tag 550); its device key stands as a thumbprint (tag 557) in an identity triple and
an attestation-key triple; chips of one board are members of a domain. Deterministic CBOR. The profile is our own:
owner and status have no place in CoMID and are left out. Nothing here reads a CoRIM: the registry's truth is its log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import cbor2

from tallystick.errors import InvalidInput
from tallystick.fleet.registry.facts import Chip, Model

UNSIGNED_CORIM, COMID, UEID, THUMBPRINT, TAGGED_BYTES = 501, 506, 550, 557, 560
SHA_256 = 1  # IANA named information hash algorithm registry
ID, TAGS = 0, 1  # of the corim map
TAG_IDENTITY, TRIPLES = 1, 4  # of the concise mid tag
IDENTITY_TRIPLES, ATTEST_KEY_TRIPLES, MEMBERSHIP_TRIPLES = 2, 3, 5
MOST_CHIPS = 100_000  # in one document; some megabytes


def export_corim(name: str, chips: Iterable[Chip], models: Mapping[str, Model]) -> bytes:
    """Return the document ``name`` over ``chips``, deterministic CBOR.

    Raises:
        InvalidInput: no chip, more than a document holds, or a model without declaration.
    """
    identities: list[object] = []
    boards: defaultdict[str, list[object]] = defaultdict(list)
    for count, chip in enumerate(chips):
        if count == MOST_CHIPS:
            raise InvalidInput(
                f"corim: more than {MOST_CHIPS} chips; export one owner's or one model's at a time"
            )
        model = models.get(chip.model)
        if model is None:
            raise InvalidInput(f"corim: model {chip.model} of chip {chip.chip} is not declared")
        environment = {
            0: {1: model.vendor, 2: chip.model},
            1: cbor2.CBORTag(UEID, bytes.fromhex(chip.chip)),
        }
        if chip.key:
            thumbprint = cbor2.CBORTag(THUMBPRINT, [SHA_256, bytes.fromhex(chip.key)])
            identities.append([environment, [thumbprint]])
        if chip.board:
            boards[chip.board].append(environment)
    triples: dict[int, object] = {}
    if identities:
        triples |= {IDENTITY_TRIPLES: identities, ATTEST_KEY_TRIPLES: identities}
    if boards:
        triples[MEMBERSHIP_TRIPLES] = [
            [{2: cbor2.CBORTag(TAGGED_BYTES, board.encode("ascii"))}, members]
            for board, members in sorted(boards.items())
        ]
    if not triples:
        raise InvalidInput("corim: no chip has a device key or a board; there is nothing to export")
    comid = {TAG_IDENTITY: {0: f"{name}/chips"}, TRIPLES: triples}
    tag = cbor2.CBORTag(COMID, cbor2.dumps(comid, canonical=True))
    return cbor2.dumps(cbor2.CBORTag(UNSIGNED_CORIM, {ID: name, TAGS: [tag]}), canonical=True)
