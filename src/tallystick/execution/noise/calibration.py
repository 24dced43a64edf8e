"""Noise measured, bands chosen: one step repeated under last-bit jitter (Monte Carlo arithmetic) and in float64.

The band of a site is the largest deviation seen, times the policy's safety factor, rounded up to
a power of two and never below the policy's smallest. A gradient that is nothing but noise gets a
floor that sends it to zero on both sides (numerics: trap 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.noise.probes import ActivationNoise, EchoingContext, ProbingContext, still_sites
from tallystick.execution.noise.reference import in_float64
from tallystick.execution.noise.weighing import Weighing, is_linear
from tallystick.execution.noise.yardstick import finer_grids
from tallystick.execution.rounding.context import RoundingContext
from tallystick.execution.rounding.grids import (
    NOISE_BAND,
    ROW_SPREAD,
    SMALL_BITS,
    SMALL_FINER,
    SMALL_SITE,
    STILL,
    UNSEEN,
    activation_grid,
    activation_rule,
    expected_form,
    is_noise_only,
    kept_scales,
    row_scales_of,
    scale_exponents,
    settled_scales,
    site_grid,
)
from tallystick.execution.session.session import Session
from tallystick.execution.session.sites import Site
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import MOST_RESIDUE_BITS, Kind
from tallystick.numerics.nearest import adapt_threshold, closed_threshold
from tallystick.numerics.policy import PER_KIND, Policy
from tallystick.numerics.tensor_measures import block_differences, block_rms

REPEATS = 2
FEWEST_ROWS = 64
SHORTEST_ROW = 16  # where every row has a scale: a scale costs a few bits, the row at least so many
UNSEEN_SAFETY = (
    6  # octaves between the policy's smallest band and that of a gradient whose noise is not known yet
)
SMALL_SITE_SAFETY = 6
LOUDER = 4  # octaves above a policy's widest band that the noise of a gradient may ask of residues
STATE_SAFETY = (
    2  # factor, as a power of two, over the optimizer's measured noise: few operations, no long sums
)

AS_RARE = 3
"""Repetitions under autocast that move no more sixteen-bit results than really fall otherwise: an auditor's."""
OUTPUTS_TO_EXCUSE = 4  # repetitions that move what a loss is made of, before somebody is accused
UNSTEADY = 1.25  # times as large as the smallest of them one may be


@dataclass
class SiteNoise:
    """What calibration measured at one site: deviation over scale, and the scale.

    Attributes:
        relative: largest ``|x - y| / 2**s`` over all elements and repeats.
        scales: exponent ``s`` of each block.
        rms: of the whole tensor.
        largest: largest ``|x - y|``.
        elements: of the site.
        block_rms, block_largest: rms and largest deviation of each block of a gradient.
        block_mean: mean deviation of each block, of a scalar site of the whole; the largest of the repetitions.
    """

    relative: float
    scales: np.ndarray
    rms: float
    largest: float
    elements: int = 0
    block_rms: np.ndarray | None = None
    block_largest: np.ndarray | None = None
    block_mean: np.ndarray = field(default_factory=lambda: np.zeros(1))


@dataclass(frozen=True)
class Threshold:
    """The paper's tau of one activation site, in quanta: an element farther than that from its rounded value is logged.

    Attributes:
        name, layer: of the site, and the class of its module.
        gradient: whether it is the gradient of an input.
        observed: the largest tau that logs every straddle seen, 0.5 if none was, None if 0.25 does not.
        closed: the largest that the measured divergence allows; never more than ``observed`` if the sample held it.
        mean: divergence of an element on average, in quanta: the share of elements that straddle.
        straddles: how many were seen.
    """

    name: str
    layer: str
    gradient: bool
    observed: float | None
    closed: float
    mean: float
    straddles: int


@dataclass
class Calibration:
    """The noise of every site, and the grids that follow from it; with policy leaf the thresholds they amount to.

    ``states`` is the mean deviation of what the optimizer writes, relative to the larger of old and new value;
    ``flips`` is how many decisions of one step are expected to fall otherwise elsewhere, ``corrections`` the share of an
    activation site's elements. ``steady`` says that repetitions with as many flips as there really are moved the gradient
    alike: then none of those flips is most of its noise. ``weighed`` is what an honest log's moves are expected to come to in the
    optimizer, over the gradient, where ``noise.weighing`` says so.
    """

    noise: dict[Site, SiteNoise] = field(default_factory=dict[Site, SiteNoise])
    table: GridTable = field(default_factory=GridTable)
    thresholds: list[Threshold] = field(default_factory=list[Threshold])
    states: dict[Site, float] = field(default_factory=dict[Site, float])
    flips: float = 0.0
    corrections: dict[Site, float] = field(default_factory=dict[Site, float])
    steady: bool = True
    weighed: float = 0.0


