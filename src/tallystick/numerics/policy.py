"""Policies: in which precision a run computes, and how its sites are rounded (spec/rounding.md).

A policy is data. Its numbers stand in every run's specification, and an auditor refuses
numbers outside the limits given here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from tallystick.errors import InvalidInput
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.nearest import FEWEST_BITS, MOST_BITS

PER_LAYER, PER_KIND = "layer", "kind"

OPTIONAL: Mapping[str, object] = {
    "residue_bits": 0, "dithered_buffers": False, "row_scales": False, "decision_safety": None, "loss_band": None,
    "gradient_spacing": None, "gradient_coarsest": None, "gradient_steer": None,
}  # fmt: skip
"""Numbers that not every policy has, with what their absence from a specification means."""


@dataclass(frozen=True)
class ActivationRule:
    """How activations and their gradients are rounded: to the nearest value of ``b_r`` bits (numerics.nearest).

    Attributes:
        b_r: 26 to 32.
        tau: ``layer`` or ``kind``, where bands are measured for each layer or each kind of layer; or a fixed threshold
            in quanta, from 0.25 on, with 1/2 - tau a power of two.
        band: smallest and largest band exponents, relative to a site's scale. A site that needs more is passed through.
        lowest_floor: exponent, relative to a site's scale, below which no quantum falls with 32 bits.
    """

    b_r: int = 32
    tau: str = PER_LAYER
    band: tuple[int, int] = (-46, -14)
    lowest_floor: int = -36

    def __post_init__(self) -> None:
        if not FEWEST_BITS <= self.b_r <= MOST_BITS:
            raise InvalidInput(f"policy leaf: b_r {self.b_r} is outside [{FEWEST_BITS}, {MOST_BITS}]")
        if self.tau not in (PER_LAYER, PER_KIND) and _margin_of(self.tau) is None:
            raise InvalidInput(
                f"policy leaf: tau must be {PER_LAYER}, {PER_KIND}, or a number from 0.25 to below 0.5 for which "
                f"0.5 - tau is a power of two (0.25, 0.375, 0.4375, ..), got {self.tau!r}"
            )

    @property
    def precision(self) -> int:
        """Significant bits of a value: 24 for 32."""
        return self.b_r - 8

    @property
    def floor(self) -> int:
        """The lowest floor for ``b_r`` bits: the same elements stand on it, whatever ``b_r``."""
        return self.lowest_floor + MOST_BITS - self.b_r

    @property
    def margin(self) -> int | None:
        """log2 of 1/2 - tau for a fixed threshold, else None."""
        return _margin_of(self.tau)

    def parameters(self) -> dict[str, int | str]:
        """Return the numbers as they stand in a specification."""
        low, high = self.band
        return {
            "b_r": self.b_r, "tau": self.tau, "activation_band_min": low, "activation_band_max": high,
            "activation_floor": self.lowest_floor,
        }  # fmt: skip


def _margin_of(tau: str) -> int | None:
    """Return log2(1/2 - tau) of a threshold written in its shortest decimal form, None for anything else."""
    try:
        value = float(tau)
    except ValueError:
        return None
    if repr(value) != tau or not 0.25 <= value < 0.5:
        return None
    mantissa, exponent = math.frexp(0.5 - value)
    return exponent - 1 if mantissa == 0.5 and exponent > -20 else None


@dataclass(frozen=True)
class Policy:
    """How one run rounds. Exponents are powers of two; bands and floors are relative to a block's scale.

    Attributes:
        name: ``fp64``, ``fp32``, ``bf16`` or ``leaf``.
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
        recalibrate_every: steps between two measurements of the noise.
        optimizer_arithmetic: ``portable`` (spec/optimizers.md: no state sites) or ``general`` (torch's own optimizer
            in float64, its results rounded and logged). ``auto`` becomes one of them when a session is prepared.
        activation: how the outputs of leaf modules and the gradients of their inputs are rounded; None if they are not.
        residue_bits: the fewest bits of every element's residue that gradients are logged by, 0 for sparse entries; buffers and
            the loss then have one.
        loss_band: smallest and largest band exponent of the loss; None for those of buffers.
        row_scales: whether every row of a matrix has a scale, at least the whole matrix's, not only where the rows' sizes
            differ much.
        decision_safety: ``safety`` for the inputs of decisions, of which then only those near a switching point count;
            None for the same, over all inputs.
        dithered_buffers: whether buffers have an absolute dithered grid, as gradients have.
        gradient_spacing: octaves wanted between a gradient's band and its quantum: with n, one element in 2**(n - 1) is
            ambiguous. None where ``SPARSEST`` is enough.
        gradient_coarsest: floor that is not passed to have so many.
        gradient_steer: power of two that the square of a steer within a step's budget of moves should not exceed, relative to
            that of the step's whole gradient: where it may, grids are finer, as far as the noise permits (docs/adr/0026).
        revision: of what the numbers do not say, such as which operators are computed in double (spec/policies.md); a run
            of another revision is refused.
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
    recalibrate_every: int
    optimizer_arithmetic: str = "auto"
    activation: ActivationRule | None = None
    residue_bits: int = 0
    dithered_buffers: bool = False
    row_scales: bool = False
    decision_safety: int | None = None
    loss_band: tuple[int, int] | None = None
    gradient_spacing: int | None = None
    gradient_coarsest: int | None = None
    gradient_steer: int | None = None
    revision: int = 2

    def finest_floor(self, band: int) -> int:
        """Return the least floor of a gradient whose band that is: as fine as the policy goes, coarser where noise asks."""
        if self.gradient_spacing is None or self.gradient_coarsest is None:
            return self.gradient_floor
        return max(self.gradient_floor, min(band + self.gradient_spacing, self.gradient_coarsest))

    @property
    def most_bent(self) -> float:
        """How far the decisions of a log may bend one step's gradient, relative to it (docs/adr/0026)."""
        return {"bfloat16": 2.0**-2, "float32": 2.0**-4}.get(self.compute, 2.0**-10)

    @property
    def most_path(self) -> float:
        """How far a log's choices may lead one tensor, under ``bf16`` all, relative to the distance trained (docs/adr/0026)."""
        return {"bfloat16": 3.0, "float32": 2.0**-4}.get(self.compute, 2.0**-6)

    @property
    def storage(self) -> str:
        """The torch dtype of parameters, buffers, gradients and batches during a step."""
        return "float32" if self.autocast else self.compute

    @property
    def autocast(self) -> bool:
        """Whether forward passes run under torch's autocast to ``compute``."""
        return self.compute == "bfloat16"

    @property
    def excuse(self) -> float:
        """How many times its own measured noise an auditor takes for possible.

        Machines differ up to 2.1 times as much as two jittered passes show (docs/adr/0025), under fp32 the deviation from
        float64 counts too. Under autocast jitter is above what machines differ by (docs/adr/0006), and a band may be two
        times the noise: four would excuse all.
        """
        if self.autocast:
            return 1.0
        return 4.0 if self.compute == "float64" else 2.0

    @property
    def allows(self) -> str:
        """The words that stand before a limit in a message about noise that is too loud."""
        return f"policy {self.name} allows"

    def parameters(self) -> dict[str, int | str]:
        """Return the numbers as they stand in a specification; what only other policies have is left out."""
        flat: dict[str, int | str] = {}
        for name, value in asdict(self).items():
            if name in ("name", "activation") or (name in OPTIONAL and value == OPTIONAL[name]):
                continue
            if isinstance(value, tuple):
                flat[f"{name}_min"], flat[f"{name}_max"] = value
            else:
                flat[name] = int(value) if isinstance(value, bool) else value
        return flat if self.activation is None else flat | self.activation.parameters()


