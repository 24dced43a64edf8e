"""What a policy fixes: limits of what a trainer may choose, and how far an auditor lets noise and moves go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tallystick.errors import InvalidInput
from tallystick.numerics.policy import (
    CHOICES,
    POLICIES,
    Policy,
    chooses_grids,
    find_policy,
    is_measured_step,
    policy_of,
)


@pytest.mark.parametrize(
    ("name", "path", "bent", "excuse"),
    [
        ("fp64", 2.0**-6, 2.0**-10, 4.0),
        ("leaf", 2.0**-6, 2.0**-10, 4.0),
        ("fp32", 2.0**-4, 2.0**-4, 2.0),
        ("bf16", 3.0, 2.0**-2, 1.0),
    ],
)
def test_how_far_moves_and_noise_may_go_is_what_was_decided(
    name: str, path: float, bent: float, excuse: float
) -> None:
    """docs/adr/0025 and 0026: an auditor's answer, and in no specification."""
    policy = POLICIES[name]
    assert (policy.most_path, policy.most_bent, policy.excuse) == (path, bent, excuse)


@pytest.mark.parametrize("every", [1, 7, 50, 63, 100])
def test_grids_are_chosen_when_the_policy_says_whatever_the_runs_interval(every: int) -> None:
    """Of 15 intervals that shifted those steps one made a gradient silent for good (attacks/lucky_measurement.py)."""
    policy, own = find_policy("fp32", recalibrate_every=every), {0, 4, 32, 100, 200, 300}
    assert {step for step in range(301) if chooses_grids(policy, step)} == own
    measured = {step for step in range(301) if is_measured_step(policy, step)}
    assert measured == own | set(range(0, 301, every))


def test_bf16_chooses_grids_at_powers_of_two_besides() -> None:
    for policy in (POLICIES["bf16"], find_policy("bf16", recalibrate_every=3)):
        assert [step for step in range(120) if chooses_grids(policy, step)] == [0, 4, 8, 16, 32, 64, 100]


@pytest.mark.parametrize("every", [0, -1, 101])
def test_noise_is_measured_as_often_as_the_policy_does_at_least(every: int) -> None:
    with pytest.raises(InvalidInput, match=f"from 1 to 100, the policy's own, got {every}"):
        find_policy("fp32", recalibrate_every=every)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, limits in CHOICES.items() for key in limits])
def test_a_chosen_number_may_be_at_its_limits_and_not_beyond(name: str, key: str) -> None:
    least, greatest = CHOICES[name][key]
    for value in (least, greatest):
        assert getattr(find_policy(name, chosen={key: value}), key) == value
    for value in (least - 1, greatest + 1):
        with pytest.raises(InvalidInput, match=f"{key} is {value}, the policy allows {least} to {greatest}"):
            find_policy(name, chosen={key: value})


def stated(policy: Policy) -> dict[str, int | str]:
    return {**policy.parameters(), "optimizer_arithmetic": "portable"}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_number_of_a_specification_is_the_policys_own(name: str) -> None:
    numbers = stated(POLICIES[name])
    free = {"recalibrate_every", "optimizer_arithmetic", "b_r", "tau", *CHOICES.get(name, {})}
    assert policy_of(name, numbers).parameters() == numbers
    for key in numbers.keys() - free:
        value = numbers[key]
        for other in (value + 1, value - 1) if isinstance(value, int) else (value + "x",):
            with pytest.raises(InvalidInput, match=f"{key} is .* in the specification"):
                policy_of(name, {**numbers, key: other})
        with pytest.raises(InvalidInput, match=f"{key} is None"):
            policy_of(name, {each: numbers[each] for each in numbers if each != key})
        if isinstance(value, int) and value in (0, 1):
            with pytest.raises(InvalidInput, match=rf"{key} is (True|False) in the specification"):
                policy_of(name, {**numbers, key: bool(value)})
    with pytest.raises(InvalidInput, match="steering is 1 in the specification"):
        policy_of(name, {**numbers, "steering": 1})


def test_the_page_lists_every_key_of_a_specification() -> None:
    page = (Path(__file__).parents[3] / "spec" / "policies.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1:-1] for line in page.partition("## 10.")[2].splitlines() if line.startswith("|")
    ]
    names = [cell.strip(" `") for cell in rows[0][1:-1]]
    shown: dict[str, dict[str, str]] = {name: {} for name in names}
    for key, *cells, _ in rows[2:]:
        for name, cell in zip(names, cells, strict=True):
            if cell.strip():
                shown[name][key.strip(" `")] = cell.strip()
    assert set(names) == set(POLICIES)
    for name in names:
        assert shown[name] == {key: str(value) for key, value in stated(POLICIES[name]).items()}
