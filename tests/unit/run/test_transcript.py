"""Transcripts: what the documents must say, to the byte, and the proofs from them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.commit.encoding import canonical_json, digest
from tallystick.commit.merkle import Accumulator, leaf_hash
from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.documents import (
    JobRecord,
    Notes,
    PolicyRecord,
    RunStatement,
    SiteRecord,
    Specification,
    StepRecord,
    parse_run_statement,
    parse_specification,
    parse_step_record,
    parse_step_records,
)
from tallystick.run.proofs import (
    parse_extension_proof,
    parse_specification_proof,
    parse_step_proof,
    verify_extension,
    verify_specification_proof,
    verify_step_proof,
)
from tallystick.run.transcript import (
    StateCommitment,
    Transcript,
    check_fingerprint,
    state_fingerprint,
    verify_transcript,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def hash_of(text: str) -> str:
    return digest("tallystick/test/1", text.encode()).hex()


def specification(**changes: Any) -> Specification:
    values: dict[str, Any] = {
        "job": JobRecord("jobs/letters.py", hash_of("source"), {"batch": "8"}, hash_of("data")),
        "policy": PolicyRecord("fp64", {"precision": 24, "safety": "0x1.0000000000000p+4"}),
        "seed": 7,
        "steps": 7,
        "checkpoint_every": 3,
        "accumulation": 2,
        "world_size": 1,
        "initial_state": hash_of("state 0"),
        "versions": {"torch": "2.13.0"},
        "sites": (SiteRecord("gradient", "w", (2, 3), "F64"), SiteRecord("state", "w", (2, 3), "F32")),
        "notes": Notes(lifted_casts=("softmax",)),
    }
    return Specification(**(values | changes))


def record(step: int, rank: int = 0, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "micro_batches": 2,
        "batch": hash_of(f"batch {step} {rank}"),
        "log": hash_of(f"log {step} {rank}"),
        "log_bytes": step,
        "loss": (1 / (step + 1)).hex(),
        "schedule": ((0, "lr", (0.1).hex()), (0, "momentum", None), (1, "lr", 3), (1, "nesterov", False)),
        "skipped": False,
        "fingerprint": hash_of(f"state {step + 1}")[:16],
        "state_root": None,
    }
    return StepRecord(**(values | changes))


def run(**changes: Any) -> Transcript:
    stated = specification(**changes)
    roots = [hash_of(f"state {t + 1}") if stated.is_checkpoint(t) else None for t in range(stated.steps)]
    return Transcript(
        stated,
        tuple(
            record(t, rank, state_root=roots[t])
            for t in range(stated.steps)
            for rank in range(stated.world_size)
        ),
    )


def documents(transcript: Transcript) -> tuple[bytes, bytes, bytes]:
    return transcript.specification.encode(), transcript.encode_records(), transcript.statement().encode()


@pytest.mark.parametrize("changes", [{}, {"steps": 1}, {"world_size": 3}, {"checkpoint_every": 100}])
def test_a_run_survives_its_documents(changes: dict[str, Any]) -> None:
    transcript = run(**changes)

    assert verify_transcript(*documents(transcript)) == transcript


def test_checkpoints_are_every_so_many_steps_and_the_last() -> None:
    assert run().checkpoints() == tuple(
        StateCommitment(done, hash_of(f"state {done}")) for done in (0, 3, 6, 7)
    )


def test_the_root_can_be_streamed_from_the_leaves() -> None:
    transcript = run()
    accumulator = Accumulator([leaf_hash(transcript.specification.leaf())])
    for item in transcript.records:
        accumulator.append(leaf_hash(item.leaf()))

    assert accumulator.root() == transcript.root()


def test_a_run_still_going_has_a_root_but_no_statement() -> None:
    whole = run()
    half = Transcript(whole.specification, whole.records[:4])

    assert half.root() != whole.root()
    assert half.num_steps == 4
    with pytest.raises(InvalidInput, match="the run has 7 records, there are 4"):
        half.statement()


def test_every_record_is_proved_under_the_root() -> None:
    transcript = run(world_size=2)
    for item in transcript.records:
        proof = transcript.prove_step(item.step, item.rank)

        verify_step_proof(parse_step_proof(proof.encode()), transcript.root())
        assert transcript.record(item.step, item.rank) == item

        forged = dataclasses.replace(proof, record=dataclasses.replace(item, log_bytes=999))
        with pytest.raises(Mismatch, match="leads to root"):
            verify_step_proof(forged, transcript.root())


@pytest.mark.parametrize(("step", "rank"), [(-1, 0), (7, 0), (0, 1), (0, -1)])
def test_there_is_no_proof_of_a_step_that_is_not_there(step: int, rank: int) -> None:
    with pytest.raises(InvalidInput, match=f"there is no record of step {step} by rank {rank}"):
        run().prove_step(step, rank)


def test_the_specification_is_proved_under_the_root() -> None:
    transcript = run()
    proof = parse_specification_proof(transcript.prove_specification().encode())

    verify_specification_proof(proof, transcript.specification, transcript.root())
    with pytest.raises(Mismatch, match="leaf 0 of 8"):
        verify_specification_proof(proof, specification(seed=8), transcript.root())


@pytest.mark.parametrize("old_size", range(1, 9))
def test_a_longer_run_is_proved_to_extend_a_shorter_one(old_size: int) -> None:
    whole = run()
    past = Transcript(whole.specification, whole.records[: old_size - 1])
    proof = parse_extension_proof(whole.prove_extension(old_size).encode())

    verify_extension(proof, old_root=past.root(), root=whole.root())
    rewritten = Transcript(specification(seed=8), past.records)
    with pytest.raises(Mismatch):
        verify_extension(proof, old_root=rewritten.root(), root=whole.root())


@pytest.mark.parametrize("old_size", [-1, 0, 9])
def test_there_is_no_extension_of_what_never_was(old_size: int) -> None:
    with pytest.raises(InvalidInput, match="old"):
        run().prove_extension(old_size)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": -1}, "seed must be 0 to"),
        ({"seed": 2**63}, "seed must be 0 to"),
        ({"steps": 0}, "steps must be 1 to"),
        ({"checkpoint_every": 0}, "checkpoint_every must be 1 to"),
        ({"accumulation": 0}, "accumulation must be 1 to"),
        ({"world_size": 0}, "world_size must be 1 to"),
        ({"initial_state": "ab"}, "initial_state: must be 64 lower-case hexadecimal digits"),
        ({"sites": (SiteRecord("state", "w", (), "F32"),) * 2}, "duplicate state site 'w'"),
    ],
)
def test_a_malformed_specification_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        specification(**changes)


def test_a_malformed_part_of_a_specification_is_refused() -> None:
    with pytest.raises(InvalidInput, match="job: source_digest: must be 64"):
        JobRecord("job.py", "AB" * 32, {}, None)
    with pytest.raises(InvalidInput, match="job: dataset_digest: must be 64"):
        JobRecord("job.py", "ab" * 32, {}, "")
    with pytest.raises(InvalidInput, match=r"kind must be one of .*, is 'weight'"):
        SiteRecord("weight", "w", (), "F32")
    with pytest.raises(InvalidInput, match="dtype 'float32' is unknown"):
        SiteRecord("state", "w", (), "float32")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": -1}, "step -1: step must be 0 to"),
        ({"rank": -1}, "rank must be 0 to"),
        ({"micro_batches": 0}, "micro_batches must be 1 to"),
        ({"batch": "00"}, "batch: must be 64"),
        ({"log": "00" * 33}, "log: must be 64"),
        ({"log_bytes": -1}, "log_bytes must be 0 to"),
        ({"loss": "0.5"}, "loss: '0.5' must be written"),
        ({"fingerprint": "00" * 7}, "fingerprint: must be 16"),
        ({"state_root": "0x" + "0" * 62}, "state_root: must be 64"),
        ({"schedule": ((0, "lr", None), (0, "lr", None))}, "strictly ascending"),
        ({"schedule": ((1, "a", None), (0, "b", None))}, "'b' of group 0 follows 'a' of group 1"),
        ({"schedule": ((-1, "lr", None),)}, r"schedule\[0\]\[0\] must be 0 to"),
        ({"schedule": ((0, "lr", "0.1"),)}, "schedule: lr: '0.1' must be written"),
    ],
)
def test_a_malformed_record_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        dataclasses.replace(record(0), **changes)


@pytest.mark.parametrize(
    "changes",
    [{"tree_size": 1}, {"root": ""}, {"steps": 0}, {"final_state": "ab"}],
    ids=lambda c: next(iter(c)),
)
def test_a_malformed_statement_is_refused(changes: dict[str, Any]) -> None:
    good = run().statement()

    with pytest.raises(InvalidInput, match=f"run statement: {next(iter(changes))}"):
        dataclasses.replace(good, **changes)


EDITS: list[tuple[Callable[[tuple[StepRecord, ...]], list[StepRecord]], str]] = [
    (lambda r: [r[1], r[0], *r[2:]], "record 0 must be step 0 rank 0, is step 1 rank 0"),
    (lambda r: [*r, record(7)], "step 7: the specification ends after 7 steps"),
    (lambda r: [record(0, micro_batches=3), *r[1:]], "step 0: 3 micro-batches exceed"),
    (lambda r: [record(0, state_root="ab" * 32), *r[1:]], "step 0: is no checkpoint"),
    (lambda r: [*r[:2], record(2), *r[3:]], "step 2: a checkpoint must have a state root"),
    (lambda r: [*r[:6], record(6)], "step 6: a checkpoint must have a state root"),
]


@pytest.mark.parametrize(("edit", "reason"), EDITS)
def test_records_against_the_specification_are_refused(
    edit: Callable[[tuple[StepRecord, ...]], list[StepRecord]], reason: str
) -> None:
    good = run()

    with pytest.raises(InvalidInput, match=reason):
        Transcript(good.specification, tuple(edit(good.records)))


def test_ranks_must_state_one_root() -> None:
    good = run(world_size=2)
    parted = (
        *good.records[:5],
        dataclasses.replace(good.records[5], state_root="ab" * 32),
        *good.records[6:],
    )

    with pytest.raises(InvalidInput, match="step 2: ranks state different state roots"):
        Transcript(good.specification, parted)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": 6}, "steps is 6, specification says 7"),
        ({"tree_size": 9}, "number of records is 8, specification says 7"),
        ({"final_state": "ab" * 32}, f"final state is {'ab' * 32}, last record says"),
        ({"root": "ab" * 32}, f"root is {'ab' * 32}, tree over the documents says"),
    ],
)
def test_a_statement_about_something_else_is_refused(changes: dict[str, Any], reason: str) -> None:
    first, lines, _ = documents(run())
    stated: RunStatement = dataclasses.replace(run().statement(), **changes)

    with pytest.raises(Mismatch, match=reason):
        verify_transcript(first, lines, stated.encode())


def test_a_record_left_out_is_noticed() -> None:
    first, lines, stated = documents(run())

    with pytest.raises(Mismatch, match=r"number of records is 7, steps\.jsonl says 6"):
        verify_transcript(first, b"".join(lines.splitlines(keepends=True)[:-1]), stated)


@given(st.data())
def test_no_byte_of_the_documents_can_be_changed(data: st.DataObject) -> None:
    changed = list(documents(run(steps=3)))
    which = data.draw(st.integers(0, 2))
    edited = bytearray(changed[which])
    edited[data.draw(st.integers(0, len(edited) - 1))] ^= data.draw(st.integers(1, 255))
    changed[which] = bytes(edited)

    with pytest.raises((InvalidInput, Mismatch)):
        verify_transcript(changed[0], changed[1], changed[2])


PROOF = run().prove_step(2)
PARSERS: list[tuple[bytes, Callable[[bytes], Any]]] = [
    (run().specification.encode(), parse_specification),
    (run().records[2].encode(), parse_step_record),
    (run().statement().encode(), parse_run_statement),
    (PROOF.encode(), parse_step_proof),
    (run().prove_specification().encode(), parse_specification_proof),
    (run().prove_extension(3).encode(), parse_extension_proof),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**63)
    | st.text(max_size=4)
    | st.sampled_from(["ab" * 32, "nan"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(("encoded", "parse"), PARSERS)
def test_a_document_survives_its_encoding(encoded: bytes, parse: Callable[[bytes], Any]) -> None:
    assert parse(encoded).encode() == encoded


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    for _, parse in PARSERS:
        with pytest.raises(InvalidInput):
            parse(data)
    if data:
        with pytest.raises(InvalidInput, match=r"steps\.jsonl"):
            parse_step_records(data)


@given(st.sampled_from(PARSERS), st.data())
def test_a_document_with_any_value_in_a_field_is_refused_or_has_that_encoding(
    parser: tuple[bytes, Callable[[bytes], Any]], data: st.DataObject
) -> None:
    encoded, parse = parser
    document = json.loads(encoded)
    places: list[Any] = [
        document,
        *(value for value in document.values() if isinstance(value, dict | list) and value),
    ]
    place: Any = data.draw(st.sampled_from(places))
    at = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[at] = data.draw(VALUES)
    try:
        changed = canonical_json(document)
        parsed = parse(changed)
    except InvalidInput:
        return

    assert parsed.encode() == changed


def test_no_records_are_no_lines() -> None:
    assert parse_step_records(b"") == ()
    with pytest.raises(InvalidInput, match=r"steps.jsonl: line 0: Expecting value"):
        parse_step_records(b"\n")
    with pytest.raises(InvalidInput, match="the last line must end in a newline"):
        parse_step_records(record(0).encode())


def test_a_proof_of_a_rank_beyond_the_world_is_refused() -> None:
    beyond = dataclasses.replace(PROOF, record=dataclasses.replace(PROOF.record, rank=1))

    with pytest.raises(InvalidInput, match="rank 1 is out of range for world size 1"):
        verify_step_proof(beyond, run().root())


def test_a_record_speaks_of_the_state_it_commits_to() -> None:
    """spec/transcript.md 3: whoever signs a fingerprint of another state contradicts itself."""
    entries = {"a": Entry("a", "F32", (2,), np.array([1.0, -2.0], dtype="<f4").tobytes())}
    mark = state_fingerprint(entries)
    check_fingerprint(record(2, fingerprint=f"{mark:016x}"), entries)
    for other in (mark ^ 1, mark ^ 1 << 63):
        with pytest.raises(Mismatch, match="step 2: the committed state's fingerprint is"):
            check_fingerprint(record(2, fingerprint=f"{other:016x}"), entries)
