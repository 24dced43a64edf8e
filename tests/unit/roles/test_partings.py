"""Where two parties' records of one run part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.dispute.verdict import LogObjection
from tallystick.roles.partings import find_known, is_agreed

EVERY = 4


def transcript(logs: str, roots: str = "aabb") -> Any:
    """A transcript of as many steps as there are logs, of two segments of four, each with the state that ``roots`` says."""
    records = [SimpleNamespace(step=step, log=log, state_root=None) for step, log in enumerate(logs)]
    for step, root in zip(range(EVERY - 1, len(logs), EVERY), roots, strict=False):
        records[step].state_root = root
    return SimpleNamespace(
        records=records,
        record=lambda step: records[step],
        num_steps=len(records),
        specification=SimpleNamespace(checkpoint_every=EVERY),
    )


@pytest.mark.parametrize(
    ("theirs", "objection", "known"),
    [
        ("abcdefgh", None, 8),
        ("abcdeXgh", None, 5),
        ("abcdefgh", ("log", 3), 3),
        ("abXdefgh", ("log", 3), 2),
        ("abcdefgh", ("gradient of w", 3), 8),
    ],
)
def test_an_auditors_states_say_nothing_behind_a_log_that_it_left_or_did_not_have(
    theirs: str, objection: tuple[str, int] | None, known: int
) -> None:
    objects = (
        None if objection is None else LogObjection("00" * 32, objection[1], objection[0], 0, "far from it")
    )
    assert find_known(transcript("abcdefgh"), transcript(theirs), objects) == known


@pytest.mark.parametrize(
    ("theirs", "step", "end", "agreed"),
    [("xy", 1, 6, True), ("zy", 1, 6, False), ("zy", 1, 3, True), ("zy", 5, 8, True), ("xz", 5, 8, False), ("zy", 2, 2, True)],
)  # fmt: skip
def test_records_are_of_one_step_where_its_segment_ends_in_one_state_or_is_the_last(
    theirs: str, step: int, end: int, agreed: bool
) -> None:
    assert is_agreed(transcript("abcdefgh", "xy"), transcript("abcdefgh", theirs), step, end) == agreed