def calibrate(
    session: Session,
    backward: Callable[[RoundingContext], None],
    *,
    repeats: int = REPEATS,
    seed: int = 0,
    units: float = 1.0,
    for_audit: bool = False,
    to_excuse: bool = False,
) -> Calibration:
    """Measure the noise of the session's next step and return the grids to use from it on.

    Args:
        session: prepared, between steps; left as it was found.
        backward: runs the step's forward and backward passes and clipping under a context, leaving the gradients.
        repeats: jittered repetitions.
        seed: of the jitter.
        units: size of the jitter, see ``Jitter``.
        for_audit: whether to measure what a follower holds a log against too: the optimizer's noise, and how often
            sixteen-bit results differ that a calibration moves more often than that, to see what they do.
        to_excuse: whether to take what the sixteen-bit numbers of a loss may do, all moved at once, for noise like any other:
            not for what bands are multiples of, which must be above it.

    Raises:
        Nondeterminism: a site is too noisy for the policy, or an operator is not in the table; by name.
    """
    counting = AS_RARE if for_audit and session.policy.autocast else 0
    repeats -= min(counting, 1)
    with undisturbed(session) as before:
        near = session.policy.decision_safety is not None
        probe = ProbingContext(
            session.policy.decision_band[1] if near else ProbingContext.wide,
            near,
            rule=session.policy.activation,
            table=session.table,
        )
        plain = gradients_under(session, backward, probe, before)
        heard = _RepeatedStep(session, backward, probe, before, plain, Deviations(session, plain[0]))
        if session.step == 0 and not for_audit and not to_excuse:
            heard.verify_twice()
        passes = _repetitions(session, repeats, seed, units)
        for extra in range(counting):
            rare = Jitter(seed * 1000003 + session.step * 101 + repeats + extra, units, fewest=0)
            passes.append(jittered(session, rare))
        for number, pass_ in enumerate(passes):
            if counting and number == repeats:  # how often what is rare happens shows in the last alone
                heard.forget_what_is_rare()
            heard.add(pass_)
        for extra in range((OUTPUTS_TO_EXCUSE if to_excuse else 1) if session.policy.autocast else 0):
            moved = Jitter(seed * 1000003 + session.step * 101 + 97 - extra, units, fewest=0, outputs=True)
            heard.add_outputs(jittered(session, moved), whole=to_excuse)
    chosen = heard.choose(measure_states=for_audit)
    if counting and session.policy.residue_bits and not is_linear(session.optimizer):
        chosen = replace(chosen, weighed=_expected_weight(session, plain[0], heard.gradients, chosen.table))
    sizes = heard.seen.sizes[-counting:]
    steady = not counting or (min(sizes) > 0.0 and min(sizes) * UNSTEADY >= max(sizes))
    flips = max(heard.flips, sum(heard.crossed) / max(len(heard.crossed), 1))
    return replace(chosen, flips=flips, steady=steady)


@contextmanager
def undisturbed(session: Session) -> Generator[dict[str, Tensor]]:
    """Inside, the session computes without noise of its own; gives its buffers' values, and puts them back after an error."""
    before = {name: tensor.clone() for name, tensor in session.tensors.all_buffers()}
    with jittered(session, None):
        try:
            yield before
        except BaseException:
            put_back(session, before)
            raise


Plain = tuple[list[Tensor | None], dict[str, Tensor], float]
"""Gradients, buffers and loss of a pass, as ``gradients_under`` gives them."""