FP64 = Policy(
    name="fp64",
    compute="float64",
    gradient_precision=24,
    gradient_floor=-21,
    dithered=False,
    gradient_band=(-44, -4),
    decision_band=(-34, -14),
    buffer_band=(-44, -28),
    state_band=(-47, -40),
    buffer_precision=24,
    loss_precision=24,
    loss_band=(-44, -2),  # a loss that is nearly nothing is mostly noise, and no reason to stop
    safety=6,
    recalibrate_every=100,
    gradient_spacing=16,
    gradient_coarsest=-16,
)

FP32 = Policy(
    name="fp32",
    compute="float32",
    gradient_precision=0,
    gradient_floor=-4,
    dithered=True,
    gradient_band=(-18, -2),
    decision_band=(-17, -6),
    buffer_band=(-20, -9),
    state_band=(-47, -40),
    buffer_precision=14,
    loss_precision=12,
    loss_band=(-20, -2),
    safety=3,
    recalibrate_every=100,
    gradient_spacing=4,  # 11 makes logs a third as long, and losses of small models worse (docs/adr/0011)
    gradient_coarsest=-3,
    gradient_steer=-20,
    revision=3,  # floors by sizes and bands alone
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
    safety=2,
    recalibrate_every=100,
    residue_bits=2,
    dithered_buffers=True,
    row_scales=True,
    decision_safety=1,
    loss_band=(-9, -2),
)

