"""What of a first state is the job's own: fixed tensors to their last bits, trained ones counted."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from tallystick.commit.encoding import canonical_json, hex_float
from tallystick.commit.state import Entry
from tallystick.roles.initial_state import (
    BUILT_ROUNDING,
    CHUNK,
    Built,
    compare_beginning,
    find_other_setting,
    is_exact,
)
from tallystick.run.transcript import CURSOR


def entry(values: object, kind: str = "F32") -> Entry:
    array = np.asarray(values, dtype={"F32": "<f4", "I64": "<i8"}[kind])
    return Entry("model/x", kind, array.shape, array.tobytes())


def built(of: Entry, *, trained: bool = False) -> Built:
    values = np.frombuffer(of.data, dtype={"F32": "<f4", "I64": "<i8"}[of.dtype])
    digest, kept = hashlib.sha256(of.data).digest(), values[: 0 if trained else None]
    return Built(digest, kept, values.size, trained, is_exact(values))


OWN = entry([1.0, -4.0, 0.3, 0.0, np.inf, -np.inf, np.nan])
NEAR = 4.0 * BUILT_ROUNDING


def moved(at: int, value: float) -> Entry:
    values = np.frombuffer(OWN.data, dtype="<f4").copy()
    values[at] = value
    return entry(values)


@pytest.mark.parametrize(
    ("stated", "rounded", "changed"),
    [
        (OWN, False, False),
        (moved(0, 1.0 + 0.9 * NEAR), True, False),
        (moved(0, 1.0 + 1.1 * NEAR), False, True),
        (moved(3, 0.9 * NEAR), True, False),
        (moved(3, np.nan), False, True),
        (moved(4, -np.inf), False, True),
        (moved(4, 1e30), False, True),
        (moved(6, 0.0), False, True),
        (entry([1.0, -4.0]), False, True),
        (entry([1, 2, 3, 4, 5, 6, 7], "I64"), False, True),
        (None, False, True),
    ],
)
def test_a_fixed_tensor_is_the_jobs_own_to_its_last_bits(
    stated: Entry | None, rounded: bool, changed: bool
) -> None:
    found = compare_beginning({"model/x": built(OWN)}, {} if stated is None else {"model/x": stated})
    assert (found.rounded == ("model/x",), found.changed is not None) == (rounded, changed)
    assert (found.trained, found.other) == (0, 0)


@pytest.mark.parametrize("other", [0.3, 1.0 + 2.0**-12, 4096.0])
def test_a_mask_is_the_jobs_own_to_the_bit(other: float) -> None:
    """Samples of weight 0 had 1.2e-5, and a loss that divides by it trained on them: a backdoor of 100 % (0.0 %)."""
    mask = [1.0, 0.0, 0.5, -2048.0, np.inf, np.nan]
    stated = entry([1.0, 2.0**-18, 0.5, -2048.0, np.inf, np.nan])
    found = compare_beginning({"model/x": built(entry(mask))}, {"model/x": stated})
    assert (found.rounded, found.changed is not None) == ((), True)
    # One number that a library may round, and all may be rounded.
    found = compare_beginning(
        {"model/x": built(entry([*mask, other]))}, {"model/x": entry([1.0, 2.0**-18, *mask[2:], other])}
    )
    assert (found.rounded, found.changed) == (("model/x",), None)


@pytest.mark.parametrize("at", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 1])
def test_no_element_of_a_large_fixed_tensor_is_left_out(at: int) -> None:
    """Of 131,074 elements every second was another, and the others were what was looked at."""
    values = np.linspace(-1.0, 1.0, 2 * CHUNK + 2, dtype="<f4")
    own = {"model/x": built(entry(values))}
    near = values + np.float32(0.5 * BUILT_ROUNDING)
    assert compare_beginning(own, {"model/x": entry(near)}).rounded == ("model/x",)
    near[at] += np.float32(2.0 * BUILT_ROUNDING)
    assert compare_beginning(own, {"model/x": entry(near)}).changed is not None


def test_whole_numbers_are_the_same_or_others() -> None:
    own = entry([0, 1, 2], "I64")
    assert compare_beginning({"model/x": built(own)}, {"model/x": own}).changed is None
    found = compare_beginning({"model/x": built(own)}, {"model/x": entry([0, 1, 3], "I64")})
    assert found.changed == "model/x: the job does not train it, and it is not what the job builds"
    large = {"model/x": built(entry([0, 1 << 20], "I64"))}  # of floats a rounding: one of 2**20
    assert compare_beginning(large, {"model/x": entry([0, (1 << 20) + 1], "I64")}).changed is not None


@pytest.mark.parametrize("trained", [False, True])
def test_ones_and_zeros_are_the_jobs_own_whether_it_trains_them_or_not(trained: bool) -> None:
    """An optimizer may hold a mask at no rate, or with no gradient: every second element of it was another."""
    found = compare_beginning(
        {"model/x": built(entry([1.0, 1.0]), trained=trained)}, {"model/x": entry([1.0, 0.0])}
    )
    assert (found.other, found.others) == (0, ())
    assert found.changed is not None and found.changed.endswith("and it is not what the job builds")


def test_trained_tensors_are_counted_whatever_they_are() -> None:
    found = compare_beginning({"model/x": built(OWN, trained=True)}, {"model/x": moved(0, 100.0)})
    assert (found.trained, found.other, found.changed) == (7, 7, None)


@pytest.mark.parametrize(("apart", "rounded"), [(2.0**-15, True), (2.0**-13, False)])
def test_a_fixed_tensor_may_differ_by_two_to_the_minus_sixteen_of_its_largest_element(
    apart: float, rounded: bool
) -> None:
    """The largest is 4: what is allowed is 2**-14."""
    found = compare_beginning({"model/x": built(OWN)}, {"model/x": moved(0, 1.0 + apart)})
    assert (found.rounded == ("model/x",), found.changed is None) == (rounded, rounded)


# -- settings ---------------------------------------------------------------------------------------------------------


def settings(value: object, more: dict[str, Entry] | None = None) -> dict[str, Entry]:
    data = canonical_json({"groups": [["lr", value]]})
    return {"document/optimizer": Entry("document/optimizer", "U8", (len(data),), data), **(more or {})}


def real(value: float) -> dict[str, str]:
    return {"float": hex_float(value)}


@pytest.mark.parametrize(
    ("stated", "other"),
    [
        (real(0.5), None),
        (real(0.5 * (1.0 + 2.0**-41)), None),
        (real(0.5 * (1.0 + 2.0**-39)), True),
        (real(0.75), True),
        (real(-0.5), True),
        (1, True),
        ("fast", False),
        (None, False),
    ],
)
def test_a_setting_is_the_jobs_own_to_forty_bits(stated: object, other: bool | None) -> None:
    """And what is another number accuses, what is another kind of value does not."""
    found = find_other_setting(settings(real(0.5)), settings(stated))
    assert (None if found is None else found.is_number) == other


def test_no_number_is_near_an_infinite_one_and_whole_numbers_are_exact() -> None:
    for own, stated, same in (
        (real(math.inf), real(math.inf), True),
        (real(math.inf), real(1.0), False),
        (real(1.0), real(math.inf), False),
        (1 << 50, (1 << 50) + 1, False),
        (1 << 50, 1 << 50, True),
    ):
        assert (find_other_setting(settings(own), settings(stated)) is None) == same


def test_an_optimizer_has_not_been_at_work_before_but_in_the_parent_run() -> None:
    name = "optimizer/w/momentum_buffer"
    used = {name: Entry(name, "F32", (1,), np.array([3.0], dtype="<f4").tobytes())}
    other = {name: Entry(name, "F32", (1,), np.array([4.0], dtype="<f4").tobytes())}
    own = settings(real(0.5))
    found = find_other_setting(own, settings(real(0.5), used))
    assert found is not None and found.text.endswith("the job's optimizer has none") and not found.is_number
    assert find_other_setting(own, settings(real(0.5), used), settings(real(0.5), used)) is None
    assert find_other_setting(own, settings(real(0.5), used), settings(real(0.5), other)) is not None


def test_a_continued_run_may_have_its_parents_settings_or_the_jobs_own() -> None:
    own, parent = settings(real(0.5)), settings(real(0.25))
    assert find_other_setting(own, settings(real(0.25)), parent) is None
    assert find_other_setting(own, settings(real(0.5)), parent) is None
    third = find_other_setting(own, settings(real(0.125)), parent)
    assert third is not None and third.is_number


def test_a_run_begins_at_step_0_whatever_its_parent_says() -> None:
    def at(step: int) -> dict[str, Entry]:
        data = canonical_json({"step": step})
        return {**settings(real(0.5)), CURSOR: Entry(CURSOR, "U8", (len(data),), data)}

    assert find_other_setting(at(0), at(0)) is None
    for parent in (None, at(100)):
        found = find_other_setting(at(0), at(100), parent)
        assert found is not None and found.is_number
        assert found.text == "cursor is 100, the job's own is 0"


def test_what_an_optimizer_begins_with_is_compared_too() -> None:
    """Adagrad has its sums before the first step."""
    name = "optimizer/w/sum"
    own, stated = (
        settings(real(0.5), {name: Entry(name, "F32", (1,), np.array([value], dtype="<f4").tobytes())})
        for value in (0.0, 1e12)
    )
    assert find_other_setting(own, own) is None
    assert find_other_setting(own, stated, stated) is None, "as its parent run left it"
    for other, says in (
        (stated, "not what the job's optimizer begins with"),
        (settings(real(0.5)), "begins with it"),
    ):
        found = find_other_setting(own, other)
        assert found is not None and not found.is_number and found.text.endswith(says)


@pytest.mark.parametrize("fill", [-1e9, float(np.finfo(np.float32).min)])
def test_beside_the_fill_of_a_mask_nothing_is_free(fill: float) -> None:
    mask = np.array([0.0, fill, 0.0, 1.0], dtype="<f4")
    own = {"model/mask": built(entry(mask))}
    for at, by, rounded in (
        (0, 2.0**-13, True),
        (0, 2.0**-11, False),
        (3, -1.0, False),
        (1, -fill / 2**17, True),
        (1, -fill / 2**15, False),
    ):
        other = mask.copy()
        other[at] += np.float32(by)
        found = compare_beginning(own, {"model/mask": entry(other)})
        assert (found.rounded == ("model/mask",), found.changed is None) == (rounded, rounded), (at, by)
