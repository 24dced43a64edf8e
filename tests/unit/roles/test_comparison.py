"""What noise in a step's data may lead to, and how far."""

from __future__ import annotations

import pytest

from tallystick.roles.audit_report import About, Deviation
from tallystick.roles.comparison import FAR_LOSS, may_follow_from_data


@pytest.mark.parametrize(
    ("about", "own", "stated", "may"),
    [
        ("loss", 1.0, 1.0 - FAR_LOSS, True),
        ("loss", 1.0, 1.0 - FAR_LOSS - 2.0**-40, False),
        ("loss", 1.0 - FAR_LOSS, 1.0, True),
        ("loss", 1.0, 1e9, False),
        ("loss", 1.0, -1.0, False),
        ("fingerprint", 1.0, 1e9, True),
        ("schedule", 1.0, 1.0, False),
        ("policy", 1.0, 1.0, False),
    ],
)
def test_noise_in_data_leads_to_no_loss_far_away_and_to_no_other_rate(
    about: About, own: float, stated: float, may: bool
) -> None:
    deviation = Deviation(3, "mismatch", about, None, own.hex(), stated.hex(), about)
    assert may_follow_from_data(deviation) == may


def test_a_record_that_states_no_loss_is_not_excused() -> None:
    assert not may_follow_from_data(Deviation(3, "mismatch", "loss", None, (1.0).hex(), "none", "loss"))
