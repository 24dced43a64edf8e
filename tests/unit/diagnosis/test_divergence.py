"""Where states differ, which causes two states alone fit, and what two records say of themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tallystick.commit.encoding import hex_float
from tallystick.commit.state import Entry
from tallystick.diagnosis.causes import Divergence, Evidence, explain_states, fitting
from tallystick.diagnosis.divergence import compare, relate_updates
from tallystick.diagnosis.document_differences import record_differences
from tallystick.diagnosis.search import Diagnosis
from tallystick.run.documents import StepRecord

generator = np.random.default_rng(3)
BASE = {
    "model/embed.weight": generator.normal(size=(64, 8)).astype("<f4"),
    "model/head.weight": generator.normal(size=(8, 4)).astype("<f4"),
    "model/head.bias": generator.normal(size=4).astype("<f4"),
}


def state(values: dict[str, np.ndarray]) -> dict[str, Entry]:
    codes = {"<f4": "F32", "<i8": "I64", "<f8": "F64", "<u2": "BF16"}
    return {
        name: Entry(name, codes[array.dtype.newbyteorder("<").str], array.shape, array.tobytes())
        for name, array in values.items()
    }


def causes(own: dict[str, np.ndarray], stated: dict[str, np.ndarray]) -> set[str]:
    found = explain_states(state(own), state(stated), ("own", "stated"))
    assert all(finding.status == "fits" for finding in found.findings)
    return {finding.cause for finding in found.findings}


def noisy(array: np.ndarray) -> np.ndarray:
    return np.nextafter(array, np.where(generator.random(array.shape) < 0.5, -np.inf, np.inf).astype("<f4"))


def test_the_first_and_the_worst_element_are_told_with_both_values_and_the_distance() -> None:
    other = {**BASE, "model/head.weight": BASE["model/head.weight"].copy()}
    changed = other["model/head.weight"]
    changed[2, 1] = np.nextafter(changed[2, 1], np.float32(np.inf))
    changed[5, 3] *= 2

    found = compare(state(BASE), state(other))

    (tensor,) = found.tensors
    assert (tensor.name, tensor.differing, tensor.elements) == ("model/head.weight", 2, 32)
    assert (tensor.first.element, tensor.first.index, tensor.first.ulps) == (9, (2, 1), 1)
    assert float.fromhex(tensor.first.own) == BASE["model/head.weight"][2, 1]
    assert (tensor.worst.index, tensor.worst.ulps) == ((5, 3), 1 << 23)
    assert tensor.distances is not None
    assert (tensor.distances.counts[0], tensor.distances.differing) == (30, 2)
    assert (found.compared, found.elements, found.differing) == (3, 64 * 8 + 36, 2)


def test_forms_that_do_not_fit_and_documents_are_listed_and_not_compared() -> None:
    own, stated = state(BASE), state({**BASE, "model/head.bias": BASE["model/head.bias"][:3]})
    own["document/grids"] = Entry("document/grids", "U8", (1,), b"\0")
    stated["document/grids"] = Entry("document/grids", "U8", (1,), b"\1")
    stated["model/more"] = Entry("model/more", "U8", (1,), b"\1")

    found = compare(own, stated)

    assert found.odd == {"model/head.bias": ("F32[4]", "F32[3]"), "model/more": ("absent", "U8[1]")}
    assert (found.documents, found.tensors) == (("document/grids",), ())


def test_bfloat16_has_distances_of_its_own() -> None:
    a, b = np.array([0x3F80, 0], dtype="<u2"), np.array([0x3F81, 0], dtype="<u2")

    (tensor,) = compare(state({"model/x": a}), state({"model/x": b})).tensors

    assert (tensor.first.own, tensor.first.stated, tensor.first.ulps) == (
        "0x1.0000000000000p+0",
        "0x1.0200000000000p+0",
        1,
    )


def test_a_nan_is_different_and_has_no_distance() -> None:
    own, stated = np.ones(3, dtype="<f4"), np.array([1, math.nan, 1], dtype="<f4")

    (tensor,) = compare(state({"model/x": own}), state({"model/x": stated})).tensors

    assert (tensor.first.element, tensor.first.ulps, tensor.worst.ulps) == (1, None, None)
    assert tensor.distances is not None
    assert tensor.distances.unordered == 1


def test_last_bits_everywhere_fit_noise_and_in_the_embedding_only_a_scatter() -> None:
    everywhere = {name: noisy(array) for name, array in BASE.items()}
    there = {**BASE, "model/embed.weight": noisy(BASE["model/embed.weight"])}

    assert causes(BASE, everywhere) == {"last_bit_noise"}
    assert "scatter_order" in causes(BASE, there)
    assert "last_bit_noise" not in causes(BASE, there)
    head = {**BASE, "model/head.weight": noisy(BASE["model/head.weight"])}
    assert "scatter_order" not in causes(BASE, head)


def test_flushed_subnormals_fit_and_normal_numbers_set_to_zero_do_not() -> None:
    small = {**BASE, "model/head.bias": np.array([1e-40, -1e-41, 1e-39, 1.0], dtype="<f4")}
    flushed = {**BASE, "model/head.bias": np.array([0, 0, 0, 1.0], dtype="<f4")}
    zeroed = {**BASE, "model/head.bias": np.array([0, 0, 0, 0], dtype="<f4")}

    assert "denormals" in causes(small, flushed)
    assert "denormals" not in causes(small, zeroed)


def test_one_changed_tensor_fits_an_edit_and_two_do_not() -> None:
    one = {**BASE, "model/head.weight": BASE["model/head.weight"] + np.float32(0.5)}
    two = {**one, "model/head.bias": BASE["model/head.bias"] + np.float32(0.5)}

    assert causes(BASE, one) == {"edited_weights"}
    assert causes(BASE, two) == {"unknown"}


def test_a_proportional_update_fits_another_rate_and_a_still_one_a_skipped_step() -> None:
    step = {
        name: generator.normal(size=array.shape).astype("<f4") * np.float32(0.01)
        for name, array in BASE.items()
    }
    own = {name: array + step[name] for name, array in BASE.items()}
    for factor, cause in ((1.5, "other_rate"), (0.0, "skipped_step")):
        stated = {name: array + np.float32(factor) * step[name] for name, array in BASE.items()}
        update = relate_updates(state(BASE), state(own), state(stated))
        assert update is not None
        assert update.factor == pytest.approx(factor, abs=1e-5)
        seen = Evidence(compare(state(own), state(stated)), update, (1.0, 1.0))
        assert [finding.cause for finding in fitting(seen)] == [cause]
    other = {
        name: array + generator.normal(size=array.shape).astype("<f4") * np.float32(0.01)
        for name, array in BASE.items()
    }
    update = relate_updates(state(BASE), state(own), state(other))
    assert [f.cause for f in fitting(Evidence(compare(state(own), state(other)), update, (1.0, 1.0)))] == [
        "unknown"
    ]


def test_equal_states_have_no_findings() -> None:
    found = explain_states(state(BASE), state(BASE), ("a", "b"))

    assert isinstance(found, Divergence)
    assert found.state is not None
    assert (found.state.is_empty, found.findings, found.cause) == (True, [], None)


# -- two records ------------------------------------------------------------------------------------------------------

RECORD = StepRecord(
    step=3, rank=0, micro_batches=1, batch="00" * 32, log="11" * 32, log_bytes=0, loss=None,
    schedule=((0, "initial_lr", hex_float(1.0)), (0, "lr", hex_float(0.125)), (0, "momentum", hex_float(0.5))),
    skipped=False, fingerprint="0" * 16, state_root=None,
)  # fmt: skip


def scheduled(**numbers: float | None) -> StepRecord:
    values = {n: v for _, n, v in RECORD.schedule} | {
        name: None if value is None else hex_float(value) for name, value in numbers.items()
    }
    return replace(RECORD, schedule=tuple((0, name, value) for name, value in values.items()))


@pytest.mark.parametrize(
    ("stated", "cause", "text"),
    [
        (
            replace(RECORD, batch="22" * 32),
            "other_data",
            "batch 0000000000000000.. against 2222222222222222..",
        ),
        (replace(RECORD, batch="33" * 32), "other_data", "; the latter is that of our step 7"),
        (replace(RECORD, micro_batches=2), "other_data", "has 1 micro-batches against 2"),
        (scheduled(lr=0.25), "other_rate", "lr of group 0 0.125 against 0.25"),
        (scheduled(momentum=0.75), "other_hyperparameter", "momentum of group 0 0.5 against 0.75"),
        (scheduled(momentum=None), "other_hyperparameter", "momentum of group 0 0.5 against none"),
        (replace(RECORD, skipped=True), "skipped_step", "the second run leaves the optimizer out in step 3"),
    ],
)
def test_records_of_different_work_say_so(stated: StepRecord, cause: str, text: str) -> None:
    (found,) = record_differences(RECORD, stated, {"00" * 32: 3, "33" * 32: 7})
    assert (found.cause, found.status) == (cause, "confirmed")
    assert text in found.text


def test_records_of_one_work_say_nothing_of_how_it_went() -> None:
    other = replace(
        scheduled(initial_lr=2.0), log="44" * 32, log_bytes=9, loss=hex_float(1.0), fingerprint="1" * 16
    )
    assert record_differences(RECORD, other, {}) == []


@pytest.mark.parametrize("unchanged", [False, True])
def test_a_change_explains_nothing_where_no_change_gives_the_stated_state_as_well(unchanged: bool) -> None:
    """Under jitter a changed label that the loss never read was the confirmed cause of what another repetition did by itself."""
    bench = SimpleNamespace(
        tries=0, gives=lambda change: "changed", repeat=lambda: "again", agrees=lambda found: unchanged
    )
    found = Divergence("the trainer", "this machine")
    search = SimpleNamespace(_tell=None, _tried={}, bench=bench, found=found, confirmed=None)
    trial: Any = SimpleNamespace(cause="other_data", words="a label changed", change="a label")
    assert Diagnosis._try(cast("Diagnosis", search), trial) != unchanged
    assert [each.status for each in found.findings] == ([] if unchanged else ["confirmed"])
    assert len(found.notes) == unchanged
    assert (search.confirmed is None) == unchanged
