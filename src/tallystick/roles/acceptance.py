"""What an auditor accepts: a log that led to the stated bytes may still have steered, and how far is measured here.

At the trainer's calibration steps, and at the beginning of what is audited, the auditor measures the noise from the same
committed state on its own hardware. Bands, scales and silenced gradients are held against that, moves against the budget
that follows from it (``execution.noise.freedom``). What is above a limit is ``not_accepted``: neither a match nor an accusation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.joint_optimizer import part_of
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.noise.freedom import Excess, Freedom
from tallystick.execution.noise.held import as_held, with_larger
from tallystick.execution.noise.own_path import MOST_CHOICES, OwnPath
from tallystick.execution.noise.survey import Backward
from tallystick.execution.noise.weighing import Weighing, is_linear
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.rounding.breaches import find_other_floors
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import DOUBT, Site, is_noise_only, scale_exponent
from tallystick.execution.session.hyperparameters import read_hyperparameters
from tallystick.execution.session.session import Session
from tallystick.execution.step import under_log
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, decode_frame
from tallystick.numerics.policy import POLICIES
from tallystick.numerics.tensor_measures import block_rms
from tallystick.roles.bending import Carried, StepBend, TensorBend, bend_of, count_exact

REPEATS = 3
"""Jittered repetitions of a measurement, one more of the first: twice a trainer's, whose largest of few may be the larger."""

LEAST_BENT, RARELY_BENT, RARE_SLACK = 8, 2.0**-5, 2.5
"""Steps, or what share of those repeated, whose gradients the log's decisions may bend and lead a tensor ``RARE_SLACK`` times as
far as else: honest machines turn some, and one turn may lead an element of 64 all its way."""
SINGLE = 4.0  # times what decisions may bend a step's whole gradient that they may bend one tensor's


@dataclass(frozen=True)
class Limits:
    """What a caller accepts at most, besides bands and budgets; ``PATH`` and ``STEER`` hold anyway.

    Attributes:
        steer: relative L2 size of a steer of one step's gradient, as the budget allows it and as the log did it.
        moves: roundings and decisions that the log takes from the follower's own, in all.
        silenced: share of the parameters whose gradient is declared to be noise only.
    """

    steer: float | None = None
    moves: int | None = None
    silenced: float | None = None

    def __post_init__(self) -> None:
        for name, value, most in (
            ("--max-steer", self.steer, math.inf),
            ("--max-moves", self.moves, math.inf),
            ("--max-silenced", self.silenced, 1.0),
        ):
            if value is not None and not 0.0 <= value <= most:
                raise InvalidInput(f"{name} must be a number from 0 to {most:g}, got {value!r}")


