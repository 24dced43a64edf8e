"""Noise measured, bands chosen: one step repeated under last-bit jitter (Monte Carlo arithmetic) and in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.joint_optimizer import part_of
from tallystick.execution.noise.bands import choose_grids, with_activations, with_still
from tallystick.execution.noise.deviations import Deviations
from tallystick.execution.noise.measured import Calibration
from tallystick.execution.noise.passes import gradients_under, jittered, put_back, undisturbed
from tallystick.execution.noise.probes import ActivationNoise, EchoingContext, ProbingContext, still_sites
from tallystick.execution.noise.reference import in_float64
from tallystick.execution.noise.safety import decision_safety
from tallystick.execution.noise.weighing import Weighing, Weight, is_linear
from tallystick.execution.rounding.context import RoundingContext
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.execution.session.sites import Site
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind

REPEATS = 2

AS_RARE = 3
"""Repetitions under autocast that move no more sixteen-bit results than really fall otherwise: an auditor's."""
OUTPUTS_TO_EXCUSE = 4  # repetitions that move what a loss is made of, before somebody is accused
UNSTEADY = 1.25  # times as large as the smallest of them one may be
Plain = tuple[list[Tensor | None], dict[str, Tensor], float]
"""Gradients, buffers and loss of a pass, as ``gradients_under`` gives them."""


def calibrate(
    session: Session,
    backward: Callable[[RoundingContext], None],
    *,
    repeats: int = REPEATS,
    seed: int = 0,
    units: float = 1.0,
    for_audit: bool = False,
    to_excuse: bool = False,
    earlier: GridTable | None = None,
) -> Calibration:
    """Measure the noise of the session's next step and return the grids to use from it on.

    Args:
        session: prepared, between steps; left as it was found.
        backward: runs the step's forward and backward passes and clipping under a context, leaving the gradients.
        repeats: jittered repetitions; for an audit those of the trainer are the first of them.
        seed: of the jitter; the trainer's is the session's.
        units: size of the jitter, see ``Jitter``.
        for_audit: whether to measure what a follower holds a log against too: the optimizer's noise, which gradients are noise
            only for who measures as the trainer does, and how often sixteen-bit results differ that a calibration moves more
            often than that, to see what they do.
        to_excuse: whether to take what the sixteen-bit numbers of a loss may do, all moved at once, for noise like any other:
            not for what bands are multiples of, which must be above it.
        earlier: grids that earlier measurements gave, whose bands small sites keep; None for the session's own, which are the
            trainer's where its log is followed.

    Raises:
        Nondeterminism: a site is too noisy for the policy, or an operator is not in the table; by name.
    """
    counting = AS_RARE if for_audit and session.policy.autocast else 0
    repeats -= min(counting, 1)
    with undisturbed(session) as before:
        heard = _RepeatedStep.of(session, backward, before)
        if session.step == 0 and not for_audit and not to_excuse:
            heard.verify_twice()
        usual = heard.repeat_as_trainer(earlier, units) if for_audit and not counting else None
        repeats -= 0 if usual is None else repetitions_at(session.step)
        passes = _jitters(session, repeats, seed, units) + (_references(session) if usual is None else [])
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
    chosen = heard.choose(earlier, measure_states=for_audit, for_audit=for_audit)
    if usual is not None:
        chosen.table = _heard_as(usual, chosen.table)
    if counting and session.policy.residue_bits and not is_linear(session.optimizer):
        chosen = _with_weights(
            chosen, _expected_weights(session, heard.plain[0], heard.gradients, chosen.table)
        )
    flips = max(heard.flips, sum(heard.crossed) / max(len(heard.crossed), 1))
    return replace(chosen, flips=flips, steady=heard.is_steady(counting), usual=usual)


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

    @classmethod
    def of(
        cls, session: Session, backward: Callable[[RoundingContext], None], before: dict[str, Tensor]
    ) -> _RepeatedStep:
        """Run the step plainly, from the buffers ``before`` it."""
        near = session.policy.decision_safety is not None
        wide = session.policy.decision_band[1] if near else ProbingContext.wide
        probe = ProbingContext(wide, near, rule=session.policy.activation, table=session.table)
        plain = gradients_under(session, backward, probe, before)
        return cls(session, backward, probe, before, plain, Deviations(session, plain[0]))

    def verify_twice(self) -> None:
        """Return if the step gives the same gradients twice.

        Raises:
            Nondeterminism: it does not; by name.
        """
        again, _, _ = gradients_under(self.session, self.backward, EchoingContext(self.probe), self.before)
        _verify_repeated(self.session, self.plain[0], again)

    def repeat_as_trainer(self, earlier: GridTable | None, units: float) -> GridTable:
        """Repeat the step as who records the run does, and return the grids that follow from it."""
        session = self.session
        jitters = _jitters(session, repetitions_at(session.step), session.seed, units)
        for pass_ in (*jitters, *_references(session)):
            self.add(pass_)
        return self.choose(earlier, measure_states=False, for_audit=True).table

    def is_steady(self, last: int) -> bool:
        """Whether the ``last`` repetitions moved the gradient alike."""
        sizes = self.seen.sizes[-last:]
        return not last or (min(sizes) > 0.0 and min(sizes) * UNSTEADY >= max(sizes))

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

    def choose(self, earlier: GridTable | None, *, measure_states: bool, for_audit: bool) -> Calibration:
        """Return the grids that follow from the repetitions; what is measured, and for whom, as ``choose_grids`` has it.

        Raises:
            Nondeterminism: a site is too noisy for the policy; by name.
        """
        session, policy = self.session, self.session.policy
        for ordinal, relative in self.decisions.items():
            self.probe.verify_apart(ordinal, relative, math.ldexp(1.0, decision_safety(policy)))
        chosen = choose_grids(
            session,
            self.seen,
            self.decisions,
            earlier=earlier,
            measure_states=measure_states,
            for_audit=for_audit,
        )
        chosen.table = with_still(policy, chosen.table, self.decisions, still_sites(self.probe, self.left))
        if self.activations:
            chosen = with_activations(session, chosen, self.probe, self.activations)
        return chosen