@dataclass
class _RepeatedStep:
    """One step, repeated: its plain pass, and what repetitions showed of its decisions and activations.

    Attributes:
        session, backward: the step.
        probe: the context of the plain pass.
        before: the buffers' values before the step.
        plain: what the plain pass gave.
        seen: how far repetitions lie from it.
        decisions, flips, crossed, left, activations: what the repetitions' contexts noted.
        gradients: of the last repetition.
    """

    session: Session
    backward: Callable[[RoundingContext], None]
    probe: ProbingContext
    before: dict[str, Tensor]
    plain: Plain
    seen: Deviations
    decisions: dict[int, float] = field(default_factory=dict[int, float])
    flips: float = 0.0
    crossed: list[int] = field(default_factory=list[int])
    left: set[int] = field(default_factory=set[int])
    activations: dict[tuple[int, int], ActivationNoise] = field(
        default_factory=dict[tuple[int, int], ActivationNoise]
    )
    gradients: list[Tensor | None] = field(default_factory=list[Tensor | None])

    def verify_twice(self) -> None:
        """Return if the step gives the same gradients twice.

        Raises:
            Nondeterminism: it does not; by name.
        """
        again, _, _ = gradients_under(self.session, self.backward, EchoingContext(self.probe), self.before)
        _verify_repeated(self.session, self.plain[0], again)

    def forget_what_is_rare(self) -> None:
        """Forget how often decisions fell otherwise and how large deviations were on average."""
        self.flips, self.crossed = 0.0, []
        self.seen.forget_means()

    def add(self, disturbed: AbstractContextManager[None]) -> None:
        """Repeat the step once more, ``disturbed``, and compare it with the plain one."""
        echo = EchoingContext(self.probe, activations=self.activations)
        with disturbed:
            self.gradients, buffers, loss = gradients_under(self.session, self.backward, echo, self.before)
        put_back(self.session, self.before)
        self.seen.compare(self.gradients)
        self.seen.compare_buffers(self.plain[1], buffers)
        self.seen.compare_loss(self.plain[2], loss)
        for ordinal, noise in echo.noise.items():
            self.decisions[ordinal] = max(self.decisions.get(ordinal, 0.0), noise)
        self.flips = max(self.flips, echo.flips)
        self.crossed.append(echo.crossed)
        self.left |= echo.left

    def add_outputs(self, disturbed: AbstractContextManager[None], *, whole: bool) -> None:
        """Repeat the step while what its loss is made of is ``disturbed``; ``whole`` if that counts as noise like any other."""
        with disturbed:
            again, _, _ = gradients_under(
                self.session, self.backward, EchoingContext(self.probe), self.before
            )
        put_back(self.session, self.before)
        self.seen.compare_outputs(again, whole=whole)

    def choose(self, *, measure_states: bool) -> Calibration:
        """Return the grids that follow from the repetitions.

        Raises:
            Nondeterminism: a site is too noisy for the policy; by name.
        """
        session, policy = self.session, self.session.policy
        for ordinal, relative in self.decisions.items():
            self.probe.verify_apart(ordinal, relative, math.ldexp(1.0, decision_safety(policy)))
        chosen = choose_grids(session, self.seen, self.decisions, measure_states=measure_states)
        chosen.table = with_still(policy, chosen.table, self.decisions, still_sites(self.probe, self.left))
        if self.activations:
            chosen = with_activations(session, chosen, self.probe, self.activations)
        return chosen


def _expected_weight(
    session: Session, first: list[Tensor | None], again: list[Tensor | None], table: GridTable
) -> float:
    """Return what moves between two repetitions would come to in the optimizer, over the gradient; 0 where nothing is trained."""
    weighing, moved, whole = Weighing(session.optimizer), 0.0, 0.0
    for ordinal, (x, y) in enumerate(zip(first, again, strict=True)):
        grid = table.sites.get((Kind.GRADIENT, ordinal))
        if x is None or y is None or grid is None or not grid.residue_bits or not x.numel():
            continue
        quanta = torch.from_numpy(np.exp2(grid.scales.astype(np.float64) + grid.floor))
        weight = weighing.expected(session.parameters[ordinal][1], x, y, quanta)
        moved, whole = moved + weight.moved, whole + weight.whole
    return moved / whole if whole > 0.0 else 0.0


def _verify_repeated(session: Session, first: list[Tensor | None], again: list[Tensor | None]) -> None:
    """Return if a step gives the same gradients twice.

    Raises:
        Nondeterminism: it does not; by name.
    """
    for (name, _), x, y in zip(session.parameters, first, again, strict=True):
        is_same = x is y if x is None or y is None else torch.equal(x.nan_to_num(), y.nan_to_num())
        if not is_same:
            raise Nondeterminism(
                f"gradient of {name}: the same step gives another one when it is repeated here; something in the program keeps "
                "count beside the model's tensors (a counter, a cache, a random generator of its own): make it a buffer, or a "
                "function of the step"
            )


