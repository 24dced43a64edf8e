"""Write the test vectors of disputes: one record, drawn in spec/dispute.md, and its refused neighbours.

As in ``vectors_commit`` nothing here imports the package: hashlib, struct, json and an Ed25519 library, straight from the page.
"""

from __future__ import annotations

import copy
import struct
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from vector_cases import Case, write_cases
from vectors_commit import (
    canonical,
    entry_fields,
    entry_leaf,
    leaf,
    mth,
    path,
    proof,
    record,
    run_leaves,
    sha256,
    specification,
    tensor,
)

PARTIES = ("auditor", "trainer")
KEYS = {
    party: Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n, party in enumerate(PARTIES, start=1)
}
SENDER = {"committed": "trainer", "opened": "trainer", "handed": "trainer"}
ZERO = "00" * 32
BLOCK = 4096


def tagged(tag: str, *parts: bytes) -> bytes:
    """The tagged digest of spec/transcript.md 1."""
    name = tag.encode()
    return sha256(bytes([len(name)]) + name + b"".join(struct.pack("<Q", len(p)) + p for p in parts))


def write(root: Path) -> None:
    """Write every case below ``root``."""
    write_cases(root / "dispute", cases())


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


VIEW = {"offset": 0, "shape": [2, 2], "stride": [2, 1]}
A, B = floats(1, 2, 3, 4), floats(5, 6, 7, 8)
FALSE, RIGHT = floats(19, 23, 43, 50), floats(19, 22, 43, 50)


def output(data: bytes) -> Case:
    return {"dtype": "F32", "elements": 4, "root": leaf(data).hex(), "view": VIEW}


def operator(name: str, module: str, phase: str, **more: Any) -> Case:
    return {
        "attributes": {},
        "inputs": [],
        "micro_batch": 0,
        "module": module,
        "name": name,
        "outputs": [],
        "overload": "",
        "phase": phase,
        **more,
    }


def operators(result: bytes) -> list[str]:
    """Two loads, a matrix product, and the end; what the state holds is left out, the dispute is about the product."""
    operands = [{"dtype": "F32", "from": [n, 0], "view": VIEW} for n in (0, 1)]
    return [
        canonical(each)
        for each in (
            operator("tallystick::load", "model/a", "load", outputs=[output(A)]),
            operator("tallystick::load", "model/b", "load", outputs=[output(B)]),
            operator(
                "aten::mm",
                "layer",
                "forward",
                overload="default",
                attributes={"mat2": {"input": 1}, "self": {"input": 0}},
                inputs=operands,
                outputs=[output(result)],
            ),
            operator("tallystick::end", "state", "store", attributes={"state_root": ZERO}),
        )
    ]


def objection(index: int, element: int) -> str:
    return canonical(
        {
            "element": element,
            "format": "tallystick/objection/1",
            "index": index,
            "output": 0,
            "structure": False,
        }
    )


def listed(leaves: list[str]) -> list[bytes]:
    return [b"tallystick/operator/1\x00" + each.encode() for each in leaves]


def base_of(spec: Case, records: list[Case]) -> bytes:
    return tagged(
        "tallystick/operator-base/1",
        bytes.fromhex(records[1]["state_root"]),
        b"tallystick/specification/1\x00" + canonical(spec).encode(),
        b"tallystick/step/1\x00" + canonical(records[2]).encode(),
        struct.pack("<Q", BLOCK),
    )


def prefixed(base: bytes, leaves: list[bytes], count: int) -> str:
    return tagged("tallystick/operator-prefix/1", base, struct.pack("<Q", count), mth(leaves[:count])).hex()


