"""What noise excuses: no state farther away than training goes, and none of those that honest rounding gives."""

from __future__ import annotations

import numpy as np
import pytest

from tallystick.commit.state import Entry
from tallystick.protocol.transcript import state_fingerprint
from tallystick.roles.auditor import MOST_NOISE, farther_than_trained


def state(**values: list[float]) -> dict[str, Entry]:
    names = {"w": "model/w", "b": "model/b", "m": "optimizer/w/exp_avg", "r": "model/buffer/r"}
    return {
        names[key]: Entry(names[key], "F32", (len(value),), np.array(value, dtype="<f4").tobytes())
        for key, value in values.items()
    }


BEFORE = state(w=[1.0, 2.0], b=[0.0], m=[0.0, 0.0], r=[0.0, -np.inf, np.nan])
OWN = state(w=[1.125, 2.0], b=[0.0], m=[0.25, 0.0], r=[0.5, -np.inf, np.nan])


@pytest.mark.parametrize(
    ("stated", "far"),
    [
        (OWN, None),  # masks of infinity among them
        (OWN | state(b=[0.125]), None),  # rounded to nothing here and not there, as long as weights go
        (OWN | state(w=[1.125 + 0.125 * MOST_NOISE, 2.0]), None),
        (OWN | state(w=[1.125 + 0.13 * MOST_NOISE, 2.0]), "model/w"),
        (OWN | state(w=[3.375, 6.0]), "model/w"),
        (OWN | state(w=[np.nan, 2.0]), "model/w"),
        (OWN | state(m=[0.25 + 0.26 * MOST_NOISE, 0.0]), "optimizer/w/exp_avg"),
        (OWN | state(r=[0.5, np.inf, np.nan]), "model/buffer/r"),
        (OWN | state(r=[0.5, -np.inf, 0.0]), "model/buffer/r"),
        (OWN | state(w=[1.0]), "model/w"),
    ],
)
def test_noise_excuses_no_state_farther_away_than_training_goes(
    stated: dict[str, Entry], far: str | None
) -> None:
    assert farther_than_trained(BEFORE, OWN, stated) == far


def test_the_fingerprint_of_entries_is_that_of_the_specification() -> None:
    """spec/transcript.md 3, worked example; whole numbers and documents have no part in it."""
    entries = {
        name: Entry(name, "F32", (len(value),), np.array(value, dtype="<f4").tobytes())
        for name, value in {"b": [0.5], "a": [1.0, -2.0]}.items()
    }
    entries["0"] = Entry("0", "I64", (1,), bytes(8))
    assert f"{state_fingerprint(entries):016x}" == "082b6bc9bdca7c17"