def _repetitions(
    session: Session, repeats: int, seed: int, units: float
) -> list[AbstractContextManager[None]]:
    """Return what a step is repeated in: under jitter, and where float64 is more precise than the policy in float64.

    Under autocast float64 would measure the error of bfloat16, which machines share.
    """
    seeds = [seed * 1000003 + session.step * 101 + repeat for repeat in range(repeats)]
    plain = [in_float64(session)] if session.arithmetic.precision == torch.float32 else []
    return [*(jittered(session, Jitter(each, units)) for each in seeds), *plain]


@contextmanager
def jittered(session: Session, jitter: Jitter | None) -> Generator[None]:
    """Inside, the session computes with this noise of its own."""
    with session.computing(replace(session.arithmetic, jitter=jitter)):
        yield


def gradients_under(
    session: Session,
    backward: Callable[[RoundingContext], None],
    context: RoundingContext,
    before: dict[str, Tensor],
) -> tuple[list[Tensor | None], dict[str, Tensor], float]:
    """Return the gradients (None where there is none), the floating buffers that changed, and the loss of one pass.

    ``before`` are clones of all buffers, which are put back; gradients are taken off the parameters.
    """
    with session.stepping(context, probing=True) as opened:
        backward(context)
        opened.verify_tensors()
        loss = opened.loss
    found: list[Tensor | None] = []
    session.trained.densify_gradients()
    for _, p in session.parameters:
        gradient = p.grad
        found.append(None if gradient is None else gradient.detach().contiguous())
    with torch.no_grad():
        buffers = {
            name: tensor.detach().clone()
            for name, tensor in session.tensors.all_buffers()
            if tensor.is_floating_point() and not torch.equal(tensor, before[name].to(tensor.dtype))
        }
    put_back(session, before)
    return found, buffers, loss


def put_back(session: Session, before: dict[str, Tensor]) -> None:
    """Undo what a forward and backward pass did to buffers and gradients."""
    session.model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, tensor in session.tensors.all_buffers():
            if name in before and not torch.equal(tensor, before[name].to(tensor.dtype)):
                tensor.copy_(before[name])