def dispute(
    result: bytes = FALSE, *, loser: str = "trainer", element: int = 1, index: int = 2, **order: int
) -> Case:
    """The record as a JSON object; its operator 2 is the product. ``order`` are other fields of the specification."""
    spec, records = (
        {**specification(), **order},
        [record(step, checkpoint=step in (1, 2)) for step in range(3)],
    )
    tree = run_leaves(spec, records)
    agreed, claimed = bytes.fromhex(records[1]["state_root"]), bytes.fromhex(records[2]["state_root"])
    base = base_of(spec, records)
    ours = listed(operators(result))
    theirs = [*ours[:2], *listed([objection(index, element)])]

    def prefix(leaves: list[bytes], count: int) -> str:
        return prefixed(base, leaves, count)

    opening = {
        "pieces": [
            [slot, [{"data": data.hex(), "index": 0, "path": []}]]
            for slot, data in ((-1, result), (0, A), (1, B))
        ],
        "sources": [[n, operators(result)[n], [node.hex() for node in path(n, ours[:2])]] for n in (0, 1)],
        "state": [],
        "stored": [],
    }

    def opened(leaves: list[bytes], text: str) -> Case:
        return {
            "index": 2,
            "leaf": text,
            "path": [mth(leaves[:2]).hex()],
            "rest": [node.hex() for node in proof(3, leaves)] if len(leaves) > 3 else [],
        }

    handed = tagged("tallystick/handed/1", canonical(opening).encode()).hex()
    size = len(tree)
    return {
        "auditor_run": sha256(b"the auditor's run").hex(),
        "chunk": BLOCK,
        "format": "tallystick/dispute/1",
        "frame": "",
        "grids": [],
        "moves": [
            ["committed", 4, mth(ours).hex()],
            ["answered", 3, mth(theirs).hex()],
            ["claim", "trainer", 2, prefix(ours, 2)],
            ["claim", "auditor", 2, prefix(theirs, 2)],
            ["claim", "trainer", 3, prefix(ours, 3)],
            ["claim", "auditor", 3, prefix(theirs, 3)],
            ["revealed", opened(theirs, objection(index, element))],
            ["opened", opened(ours, operators(result)[2]), [], []],
            ["handed", handed],
        ],
        "opening": opening,
        "ruling": {"loser": loser, "reason": "element 1 of the product"},
        "run_root": mth(tree).hex(),
        "specification": canonical(spec),
        "specification_proof": canonical(
            {
                "format": "tallystick/specification-proof/1",
                "path": [node.hex() for node in path(0, tree)],
                "tree_size": size,
            }
        ),
        "step_proof": canonical(
            {
                "format": "tallystick/step-proof/1",
                "index": 3,
                "path": [node.hex() for node in path(3, tree)],
                "record": records[2],
                "tree_size": size,
                "world_size": 1,
            }
        ),
        "steps": {
            "agreed": spec["initial_state"],
            "checkpoints": [0, 2, 3],
            "claims": [[party, 2, agreed.hex()] for party in ("trainer", "auditor")],
            "ends": {"auditor": sha256(b"another state").hex(), "trainer": claimed.hex()},
        },
    }


def step_proof(step: int) -> str:
    """The proof of a record of the same run."""
    records = [record(at, checkpoint=at in (1, 2)) for at in range(3)]
    tree = run_leaves(specification(), records)
    return canonical(
        {
            "format": "tallystick/step-proof/1",
            "index": step + 1,
            "path": [node.hex() for node in path(step + 1, tree)],
            "record": records[step],
            "tree_size": len(tree),
            "world_size": 1,
        }
    )


