"""The log and the grids in a dispute's record are those that both parties committed to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.commit.encoding import canonical_json, digest
from tallystick.commit.state import Entry, hold
from tallystick.dispute import record as dispute
from tallystick.dispute.bounds.steps import FRAME_TAG
from tallystick.dispute.openings import StateChunk
from tallystick.dispute.operator_game import Opened
from tallystick.dispute.operator_list import ROUND, parse_operator
from tallystick.dispute.record import GRIDS_ENTRY, MOST_MOVES, parse_dispute
from tallystick.dispute.terms import DisputedPosition
from tallystick.errors import InvalidInput, Mismatch
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Frame, encode_frame

VECTOR = Path(__file__).parents[3] / "vectors" / "dispute" / "worked-example" / "input.json"
GRIDS = GridTable().encode()
FRAME = encode_frame(Frame())


def checked(entry: str, index: int = 0, frame: bytes = FRAME, *, grids: bool = True) -> str:
    """Return what the fourth check says of a rounding site whose record opens state entry ``entry`` as the grids."""
    record = parse_dispute(json.loads(VECTOR.read_text())["record"].encode())
    state = hold(Entry(name, "U8", (len(GRIDS),), memoryview(GRIDS)) for name in (GRIDS_ENTRY, "model/w"))
    moves = tuple(
        replace(
            m, leaf=replace(m.leaf, leaf=replace(parse_operator(m.leaf.leaf or b""), name=ROUND).encode())
        )
        if isinstance(m, Opened)
        else m
        for m in record.moves
    )
    logged = replace(record.step_proof.record, log=digest(FRAME_TAG, FRAME).hex())
    held = replace(
        record, frame=frame, grids=(StateChunk(state.open(entry, index), GRIDS),) * grids, moves=moves,
        step_proof=replace(record.step_proof, record=logged),
    )  # fmt: skip
    position = DisputedPosition("steps", 2, 3, state.root, {"trainer": bytes(32), "auditor": bytes(32)})
    outcome, detail = dispute._check_log(held, {"position": position}, None)  # pyright: ignore[reportPrivateUsage]
    assert outcome == "passed"
    return detail


def test_the_grids_are_those_of_the_agreed_state_and_the_frame_the_records() -> None:
    assert checked(GRIDS_ENTRY) == "0 payloads, 0 grids"
    with pytest.raises(Mismatch, match="chunk 0 of the grids is another entry's"):
        checked("model/w")  # the same bytes, which a trainer may have put among its weights
    with pytest.raises(InvalidInput, match="the log is not the one its record names"):
        checked(GRIDS_ENTRY, frame=FRAME + b"\0")
    with pytest.raises(Mismatch, match="the operator needs the grids, and the record has none"):
        checked(GRIDS_ENTRY, grids=False)


@pytest.mark.parametrize(
    ("count", "reason"), [(MOST_MOVES, "move"), (MOST_MOVES + 1, "moves must have 0 to 256 items, has 257")]
)
def test_a_record_holds_no_more_moves_than_a_game_has(count: int, reason: str) -> None:
    fields = json.loads(json.loads(VECTOR.read_text())["record"])
    fields["moves"] = [{}] * count
    with pytest.raises(InvalidInput, match=reason) as refused:
        parse_dispute(canonical_json(fields))
    assert ("must have" in str(refused.value)) == (count > MOST_MOVES)