class Deviations:
    """Deviations so far, against the plain repetition whose gradients are ``first``."""

    def __init__(self, session: Session, first: list[Tensor | None]) -> None:
        self.session = session
        self.first = first
        self.noise: dict[Site, SiteNoise] = {}
        self.sizes: list[float] = []
        policy = session.policy
        for ordinal, gradient in enumerate(first):
            if gradient is None or gradient.numel() == 0:
                continue
            name = session.parameters[ordinal][0]
            place = (Kind.GRADIENT, ordinal)
            previous = session.table.sites.get(place)
            blocks = (
                previous.scales.size if previous is not None else _blocks_for(gradient, policy.row_scales)
            )
            rms = block_rms(gradient, blocks)
            if not np.isfinite(rms).all():
                raise Nondeterminism(
                    f"gradient of {name} is not finite at step {session.step}; there is no noise to measure"
                )
            if not rms.any():
                scales = np.full(blocks, UNSEEN) if previous is None else previous.scales.astype(np.int64)
            elif previous is None or is_noise_only(previous):
                scales = settled_scales(None, rms, policy.row_scales)
            else:
                scales = settled_scales(previous.scales.astype(np.int64), rms, policy.row_scales)
            whole = float(np.sqrt(np.mean(np.square(rms))))
            self.noise[place] = SiteNoise(
                0.0, scales, whole, 0.0, gradient.numel(), rms, np.zeros(blocks), np.zeros(blocks)
            )

    def forget_means(self) -> None:
        """Forget how large deviations were on average; how large the largest were stays."""
        for noise in self.noise.values():
            noise.block_mean = np.zeros_like(noise.block_mean)

    def compare(self, again: list[Tensor | None]) -> None:
        """Take note of another repetition's gradients, and how large all their deviations together are, by what they weigh."""
        self.sizes.append(0.0)
        for ordinal, (x, y) in enumerate(zip(self.first, again, strict=True)):
            noise = self.noise.get((Kind.GRADIENT, ordinal))
            if noise is None or x is None or y is None:
                continue
            largest, mean = block_differences(x, y, noise.scales.size)
            if noise.rms > noise.largest:
                weights = np.exp2(noise.scales.astype(np.float64))
                self.sizes[-1] += float(mean @ weights) * noise.elements / weights.size
            self._raise((Kind.GRADIENT, ordinal), largest, mean)

    def compare_outputs(self, again: list[Tensor | None], *, whole: bool) -> None:
        """Take note of what the numbers of a loss do to gradients: bands need be no wider, so it counts as less noise."""
        for ordinal, (x, y) in enumerate(zip(self.first, again, strict=True)):
            noise = self.noise.get((Kind.GRADIENT, ordinal))
            if noise is None or x is None or y is None:
                continue
            largest, _ = block_differences(x, y, noise.scales.size)
            share = 1.0 if whole else 2.0 ** -_safety_for(self.session.policy, noise)
            self._raise((Kind.GRADIENT, ordinal), share * largest, np.zeros_like(largest))

    def compare_buffers(self, plain: dict[str, Tensor], again: dict[str, Tensor]) -> None:
        """Take note of another repetition's buffers."""
        ordinals = {site.name: site.ordinal for site in self.session.sites if site.kind == Kind.BUFFER}
        for name, x in plain.items():
            y = again.get(name)
            if y is None or x.numel() == 0:
                continue
            self._scalar_site((Kind.BUFFER, ordinals[name]), x, y)

    def compare_loss(self, x: float, y: float) -> None:
        """Take note of another repetition's loss."""
        self._scalar_site(
            (Kind.LOSS, 0), torch.tensor([x], dtype=torch.float64), torch.tensor([y], dtype=torch.float64)
        )

    def _scalar_site(self, place: Site, x: Tensor, y: Tensor) -> None:
        if place not in self.noise:
            rms = block_rms(x.contiguous(), 1)
            scales = scale_exponents(rms) if rms.any() else np.zeros(1, dtype=np.int64)
            self.noise[place] = SiteNoise(0.0, scales, float(rms[0]), 0.0, x.numel())
        self._raise(place, *block_differences(x.contiguous(), y.contiguous(), 1))

    def _raise(self, place: Site, largest: np.ndarray, mean: np.ndarray) -> None:
        noise = self.noise[place]
        if not np.isfinite(largest).all():
            raise Nondeterminism(
                f"{self.session.site_name(place)}: is not finite when the step is repeated; there is no noise to measure"
            )
        with np.errstate(over="ignore"):
            relative = largest * np.exp2(-noise.scales.astype(np.float64))
        noise.relative = max(noise.relative, float(np.max(relative)))
        noise.largest = max(noise.largest, float(largest.max()))
        noise.block_mean = np.maximum(noise.block_mean, mean)
        if noise.block_largest is not None:
            noise.block_largest = np.maximum(noise.block_largest, largest)


def _blocks_for(gradient: Tensor, every_row: bool) -> int:
    if gradient.dim() < 2 or gradient.shape[0] < FEWEST_ROWS:
        return 1
    if every_row and gradient[0].numel() >= SHORTEST_ROW:
        return gradient.shape[0]
    rows = block_rms(gradient, gradient.shape[0])
    present = rows[rows > 0.0]
    if present.size == 0:
        return 1
    return gradient.shape[0] if present.max() > ROW_SPREAD * float(np.median(rows)) else 1


def exponent_above(value: float) -> int:
    """Return the smallest ``e`` with ``value <= 2**e``; a very small number for zero."""
    return -1000 if value <= 0.0 else int(scale_exponents(np.array([value]))[0])