def end_dispute(loser: str = "trainer", *, block: int = 0, short: bool = False) -> Case:
    """Two loads, two stores and the end: the trainer's one node is the state it claims, which its stores do not make up."""
    records = [record(step, checkpoint=step in (1, 2)) for step in range(3)]
    claimed = records[2]["state_root"]
    entries = [tensor(f"model/{name}", "F32", [2, 2], data.hex()) for name, data in (("a", A), ("b", B))]
    stores = [
        operator("tallystick::store", entry["name"], "store", attributes={"entry": entry_fields(entry)},
                 inputs=[{"dtype": "F32", "from": [number, 0], "view": VIEW}])
        for number, entry in enumerate(entries)
    ]  # fmt: skip
    end = operator("tallystick::end", "state", "store", attributes={"state_root": claimed})
    texts = [*operators(RIGHT)[:2], *(canonical(each) for each in (*stores, end))]
    ours = listed(texts)
    theirs = [*ours[:4], *listed([objection(4, 0)])]
    base = base_of(specification(), records)
    opening = {
        "pieces": [],
        "sources": [[n, texts[n], [node.hex() for node in path(n, ours[:4])]] for n in (1, 2, 3)],
        "state": [],
        "stored": [],
    }

    def opened(text: str) -> Case:
        return {"index": 4, "leaf": text, "path": [mth(ours[:4]).hex()], "rest": []}

    value = dispute(loser=loser)
    value["moves"] = [
        ["committed", 5, mth(ours).hex()],
        ["answered", 5, mth(theirs).hex()],
        *(
            ["claim", party, at, prefixed(base, leaves, at)]
            for at in (2, 3, 4)
            for party, leaves in (("trainer", ours), ("auditor", theirs))
        ),
        ["revealed", opened(objection(4, 0))],
        ["opened", opened(texts[4]), [], [claimed[:62] if short else claimed]],
        ["pointed", block],
        ["handed", tagged("tallystick/handed/1", canonical(opening).encode()).hex()],
    ]
    value["opening"] = opening
    assert mth([entry_leaf(entry) for entry in entries]).hex() != claimed
    return value


def sender(move: list[Any]) -> str:
    return move[1] if move[0] == "claim" else SENDER.get(move[0], "auditor")


def spki(party: str) -> bytes:
    return KEYS[party].public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def statements(value: Case) -> list[bytes]:
    """What is signed for each move: DSSE's encoding of the statement of spec/dispute.md 6."""
    terms = {
        "auditorRun": value["auditor_run"],
        "base": base_of(
            specification(), [record(step, checkpoint=step in (1, 2)) for step in range(3)]
        ).hex(),
        "claims": value["steps"]["ends"],
        "step": 2,
    }
    tag = "tallystick/dispute-history/1"
    history = tagged(tag, canonical({**terms, "run": value["run_root"]}).encode())
    asked: dict[tuple[str, str], bytes] = {}
    found: list[bytes] = []
    for move in value["moves"]:
        text = canonical(move).encode()
        answers = asked.setdefault(
            (sender(move), f"{move[0]} {move[2] if move[0] == 'claim' else ''}"), history
        )
        predicate = {
            **terms,
            "history": answers.hex(),
            "kind": move[0],
            "move": tagged("tallystick/dispute-move/1", text).hex(),
            "party": sender(move),
        }
        statement = {
            "_type": "https://in-toto.io/Statement/v1",
            "predicate": predicate,
            "predicateType": "https://tallystick/dispute-move/v0.1",
            "subject": [{"digest": {"tallystickRun": value["run_root"]}, "name": "run"}],
        }
        payload, kind = canonical(statement).encode(), b"application/vnd.in-toto+json"
        found.append(b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload))
        history = tagged(tag, history, text)
    return found


def signed(value: Case, parties: tuple[str, ...] = PARTIES) -> Case:
    """The record with the signatures of ``parties`` over their moves."""
    pairs = zip(value["moves"], statements(value), strict=True)
    heard = {sender(move) for move in value["moves"]} & set(parties)
    return {
        **value,
        "keys": {party: spki(party).hex() if party in heard else None for party in PARTIES},
        "signatures": [
            KEYS[sender(move)].sign(said).hex() if sender(move) in parties else None for move, said in pairs
        ],
    }


def good(value: Case) -> Case:
    value = value if "signatures" in value else signed(value)
    keys = {party: [sha256(spki(party)).hex()] for party in PARTIES}
    return {"operation": "dispute", "record": canonical(value), "run_root": value["run_root"], "keys": keys}


def failing(value: Case, check: int, reason: str, outcome: str = "failed") -> Case:
    """A record that parses and fails at ``check``."""
    return {**good(value), "check": check, "reason": reason, "outcome": outcome}