@dataclass
class Acceptance:
    """One auditor's measurements on its way through a run.

    Attributes:
        limits: the caller's.
        freedom: what is found, over all steps.
        origin: the trained parameters as the run began; none if the first steps repeated begin with these.
        is_loop, is_traced: whether a loop is followed that may measure other gradients than it trains, or by its own operators.
    """

    limits: Limits
    freedom: Freedom
    origin: list[Tensor] = field(default_factory=list[Tensor])
    is_loop: bool = False
    is_traced: bool = False
    _yardstick: Yardstick | None = None
    _kept: Yardstick | None = None
    _excesses: list[tuple[int, Excess]] = field(default_factory=list[tuple[int, Excess]])
    _weights: list[Tensor] = field(default_factory=list[Tensor])
    _first: list[Tensor] = field(default_factory=list[Tensor])
    _end: int = -1
    _measured: int = 0
    _latest: int = -1
    _unasked: int = 0
    _waits_for: bool | None = None
    _travelled: float = 0.0
    _weighing: Weighing | None = None
    _own: OwnPath = field(default_factory=lambda: OwnPath([], []))
    _bends: dict[str, TensorBend] = field(default_factory=dict[str, TensorBend])
    _carried: Carried | None = None
    _bent: int = 0
    _steps: int = 0
    _before: dict[str, Any] = field(default_factory=dict[str, Any])

    def begin(self, session: Session) -> None:
        """Begin with steps that follow the session's state: the noise is measured before the first, whatever the schedule."""
        self._before = copy.deepcopy({"freedom": vars(self.freedom), "bends": self._bends})
        if self._end != session.step:
            self._yardstick, self._kept = self._kept, None
        self._weights = copied(session)
        if self._end != session.step:
            self._travelled, self._first = self.freedom.distance, copied(session)
            if session.step == 0 or not self.origin:
                self.origin = self._first
            is_general = session.policy.optimizer_arithmetic == "general"
            self._own = OwnPath(self._first, self.origin, is_general=is_general)
            # Under autocast decisions move all the time.
            self._carried = None if session.policy.autocast else Carried(self.is_loop)
            self._unasked = self._bent = self._steps = 0
            self.freedom.leave_out_steps()
        known = self._weighing
        if self._end != session.step or known is None or known.optimizer is not session.optimizer:
            self._weighing = Weighing(session.optimizer)

    def continues_at(self, step: int) -> bool:
        """Whether the steps before ``step`` were the last repeated, so that their noise is known."""
        return self._end == step

    def discard(self, *, keeping: bool = False) -> None:
        """Take back what was counted since ``begin``: steps that differ say nothing of what a log moves.

        With ``keeping`` what begins next is held against what was measured in them.
        """
        self._kept = self._yardstick if keeping else None
        vars(self.freedom).update(self._before["freedom"])
        self._bends = self._before["bends"]
        self._own = OwnPath([], [])  # the next begins anew
        self._excesses, self._end = [], -1

    def end(self, session: Session) -> list[tuple[int, Excess]]:
        """Return what exceeded a limit since ``begin``, with the step in which it first did."""
        self._end = session.step
        self.freedom.distance = self._travelled + _distance(_tensors(session), self._first)
        led = self._own.shares(session.parameters)
        self.freedom.led = max(self.freedom.led, *led.values(), 0.0)
        self.freedom.choices = max(self.freedom.choices, self._own.choices, self._unasked)
        found, self._excesses = self._excesses, []
        return found + [(max(session.step - 1, 0), excess) for excess in self._of_limits(session, led)]

    def follow(
        self, session: Session, frame: bytes, backward: Backward, *, later: bool = False
    ) -> FollowingContext:
        """Return the context for the next step, the noise measured first where the trainer did, or where that is long ago.

        ``later`` is whether it is measured in the step, by ``watching``, once its operators have run.

        Raises:
            InvalidInput: the frame is malformed.
        """
        is_trainers = session.is_calibrated(decode_frame(frame))
        context, weighing = session.following_context(frame), self._weighing
        if later and self._is_due(session, is_trainers=is_trainers):
            self._waits_for = is_trainers
        else:
            self._hold(session, context, backward, is_trainers=is_trainers)
        if weighing is not None and not is_linear(session.optimizer):
            context.weigh = lambda ordinal, gradient, at, moves: weighing.weigh(
                ordinal, session.parameters[ordinal][1], gradient, at, moves
            )
        if session.policy.residue_bits == 0:
            context.own = lambda *noted: self._note_own(session, context, *noted)
        return context

    def _is_due(self, session: Session, *, is_trainers: bool) -> bool:
        """Whether the noise is to be measured for the next step; ``is_trainers`` is whether the trainer did."""
        return self._yardstick is None or self._is_overdue(session) or is_trainers

    def _is_overdue(self, session: Session) -> bool:
        return session.step - self._measured >= POLICIES[session.policy.name].recalibrate_every

    def _hold(
        self, session: Session, context: FollowingContext, backward: Backward, *, is_trainers: bool
    ) -> None:
        """Hold a step against the noise, measured for it where that is due."""
        overdue, continues = self._is_overdue(session), self._yardstick is not None
        if self._is_due(session, is_trainers=is_trainers):
            self._measured = session.step
            self._measure(session, backward, is_trainers=is_trainers, changes=context.changes_hearing)
        if self._yardstick is not None:
            context.hold_against(self._yardstick)
            is_fresh = is_trainers and self._measured == session.step and not self.is_loop
            if is_fresh:
                before = None if session.chooses_grids(session.step) else session.table
                context.excesses += find_other_floors(
                    session.policy, context.table, self._yardstick, session.site_name, before
                )
        if overdue and continues and not is_trainers:
            context.hold_overdue()

    def _measure(
        self,
        session: Session,
        backward: Backward,
        *,
        is_trainers: bool,
        changes: Callable[[Site], bool] = lambda place: True,
    ) -> None:
        own, self._latest = self._yardstick, session.step
        given: dict[str, Any] = {"repeats": REPEATS + (1 if own is None else 0), "seed": session.seed + 1}
        # What the trainer declared before is its word; it counts only where an audit begins in the middle.
        earlier = own.measured.table if own is not None else None if session.step else GridTable()
        try:
            with under_log("where noise is measured"):
                measured = calibrate(session, backward, **given, for_audit=True, earlier=earlier)
        except Nondeterminism as problem:
            self._exceed(session.step, Excess("noise", str(problem), "that it can be measured"))
        else:
            zeros = frozenset[Site]()
            if own is not None and is_trainers and not session.chooses_grids(session.step):
                wider = with_larger(session.policy, measured, own.measured)
                measured = as_held(session.policy, wider, own.measured, changes)
            elif earlier is None or not is_trainers:
                # Where an audit begins, the grids of gradients that were exactly zero are the trainer's word.
                nothing = (place for place, n in measured.noise.items() if n.rms == n.largest == 0.0)
                zeros = frozenset(place for place in nothing if place[0] == Kind.GRADIENT)
                measured = measured.without(zeros)
            self._yardstick = Yardstick(session.policy, measured, own, is_trainers=is_trainers, zeros=zeros)

    @contextmanager
    def watching(
        self,
        session: Session,
        context: FollowingContext,
        backward: Backward,
        in_parts: Backward | None = None,
    ) -> Generator[None]:
        """Inside, a step whose decisions the log moved is repeated with the follower's own, and the gradients compared.

        A gradient that no step had when the noise was measured, or no value but zero, is measured in this one, and so is one
        that has outgrown the noise that it was, or that the log calls more than noise between two measurements. And it is
        counted where the trainer measured and nothing in this step asks for it, or the other way round. Of a loop ``in_parts``
        repeats the step by micro-batches.
        """
        if self._yardstick is None and self._waits_for is None:
            yield
            return

        began, carried, is_begun = read_hyperparameters(session.optimizer), self._carried, False

        def before_backward() -> AbstractContextManager[object]:
            nonlocal is_begun
            if carried is not None and not is_begun:  # a loop may have let go of the last step's gradients
                carried.begin(session)
            is_begun = True
            return nullcontext()

        def hold() -> None:
            is_trainers, self._waits_for = self._waits_for, None
            if is_trainers is not None:
                with session.interlude():
                    self._hold(session, context, backward, is_trainers=is_trainers)

        def judge() -> None:
            hold()
            if self._yardstick is not None:
                self._judge_decisions(session, context, backward, in_parts)

        def measure() -> None:
            hold()
            if self._yardstick is not None:
                self._measure_what_is_new(session, context, backward)
            judge()
            moved, is_changed = context.freedom.decisions_moved, session.open_step.schedule != began
            if moved and is_changed and not self.is_loop:
                what = "decisions moved in a step that changes its own hyper-parameters"
                context.excesses.append((None, Excess(what, "0 at most", str(moved))))

        listeners = session.listeners
        listeners.gradients, listeners.carried, listeners.around_backward = measure, judge, before_backward
        try:
            yield
        finally:
            listeners.gradients = listeners.carried = listeners.around_backward = None

    def _judge_decisions(
        self, session: Session, context: FollowingContext, backward: Backward, in_parts: Backward | None
    ) -> None:
        """Count what the decisions that the log moved make of a step whose gradients are there."""
        if exact := count_exact(session, context, in_parts or backward):
            what = "decisions turned that lie exactly on their switching point for what they are"
            context.excesses.append((None, Excess(what, "0 at most", str(exact))))
        bend = bend_of(session, context, backward, self._carried, in_parts, is_exact=self.is_traced)
        self._note_bend(session, context, bend)
        self._bent += bool(bend.gradients) and context.freedom.decisions_moved > 0
        context.own_gradients = bend.gradients
        if bend.problem is not None:
            what = "decisions moved that a repetition of the step does not come to as the log does"
            if not context.freedom.decisions_moved:
                what = "step that does not follow from its loss, after the log turned a decision"
            context.excesses.append((None, Excess(what, "all of them", bend.problem)))

    def _measure_what_is_new(self, session: Session, context: FollowingContext, backward: Backward) -> None:
        """Measure gradients in their step that the last measurement says nothing of; see ``watching``."""
        assert self._yardstick is not None
        self._unasked += is_chosen(session, context)
        if context.is_calibrated and not session.chooses_grids(session.step):
            context.outgrown = session.outgrown(DOUBT) | session.outgrown(DOUBT, session.table)
        known = self._yardstick
        gradients = {
            (int(Kind.GRADIENT), n): p.grad
            for n, (_, p) in enumerate(session.parameters)
            if p.grad is not None and bool(p.grad.any())
        }
        floors = {place: known.floor_of_noise(place) for place in gradients}
        grown = {
            place
            for place, floor in floors.items()
            if floor is not None and scale_exponent(float(block_rms(gradients[place], 1)[0])) >= floor
        }
        unknown = {place for place in gradients if known.lacks(place)}
        unknown |= {place for place in grown - unknown if known.noise[place].rms == 0.0}
        heard = {place for place in gradients if context.newly_heard(place) and not known.hears(place)}
        if unknown or heard or grown:
            with session.interlude():
                self._measure(session, backward, is_trainers=False)
            # What is known already is held against the step for which the trainer measured it too.
            measured = known.measured.without(unknown)
            self._yardstick = Yardstick(
                session.policy, measured, self._yardstick, is_trainers=known.is_trainers
            ).with_signal(self._yardstick, (heard | grown) - unknown)
            context.hold_against(self._yardstick)

    def _note_bend(self, session: Session, context: FollowingContext, bend: StepBend) -> None:
        """Count how far a log's decisions bend the step, and note more than honest ones come to."""
        most, context.freedom.bent = session.policy.most_bent, bend.whole
        if not bend.whole <= most:
            what = "what its decisions make of this step's gradient"
            context.excesses.append((None, Excess(what, f"{most:.3g} of it at most", f"{bend.whole:.3g}")))
        gradients = {name: (int(Kind.GRADIENT), n) for n, (name, _) in enumerate(session.parameters)}
        for name, tensor in bend.tensors.items():
            place = gradients.get(name)
            grid = None if place is None else context.table.sites.get((Kind.GRADIENT, place[1]))
            is_silent = grid is not None and is_noise_only(grid)
            moved = self._above_noise(name, place, tensor, session, is_silent=is_silent)
            if place is not None and not moved <= (SINGLE * most) ** 2 * tensor.own:
                stated = math.sqrt(moved / tensor.own) if tensor.own > 0.0 else math.inf
                what = f"{name}: what the log's decisions make of this gradient"
                excess = Excess(what, f"{SINGLE * most:.3g} of it at most", f"{stated:.3g}")
                context.excesses.append((place, excess))
            self._bends.setdefault(name, TensorBend()).add(moved, tensor.own)

    def _above_noise(
        self, name: str, place: Site | None, bend: TensorBend, session: Session, *, is_silent: bool
    ) -> float:
        """Return how far decisions moved a gradient or a buffer, squared, beyond what noise does to it too."""
        assert self._yardstick is not None
        if bend.moved == 0.0:
            return 0.0
        if place is None:
            buffers = {site.name: site.ordinal for site in session.sites if site.kind == Kind.BUFFER}
            noise = self._yardstick.noise.get((Kind.BUFFER, buffers.get(name, -1)))
            expected = 0.0 if noise is None else noise.elements * noise.largest**2
        else:
            numel = session.parameters[place[1]][1].numel()
            rms = math.sqrt(bend.own / max(numel, 1))
            if self._yardstick.is_mostly_noise(place, rms, numel, is_silent=is_silent):
                return 0.0
            expected = self._yardstick.unsure(place, bend.own)
        return 0.0 if bend.moved <= expected else bend.moved - expected  # what is not a number is more

    def _note_own(
        self,
        session: Session,
        context: FollowingContext,
        ordinal: int,
        gradient: Tensor,
        at: Tensor,
        own: Tensor,
        is_loud: bool,
        is_all: bool,
    ) -> None:
        """Note where the follower's own rounding would have given other values than the log's."""
        _, p = session.parameters[ordinal]
        is_measured = context.is_calibrated or self._latest == session.step
        noise = None if self._yardstick is None else self._yardstick.noise.get((Kind.GRADIENT, ordinal))
        noisy = None if noise is None or noise.noisy.size != p.numel() else torch.from_numpy(noise.noisy)
        self._own.note(
            part_of(session.optimizer, p), ordinal, p, gradient, at, own,
            is_loud=is_loud, is_all=is_all, is_measured=is_measured, noisy=noisy,
        )  # fmt: skip

    def count(self, session: Session, context: FollowingContext) -> None:
        """Count in what the step just done showed."""
        step, freedom = session.step - 1, context.freedom
        self._steps += 1
        self._own.step(session.parameters)
        moved = _tensors(session)
        update = _distance(moved, self._weights)
        if session.policy.residue_bits and freedom.largest_move > 0.0 and update > 0.0:
            freedom.path = freedom.largest_move * update * _memory(session)
        for before, now in zip(self._weights, moved, strict=True):
            before.copy_(now)
        for _, excess in context.excesses:
            self._exceed(step, excess)
        for place, excess in self.freedom.add(freedom):
            site = excess.site if place is None else f"{session.site_name(place)}: {excess.site}"
            self._exceed(step, replace(excess, site=site))

    def _exceed(self, step: int, excess: Excess) -> None:
        if all(known.site != excess.site for _, known in self._excesses):
            self._excesses.append((step, excess))

    def _of_limits(self, session: Session, led: Mapping[str, float]) -> list[Excess]:
        found: list[Excess] = []
        freedom, policy = self.freedom, session.policy
        total = sum(p.numel() for _, p in session.parameters)
        steer = max(freedom.largest_steer, freedom.largest_move)
        moves = freedom.moved + freedom.decisions_moved
        for name, value, limit in (
            (
                "path of all moves over the distance trained",
                freedom.path_steer,
                policy.most_path if policy.residue_bits else None,
            ),
            ("steer of one step's gradient", steer, self.limits.steer),
            ("roundings and decisions moved", moves, self.limits.moves),
            (
                "share of parameters silenced",
                freedom.silenced_parameters / max(total, 1),
                self.limits.silenced,
            ),
        ):
            if limit is not None and not value <= limit:
                found.append(Excess(name, f"{limit:.3g} at most", f"{value:.3g}"))
        if self._own.problem is not None:
            found.append(Excess(self._own.problem, "an optimizer of which a copy takes its steps", "none"))
        is_rare = 0 < self._bent <= max(LEAST_BENT, RARELY_BENT * self._steps)
        most = policy.most_path * (RARE_SLACK if is_rare else 1.0)
        for name, share in led.items():
            if not share <= most:
                what = f"{name}: way that the log's choices led it, over the way trained"
                found.append(Excess(what, f"{most:.3g} at most", f"{share:.3g}"))
        for what, chosen in (
            ("steps in which the noise was measured unasked, or was not and asked for it", self._unasked),
            ("times that the log chose whether a gradient is nothing but noise", self._own.choices),
        ):
            if chosen > MOST_CHOICES:
                found.append(Excess(what, f"{MOST_CHOICES} at most", f"{chosen}"))
        for name, bend in self._bends.items():
            if not bend.share <= policy.most_bent:
                what = f"{name}: what the log's decisions make of it, over all steps"
                found.append(Excess(what, f"{policy.most_bent:.3g} of it at most", f"{bend.share:.3g}"))
        return found