def choose_grids(
    session: Session, seen: Deviations, decisions: dict[int, float], *, measure_states: bool = False
) -> Calibration:
    """Return the grids that follow from the deviations ``seen`` and, by ordinal, those of decisions' inputs.

    The optimizer's noise is measured where the session has no grids of state sites yet, or if ``measure_states``.

    Raises:
        Nondeterminism: a site is too noisy for the policy; by name.
    """
    policy = session.policy
    grids = dict(session.table.sites)
    noise = dict(seen.noise)
    loudest = max((n.largest for (kind, _), n in noise.items() if kind == Kind.GRADIENT), default=0.0)
    for place, measured in seen.noise.items():
        if policy.row_scales and place[0] == Kind.GRADIENT:
            choose_rows(policy, measured, session.table.sites.get(place))
        if place[0] == Kind.GRADIENT and measured.rms == measured.largest == 0.0 < loudest:
            grids[place] = zero_grid(policy, measured, session.table.sites.get(place), loudest)
        else:
            grids[place] = _grid_for(session, place, measured, for_audit=measure_states)
    grids |= finer_grids(policy, Calibration(seen.noise, GridTable(grids)))
    grids |= _defaults(session, grids)
    states: dict[Site, float] = {}
    if not session.arithmetic.is_portable and (
        measure_states or not any(kind == Kind.STATE for kind, _ in session.table.sites)
    ):
        for position, (typical, largest, mean) in enumerate(_state_noise(session, seen.first)):
            place = (Kind.STATE, position)
            states[place] = mean
            lowest, highest = policy.state_band
            if exponent_above(typical) + STATE_SAFETY > highest:
                raise Nondeterminism(
                    f"{session.site_name(place)}: the optimizer's noise is {typical:.2g} of the value, "
                    f"policy {policy.name} allows 2**{highest - STATE_SAFETY}; is it an elementwise optimizer?"
                )
            band = min(highest, max(lowest, exponent_above(largest) + STATE_SAFETY))
            grids[place] = SiteGrid(24, band, -149)
    lowest, highest = policy.decision_band
    for ordinal, relative in decisions.items():
        band = decision_band(policy, relative)
        place = (Kind.DECISION, ordinal)
        if band > highest:
            why = (
                f"moves by {relative:.2g} of its rms under last-bit noise, policy {policy.name} allows "
                f"2**{highest if policy.residue_bits else highest - 1}"
                if math.isfinite(relative)
                else "is all zeros, and something else under last-bit noise: is a constant normalised before it?"
            )
            raise Nondeterminism(f"decision {ordinal}: its input {why}")
        grids.pop(place, None)
        if band > lowest:
            grids[place] = SiteGrid(0, band, 0)
        noise[place] = SiteNoise(relative, np.zeros(0, dtype=np.int64), 0.0, 0.0)
    return Calibration(noise, GridTable(grids), states=states)


def with_still(
    policy: Policy, table: GridTable, decisions: Collection[int], still: frozenset[int]
) -> GridTable:
    """Return ``table`` with what was seen of elements that lie exactly on a switching point, for decisions just measured."""
    grids = dict(table.sites)
    for ordinal in still.union(decisions):
        place = (Kind.DECISION, ordinal)
        grid = grids.get(place)
        if ordinal in still:
            grids[place] = SiteGrid(0, policy.decision_band[0] if grid is None else grid.band, STILL)
        elif grid is not None and grid.floor == STILL:
            grids[place] = SiteGrid(0, grid.band, 0)
    return GridTable(grids)


def decision_safety(policy: Policy) -> int:
    """Return how many octaves the band of a decision lies above the noise of its input."""
    return policy.safety if policy.decision_safety is None else policy.decision_safety


def decision_band(policy: Policy, relative: float) -> int:
    """Return the band exponent of a decision whose input moves by ``relative`` of its rms; it may lie above the policy's.

    Where the policy's largest band leaves no room for the factor over the noise it is given up: down to an octave, and with
    residues altogether, as jitter is above what machines differ by there (docs/adr/0006).
    """
    lowest, highest = policy.decision_band
    noise = exponent_above(relative)
    band = noise + decision_safety(policy)
    return max(lowest, min(band, max(highest, noise + (0 if policy.residue_bits else 1))))


def choose_rows(policy: Policy, measured: SiteNoise, previous: SiteGrid | None) -> None:
    """Let the scales of small rows lie below the whole matrix's where the noise does: where that costs no wider band.

    Where rows differ much, as those of an embedding do, it may cost an octave: it buys up to ``ROW_DIP`` for most rows.
    """
    rms, largest = measured.block_rms, measured.block_largest
    if rms is None or largest is None or not rms.any():
        return
    kept = kept_scales(None, previous, policy, rms.size)
    found: dict[bool, tuple[np.ndarray, float]] = {}
    for dips in (False, True):
        scales = row_scales_of(rms, dips)
        scales = scales if kept is None else np.maximum(scales, kept)
        found[dips] = scales, float(np.max(largest * np.exp2(-scales.astype(np.float64))))
    uneven = float(rms.max()) > ROW_SPREAD * float(np.median(rms))
    follows = exponent_above(found[True][1]) <= exponent_above(found[False][1]) + uneven
    measured.scales, measured.relative = found[follows]


