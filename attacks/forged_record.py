"""Forges the record of a dispute at one operator: its input, leaf, wiring, sums, moves, log, run or ruling.

Whoever changes what the trainer opened also renews the digest by which the last move names it, so that it is the
commitments that hold, and not that digest.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from false_operator import ELEMENT
from forgery import HANDS, Forger, outside_its_bound
from stage import AT, STEPS, Stage, claim_path, dispute, main

from tallystick.commit.encoding import canonical_json, parse_canonical_json
from tallystick.dispute.bisection import Claim
from tallystick.dispute.objections import Objection
from tallystick.dispute.openings import Opening
from tallystick.dispute.operator_game import Handed, Opened
from tallystick.dispute.record import DisputeRecord, handed_digest, parse_dispute, verify_dispute
from tallystick.errors import InvalidInput
from tallystick.roles.claim import write_claim
from tallystick.testing.attacks import must
from tallystick.testing.cheats import forge as forge_run
from tallystick.testing.cheats import honest_defence
from tallystick.testing.forged_entry import ForgedEntry

Forge = Callable[[DisputeRecord], DisputeRecord]


def opened(record: DisputeRecord) -> Opened:
    return next(move for move in record.moves if isinstance(move, Opened))


def handing(record: DisputeRecord, opening: Opening) -> DisputeRecord:
    """Return the record with another opening, and the digest that names it."""
    return replace(record, opening=opening, moves=(*record.moves[:-1], Handed(handed_digest(opening))))


def other_input(record: DisputeRecord) -> DisputeRecord:
    pieces = dict(record.opening.pieces)
    slot = next(slot for slot in pieces if slot >= 0)
    first, *rest = pieces[slot]
    pieces[slot] = (replace(first, data=bytes([first.data[0] ^ 1]) + first.data[1:]), *rest)
    return handing(record, replace(record.opening, pieces=pieces))


def exchanged_tensors(record: DisputeRecord) -> DisputeRecord:
    pieces = dict(record.opening.pieces)
    one, other, *_ = sorted(pieces)
    pieces[one], pieces[other] = pieces[other], pieces[one]
    return handing(record, replace(record.opening, pieces=pieces))


def other_source(record: DisputeRecord) -> DisputeRecord:
    sources = dict(record.opening.sources)
    number = next(iter(sources))
    text = sources[number].leaf.replace(b'"offset":0', b'"offset":1', 1)
    sources[number] = replace(sources[number], leaf=text)
    return handing(record, replace(record.opening, sources=sources))


def other_leaf(record: DisputeRecord, edit: Callable[[dict], object]) -> DisputeRecord:
    move = opened(record)
    assert move.leaf.leaf is not None
    fields = parse_canonical_json(move.leaf.leaf, what="leaf", limit=1 << 20)
    assert isinstance(fields, dict)
    edit(fields)
    leaf = replace(move.leaf, leaf=canonical_json(fields))
    moves = tuple(replace(m, leaf=leaf) if m is move else m for m in record.moves)
    return replace(record, moves=moves, opening=replace(record.opening, leaf=leaf))


def other_claim(record: DisputeRecord) -> DisputeRecord:
    last = max(i for i, move in enumerate(record.moves) if isinstance(move, Claim))
    claim = record.moves[last]
    assert isinstance(claim, Claim)
    moves = list(record.moves)
    moves[last] = replace(claim, commitment=bytes(32))
    return replace(record, moves=tuple(moves))


FORGERIES: dict[str, Forge] = {
    "another input": other_input,
    "two tensors exchanged": exchanged_tensors,
    "another source of an input": other_source,
    "another attribute": lambda r: other_leaf(r, lambda f: f["attributes"].update({"alpha": 2})),
    "wired to another leaf": lambda r: other_leaf(r, lambda f: f["inputs"][0].update({"from": [0, 0]})),
    "another module": lambda r: other_leaf(r, lambda f: f.update({"module": "elsewhere"})),
    "another claim in the game": other_claim,
    "a move left out": lambda r: replace(r, moves=r.moves[:-1], signatures=r.signatures[:-1]),
    "another ruling": lambda r: replace(r, loser="auditor"),
    "another run": lambda r: replace(r, run_root=bytes(32)),
    "other ends of the game": lambda r: replace(r, steps=replace(r.steps, ends={**r.steps.ends, "trainer": bytes(32)})),
    "another chunk size": lambda r: replace(r, chunk=2 * r.chunk),
    "another auditor's claim": lambda r: replace(r, auditor_run=bytes(32)),
    "another signature": lambda r: replace(r, signatures=(r.signatures[-1], *r.signatures[1:])),
    "a log that nobody needs": lambda r: replace(r, frame=b"log"),
}  # fmt: skip


def must_not_verify(record: DisputeRecord, forge: Forge, what: str) -> str:
    """Return at which check a reader refuses the forged record."""
    forged = forge(record)
    try:
        checks = verify_dispute(parse_dispute(forged.encode()))
    except InvalidInput as problem:
        return f"{what}: malformed, {problem}"
    failed = next((check for check in checks if check.outcome == "failed"), None)
    must(failed is not None, f"{what}: the reader says {[check.outcome for check in checks]}")
    assert failed is not None
    return f"{what}: check {failed.number}"


def must_verify(data: bytes | None) -> DisputeRecord:
    must(data is not None, "the dispute has no record")
    assert data is not None
    record = parse_dispute(data)
    outcomes = [check.outcome for check in verify_dispute(record)]
    must(outcomes == ["passed"] * 6, f"the control: the record as it was written says {outcomes}")
    return record


def _blaming_the_trainer(forge: Forge, honest: DisputeRecord) -> DisputeRecord:
    return replace(forge(honest), loser="trainer")


def attack(stage: Stage) -> str:
    forger = Forger(stage)

    record = must_verify(forger.convicted(outside_its_bound, naming="must be").record)
    said = [must_not_verify(record, forge, what) for what, forge in FORGERIES.items()]
    # An honest operator, falsely accused: the auditor loses, and no opening turns the record against the trainer.
    honest = stage.honest_run("honest")
    claim = claim_path(honest)
    write_claim(honest, stage.source, claim)
    forge_run(claim, lambda r: r if r.step != STEPS - 1 else replace(r, state_root="ab" * 32))
    at = forger.plain.operator and forger.plain.operator.index
    assert at is not None
    accused = dispute(
        honest, claim, stage.source, defence=honest_defence(stage.source), objection=Objection(at, 0, ELEMENT),
        signers=HANDS,
    )  # fmt: skip
    must(accused.loser == "auditor", f"a false accusation ends in {accused.loser}: {accused.reason}")
    sound = must_verify(accused.record)
    for what in ("another input", "another source of an input", "another ruling"):
        turned: Forge = partial(_blaming_the_trainer, FORGERIES[what])
        said.append(must_not_verify(sound, turned, f"{what}, against an honest trainer"))
    # A rounding site, which needs the log and the grids.
    run, cheat = stage.run("entry"), ForgedEntry(AT)
    cheat.run(stage.order(), run)
    write_claim(run, stage.source, claim_path(run))
    logged = must_verify(
        dispute(run, claim_path(run), stage.source, defence=cheat.defence(stage.source), signers=HANDS).record
    )
    must(bool(logged.frame and logged.grids), "a rounding site is judged without its log")
    of_logs: dict[str, Forge] = {
        "the log dropped": lambda r: replace(r, frame=b"", grids=()),
        "another log": lambda r: replace(r, frame=r.frame[:-1] + bytes([r.frame[-1] ^ 1])),
        "the grids dropped": lambda r: replace(r, grids=()),
        "other grids": lambda r: replace(
            r, grids=(replace(r.grids[0], data=b"x" + r.grids[0].data[1:]), *r.grids[1:])
        ),
        "another step's proof": lambda r: replace(r, step_proof=run.load_transcript().prove_step(AT - 1)),
    }
    said += [must_not_verify(logged, forge, what) for what, forge in of_logs.items()]
    return f"the reader of the record, without torch: {'; '.join(said)}"


if __name__ == "__main__":
    main(attack, __doc__)
