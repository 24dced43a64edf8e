"""What a policy fixes: limits of what a trainer may choose, and how far an auditor lets noise and moves go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tallystick.errors import InvalidInput
from tallystick.numerics.policy import CHOICES, POLICIES, Policy, chooses_grids, find_policy, policy_of


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


@pytest.mark.parametrize(
    ("every", "chosen"),
    [
        (1, [0, 4, 32, 100, 200]), (7, [0, 4, 32, 105, 210]), (50, [0, 4, 32, 100, 200]), (100, [0, 4, 32, 100, 200]),
        (150, [0, 4, 32, 150, 300]), (250, [0, 4, 32, 250]),
    ],
)  # fmt: skip
def test_grids_are_chosen_as_often_as_the_policy_measures_however_often_the_run_does(
    every: int, chosen: list[int]
) -> None:
    policy = find_policy("fp32", recalibrate_every=every)
    assert [step for step in range(301) if chooses_grids(policy, step)][: len(chosen)] == chosen
    often = find_policy("bf16", recalibrate_every=3)  # which measures at powers of two besides
    assert [step for step in range(120) if chooses_grids(often, step)] == [0, 4, 32, 102]
    assert [step for step in range(120) if chooses_grids(POLICIES["bf16"], step)] == [
        0,
        4,
        8,
        16,
        32,
        64,
        100,
    ]


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
