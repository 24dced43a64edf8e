"""What of a first state is the job's own: fixed tensors to their last bits, trained ones counted."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tallystick.commit.state import Entry
from tallystick.roles.beginning import BUILT_ROUNDING, CHUNK, Built, compare_beginning


def entry(values: object, kind: str = "F32") -> Entry:
    array = np.asarray(values, dtype={"F32": "<f4", "I64": "<i8"}[kind])
    return Entry("model/x", kind, array.shape, array.tobytes())


def built(of: Entry, *, trained: bool = False) -> Built:
    values = np.frombuffer(of.data, dtype={"F32": "<f4", "I64": "<i8"}[of.dtype])
    return Built(hashlib.sha256(of.data).digest(), values[: 0 if trained else None], values.size, trained)


OWN = entry([1.0, -4.0, 0.25, 0.0, np.inf, -np.inf, np.nan])
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


def test_trained_tensors_are_counted_whatever_they_are() -> None:
    found = compare_beginning({"model/x": built(OWN, trained=True)}, {"model/x": moved(0, 100.0)})
    assert (found.trained, found.other, found.changed) == (7, 7, None)
