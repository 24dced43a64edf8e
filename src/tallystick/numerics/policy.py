"""Policies: in which precision a run computes, and how its sites are rounded (spec/rounding.md).

A policy is data. Its numbers stand in every run's specification, and an auditor refuses
numbers outside the limits given here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from tallystick.errors import InvalidInput
from tallystick.numerics.log import SiteGrid


@dataclass(frozen=True)
class Policy:
    """How one run rounds. Exponents are powers of two; bands and floors are relative to a block's scale.

    Attributes:
        name: ``fp64``, ``fp32`` or ``bf16``.
        compute: torch dtype of the forward and backward pass; ``bfloat16`` means torch's autocast to it, around
            float32 parameters.
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
        parity: whether a gradient whose quantum would be below ``2**SPARSEST`` bands is logged by parity, one bit an
            element, and every buffer and the loss.
        loss_band: smallest and largest band exponent of the loss; None for those of buffers.
        row_scales: whether every row of a matrix has a scale, at least the whole matrix's, not only where the rows' sizes
            differ much.
        decision_safety: ``safety`` for the inputs of decisions, of which then only those near a switching point count;
            None for the same, over all inputs.
        dithered_buffers: whether buffers have an absolute dithered grid, as gradients have.
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
    parity: bool = False
    dithered_buffers: bool = False
    row_scales: bool = False
    decision_safety: int | None = None
    loss_band: tuple[int, int] | None = None

    @property
    def storage(self) -> str:
        """The torch dtype of parameters, buffers, gradients and batches during a step."""
        return "float32" if self.autocast else self.compute

    @property
    def autocast(self) -> bool:
        """Whether forward passes run under torch's autocast to ``compute``."""
        return self.compute == "bfloat16"

    def parameters(self) -> dict[str, int | str]:
        """Return the numbers as they stand in a specification; what only other policies have is left out."""
        flat: dict[str, int | str] = {}
        later = {each.name: each.default for each in fields(self)}
        for name, value in asdict(self).items():
            if name == "name" or value == later[name]:
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

BF16 = Policy(
    name="bf16",
    compute="bfloat16",
    gradient_precision=0,
    gradient_floor=-3,
    dithered=True,
    gradient_band=(-9, -2),
    decision_band=(-8, -2),
    buffer_band=(-20, -2),
    state_band=(-47, -40),
    buffer_precision=0,
    loss_precision=0,
    safety=3,
    noise_limit=-3,
    recalibrate_every=100,
    parity=True,
    dithered_buffers=True,
    row_scales=True,
    decision_safety=1,
    loss_band=(-9, -2),
)

SPARSEST = 4
"""Octaves between band and quantum from which on a sparse log is the smaller one.

With q = 16 delta one element in eight is ambiguous, and gaps and sides take 0.68 bit an element; with q = 8 delta it is
one in four and 1.07 bit, more than the one bit of a parity (spec/policies.md 6).
"""

EARLY = (
    0,
    8,
    32,
)  # steps before which the noise is measured besides the fixed interval: gradients change fastest early


def is_calibration_step(step: int, every: int, doubling: bool = False) -> bool:
    """Whether the noise is measured before ``step``: at the start, twice soon after, and every ``every`` steps.

    With ``doubling`` at every power of two from 4 on as well, until that is ``every``.
    """
    early = doubling and 4 <= step < every and step & (step - 1) == 0
    return step % every == 0 or step in EARLY or early


def move_budget(grid: SiteGrid, numel: int) -> int:
    """Return how many of ``numel`` elements honest parities may move: mean plus eight deviations and 16.

    A boundary lies between two values d apart with probability d over the quantum. The band is at least twice the
    largest deviation that was measured, so the mean one is taken to be an eighth of the band at most.
    """
    mean = numel * math.ldexp(0.125, grid.band - grid.floor)
    return min(numel, int(mean + 8.0 * math.sqrt(mean)) + 16)


POLICIES: Mapping[str, Policy] = {policy.name: policy for policy in (FP64, FP32, BF16)}


def find_policy(name: str, *, recalibrate_every: int | None = None) -> Policy:
    """Return the policy called ``name``.

    Raises:
        InvalidInput: there is none of that name, or the interval is below 1.
    """
    if name not in POLICIES:
        raise InvalidInput(f"policy {name}: unknown; known are {', '.join(POLICIES)}")
    if recalibrate_every is None:
        return POLICIES[name]
    if recalibrate_every < 1:
        raise InvalidInput(f"recalibrate_every must be at least 1, got {recalibrate_every}")
    return replace(POLICIES[name], recalibrate_every=recalibrate_every)


def policy_of(name: str, parameters: Mapping[str, int | str]) -> Policy:
    """Return the policy a specification states, every number checked against the known policy of that name.

    Only ``recalibrate_every`` is the trainer's to choose.

    Raises:
        InvalidInput: an unknown name, or a number that differs from what the policy prescribes.
    """
    every = parameters.get("recalibrate_every")
    if not isinstance(every, int):
        raise InvalidInput(f"policy {name}: recalibrate_every must be a whole number, got {every!r}")
    policy = find_policy(name, recalibrate_every=every)
    known = policy.parameters()
    for key in sorted(known.keys() | parameters.keys()):
        if known.get(key) != parameters.get(key):
            raise InvalidInput(
                f"policy {name}: {key} is {parameters.get(key)!r} in the specification, the policy prescribes {known.get(key)!r}"
            )
    return policy
