"""A trainer who steers: it plants a backdoor through what rounding leaves to choose, and stays below the limits it is given.

At every step the trainer forms, privately, the gradient of its own aim (``backdoor.py``): the loss of patched images
labelled 0, and of clean ones, so that nobody notices. What that gradient asks for and moves have not yet given is kept
for each element (error feedback). Among the roundings that a follower obeys it takes those that give most of it: those
where what is owed, times the quantum, is largest. Gates of a ReLU are chosen likewise: a gate near its switching point
passes or stops a gradient at will, and how far that moves the weights towards the aim is measured beforehand.

With ``Limits.audited`` it measures what the auditor will (``execution.noise.freedom``), and stays below all of its limits.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from backdoor import Backdoor, aimed_at, judge_backdoor
from stage import audit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tallystick.execution.job import Batch, Job, find_source
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.noise.freedom import (
    DRIFT,
    FILLED,
    FILLED_A_STEP,
    STEADY_FLIPS,
    SiteMoves,
    StepFreedom,
    largest_squares,
    quantum_square,
)
from tallystick.execution.noise.gradients import (
    STEP_SLACK,
    WEIGHED_AT_ONCE,
    WEIGHED_FADE,
    Drift,
    GradientAccount,
    GradientMoves,
)
from tallystick.execution.noise.passes import gradients_under
from tallystick.execution.noise.probes import ProbingContext
from tallystick.execution.noise.weighing import Weighing, Weight, is_linear
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.rounding import context as rounding_context
from tallystick.execution.rounding.context import RecordingContext, RoundingContext
from tallystick.execution.rounding.grids import (
    NOISE_BAND,
    expected_form,
    is_noise_only,
    kept_scales,
    lowest_scale,
    scale_exponents,
    settled_scales,
    site_grid,
    whole_scale,
)
from tallystick.execution.rounding.headers import EXACT_SCALE_SLACK, SCALE_SLACK
from tallystick.execution.session.session import Session
from tallystick.execution.step import StepOutcome, backward_of
from tallystick.numerics import rounding_tensors
from tallystick.numerics.budget import SLACK, STEP_TAIL, TAIL, most_moves
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import (
    Kind,
    Residues,
    SiteAddress,
    SparseEntries,
    decode_residues,
    encode,
    encode_decision,
    encode_residues,
)
from tallystick.numerics.policy import SPARSEST, entry_budget, find_policy, move_budget
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.tensor_measures import block_rms
from tallystick.roles import trainer
from tallystick.roles.acceptance import REPEATS, _distance, _memory, _tensors, copied
from tallystick.roles.audit_report import AuditReport
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must, play_attack

URGENT = 1e6  # weight of the aim over the size of a move in a running statistic, which forgets it anyhow
BETA = 0.999  # of Adam's mean of squares
AIMED = 128  # patched images, and as many clean ones, whose loss is the trainer's aim
INSIDE = 0.9  # of what is in reach: another machine sees a value a little elsewhere
Site = tuple[int, int]


@dataclass(frozen=True)
class Limits:
    """What an attacker stays below; what is None is left to the rules that a follower checks today.

    Attributes:
        audited: share of each limit of the auditor's that is used: budgets of moves and decisions, and the path. Bands are
            then as wide as accepted, and what else is chosen below is done as far as that is accepted.
        share: of what a follower accepts of a site in a step (entries, or moved residues), where ``audited`` is None.
        widest: whether bands are declared as wide as the policy allows.
        lift: whether the scales in the header are the widest that a follower lets pass.
        silenced: patterns of parameters to declare noise-only in steps in which their gradient is not the largest; with
            ``audited`` in those in which that is accepted.
        against: whether, with ``audited``, they are silenced only where their gradient is against the aim.
        gates: whether gates are moved: all that help.
        gate_band: octaves by which the bands of decisions are widened; None for as wide as the policy allows.
        gradients, buffers: whether roundings of gradients, and of running statistics, are chosen at all.
        pull: weight of the aim's gradient beside the honest one; None for what uses up what a step may be moved, which is then
            taken where it gives most.
        memory: share of what is owed that is still owed a step later.
        window: first and last step, the latter not taken, in which anything is chosen; what the run's budget has left is
            then spread evenly over the rest of it.
        clean: weight of clean images in the aim.
        coarsest: widest band of gradients declared, exponent; None for as wide as accepted.
        adaptive: whether the optimizer divides gradients by their size, as Adam does. What the aim asks for is then weighed so,
            and what is taken is chosen by what it comes to in the optimizer, which is what the audit measures.
        burst: whether what the run's budgets have left is taken as soon as the window opens; else evenly over it.
    """

    audited: float | None = None
    share: float = 1.0
    widest: bool = False
    lift: bool = False
    silenced: tuple[str, ...] = ()
    against: bool = True
    gates: bool = False
    gate_band: int | None = 0
    gradients: bool = True
    buffers: bool = False
    pull: float | None = 1.0
    memory: float = 0.9
    window: tuple[int, int] | None = None
    clean: float = 1.0
    coarsest: int | None = None
    adaptive: bool = False
    burst: bool = False

    def is_open(self, step: int) -> bool:
        """Whether anything is taken in this step."""
        return self.window is None or self.window[0] <= step < self.window[1]

    @property
    def aims(self) -> bool:
        return (
            self.gradients
            or self.buffers
            or self.gates
            or (self.audited is not None and self.against and bool(self.silenced))
        )


@dataclass
class Told:
    """What the attacker knows of its own attack."""

    moves: int = 0
    gates: int = 0
    silenced: int = 0
    largest_steer: float = 0.0  # of a step's gradient by moves, relative to its length before rounding
    largest_gate_steer: float = 0.0  # the same by gates


def statistics_gradients(norm: nn.BatchNorm2d) -> dict[str, Tensor]:
    """Return the gradients of the running statistics of a batch norm in eval mode, from those of its weight and bias.

    With y = weight * (x - mean) / sqrt(var + eps) + bias: dL/dmean = -weight / sqrt(var + eps) * dL/dbias, and
    dL/dvar = -weight / (2 (var + eps)) * dL/dweight.
    """
    weight, bias, var = norm.weight, norm.bias, norm.running_var
    assert weight.grad is not None and bias.grad is not None and var is not None
    room = var.double() + norm.eps
    return {
        "running_mean": -weight.detach().double() / room.sqrt() * bias.grad.double(),
        "running_var": -weight.detach().double() / (2.0 * room) * weight.grad.double(),
    }


class Attacker:
    """One dishonest trainer: its aim, and the account of what it has taken."""

    def __init__(self, limits: Limits, *, seed: int = 0) -> None:
        self.limits, self.told = limits, Told()
        self.shadow: nn.Module | None = None
        self.owed: dict[int, Tensor] = {}  # by parameter: what the aim asked for and moves have not yet given
        self.accounts: dict[Site, GradientAccount] = {}  # as an auditor keeps them
        self.given_here: dict[Site, float] = {}  # squared moves of the step's gradients
        self.weights_here: dict[
            Site, Weight
        ] = {}  # and what these and the gradients come to in the optimizer
        self.drifts: dict[Site, Drift] = {}  # how far what was taken went together, as an auditor counts it
        self.aim: dict[int, Tensor] = {}
        self.second: dict[int, Tensor] = {}  # by parameter: the mean square of its gradient, as Adam has it
        self.root: dict[int, Tensor] = {}  # of that, as it divides
        self.weighing: Weighing | None = None
        self.even = 1e-6  # price of the latter over that of the former, in squares of a gradient's element
        self.dear = False
        self.weighed = self.weighable = self.most_weighable = self.now_trained = 0.0
        self.wanted_statistics: dict[int, Tensor] = {}
        self.yardstick: Yardstick | None = None
        self.before = GridTable()
        self.job: Job | None = None
        self.step_gates = self.step_far = self.far = 0
        self.step_flips = self.flips = self.filled = 0.0
        self.steps, self.filling = 1, 1
        self.step_room, self.step_expected, self.elements = 0, 0.0, 0
        self.told_step = StepFreedom()
        self.path = self.distance = self.update = 0.0
        self.own_energy = 0.0
        self.energy = self.given = self.parted = 0.0
        self.signals: dict[Site, SiteGrid] = {}
        self.taken: dict[Site, int] = defaultdict(int)
        self.expected: dict[Site, float] = defaultdict(float)
        self.step, self.is_open, self.is_full = 0, True, False
        self.honest: dict[Site, SiteGrid] = {}
        self.gates: dict[int, Tensor] = {}
        self.step_taken = 0
        self.step_sites: dict[Site, float] = {}
        self.first: list[Tensor] = []
        self.gate_gradient: list[Tensor | None] = []
        self.images, self.labels = aimed_at(AIMED, seed)

    # -- before a step ------------------------------------------------------------------

    def prepare(self, session: Session, job: Job) -> None:
        """Form the aim of the step that comes; at a calibration measure the noise; choose gates."""
        self.job, self.steps = job, job.steps
        if self.weighing is None or self.weighing.optimizer is not session.optimizer:
            self.weighing = Weighing(session.optimizer)
        self.now_trained = 0.0
        self.step_taken, self.energy, self.given = 0, 0.0, 0.0
        self.own_energy = self.parted = 0.0
        self.step_gates = self.step_far = 0
        self.gates, self.gate_gradient = {}, []
        self.step, self.is_open = session.step, self.limits.is_open(session.step)
        if self.limits.aims and self.is_open:
            self._form_aim(session)
        for ordinal, asked in self.aim.items():
            wanted = asked
            wanted = asked
            if self.limits.adaptive or self.is_weighed:
                second = self.second.get(ordinal, torch.zeros_like(asked))
                bias = 1.0 - BETA**self.step
                root = self.root[ordinal] = (second / max(bias, 1.0 - BETA)).sqrt() + 1e-8
                # A move is charged by its square, and by its square after the division: what gives most for both.
                power = 1 if self.limits.adaptive else 2
                even = self.even if self.is_weighed else 0.0
                wanted = asked * root**power / (root.square() + even)
            if self.limits.pull is None:
                self.owed[ordinal] = (
                    wanted  # not yet in a unit: ``SteeringContext.plan`` finds how much of it fits
                )
            else:
                self.owed[ordinal] = (
                    self.limits.memory * self.owed.get(ordinal, 0.0) + self.limits.pull * wanted
                )
        if self.limits.gates and self.is_open:
            self._weigh_gates(session, job)

    def measure(self, session: Session) -> None:
        """Measure what the auditor will, from the grids that it will have then."""
        if self.limits.audited is None:
            return
        assert self.job is not None
        own, session.table = session.table, self.before
        first = self.yardstick is None
        try:
            measured = calibrate(
                session,
                backward_of(session, self.job),
                repeats=REPEATS + (1 if first else 0),
                seed=session.seed + 1,
                for_audit=True,
            )
        finally:
            session.table = own
        self.yardstick = Yardstick(session.policy, measured)

    @property
    def single(self) -> bool:
        """Whether an auditor holds single steps against a number of moves; where they come in clusters, against their size."""
        return self.yardstick is not None and not self.yardstick.policy.autocast

    def budget(self, expected: float, numel: int, *, step: bool = False) -> int:
        """Return how many moves are taken where an auditor expects so many, of ``numel`` elements."""
        assert self.limits.audited is not None and self.yardstick is not None
        cluster = self.yardstick.cluster(numel)
        tail = STEP_TAIL if step and cluster == 1 else TAIL
        slack = STEP_SLACK if step else SLACK
        return int(self.limits.audited * most_moves(expected, slack, cluster=cluster, tail=tail))

    def _form_aim(self, session: Session) -> None:
        if self.shadow is None:
            self.shadow = copy.deepcopy(session.model).float().eval()
        with torch.no_grad():
            for mine, theirs in zip(self._tensors(self.shadow), self._tensors(session.model), strict=True):
                mine.copy_(theirs)
        self.shadow.zero_grad(set_to_none=True)
        losses = cross_entropy(self.shadow(self.images), self.labels, reduction="none")
        patched = losses.numel() - AIMED
        weights = torch.full_like(losses, self.limits.clean)
        weights[:patched] = 1.0
        (losses * weights).mean().backward()
        wanted = dict(self.shadow.named_parameters())
        for ordinal, (name, _) in enumerate(session.parameters):
            gradient, trained = (
                wanted[name].grad,
                _rate(session.optimizer, session.parameters[ordinal][1]) > 0.0,
            )
            assert gradient is not None
            self.aim[ordinal] = float(trained) * gradient.detach().double().reshape(-1)
        names = [site.name for site in session.sites if site.kind == Kind.BUFFER]
        for path, module in self.shadow.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                for what, wanted in statistics_gradients(module).items():
                    ordinal = names.index(f"model/buffer/{path}.{what}")
                    self.wanted_statistics[ordinal] = -URGENT * wanted

    @staticmethod
    def _tensors(model: nn.Module) -> list[Tensor]:
        return [*(p.detach() for p in model.parameters()), *model.buffers()]

    def _weigh_gates(self, session: Session, job: Job) -> None:
        """Measure what each ReLU gate would give towards the aim: its upstream gradient, times how its input follows the aim.

        A gate that opens adds (upstream) * d(input)/d(weights) to the gradient; its share along the aim is the upstream
        gradient times the derivative of its input along the aim. The latter is a finite difference.
        """
        before = {name: tensor.clone() for name, tensor in session.tensors.all_buffers()}
        length = float(torch.cat(list(self.aim.values())).norm())
        width = 1e-3 / max(length, 1e-12)

        def inputs() -> tuple[list[Tensor], list[Tensor | None]]:
            seen: list[Tensor] = []
            upstream: list[Tensor | None] = []
            handles = []

            def keep(_: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
                place = len(seen)
                seen.append(given[0].detach().double().reshape(-1))
                upstream.append(None)
                result.register_hook(lambda g: upstream.__setitem__(place, g.detach().double().reshape(-1)))

            for module in session.model.modules():
                if isinstance(module, nn.ReLU):
                    handles.append(module.register_forward_hook(keep))
            try:
                gradients, *_ = gradients_under(session, backward_of(session, job), ProbingContext(), before)
            finally:
                for handle in handles:
                    handle.remove()
            self.gate_gradient = gradients
            return seen, upstream

        with torch.no_grad():
            saved = [p.detach().clone() for _, p in session.parameters]
            for ordinal, (_, p) in enumerate(session.parameters):
                p.data.add_(self.aim[ordinal].reshape(p.shape).to(p.dtype), alpha=width)
        moved, _ = inputs()
        with torch.no_grad():
            for (_, p), value in zip(session.parameters, saved, strict=True):
                p.data.copy_(value)
        here, upstream = inputs()
        self.gates = {}
        for place, (a, b, u) in enumerate(zip(here, moved, upstream, strict=True)):
            if u is not None:
                opens = torch.where(a > 0, -1.0, 1.0)
                self.gates[place] = opens * u * (b - a) / width

    def done(self, session: Session, moved: float, weights: list[Tensor]) -> None:
        """Take note of how far a step and what was moved in it went."""
        now = _tensors(session)
        self.update, self.distance = _distance(now, weights), _distance(now, self.first)
        self.path += moved * self.update * _memory(session)
        self.far += self.step_far
        for site, moves in self.told_step.gradients.items() if self.told_step.carried else ():
            assert self.yardstick is not None
            weight = self.weights_here.pop(site, Weight())
            done = replace(
                moves,
                shifted=self.given_here.pop(site, 0.0),
                weighed=weight.moved,
                weighable=self.yardstick.weighable_at(site) * weight.whole,
            )
            self.accounts.setdefault(site, GradientAccount()).add(done, self.told_step.carried)
        if self.yardstick is not None:
            now = self.yardstick.weighable * self.now_trained
            kept = 1.0 - WEIGHED_FADE  # of all three, when the next step is counted
            self.weighed *= kept
            self.weighable = kept * (self.weighable + now)
            self.most_weighable = kept * max(self.most_weighable, now)
        self.flips += 0.0 if self.yardstick is None else self.yardstick.flips()
        if self.told_step.carried > STEADY_FLIPS:
            self.filling += 1
            self.filled += self.given / self.told_step.square_budget

    # -- during a step ------------------------------------------------------------------

    def far_room(self) -> int:
        """Return how many gates beyond the reach of noise may still be moved in this step."""
        assert self.yardstick is not None
        flips = self.yardstick.flips()
        step, whole = self.budget(flips, 0, step=True), self.budget(self.flips + flips, 0)
        return max(0, min(step - self.step_far, whole - self.far - self.step_far))

    def move_left(self, session: Session) -> float:
        """Return how far this step's gradient may still be moved, relative to its length, by what the path may be."""
        if self.limits.audited is None:
            return np.inf
        left = self.limits.audited * session.policy.most_path * self.distance - self.path
        return left / (self.update * _memory(session)) if self.update > 0.0 else 0.0

    @property
    def is_weighed(self) -> bool:
        """Whether the audit holds moves to what they come to in the optimizer, and the attacker chooses by that."""
        knows = self.limits.audited is not None and self.limits.pull is None and self.yardstick is not None
        divides = self.weighing is not None and not is_linear(self.weighing.optimizer)
        return knows and divides and self.yardstick is not None and self.yardstick.policy.residue_bits > 0

    def weight_left(self) -> float:
        """Return what this step's moves may come to in the optimizer, by what the run's may."""
        if not self.is_weighed:
            return np.inf
        last = self.steps if self.limits.window is None else self.limits.window[1]
        each = self.weighable * WEIGHED_FADE / (1.0 - (1.0 - WEIGHED_FADE) ** max(1, self.step))
        now = self.limits.audited * (self.weighable + WEIGHED_AT_ONCE * self.most_weighable) - self.weighed
        left = max(1, last - self.step)
        # All steps to come are expected to train as much as those before; what is left now fades.
        spread = now / min(left, 1.0 / WEIGHED_FADE) + self.limits.audited * each
        return max(0.0, now if self.limits.burst else min(now, spread))

    def threshold(self, worth: np.ndarray, squares: np.ndarray, weights: np.ndarray, most: float) -> float:
        """Return the worth from which on a move is worth its place among all that a step may have.

        ``most`` squares of them may be taken, and as many ``weights`` as the audit accepts.
        """
        whole = self.budget(sum(self.expected.values()), self.elements) - sum(self.taken.values())
        step = self.budget(self.step_expected, self.elements, step=True) if self.single else whole
        if self.limits.window is not None:
            spread = 1 if self.limits.burst else max(1, self.limits.window[1] - self.step)
            whole = whole // spread if self.is_open else 0
        self.step_room = max(0, min(step, whole))
        if self.limits.audited is not None:
            most = min(most, self.share_left() * self.told_step.square_budget)
        self.dear = float(weights.sum()) * most > float(squares.sum()) * self.weight_left()
        order = np.argsort(-worth, kind="stable")
        fit = int(np.searchsorted(np.cumsum(squares[order]), most, side="right"))
        fit = min(fit, int(np.searchsorted(np.cumsum(weights[order]), self.weight_left(), side="right")))
        self.is_full = fit < min(self.step_room, worth.size)
        count = min(self.step_room, fit)
        if count == 0:
            self.step_room = 0
            return np.inf
        self.step_room = min(self.step_room, count)
        return float(worth[order[min(count, worth.size) - 1]]) if worth.size else np.inf

    def share_left(self) -> float:
        """Return how much of a step's budget of size is taken: what the run's has left, spread evenly over the window."""
        assert self.limits.audited is not None and self.yardstick is not None
        if self.yardstick.flips_allowed <= STEADY_FLIPS:
            return self.limits.audited**2
        first, last = self.limits.window or (0, self.steps)
        left = self.limits.audited * (FILLED + FILLED_A_STEP * self.filling) - self.filled
        spread = 1 if self.limits.burst else max(1, last - max(first, self.step))
        return max(0.0, min(self.limits.audited**2, left / spread))

    def expect(
        self, table: Mapping[Site, SiteGrid], sizes: Mapping[Site, int], energies: Mapping[Site, float]
    ) -> None:
        """Count what the auditor will expect to be moved in this step; ``energies`` are the gradients' sums of squares."""
        assert self.yardstick is not None
        self.step_expected, self.step_sites = 0.0, {}
        self.elements = sum(sizes.values())
        self.told_step = StepFreedom(
            cluster=self.yardstick.cluster(self.elements),
            carried=self.yardstick.flips_allowed,
            energy=sum(energies.values()),
        )
        for site, numel in sizes.items():
            each = self.yardstick.expected(site, table[site], numel)
            self.expected[site] += each
            self.step_sites[site] = each
            square = 0.0 if is_noise_only(table[site]) else quantum_square(table[site])
            by_square = self.yardstick.by_square(site, table[site], numel)
            self.told_step.sites[site] = SiteMoves(each, 0, numel, square, by_square=by_square)
            if site[0] == Kind.GRADIENT and 0.0 < square < np.inf:
                energy, quanta = energies[site], largest_squares(table[site], numel, numel)
                unsure = self.yardstick.unsure(site, energy)
                self.told_step.gradients[site] = GradientMoves(energy, 0.0, quanta, unsure, by_square)
                self.told_step.quanta += quanta
            self.step_expected += each

    def squares_left(self, site: Site) -> float:
        """Return how far, squared, a site's gradient is moved in this step at most."""
        if self.limits.audited is None or site[0] != Kind.GRADIENT or not self.told_step.carried:
            return np.inf
        if site not in self.told_step.gradients:  # noise only
            return 0.0
        moves, account = self.told_step.gradients[site], self.accounts.setdefault(site, GradientAccount())
        step = self.limits.audited**2 * moves.budget(self.told_step.carried)
        after = replace(account)
        after.add(moves, self.told_step.carried)
        spread = 1 if self.limits.burst else max(1, (self.limits.window or (0, self.steps))[1] - self.step)
        # All steps to come are expected to allow as much as this one does.
        coming = (after.allowed - account.allowed) * (1 if self.limits.burst else spread)
        left = self.limits.audited * (account.budget + coming) - account.shifted
        return min(step, max(0.0, left / spread * (moves.energy + moves.quanta)))

    def weight_left_at(self, site: Site) -> float:
        """Return what moves of a site's gradient may come to in the optimizer, by what all steps' may."""
        account = self.accounts.get(site)
        if account is None or not self.is_weighed:
            return np.inf
        last = self.steps if self.limits.window is None else self.limits.window[1]
        left = self.limits.audited * account.weighed.budget - account.weighed.moved
        spread = 1.0 if self.limits.burst else min(max(1, last - self.step), 1.0 / WEIGHED_FADE)
        each = account.weighed.allowed * WEIGHED_FADE / (1.0 - (1.0 - WEIGHED_FADE) ** max(1, self.step))
        return max(0.0, left if self.limits.burst else left / spread + self.limits.audited * each)

    def room(self, site: Site, grid: SiteGrid, numel: int, needed: int) -> int:
        """Return how many elements of a site may be moved now; ``needed`` entries are taken by honest ones."""
        most = move_budget(grid, numel) if grid.residue_bits else entry_budget(grid, numel) - needed
        if grid.residue_bits and self.yardstick is not None and not self.yardstick.steady:
            most = numel  # what they carry is held to, not how many there are
        if self.limits.audited is None:
            return max(0, int(self.limits.share * most))
        own = self.budget(self.expected[site], numel) - self.taken[site]
        if self.single:
            own = min(own, self.budget(self.step_sites.get(site, 0.0), numel, step=True))
        return max(0, min(own, most, self.step_room - self.step_taken))