SPARSEST = 4
"""Octaves between band and quantum from which on a sparse log is the smaller one.

With q = 16 delta one element in eight is ambiguous, and gaps and sides take 0.68 bit an element; with q = 8 delta it is
one in four and 1.07 bit, more than the one bit of a parity (spec/policies.md 7).
"""

SMALL_SITE, SMALL_FINER = 256, 2
"""Elements of a gradient below which its quantum is finer, and by how many octaves: its entries or residues cost next to nothing,
and a single one that is turned is much of it."""

LEAF = replace(
    FP64,
    name="leaf",
    activation=ActivationRule(),
)

ARITHMETICS = ("auto", "portable", "general")
EARLY = (
    0,
    4,
    32,
)  # steps before which the noise is measured besides the fixed interval: gradients change fastest early


def is_calibration_step(step: int, every: int, doubling: bool = False) -> bool:
    """Whether the noise is measured before ``step``: at the start, twice soon after, and every ``every`` steps.

    With ``doubling`` at every power of two from 4 on as well, until that is ``every``.
    """
    early = doubling and 4 <= step < every and step & (step - 1) == 0
    return step % every == 0 or step in EARLY or early


def is_measured_step(policy: Policy, step: int) -> bool:
    """Whether the noise is measured before ``step`` whatever happens: by the run's own interval, and where grids are chosen."""
    by_run = is_calibration_step(step, policy.recalibrate_every, bool(policy.residue_bits))
    return by_run or chooses_grids(policy, step)


def chooses_grids(policy: Policy, step: int) -> bool:
    """Whether grids are chosen anew before ``step``, and what is nothing but noise: by the policy's interval, not the run's.

    Whoever may choose when to ask takes the answer that it likes (docs/adr/0026, point 34).
    """
    own = POLICIES[policy.name]
    return is_calibration_step(step, own.recalibrate_every, bool(own.residue_bits))


def hearing_safety(policy: Policy) -> int:
    """Return how many octaves over its noise decide whether a gradient is heard: the policy's own, whatever the run's are."""
    return POLICIES[policy.name].safety


def entry_budget(grid: SiteGrid, numel: int) -> int:
    """Return how many entries an honest log of ``numel`` elements may have: binomial mean plus eight deviations and 16.

    For relative bands the share is that of the smallest significand, times four for values that cancelled.
    """
    share = (
        math.ldexp(1.0, grid.band - grid.floor + 1)
        if grid.scales.size
        else math.ldexp(4.0, grid.band + grid.precision + 1)
    )
    mean = numel * min(share, 1.0)
    return min(numel, int(mean + 8.0 * math.sqrt(mean)) + 16)


def move_budget(grid: SiteGrid, numel: int) -> int:
    """Return how many of ``numel`` elements honest residues may move: mean plus eight deviations and 16.

    A boundary lies between two values d apart with probability d over the quantum. The band is at least twice the
    largest deviation that was measured, so the mean one is taken to be an eighth of the band at most.
    """
    mean = numel * math.ldexp(0.125, grid.band - grid.floor)
    return min(numel, int(mean + 8.0 * math.sqrt(mean)) + 16)