def _expected_weights(
    session: Session, first: list[Tensor | None], again: list[Tensor | None], table: GridTable
) -> dict[Site, Weight]:
    """Return what moves between two repetitions, and each gradient, would come to in the optimizer."""
    weighing, weights = Weighing(session.optimizer), dict[Site, Weight]()
    for ordinal, (x, y) in enumerate(zip(first, again, strict=True)):
        grid = table.sites.get((Kind.GRADIENT, ordinal))
        if x is None or y is None or grid is None or not grid.residue_bits or not x.numel():
            continue
        if is_linear(part_of(session.optimizer, session.parameters[ordinal][1])):
            continue
        quanta = torch.from_numpy(np.exp2(grid.scales.astype(np.float64) + grid.floor))
        weights[(Kind.GRADIENT, ordinal)] = weighing.expected(session.parameters[ordinal][1], x, y, quanta)
    return weights


def _with_weights(chosen: Calibration, weights: dict[Site, Weight]) -> Calibration:
    whole = sum(weight.whole for weight in weights.values())
    weighed = sum(weight.moved for weight in weights.values()) / whole if whole > 0.0 else 0.0
    ratios = {place: weight.moved / weight.whole for place, weight in weights.items() if weight.whole > 0.0}
    return replace(chosen, weighed=weighed, weights=ratios)


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


def repetitions_at(step: int) -> int:
    """Return how often who records a run repeats a step under jitter, where its noise is measured."""
    return REPEATS if step == 0 else 1


def _jitters(session: Session, repeats: int, seed: int, units: float) -> list[AbstractContextManager[None]]:
    """Return the repetitions of a step under jitter."""
    seeds = (seed * 1000003 + session.step * 101 + repeat for repeat in range(repeats))
    return [jittered(session, Jitter(each, units)) for each in seeds]


def _references(session: Session) -> list[AbstractContextManager[None]]:
    """Return the repetition in float64, where that is more precise than the policy.

    Under autocast it would measure the error of bfloat16, which machines share.
    """
    return [in_float64(session)] if session.arithmetic.precision == torch.float32 else []


def _heard_as(usual: GridTable, own: GridTable) -> GridTable:
    """Return the grids ``own``, but the ``usual`` ones of gradients that are nothing but noise by either.

    Whether a gradient near the limit is heard hangs on how often a step is repeated, and under which jitter, far more than on the
    machine; so honest parties who ask alike agree.
    """
    grids = dict(own.sites)
    for place, grid in usual.sites.items():
        mine = grids.get(place)
        if place[0] == Kind.GRADIENT and mine is not None and (is_noise_only(grid) or is_noise_only(mine)):
            grids[place] = grid
    return GridTable(grids)