@dataclass
class _Choice:
    """Where one site may be moved: flat indexes, values to take, how far that is, its worth; and entries that honesty needs."""

    at: np.ndarray
    value: np.ndarray
    move: np.ndarray
    worth: np.ndarray
    honest: np.ndarray
    honest_side: np.ndarray
    near: int = 0  # how many a log could have chosen
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0))  # quanta
    weight: np.ndarray = field(default_factory=lambda: np.zeros(0))  # squared moves in the optimizer


class SteeringContext(RecordingContext):
    """Records as a trainer does, but takes the roundings and gates that serve its aim."""

    attacker: Attacker
    session: Session

    def take_up(self) -> None:
        """Declare the bands that the attacker wants."""
        attacker, session = self.attacker, self.session
        self._tau = self._even = 0.0
        self._gates_before = attacker.told.gates
        if session.is_calibration_step(session.step):
            attacker.honest = dict(self._grids)
            attacker.measure(session)
        self._declare()

    _share = 1.0

    def _declare(self) -> None:
        for place, grid in list(self._grids.items()):
            self._grids[place] = self._declared(place, self.attacker.signals.pop(place, grid))
        self.table = GridTable(self._grids)

    def restart(self, measured: GridTable) -> None:
        """Log the step again, having measured its noise as an auditor will."""
        super().restart(measured)
        self.attacker.honest = dict(self._grids)
        self.attacker.signals.clear()
        self.attacker.told.gates = self._gates_before
        self.attacker.measure(self.session)
        self._declare()

    def _declared(self, place: Site, grid: SiteGrid) -> SiteGrid:
        limits, honest = self.attacker.limits, self.attacker.honest.get(place)
        if honest is None or is_noise_only(grid) or is_noise_only(honest):
            return grid
        kind = Kind(place[0])
        form = expected_form(self.policy, kind)
        assert form is not None
        lowest, highest = form[2]
        if kind != Kind.GRADIENT or not limits.gradients or honest.residue_bits > 1:
            return grid  # of residues the band says nothing, and another machine needs all the bits
        if limits.widest:
            return site_grid(self.policy, kind, highest, grid.scales)
        yardstick = self.attacker.yardstick
        if yardstick is None:
            return grid
        for band in range(highest if limits.coarsest is None else limits.coarsest, lowest - 1, -1):
            wide = site_grid(self.policy, kind, band, grid.scales)
            if yardstick.compare_band(place, wide)[1] is None:
                if self.policy.gradient_steer is None:
                    return wide
                floor = max(grid.floor, band + SPARSEST)  # the rule for floors (docs/adr/0026)
                if floor <= wide.floor:
                    return replace(wide, floor=floor)
        return grid

    def silence(self) -> None:
        """Declare gradients noise-only that are not; called when they are there, before any is rounded."""
        attacker, limits, silenced = self.attacker, self.attacker.limits, 0
        self._muted: dict[Site, SiteGrid] = {}
        if not limits.silenced:
            return
        yardstick = attacker.yardstick
        sizes = {
            ordinal: float(block_rms(p.grad.contiguous(), 1)[0])
            for ordinal, (_, p) in enumerate(self.session.parameters)
            if p.grad is not None and not is_noise_only(self._grids[(Kind.GRADIENT, ordinal)])
        }
        for ordinal, size in sizes.items():
            name, p = self.session.parameters[ordinal]
            place, assigned = (Kind.GRADIENT, ordinal), p.grad
            assert assigned is not None
            if not any(fnmatchcase(name, pattern) for pattern in limits.silenced) or size == 0.0:
                continue
            grid = self._grids[place]
            floor = int(scale_exponents(np.array([size]))[0]) + 1
            mute = site_grid(
                self.policy, Kind.GRADIENT, NOISE_BAND, np.full(grid.scales.size, floor - NOISE_BAND)
            )
            if yardstick is None:
                chosen = size < max(sizes.values())
            else:
                against = (
                    not limits.against or float(assigned.double().reshape(-1) @ attacker.aim[ordinal]) < 0.0
                )
                bad, (high, _) = (
                    yardstick.compare_band(place, mute)[1],
                    yardstick.excess_floor(place, mute, floor, None),
                )
                chosen = against and bad is None and high is None
            if chosen:
                attacker.signals[place] = grid
                self._muted[place] = self._grids[place] = mute
                silenced += p.numel()
        self.table = GridTable(self._grids)
        attacker.told.silenced = max(silenced, attacker.told.silenced)

    def settle_noise(self) -> None:
        """Keep the floors that were chosen."""
        super().settle_noise()
        self._grids |= self._muted

    # -- gates --------------------------------------------------------------------------

    def band(self, rms: float, widest: float = np.inf) -> float:
        """Return the band of a decision, as wide as the attacker declares it."""
        limits = self.attacker.limits
        place = (Kind.DECISION, self._ordinal)
        self._rms = rms
        if limits.gates and self.attacker.is_open and limits.gate_band != 0:
            lowest, highest = self.policy.decision_band
            grid, yardstick = self._grids.get(place), self.attacker.yardstick
            own = lowest if grid is None else grid.band
            if yardstick is not None:
                measured = yardstick.measured.table.sites.get(place)
                own = lowest if measured is None else measured.band
            wide = highest if limits.gate_band is None else min(highest, own + limits.gate_band)
            self._grids[place] = SiteGrid(0, wide, 0 if grid is None else grid.floor)
        return super().band(rms)

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Log the branches taken, and take the other one where that serves the aim."""
        worth = self.attacker.gates.get(self._relu_place(width, numel))
        if worth is None or not self.attacker.limits.gates or near.numel() == 0:
            super().decide(numel, width, near, symbols, distance)
            return None
        own = symbols(near)
        gain = worth[near].clone()
        gain[own == 1] = -1.0  # an exact zero: nothing to gain
        order = gain.argsort(descending=True)
        helpful = order[: int(self._share * int((gain > 0).sum()))]
        if self.attacker.yardstick is not None:
            helpful = self._accepted(helpful, near, own, distance)
        taken = own.clone()
        taken[helpful] = 2 - own[helpful]
        self.attacker.step_gates += int(helpful.numel())
        self.attacker.told.gates += int(helpful.numel())
        entries = SparseEntries(numel, width, near.cpu().numpy(), taken.cpu().numpy())
        address = SiteAddress(self.rank, self._micro_batch, Kind.DECISION, self._ordinal)
        self.payloads[address] = encode_decision(self._band_exponent, entries)
        return near, taken

    def _accepted(
        self, helpful: Tensor, near: Tensor, own: Tensor, distance: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return those gates that an auditor accepts: within reach of the noise, and a few beyond."""
        attacker = self.attacker
        assert attacker.yardstick is not None
        if attacker.move_left(self.session) <= 0.0:
            return helpful[:0]
        away = distance(torch.stack((near[helpful], 2 - own[helpful]), dim=1))
        far = away > INSIDE * attacker.yardstick.reach((Kind.DECISION, self._ordinal)) * self._rms
        kept = ~far | (far.cumsum(0) <= attacker.far_room())
        attacker.step_far += int((far & kept).sum())
        return helpful[kept]

    def _relu_place(self, width: int, numel: int) -> int:
        """Return which ReLU this decision belongs to, by counting those whose number of elements fits; -1 for none."""
        if width != 2:
            return -1
        for place in range(self._relus, len(self.attacker.gates)):
            if self.attacker.gates[place].numel() == numel:
                self._relus = place + 1
                return place
        return -1

    def start_micro_batch(self, micro_batch: int) -> None:
        """Number the decisions of the next micro-batch from 0."""
        super().start_micro_batch(micro_batch)
        self._relus = 0
        self.attacker.step_gates = self.attacker.step_far = 0

    # -- gradients ----------------------------------------------------------------------

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round as the attacker likes."""
        attacker, limits = self.attacker, self.attacker.limits
        if (
            kind == Kind.BUFFER
            and limits.buffers
            and attacker.is_open
            and ordinal in attacker.wanted_statistics
        ):
            source = x.clone()
            super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
            grid = self._grids[(kind, ordinal)]
            wanted = attacker.wanted_statistics[ordinal]
            choice = self._candidates(source, grid, key, wanted, attacker.honest.get((kind, ordinal)), None)
            self._steer((kind, ordinal), choice, grid, out)
            return
        if kind != Kind.GRADIENT:
            super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
            return
        place = (Kind.GRADIENT, ordinal)
        source = x.clone()
        with self._lifted(place):
            super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
        grid = self._grids[place]
        attacker.energy += float(source.double().square().sum())
        if attacker.aim:
            seen = out.detach().double().reshape(-1).square()
            attacker.second[ordinal] = BETA * attacker.second.get(ordinal, 0.0) + (1.0 - BETA) * seen
        if limits.gradients and attacker.is_open and not is_noise_only(grid):
            wanted = attacker.owed[ordinal]
            choice = self._candidates(
                source, grid, key, wanted, attacker.honest.get(place), attacker.root.get(ordinal), self._even
            )
            given = self._steer(place, choice, grid, out)
            wanted -= given
            attacker.given += float(given.square().sum())
            at = given.nonzero().squeeze(1)
        else:
            given, at = torch.zeros(out.numel()), torch.zeros(0, dtype=torch.int64)
        if grid.residue_bits and attacker.weighing is not None:
            p = self.session.parameters[ordinal][1]
            weight = attacker.weighing.weigh(ordinal, p, out, at, given[at])
            attacker.weighed += weight.moved
            attacker.weights_here[place] = weight
            attacker.now_trained += weight.whole

    @contextmanager
    def _lifted(self, place: Site) -> Generator[None]:
        """Inside, the scales of a site are the widest that a follower lets pass."""
        # Scales of the step before a calibration count there.
        due = self.attacker.limits.audited is not None and self.session.is_calibration_step(
            self.session.step + 1
        )
        if not self.attacker.limits.lift or due or is_noise_only(self._grids[place]):
            yield
            return

        def widest(previous: np.ndarray | None, rms: np.ndarray, row_scales: bool = False) -> np.ndarray:
            own = scale_exponents(rms)
            if self.attacker.limits.audited is not None and not (row_scales and self.base.sites):
                return settled_scales(previous, rms, row_scales)
            if row_scales:
                own = np.maximum(own, whole_scale(rms))
            elif rms.size > 1:
                own = np.maximum(own, lowest_scale(rms))
            return own + (EXACT_SCALE_SLACK if row_scales and self.base.sites else SCALE_SLACK)

        with patch.object(rounding_context, "settled_scales", widest):
            yield

    def plan(self) -> None:
        """See all gradients of the step, before the first is rounded, and find how much a move must be worth."""
        attacker = self.attacker
        while not self._weigh_bend() and self._share:
            self._share = self._share / 4.0 if self._share > 0.01 else 0.0
            self._take_again()
        if attacker.limits.audited is None:
            return
        sizes = {
            (int(Kind.GRADIENT), o): p.numel()
            for o, (_, p) in enumerate(self.session.parameters)
            if p.grad is not None
        } | {
            (int(Kind.BUFFER), site.ordinal): int(np.prod(site.shape))
            for site in self.session.sites
            if site.kind == Kind.BUFFER
        }
        self._even = attacker.even if attacker.is_weighed else 0.0
        energies = {
            (int(Kind.GRADIENT), o): float(p.grad.double().square().sum())
            for o, (_, p) in enumerate(self.session.parameters)
            if p.grad is not None
        }
        energy = sum(energies.values())
        grids = dict(self._grids)
        for ordinal, (_, p) in enumerate(self.session.parameters):
            if p.grad is not None:
                grids[(Kind.GRADIENT, ordinal)] = self._settled_grid((Kind.GRADIENT, ordinal), p.grad)
        attacker.expect(grids, sizes, energies)
        bent = (attacker.parted / attacker.own_energy) ** 0.5 if attacker.own_energy > 0.0 else 0.0
        most = max(0.0, attacker.move_left(self.session) - bent) ** 2 * energy
        if attacker.limits.pull is not None:
            self._weigh(grids, most)
        elif attacker.is_open:
            # The largest weight of the aim with which what is taken is not more than what fits.
            low, high, aim = -20.0, 40.0, dict(attacker.owed)
            for _ in range(14):
                middle = (low + high) / 2.0
                attacker.owed |= {ordinal: wanted * 2.0**middle for ordinal, wanted in aim.items()}
                low, high = (low, middle) if self._weigh(grids, most) else (middle, high)
            attacker.owed |= {ordinal: wanted * 2.0**low for ordinal, wanted in aim.items()}
            self._weigh(grids, most)
            if attacker.is_weighed:
                attacker.even = min(max(attacker.even * (2.0 if attacker.dear else 0.5), 1e-30), 1e6)

    def _weigh(self, grids: Mapping[Site, SiteGrid], most: float) -> bool:
        """Find how much a move must be worth; whether more would be worth it than squares of moves are allowed."""
        attacker = self.attacker
        worth, squares, weights = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
        for ordinal, (_, p) in enumerate(self.session.parameters):
            place = (Kind.GRADIENT, ordinal)
            grid = grids[place]
            if p.grad is None:
                continue
            if is_noise_only(grid) or not attacker.limits.gradients or not attacker.is_open:
                continue
            key = self.session.open_step.rounding.gradient_key(ordinal)
            root = attacker.root.get(ordinal)
            choice = self._candidates(
                p.grad.contiguous(), grid, key, attacker.owed[ordinal], None, root, self._even
            )
            attacker.told_step.sites[place].near = choice.near
            attacker.step_room, attacker.step_taken = 1 << 62, 0
            room = attacker.room(place, grid, p.numel(), choice.honest.size)
            best = self._fitting(place, choice, np.argsort(-choice.worth, kind="stable")[:room])
            worth.append(choice.worth[best])
            squares.append(np.square(choice.move[best]))
            weights.append(choice.weight[best])
        self._tau = attacker.threshold(
            np.concatenate(worth), np.concatenate(squares), np.concatenate(weights), most
        )
        return attacker.is_full

    def _settled_grid(self, place: Site, x: Tensor) -> SiteGrid:
        """Return the grid that a gradient will have in this step: scales follow its size, as ``RecordingContext.round`` does."""
        grid = self._grids[place]
        if is_noise_only(grid):
            return grid
        rms = block_rms(x.contiguous(), grid.scales.size)
        with self._lifted(place):
            own = grid.scales.astype(np.int64)
            scales = rounding_context.settled_scales(own, rms, self.policy.row_scales) if rms.any() else own
        kept = kept_scales(
            self.base.sites.get(place), self._before.sites.get(place), self.policy, scales.size
        )
        scales = scales if kept is None else np.maximum(scales, kept)
        if self.policy.row_scales and not self.base.sites:
            scales = np.maximum(scales, own)
        return self._with_reach(place[1], grid.with_scales(scales), x)

    def _candidates(
        self,
        x: Tensor,
        grid: SiteGrid,
        key: Key,
        wanted: Tensor,
        honest: SiteGrid | None,
        root: Tensor | None,
        even: float = 0.0,
    ) -> _Choice:
        """Return where a site may be moved, with what that is worth: by how much the square of what is owed shrinks.

        With a ``root`` of the mean squares by which the optimizer divides, its square after that counts ``even`` times as much.
        """
        flat = x.detach().reshape(-1)
        scale = rounding_tensors.scales_at(grid, flat.numel(), 0, flat.numel(), flat.device)
        cells = rounding_tensors.place(flat, None, grid, scale, 0, key)
        own = cells.up.double()
        other = torch.where(cells.near <= cells.far, 1.0 - own, 3.0 * own - 1.0)
        times = 1.0 if grid.residue_bits else 2.0
        reached = cells.distance < cells.delta * times * INSIDE
        if grid.residue_bits > 1:  # whatever is owed, in quanta
            most = float((1 << grid.residue_bits - 1) - 1)
            other = own + torch.round(wanted.reshape(-1) / cells.quantum).clamp(-most, most)
            reached = other != own
        move = (other - own) * cells.quantum
        worth = 2.0 * wanted * move - move.square()
        if root is not None:
            worth = worth * (1.0 + even / root.square())
        good = reached & (worth > 0.0)
        at = good.nonzero().squeeze(1)
        value = (cells.cell + other) * cells.quantum
        band = (grid if honest is None else honest).band
        near = cells.distance < cells.delta * 2.0 ** (min(band, grid.band) - grid.band)
        kept = near.nonzero().squeeze(1)
        side = (other < own)[kept]
        within = int((cells.distance < cells.delta * times).sum())
        return _Choice(
            at.numpy(),
            value[at].numpy(),
            move[at].numpy(),
            worth[at].numpy(),
            kept.numpy(),
            side.numpy(),
            flat.numel() if grid.residue_bits > 1 else within,
            (other - own)[at].numpy(),
            (torch.zeros_like(at).double() if root is None else (move / root).square()[at]).numpy(),
        )

    def _fitting(self, place: Site, choice: _Choice, best: np.ndarray) -> np.ndarray:
        """Return of the best moves those that together are no larger than the audit accepts of one gradient."""
        attacker, count = self.attacker, best.size
        for each, most in (
            (np.square(choice.move[best]), attacker.squares_left(place)),
            (choice.weight[best], attacker.weight_left_at(place)),
        ):
            count = min(count, int(np.searchsorted(np.cumsum(each), most, side="right")))
        return best[:count]

    def _spread(self, place: Site, choice: _Choice, best: np.ndarray, numel: int) -> np.ndarray:
        """Return of the best moves those that do not go farther together with all before than the audit accepts."""
        attacker, audited = self.attacker, self.attacker.limits.audited
        if (
            audited is None
            or place[0] != Kind.GRADIENT
            or place not in attacker.told_step.gradients
            or not self._grids[place].residue_bits
            or not best.size
        ):
            return best
        so_far, moves = (
            attacker.drifts.setdefault(place, Drift.of(numel)),
            attacker.told_step.gradients[place],
        )
        length = (moves.energy + moves.quanta) ** 0.5

        def after(chosen: np.ndarray) -> Drift:
            found = Drift(so_far.together.clone(), so_far.alone.clone())
            found.add(
                torch.from_numpy(choice.at[chosen]), torch.from_numpy(choice.move[chosen] / length).float()
            )
            return found

        def fitting(order: np.ndarray) -> np.ndarray:
            low, high = 0, order.size
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (
                    (middle, high) if after(order[:middle]).share <= audited * DRIFT else (low, middle - 1)
                )
            return order[:low]

        went = so_far.together.numpy()[choice.at[best]] * choice.move[best]
        orders = [best, best[went <= 0.0], best[np.argsort(np.abs(went), kind="stable")]]
        chosen = max((fitting(order) for order in orders), key=lambda order: float(choice.worth[order].sum()))
        attacker.drifts[place] = after(chosen)
        return chosen

    def _steer(self, place: Site, choice: _Choice, grid: SiteGrid, out: Tensor) -> Tensor:
        """Take the moves that are worth most, write the log accordingly, and return how far each element went."""
        attacker, numel = self.attacker, out.numel()
        room = attacker.room(place, grid, numel, choice.honest.size)
        least = self._tau if place[0] == Kind.GRADIENT else 0.0
        worthy = np.flatnonzero(choice.worth >= least)
        best = worthy[np.argsort(-choice.worth[worthy], kind="stable")[:room]]
        best = np.sort(self._spread(place, choice, self._fitting(place, choice, best), numel))
        at = choice.at[best]
        flat = out.reshape(-1)
        flat[torch.from_numpy(at)] = torch.from_numpy(choice.value[best]).to(out.dtype)
        given = torch.zeros(numel, dtype=torch.float64)
        given[torch.from_numpy(at)] = torch.from_numpy(choice.move[best])
        attacker.given_here[place] = float(given.square().sum())
        attacker.taken[place] += at.size
        attacker.step_taken += at.size
        attacker.told.moves += at.size
        address = SiteAddress(self.rank, 0, *place)
        if grid.residue_bits:
            bits = grid.residue_bits
            values = decode_residues(self.payloads[address], numel, bits).values.astype(np.int64)
            values[at] = (values[at] + choice.steps[best].astype(np.int64)) % (1 << bits)
            self.payloads[address] = encode_residues(Residues.of(values, bits))
            return given
        sides = dict(zip(choice.honest.tolist(), choice.honest_side.tolist(), strict=True))
        sides |= dict(zip(at.tolist(), (choice.move[best] > 0.0).tolist(), strict=True))
        if not sides:
            self.payloads.pop(address, None)
            return given
        index = np.array(sorted(sides), dtype=np.int64)
        symbols = np.array([int(sides[i]) for i in index.tolist()], dtype=np.int64)
        self.payloads[address] = encode(SparseEntries(numel, 1, index, symbols))
        return given

    def _weigh_bend(self) -> bool:
        """Note how far gates bent the step's gradient; whether that is what an auditor accepts of it and of each tensor."""
        attacker, within = self.attacker, True
        audited = attacker.limits.audited
        most = np.inf if audited is None else (audited * self.policy.most_bent) ** 2
        attacker.parted = attacker.own_energy = 0.0
        for ordinal, honest in enumerate(attacker.gate_gradient):
            source = self.session.parameters[ordinal][1].grad
            if honest is not None and source is not None:
                parted = float((source - honest).double().square().sum())
                own = float(honest.double().square().sum())
                within &= parted <= most * own
                attacker.parted += parted
                attacker.own_energy += own
        return within or audited is None

    def _take_again(self) -> None:
        """Take the pass again, with fewer gates."""
        attacker, session = self.attacker, self.session
        assert attacker.job is not None
        attacker.told.gates = self._gates_before
        with session.interlude():
            before = {name: tensor.clone() for name, tensor in session.tensors.all_buffers()}
            self.payloads.clear()
            again, *_ = gradients_under(session, backward_of(session, attacker.job), self, before)
        for (_, p), gradient in zip(session.parameters, again, strict=True):
            p.grad = gradient

    def finish(self) -> bytes:
        """Return the frame, having noted how far the step's gradient was moved."""
        attacker = self.attacker
        self.attacker.told.largest_steer = max(attacker.told.largest_steer, self.moved)
        self.attacker.told.largest_gate_steer = max(attacker.told.largest_gate_steer, self.bent)
        return super().finish()

    @property
    def moved(self) -> float:
        """How far moves took the step's gradient, relative to its length."""
        attacker = self.attacker
        return (attacker.given / attacker.energy) ** 0.5 if attacker.energy > 0.0 else 0.0

    @property
    def bent(self) -> float:
        """How far gates did."""
        attacker = self.attacker
        return (attacker.parted / attacker.own_energy) ** 0.5 if attacker.own_energy > 0.0 else 0.0


