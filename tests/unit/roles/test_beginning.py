"""Which differences between a first state's settings and the job's own accuse somebody."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tallystick.commit.encoding import canonical_json
from tallystick.commit.state import Entry
from tallystick.roles.beginning import SETTING_ROUNDING, find_other_setting


def number(value: float) -> dict[str, str]:
    return {"float": value.hex()}


def settings(**values: Any) -> dict[str, Entry]:
    data = canonical_json({"groups": [{"map": [[key, value] for key, value in sorted(values.items())]}]})
    return {"document/optimizer": Entry("document/optimizer", "U8", (len(data),), data)}


OWN = settings(lr=number(0.1), steps=3, nesterov=False)


@pytest.mark.parametrize(
    ("stated", "said", "is_number"),
    [
        (settings(lr=number(0.4), steps=3, nesterov=False), "lr is 0.4, the job's own is 0.1", True),
        (settings(lr=number(0.1), steps=4, nesterov=False), "steps is 4, the job's own is 3", True),
        (settings(lr=number(0.1), steps=3, nesterov=True), "nesterov is True", False),
        (settings(lr=number(0.1), steps=3), "has 2 values, the job's own 3", False),
        (settings(lr=number(0.1), steps=True, nesterov=False), "steps is True", False),
        (settings(lr=number(math.inf), steps=3, nesterov=False), "lr is inf, the job's own is 0.1", True),
        (settings(lr=number(-math.inf), steps=3, nesterov=False), "lr is -inf", True),
        (settings(lr=number(math.nan), steps=3, nesterov=False), "lr is nan", True),
        (settings(lr=0, steps=3, nesterov=False), "lr is 0, the job's own is 0.1", True),
        (settings(lr=number(0.1), steps=number(3.5), nesterov=False), "steps is 3.5", True),
        (settings(lr=number(0.1), steps=number(3.0), nesterov=False), "steps is 3.0", False),
        ({}, "the job's own is", False),
        (settings(lr=number(0.1 + 1e-9), steps=3, nesterov=False), "the job's own is 0.1", True),
    ],
)
def test_only_another_number_accuses(stated: dict[str, Entry], said: str, is_number: bool) -> None:
    found = find_other_setting(OWN, stated)
    assert found is not None
    assert said in found.text
    assert found.is_number is is_number


def test_a_number_is_named_before_anything_else() -> None:
    found = find_other_setting(OWN, settings(lr=number(0.1), nesterov=True, steps=4))
    assert found is not None
    assert (found.is_number, "steps is 4" in found.text) == (True, True)


def test_the_same_settings_and_last_bits_are_no_difference() -> None:
    near = number(0.1 * (1 + SETTING_ROUNDING / 4))
    assert find_other_setting(OWN, OWN) is None
    assert find_other_setting(OWN, settings(lr=near, steps=3, nesterov=False)) is None


def test_small_and_whole_numbers_are_told_apart() -> None:
    """A decay of almost nothing is no decay of almost nothing else, and a count has no last bits to spare."""
    for own, stated in ((number(1e-13), number(2e-13)), (1 << 60, (1 << 60) + 1)):
        found = find_other_setting(settings(eps=own), settings(eps=stated))
        assert found is not None
        assert found.is_number


def test_a_document_that_says_more_or_less_is_another() -> None:
    data = [canonical_json(document) for document in ({"groups": []}, {"groups": [], "more": {}})]
    one, other = (held("document/optimizer", each) for each in data)
    for own, stated in ((one, other), (other, one)):
        found = find_other_setting(own, stated)
        assert found is not None
        assert "more" in found.text
        assert not found.is_number


def test_an_infinity_or_nan_is_only_itself() -> None:
    for value in (math.inf, -math.inf, math.nan):
        own = settings(eps=number(value))
        assert find_other_setting(own, own) is None
        assert find_other_setting(own, settings(eps=number(0.1))) is not None


def held(name: str, data: bytes) -> dict[str, Entry]:
    return {name: Entry(name, "U8", (len(data),), data)}


def test_an_optimizer_that_has_begun_holds_the_parents_tensors_or_none() -> None:
    """A momentum of one's own choice carries the weights anywhere in one step that repeats to the last bit."""
    name = "optimizer/w/momentum_buffer"
    theirs, forged, weights = held(name, b"\1"), held(name, b"\2"), held("model/w", b"\3")
    assert find_other_setting(OWN, OWN | weights) is None
    assert find_other_setting(OWN, OWN | theirs, OWN | theirs) is None
    assert find_other_setting(OWN, OWN, OWN | theirs) is None  # begins anew
    assert (
        find_other_setting(OWN | theirs, OWN | forged) is None
    )  # the job has one itself, drawn as weights are
    for parent in (None, OWN, OWN | theirs):
        found = find_other_setting(OWN, OWN | forged, parent)
        assert found is not None
        assert (found.text.startswith(f"{name}: the optimizer has been at work"), found.is_number) == (
            True,
            False,
        )


def test_what_the_parent_run_ended_with_is_no_difference() -> None:
    stated = settings(lr=number(0.4), steps=3, nesterov=False)
    assert find_other_setting(OWN, stated, stated) is None
    assert find_other_setting(OWN, stated, OWN) is not None