POLICIES: Mapping[str, Policy] = {policy.name: policy for policy in (FP64, FP32, BF16, LEAF)}

CHOICES: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "fp64": {"gradient_floor": (-23, -12), "gradient_spacing": (SPARSEST, 16), "safety": (3, 10)},
    "fp32": {
        "gradient_floor": (-10, -2),
        "gradient_spacing": (SPARSEST, 11),
        "safety": (3, 8),
        "gradient_steer": (-24, -20),
    },
    "bf16": {"gradient_floor": (-3, -2)},
}
"""Numbers that the trainer may choose after a calibration, with the least and the greatest that an auditor accepts."""


def find_policy(
    name: str,
    *,
    recalibrate_every: int | None = None,
    optimizer_arithmetic: str = "auto",
    b_r: int | None = None,
    tau: str | None = None,
    chosen: Mapping[str, int] | None = None,
) -> Policy:
    """Return the policy called ``name``, with what the trainer may choose.

    Args:
        name: ``fp64``, ``fp32``, ``bf16`` or ``leaf``.
        recalibrate_every: steps between two measurements of the noise.
        optimizer_arithmetic: ``auto``, ``portable`` or ``general``.
        b_r: of ``leaf`` alone, the bits of an activation, see ``ActivationRule``.
        tau: of ``leaf`` alone, the threshold.
        chosen: numbers in place of the policy's own.

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
    if b_r is not None or tau is not None:
        rule = policy.activation
        if rule is None:
            raise InvalidInput(f"policy {name}: has no b_r and no tau, they are those of policy leaf")
        rule = replace(rule, b_r=rule.b_r if b_r is None else b_r, tau=rule.tau if tau is None else tau)
        policy = replace(policy, activation=rule)
    if recalibrate_every is None:
        return policy
    if not 1 <= recalibrate_every <= policy.recalibrate_every:
        raise InvalidInput(
            f"recalibrate_every must be from 1 to {policy.recalibrate_every}, the policy's own, got {recalibrate_every}"
        )
    return replace(policy, recalibrate_every=recalibrate_every)


def policy_of(name: str, parameters: Mapping[str, int | str]) -> Policy:
    """Return the policy a specification states, every number checked against the known policy of that name.

    The trainer's to choose are ``recalibrate_every``, ``optimizer_arithmetic`` and, within their limits, the numbers
    in ``CHOICES``, and ``b_r`` and ``tau`` of ``leaf``.

    Raises:
        InvalidInput: an unknown name, a chosen number outside its limits, or another number that differs from
            what the policy prescribes.
    """
    for key, value in parameters.items():
        if isinstance(value, bool):  # which Python holds for 0 or 1
            raise InvalidInput(
                f"policy {name}: {key} is {value} in the specification, must be a number or a text"
            )
    chosen: dict[str, int] = {}
    for key in ("recalibrate_every", *CHOICES.get(name, {})):
        value = parameters.get(key)
        if not isinstance(value, int):
            raise InvalidInput(f"policy {name}: {key} must be a whole number, got {value!r}")
        chosen[key] = value
    every = chosen.pop("recalibrate_every")
    arithmetic = parameters.get("optimizer_arithmetic")
    if arithmetic not in ("portable", "general"):
        raise InvalidInput(
            f"policy {name}: optimizer_arithmetic must be portable or general, got {arithmetic!r}"
        )
    if name != LEAF.name:
        b_r, tau = None, None
    else:
        b_r, tau = parameters.get("b_r"), parameters.get("tau")
        if not isinstance(b_r, int) or not isinstance(tau, str):
            raise InvalidInput(
                f"policy {name}: b_r and tau must be a whole number and a text, got {b_r!r}, {tau!r}"
            )
    policy = find_policy(
        name, recalibrate_every=every, optimizer_arithmetic=str(arithmetic), chosen=chosen, b_r=b_r, tau=tau
    )
    known = policy.parameters()
    for key in sorted(known.keys() | parameters.keys()):
        if known.get(key) != parameters.get(key):
            raise InvalidInput(
                f"policy {name}: {key} is {parameters.get(key)!r} in the specification, the policy prescribes {known.get(key)!r}"
            )
    return policy