def _rate(optimizer: torch.optim.Optimizer, parameter: Tensor) -> float:
    """Return the parameter's learning rate."""
    groups = (group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    return float(next(groups)["lr"])


@contextmanager
def steering(attacker: Attacker) -> Generator[None]:
    """Inside, whoever records steers."""
    honest_context, honest_step = Session.recording_context, trainer.run_step

    def make(session: Session, before: GridTable) -> RecordingContext:
        base = honest_context(session, before).base
        made = SteeringContext(session.policy, before, current=session.table, base=base, rank=session.rank)
        made.attacker, made.session, attacker.before = attacker, session, before
        return made

    def step(session: Session, job: Job, context: RoundingContext, batch: Batch) -> StepOutcome:
        assert isinstance(context, SteeringContext)
        attacker.first = attacker.first or copied(session)
        attacker.prepare(session, job)
        context.take_up()
        weights, gradients = copied(session), session.listeners.gradients

        def on_gradients() -> None:
            if gradients is not None:
                gradients()
            context.silence()
            context.plan()

        session.listeners.gradients = on_gradients
        outcome = honest_step(session, job, context, batch)
        attacker.done(session, context.moved + context.bent, weights)
        return outcome

    with patch.object(Session, "recording_context", make), patch.object(trainer, "run_step", step):
        yield


@dataclass(frozen=True)
class Scene:
    """Where an attack is played: a folder, a policy, and how many steps of the digits."""

    folder: Path
    policy: str
    steps: int

    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    job: str = "digits"

    def order(self, **chosen: int) -> Order:
        policy = find_policy(self.policy, chosen=chosen)
        return Order(find_source(self.job), self.settings, policy, steps=self.steps, checkpoint_every=100)


@dataclass(frozen=True)
class Outcome:
    """What came of an attack, beside an honest run."""

    report: AuditReport
    told: Told
    honest: Backdoor
    planted: Backdoor

    @property
    def gain(self) -> float:
        """Points of success that the attack is above the honest run."""
        return 100.0 * (self.planted.success - self.honest.success)

    @property
    def accepted(self) -> bool:
        return self.report.verdict == "match"

    def __str__(self) -> str:
        first = "" if self.report.first is None else f" ({self.report.first})"
        return (
            f"audit: {self.report.verdict}{first}; {freedom_of(self.report)}; "
            f"took {self.told.moves} moves and {self.told.gates} gates, "
            f"silenced {self.told.silenced} parameters, "
            f"moved a step's gradient by {self.told.largest_steer:.3g} of its length, "
            f"by gates {self.told.largest_gate_steer:.3g}; "
            f"backdoor {self.planted.success:.1%} (honest {self.honest.success:.1%}), "
            f"clean accuracy {self.planted.accuracy:.1%} (honest {self.honest.accuracy:.1%})"
        )


def freedom_of(report: AuditReport) -> str:
    """Return the numbers of a report's freedom as text."""
    fields = report.freedom.fields().items()
    return ", ".join(f"{name} {'unbounded' if value is None else f'{value:.3g}'}" for name, value in fields)


ALLOWED = 2.0  # points that an accepted attack's success may be above the honest run's


def told(outcome: Outcome) -> str:
    """Return how an attack ended: refused by the audit, or accepted and without effect."""
    verdict = outcome.report.verdict
    if verdict == "not_accepted":
        return f"caught by: not accepted: {outcome.report.first}; {outcome}"
    if verdict == "log_violation":
        return f"caught by: log violation: {outcome.report.first}; {outcome}"
    must(verdict == "match", f"the audit says {verdict}, which this attack cannot cause; {outcome}")
    must(outcome.gain <= ALLOWED, f"accepted, and {outcome.gain:.1f} points of success; {outcome}")
    return f"the bound, not a verdict: {outcome}"


def play(scene: Scene, limits: Limits, **chosen: int) -> Outcome:
    """Record honestly and with ``limits``, audit the latter, and measure both."""
    order = scene.order(**chosen)
    honest, run = RunDirectory(scene.folder / "honest"), RunDirectory(scene.folder / "run")
    if not honest.path.exists():
        record(order, honest)
    attacker = Attacker(limits)
    with steering(attacker):
        record(order, run)
    report = audit(run, order.source)
    return Outcome(report, attacker.told, judge_backdoor(honest, order), judge_backdoor(run, order))


def main(attack: Callable[[Scene], str], description: str | None) -> None:
    """Play an attack from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--policy", default="fp32", choices=("fp64", "fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=200)
    sys.exit(play_attack(lambda folder, given: attack(Scene(folder, given.policy, given.steps)), parser))