def equivocation() -> Case:
    """The trainer signs two lists for one dispute."""
    value = dispute()
    leaf = value["moves"][7][1]
    assert leaf["index"] == 2
    other = ["committed", 4, mth(listed(operators(RIGHT))).hex()]
    value["moves"] = [value["moves"][0], other]
    value["opening"] = {"pieces": [], "sources": [], "state": [], "stored": []}
    return value


def malformed(text: str, reason: str) -> Case:
    return {"operation": "dispute", "record": text, "run_root": ZERO, "check": 0, "reason": reason}


def cases() -> dict[str, tuple[str, Case]]:
    one = dispute()
    found: dict[str, tuple[str, Case]] = {
        "worked-example": ("The record drawn in spec/dispute.md: a false element of a product.", good(one)),
        "false-objection": (
            "The same list, honest: the auditor objects to a right element, and loses.",
            good(dispute(RIGHT, loser="auditor")),
        ),
    }
    found["false-node"] = (
        "The list's end: the node over the two stores is the claimed state's root, which they do not make up.",
        good(end_dispute()),
    )
    found["node-not-pointed-at"] = (
        "The same end, and the auditor points at no node: what is stated adds up, and it loses.",
        good(end_dispute("auditor", block=-1)),
    )
    found["auditor-unsigned"] = (
        "The auditor did not sign, and it is the trainer who loses: by its own moves.",
        good(signed(one, ("trainer",))),
    )
    found["two-lists"] = (
        "The trainer signed two lists for one dispute, and loses: the record is the evidence.",
        good(equivocation()),
    )
    found |= _failing(one)
    found |= _unsigned(one)
    found |= _malformed(signed(one))
    return found


def changed(value: Case, *path_to: Any, to: Any) -> Case:
    other = copy.deepcopy(value)
    at = other
    for key in path_to[:-1]:
        at = at[key]
    at[path_to[-1]] = to
    return other


