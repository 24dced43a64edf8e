"""Policies: in which precision a run computes, and how its sites are rounded (spec/rounding.md).

A policy is data. Its numbers stand in every run's specification, and an auditor refuses
numbers outside the limits given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from tallystick.errors import InvalidInput


@dataclass(frozen=True)
class Policy:
    """How one run rounds. Exponents are powers of two; bands and floors are relative to a block's scale.

    Attributes:
        name: ``fp64`` or ``fp32``.
        compute: torch dtype of the forward and backward pass.
        gradient_precision: significant bits of the gradient grid; 0 for an absolute grid.
        gradient_floor: quantum exponent relative to the block's scale (its rms rounded up to a power of two).
        dithered: whether each element has its own boundary offset (absolute grids only).
        gradient_band, decision_band, buffer_band, state_band: smallest and largest band exponents;
            calibration chooses between them, and refuses a tensor that needs more than the largest.
        buffer_precision: significant bits of floating buffers.
        loss_precision: significant bits of the loss as recorded.
        safety: factor, as a power of two, between the measured noise and the band.
        noise_limit: a band set by the noise floor may not exceed this power of two times the largest
            gradient scale of the step.
        recalibrate_every: steps between two measurements of the noise.
        optimizer_arithmetic: ``portable`` (spec/optimizers.md: no state sites) or ``general`` (torch's own optimizer
            in float64, its results rounded and logged). ``auto`` becomes one of them when a session is prepared.
    """

    name: str
    compute: str
    gradient_precision: int
    gradient_floor: int
    dithered: bool
    gradient_band: tuple[int, int]
    decision_band: tuple[int, int]
    buffer_band: tuple[int, int]
    state_band: tuple[int, int]
    buffer_precision: int
    loss_precision: int
    safety: int
    noise_limit: int
    recalibrate_every: int
    optimizer_arithmetic: str = "auto"

    def parameters(self) -> dict[str, int | str]:
        """Return the numbers as they stand in a specification."""
        flat: dict[str, int | str] = {}
        for name, value in asdict(self).items():
            if name == "name":
                continue
            if isinstance(value, tuple):
                flat[f"{name}_min"], flat[f"{name}_max"] = value
            else:
                flat[name] = int(value) if isinstance(value, bool) else value
        return flat


FP64 = Policy(
    name="fp64",
    compute="float64",
    gradient_precision=24,
    gradient_floor=-21,
    dithered=False,
    gradient_band=(-44, -26),
    decision_band=(-34, -14),
    buffer_band=(-44, -28),
    state_band=(-47, -40),
    buffer_precision=24,
    loss_precision=24,
    safety=6,
    noise_limit=-30,
    recalibrate_every=100,
)

FP32 = Policy(
    name="fp32",
    compute="float32",
    gradient_precision=0,
    gradient_floor=-5,
    dithered=True,
    gradient_band=(-18, -3),
    decision_band=(-17, -8),
    buffer_band=(-20, -12),
    state_band=(-47, -40),
    buffer_precision=14,
    loss_precision=12,
    safety=4,
    noise_limit=-8,
    recalibrate_every=100,
)

ARITHMETICS = ("auto", "portable", "general")
EARLY = (
    0,
    8,
    32,
)  # steps before which the noise is measured besides the fixed interval: gradients change fastest early


def is_calibration_step(step: int, every: int) -> bool:
    """Whether the noise is measured before ``step``: at the start, twice soon after, and every ``every`` steps."""
    return step % every == 0 or step in EARLY


POLICIES: Mapping[str, Policy] = {policy.name: policy for policy in (FP64, FP32)}

CHOICES: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "fp64": {"gradient_floor": (-23, -12), "safety": (3, 10)},
    "fp32": {"gradient_floor": (-10, -2), "safety": (3, 8)},
}
"""Numbers that the trainer may choose after a calibration, with the least and the greatest that an auditor accepts."""


def find_policy(
    name: str,
    *,
    recalibrate_every: int | None = None,
    optimizer_arithmetic: str = "auto",
    chosen: Mapping[str, int] | None = None,
) -> Policy:
    """Return the policy called ``name``, with the numbers in ``chosen`` in place of its own.

    Raises:
        InvalidInput: there is none of that name, the interval is below 1, the arithmetic is unknown, or a chosen number
            is not the trainer's to choose or lies outside its limits.
    """
    if name not in POLICIES:
        raise InvalidInput(f"policy {name}: unknown; known are {', '.join(POLICIES)}")
    if optimizer_arithmetic not in ARITHMETICS:
        raise InvalidInput(
            f"optimizer arithmetic {optimizer_arithmetic}: unknown; known are {', '.join(ARITHMETICS)}"
        )
    limits = CHOICES.get(name, {})
    for key, value in (chosen or {}).items():
        if key not in limits:
            raise InvalidInput(
                f"policy {name}: {key[:40]} is not for the trainer to choose; {', '.join(limits) or 'nothing'} is"
            )
        least, greatest = limits[key]
        if not least <= value <= greatest:
            raise InvalidInput(
                f"policy {name}: {key} is {value}, the policy allows {least} to {greatest} (powers of two)"
            )
    policy = replace(POLICIES[name], optimizer_arithmetic=optimizer_arithmetic, **dict(chosen or {}))
    if recalibrate_every is None:
        return policy
    if recalibrate_every < 1:
        raise InvalidInput(f"recalibrate_every must be at least 1, got {recalibrate_every}")
    return replace(policy, recalibrate_every=recalibrate_every)


def policy_of(name: str, parameters: Mapping[str, int | str]) -> Policy:
    """Return the policy a specification states, every number checked against the known policy of that name.

    The trainer's to choose are ``recalibrate_every``, ``optimizer_arithmetic`` and, within their limits, the numbers
    in ``CHOICES``.

    Raises:
        InvalidInput: an unknown name, a chosen number outside its limits, or another number that differs from
            what the policy prescribes.
    """
    chosen: dict[str, int] = {}
    for key in ("recalibrate_every", *CHOICES.get(name, {})):
        value = parameters.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidInput(f"policy {name}: {key} must be a whole number, got {value!r}")
        chosen[key] = value
    every = chosen.pop("recalibrate_every")
    arithmetic = parameters.get("optimizer_arithmetic")
    if arithmetic not in ("portable", "general"):
        raise InvalidInput(
            f"policy {name}: optimizer_arithmetic must be portable or general, got {arithmetic!r}"
        )
    policy = find_policy(name, recalibrate_every=every, optimizer_arithmetic=str(arithmetic), chosen=chosen)
    known = policy.parameters()
    for key in sorted(known.keys() | parameters.keys()):
        if known.get(key) != parameters.get(key):
            raise InvalidInput(
                f"policy {name}: {key} is {parameters.get(key)!r} in the specification, the policy prescribes {known.get(key)!r}"
            )
    return policy