def _grid_for(session: Session, place: Site, measured: SiteNoise, *, for_audit: bool) -> SiteGrid:
    """Return a site's grid; of a loss that is too loud for its policy an auditor takes the widest: nothing moves by it."""
    policy = session.policy
    if place[0] == Kind.GRADIENT and measured.rms == 0.0 and measured.largest == 0.0:
        return session.table.sites.get(place) or _unseen(session, place[0], measured.scales)
    grid = grid_for(policy, place[0], measured, session.table.sites.get(place))
    if grid is None:
        form = expected_form(policy, place[0])
        assert form is not None
        if for_audit and place[0] == Kind.LOSS:
            return site_grid(policy, Kind.LOSS, form[2][1], measured.scales)
        highest = form[2][1] - _safety_for(policy, measured)
        raise Nondeterminism(
            f"{session.site_name(place)}: its noise is 2**{exponent_above(measured.relative)} of its scale, "
            f"policy {policy.name} allows 2**{highest}"
        )
    return grid


def zero_grid(policy: Policy, measured: SiteNoise, previous: SiteGrid | None, loudest: float) -> SiteGrid:
    """Return the grid of a gradient that was exactly zero and did not move: noise only, up to the step's ``loudest`` noise.

    Sums that cancel to zero here leave their last bits elsewhere, and nothing but the rest of the step says how large those
    are. A gradient that had values before keeps its grid.
    """
    if previous is not None and not is_noise_only(previous) and int(previous.scales.max()) > UNSEEN:
        return previous
    floor = exponent_above(loudest) + policy.safety
    return site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.full(measured.scales.size, floor - NOISE_BAND))


def grid_for(
    policy: Policy, kind: Kind, measured: SiteNoise, previous: SiteGrid | None = None
) -> SiteGrid | None:
    """Return the grid that ``policy`` gives a gradient, buffer or loss site of this noise; None if it is too loud.

    A gradient that is too loud is noise only: what little signal it has is not worth its noise. Of few elements residues have
    all the bits there are, and a finer quantum where they are quiet: a bias before a batch norm, whose next deviation may be
    twenty times those seen, is followed whatever it is. ``previous`` is the site's grid so far.
    """
    form = expected_form(policy, kind)
    assert form is not None
    _, _, (lowest, highest) = form
    noise = exponent_above(measured.relative)
    band = max(lowest, noise + _safety_for(policy, measured))
    is_few = policy.residue_bits > 0 and kind == Kind.GRADIENT and measured.elements < SMALL_SITE
    finer = SMALL_FINER if is_few and band <= highest else 0
    if policy.residue_bits:
        highest += LOUDER if kind == Kind.GRADIENT else 0
        band = _within_room(band, noise, highest, previous, measured.elements)
        band += band == NOISE_BAND  # which means something else; residues have a bit more instead
    if band <= highest and not (kind == Kind.GRADIENT and measured.rms == 0.0):
        grid = site_grid(policy, kind, band, measured.scales)
        bits = grid.residue_bits + finer + SMALL_BITS if finer else MOST_RESIDUE_BITS
        return replace(grid, floor=grid.floor - finer, residue_bits=bits) if is_few else grid
    if kind != Kind.GRADIENT:
        return None
    allowance = exponent_above(measured.largest) + policy.safety
    floor = max(
        allowance, exponent_above(measured.rms) + 1
    )  # an octave, lest it is as large as its floor elsewhere
    return site_grid(
        policy, kind, NOISE_BAND, np.full(measured.scales.size, floor - NOISE_BAND, dtype=np.int64)
    )