def is_chosen(session: Session, context: FollowingContext) -> bool:
    """Whether the trainer measured the noise out of schedule and no gradient asks for it here, or none and one clearly does.

    Who measures when it suits chooses when to ask what is nothing but noise. Not under autocast.
    """
    if session.policy.autocast or (context.is_calibrated and session.is_calibration_step(session.step)):
        return False
    return context.is_calibrated != session.has_outgrown(DOUBT if context.is_calibrated else -DOUBT)


def _tensors(session: Session) -> list[Tensor]:
    return [p.detach() for _, p in session.parameters]


def copied(session: Session) -> list[Tensor]:
    """Return copies of the parameters that a session trains, as they are."""
    return [tensor.clone() for tensor in _tensors(session)]


def _distance(now: list[Tensor], then: list[Tensor]) -> float:
    return math.sqrt(
        sum(
            float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2
            for x, y in zip(now, then, strict=True)
        )
    )


def _memory(session: Session) -> float:
    """Return how much farther a push goes than the update it is part of: momentum keeps it, and averages updates out.

    With a decay m a push goes 1 / (1 - m) times as far as without, updates of no common direction 1 / sqrt(1 - m**2).
    """
    decays = [
        value
        for _, name, value in read_hyperparameters(session.optimizer)
        if name in ("momentum", "betas.0") and 0.0 <= value < 1.0
    ]
    decay = max(decays, default=0.0)
    return math.sqrt((1.0 + decay) / (1.0 - decay))