def _failing(one: Case) -> dict[str, tuple[str, Case]]:
    moves = one["moves"]
    other = copy.deepcopy(one)
    other["opening"]["pieces"][1][1][0]["data"] = B.hex()
    handed = tagged("tallystick/handed/1", canonical(other["opening"]).encode()).hex()
    swapped = changed(other, "moves", 8, to=["handed", handed])
    return {
        "other-run_fail": (
            "It speaks of another run than the one expected.",
            {**failing(one, 1, "expected is"), "run_root": ZERO},
        ),
        "other-size_fail": (
            "The order's proof is of a tree of three leaves, whose path to the root is the same, the step's of four.",
            failing(
                changed(one, "specification_proof", to=one["specification_proof"].replace('"tree_size":4', '"tree_size":3')),
                1, "of different sizes",
            ),
        ),
        "record-of-another-step_fail": (
            "The game leads to step 2, and the record is that of step 1, which lies under the root as well.",
            failing(changed(one, "step_proof", to=step_proof(1)), 2, "the record is about another"),
        ),
        "log-not-needed_fail": (
            "A product needs no log, and a frame is there.",
            failing(changed(one, "frame", to="00"), 4, "does not need"),
        ),
        "other-ranks_fail": (
            "The order is of two ranks, the step's proof of one.",
            failing(dispute(world_size=2), 1, "another number of ranks"),
        ),
        "endless-order_fail": (
            "An order of 2^40 steps, whose checkpoints nobody needs to list to see that the game's are others.",
            failing(dispute(steps=1 << 40), 2, "checkpoints are not the order's"),
        ),
        "checkpoint-twice_fail": (
            "The last checkpoint stands twice.",
            failing(changed(one, "steps", "checkpoints", to=[0, 2, 3, 3]), 2, "checkpoints are not the order's"),
        ),
        "other-step_fail": (
            "The step's record does not lie under the run's root.",
            failing(changed(one, "step_proof", to=one["step_proof"].replace('"rank":0', '"rank":0').replace(
                '"skipped":false', '"skipped":true')), 1, "leads to root"),
        ),
        "other-beginning_fail": (
            "The game over steps does not begin with the ordered initial state.",
            failing(changed(one, "steps", "agreed", to=ZERO), 2, "initial state"),
        ),
        "unfinished-steps_fail": (
            "The claims do not lead to one step.",
            failing(changed(one, "steps", "claims", to=one["steps"]["claims"][:1]), 2, "do not lead to one step"),
        ),
        "other-claim_fail": (
            "The trainer claims another state than its record commits to.",
            failing(changed(one, "steps", "ends", "trainer", to=ZERO), 2, "its record says"),
        ),
        "move-missing_fail": (
            "The auditor's objection is not revealed.",
            failing(changed(one, "moves", to=moves[:6] + moves[7:]), 3, "must wait"),
        ),
        "move-twice_fail": (
            "A claim is made twice.",
            failing(changed(one, "moves", to=moves[:3] + moves[2:]), 3, "has answered"),
        ),
        "unfinished-operators_fail": (
            "The trainer has handed nothing over.",
            failing(changed(one, "moves", to=moves[:8]), 3, "awaits chunks"),
        ),
        "other-opening_fail": (
            "What was handed over is not what the move names.",
            failing(other, 3, "is not what its last move names"),
        ),
        "swapped-input_fail": (
            "An input is opened with other bytes than its leaf commits to: its holder may have done it, so it blames nobody.",
            failing(swapped, 5, "who spoilt it, the record cannot show"),
        ),
        "other-loser_fail": (
            "The operator speaks against the trainer, the ruling against the auditor.",
            failing(changed(one, "ruling", "loser", to="auditor"), 5, "speaks against the trainer"),
        ),
        "false-node-other-loser_fail": (
            "The stores do not make up the node, and the ruling blames the auditor.",
            failing(end_dispute("auditor"), 5, "speaks against the trainer"),
        ),
        "honest-operator_fail": (
            "The operator is right, and the ruling blames the trainer.",
            failing(dispute(RIGHT), 5, "speaks against the auditor"),
        ),
        "objection-elsewhere_fail": (
            "The objection names another leaf than the one that was found: the auditor has lost, not the trainer.",
            failing(changed(dispute(index=1), "moves", to=dispute(index=1)["moves"][:8]), 5, "was lost by the auditor"),
        ),
    }  # fmt: skip


def _unsigned(one: Case) -> dict[str, tuple[str, Case]]:
    """Records that show a fault, and not whose."""
    whole = signed(one)
    signatures = whole["signatures"]
    flipped = f"{signatures[0][:-1]}{'0' if signatures[0][-1] != '0' else '1'}"
    two_false = floats(18, 23, 43, 50)
    answered, replayed = signed(dispute(two_false, element=0)), signed(dispute(two_false, element=1))
    mixed = [  # by a judge that plays the auditor, in whose key it signs another objection
        theirs if sender(move) == "trainer" else own
        for move, own, theirs in zip(
            replayed["moves"], replayed["signatures"], answered["signatures"], strict=True
        )
    ]
    known = {"trainer": [sha256(b"another key").hex()], "auditor": [sha256(spki("auditor")).hex()]}
    nobody = "that the trainer made them is the judge's word"
    lists = signed(equivocation())
    return {
        "unsigned_fail": (
            "Nobody signed: a judge could have made the moves of both.",
            failing(signed(one, ()), 6, nobody, "not proven"),
        ),
        "trainer-unsigned_fail": (
            "The auditor signed, and it is the trainer who loses.",
            failing(signed(one, ("auditor",)), 6, nobody, "not proven"),
        ),
        "one-move-unsigned_fail": (
            "The trainer did not sign the leaf it opened.",
            failing(changed(whole, "signatures", 7, to=None), 6, "4 of the trainer's 5 moves", "not proven"),
        ),
        "two-lists-one-unsigned_fail": (
            "The second list is not signed: anybody could have put it there.",
            failing(changed(lists, "signatures", 1, to=None), 6, "1 of the trainer's 2 moves", "not proven"),
        ),
        "another-key_fail": (
            "The moves are signed with a key that is not the trainer's.",
            {**failing(whole, 6, "which is not the trainer's", "not proven"), "keys": known},
        ),
        "signature-changed_fail": (
            "Four bits of a signature are others.",
            failing(changed(whole, "signatures", 0, to=flipped), 6, "the signature is not of the trainer's key"),
        ),
        "signatures-exchanged_fail": (
            "The signatures of two moves of one party stand in each other's place.",
            failing(
                changed(changed(whole, "signatures", 2, to=signatures[4]), "signatures", 4, to=signatures[2]), 6,
                "move 2 (claim): the signature is not of",
            ),
        ),
        "signed-for-another-claim_fail": (
            "The moves were signed in a dispute with another auditor's claim.",
            failing({**whole, "auditor_run": ZERO}, 6, "move 0 (committed): the signature is not of"),
        ),
        "signed-before-another-objection_fail": (
            "What the trainer opened answers an objection to another element.",
            failing({**replayed, "signatures": mixed}, 6, "the signature is not of"),
        ),
    }  # fmt: skip