def with_activations(
    session: Session, chosen: Calibration, probe: ProbingContext, seen: dict[tuple[int, int], ActivationNoise]
) -> Calibration:
    """Add the bands of activations and of their gradients, for each layer or the widest of each kind of layer.

    The band is the larger of what the measured divergence asks for and what the straddles do (they are counted over
    all elements, the divergence over a sample), times the safety factor.
    """
    rule = activation_rule(session.policy)
    assert session.leaves is not None
    layers, names = session.leaves.layers, session.leaves.names
    bands: dict[tuple[int, int], int] = {}
    widest: dict[tuple[int, str], int] = {}
    for place, noise in seen.items():
        relative = max(noise.relative, noise.reach)
        bands[place] = max(rule.band[0], exponent_above(relative) + session.policy.safety)
        chosen.noise[(Kind(place[0]), place[1])] = SiteNoise(relative, probe.scales[place], 0.0, 0.0)
        if bands[place] <= rule.band[1]:
            kind = (place[0], layers[place])
            widest[kind] = max(bands[place], widest.get(kind, bands[place]))
        mean = noise.total / max(noise.seen, 1)
        chosen.thresholds.append(
            Threshold(
                names[place], layers[place], place[0] == Kind.ACTIVATION_GRADIENT,
                adapt_threshold(noise.straddles), closed_threshold(noise.quanta), mean, len(noise.straddles),
            )
        )  # fmt: skip
    grids = dict(chosen.table.sites)
    for place, own in bands.items():
        band = own
        if band > rule.band[1]:
            band = NOISE_BAND
        elif rule.tau == PER_KIND:
            band = widest[(place[0], layers[place])]
        grids[place] = activation_grid(rule, band, probe.scales[place])
    corrections = {place: noise.total / max(noise.seen, 1) for place, noise in seen.items()}
    return replace(chosen, table=GridTable(grids), corrections=corrections)


def _within_room(band: int, noise: int, highest: int, previous: SiteGrid | None, elements: int) -> int:
    """Return the band where it must stay far below the quantum: as much safety as there is room for, an octave at least.

    A site of few elements keeps a wider band that it once needed: its next deviation may be that large again.
    """
    if previous is not None and elements < SMALL_SITE and not is_noise_only(previous):
        band = max(band, previous.band)
    return min(band, max(highest, noise + 1))


def _safety_for(policy: Policy, measured: SiteNoise) -> int:
    return safety_of(policy.safety, measured.elements) if policy.residue_bits else policy.safety


def safety_of(octaves: int, elements: int) -> int:
    """Return the factor over the measured noise, as a power of two, for a site of so many elements.

    The largest of few deviations says less about the next one than the largest of many: below 256 elements there is an
    octave more for each two octaves less, up to 2**6 in all.
    """
    more = -(-max(0, 9 - max(elements, 1).bit_length()) // 2)
    return max(octaves, min(SMALL_SITE_SAFETY, octaves + more))


def _defaults(session: Session, grids: dict[tuple[int, int], SiteGrid]) -> dict[tuple[int, int], SiteGrid]:
    """Grids of sites that had no value in this step: unused parameters, buffers that did not move."""
    found: dict[tuple[int, int], SiteGrid] = {}
    for site in session.sites:
        place = (site.kind, site.ordinal)
        if place in grids:
            continue
        found[place] = _unseen(session, site.kind, np.full(0 if site.kind == Kind.STATE else 1, UNSEEN))
    return found


def _unseen(session: Session, kind: Kind, scales: np.ndarray) -> SiteGrid:
    """Return the grid of a site whose noise is not known yet; a gradient's band is on the safe side."""
    form = expected_form(session.policy, kind)
    assert form is not None
    _, _, (lowest, highest) = form
    band = min(highest, lowest + UNSEEN_SAFETY) if kind == Kind.GRADIENT else lowest
    return site_grid(session.policy, kind, band, scales)


def _state_noise(session: Session, gradients: list[Tensor | None]) -> list[tuple[float, float, float]]:
    """Return, per state site, the optimizer's deviation relative to the larger of old and new value.

    The first number holds for 99 elements in a hundred: where momentum cancels over a tiny weight the largest,
    the second number, says little about the others. The third is the mean.
    """
    old, new = (
        session.trained.replica_step(1, None, gradients),
        session.trained.replica_step(2, None, gradients),
    )
    jittered = session.trained.replica_step(2, Jitter(17), gradients)
    found: list[tuple[float, float, float]] = []
    for position in range(len(session.parameters)):
        for key in ("parameter", *session.trained.keys):
            x, y, was = new[position].get(key), jittered[position].get(key), old[position].get(key)
            if (
                not isinstance(x, Tensor)
                or not isinstance(y, Tensor)
                or not isinstance(was, Tensor)
                or not x.numel()
            ):
                found.append((0.0, 0.0, 0.0))
                continue
            size = torch.maximum(x.abs(), was.abs()).double()
            ratio = torch.where(size > 0.0, (x.double() - y.double()).abs() / size, 0.0).reshape(-1)
            ratio = ratio.nan_to_num_(nan=math.inf)
            typical = float(ratio.sort().values[(ratio.numel() * 99 - 1) // 100])
            found.append((typical, float(ratio.max()), float(ratio.mean())))
    return found