def _malformed(one: Case) -> dict[str, tuple[str, Case]]:
    return {
        "key-without-signature_fail": (
            "A key, and nothing that it signed.",
            malformed(
                canonical({**one, "signatures": [None] * 9}),
                "there are keys of auditor, trainer, signatures of nobody",
            ),
        ),
        "signature-without-key_fail": (
            "A signature of a party without a key.",
            malformed(canonical(changed(one, "keys", "trainer", to=None)), "there are keys of auditor"),
        ),
        "signature-missing_fail": (
            "One signature less than moves.",
            malformed(canonical({**one, "signatures": one["signatures"][:-1]}), "must be a list of 9"),
        ),
        "signature-long_fail": (
            "A signature of 129 bytes.",
            malformed(canonical(changed(one, "signatures", 0, to="00" * 129)), "1 to 128 bytes"),
        ),
        "key-raw_fail": (
            "A key of 32 bytes, not wrapped.",
            malformed(canonical(changed(one, "keys", "trainer", to="11" * 32)), "key of the trainer"),
        ),
        "node-short_fail": (
            "A node of 31 bytes.",
            malformed(canonical(signed(end_dispute(short=True))), "must be 64"),
        ),
        "spaced_fail": (
            "A space after a comma.",
            malformed(canonical(one).replace(",", ", ", 1), "canonical"),
        ),
        "field-missing_fail": (
            "There is no ruling.",
            malformed(canonical({k: v for k, v in one.items() if k != "ruling"}), "'ruling' is missing"),
        ),
        "field-unknown_fail": ("A field too many.", malformed(canonical({**one, "note": ""}), "unknown")),
        "other-chunk-size_fail": (
            "The chunk size is no power of two.",
            malformed(canonical(changed(one, "chunk", to=5000)), "chunk size"),
        ),
        "no-party_fail": (
            "The judge cannot lose.",
            malformed(canonical(changed(one, "ruling", "loser", to="judge")), "is no party"),
        ),
        "unknown-move_fail": (
            "A move of no known kind.",
            malformed(canonical(changed(one, "moves", 0, to=["resigned"])), "of no known kind"),
        ),
        "slots-descending_fail": (
            "Slots out of order.",
            malformed(
                canonical(changed(one, "opening", "pieces", to=one["opening"]["pieces"][::-1])), "must ascend"
            ),
        ),
        "partial-decimal_fail": (
            "A partial sum in decimal.",
            malformed(canonical(changed(one, "moves", 7, 2, to=[["1.0", "1.0"]])), "must be written"),
        ),
    }


if __name__ == "__main__":
    import sys

    write(Path(sys.argv[1]))
