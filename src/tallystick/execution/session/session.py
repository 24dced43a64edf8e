"""A session: one model, optimizer and policy, and where its run stands.

Trainer, auditor and judge hold the same session and differ only in the rounding context they put in. The
model is converted to the policy's dtype and otherwise untouched; between steps the state holds
float32 values only, so its bytes are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from tallystick.errors import InvalidInput, Nondeterminism, ProtocolViolation
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.execution.joint_optimizer import joined, joined_schedule, parts_of
from tallystick.execution.noise.measured import Calibration
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.pass_trace import PassTrace
from tallystick.execution.rounding.context import RecordingContext, RoundingContext, outgrown_from, reaches
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import held_grids
from tallystick.execution.rounding.leaves import LeafSites
from tallystick.execution.session.arithmetic import Arithmetic
from tallystick.execution.session.hooks import Hook
from tallystick.execution.session.parameters import TrainedParameters
from tallystick.execution.session.setup import find_unrepeatable
from tallystick.execution.session.sites import SiteSpec, list_sites
from tallystick.execution.session.state import FloatingState
from tallystick.execution.session.step import OpenStep, Prepared, StepListeners
from tallystick.execution.session.tensors import ModelTensors
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import CALIBRATED, Frame, Kind, SiteAddress, decode_frame
from tallystick.numerics.policy import Policy, chooses_grids, is_measured_step
from tallystick.numerics.tensor_measures import sampled_rms

Context = TypeVar("Context", bound=FollowingContext)


@dataclass(frozen=True)
class HasRun:
    """The closure of an optimizer's step that has been run before it; ``result`` is what it returned."""

    result: Any

    def __call__(self) -> Any:
        """Return what it returned, and compute nothing."""
        return self.result


class Session:
    """The state of a run; in its steps the rounding context decides whether it records or follows.

    Args:
        model: converted in place to the policy's storage dtype by ``prepare``.
        optimizer: a ``torch.optim`` optimizer over ``model``'s parameters, or several that step one after another.
        policy: dtype, grids and bands.
        seed: of the portable random streams.
        scheduler: part of the state, if given; or several.
        extra: further modules whose tensors are part of the state.
        smooth: operators outside the table that the job declares continuous.
        jitter: last-bit noise for the whole step; None for the machine's own arithmetic.
        rank: of this process in a data-parallel run.
        follows_up: whether something changes averages or other slow values after the optimizer (``following_up``).
        keeps_gradients: whether gradients are there after the optimizer's step, as after torch's own.

    Attributes:
        arithmetic: how its passes compute.
        first_groups, first_schedule: settings of the optimizer's groups, and the scheduler's state, as the job made them.
        step: the number of the next step, or of the one that is open.
        table: the grids before it.
        base: the grids of the last calibration.
        listeners: what is called in every step.
        tensors, trained, state, sites, leaves: what ``prepare`` found; see their classes.
    """

    tensors: ModelTensors
    trained: TrainedParameters
    state: FloatingState

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        policy: Policy,
        seed: int,
        scheduler: Any = None,
        extra: Mapping[str, nn.Module] | None = None,
        smooth: frozenset[str] = frozenset(),
        jitter: Jitter | None = None,
        rank: int = 0,
        follows_up: bool = False,
        keeps_gradients: bool = False,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, joined(optimizer), joined_schedule(scheduler)
        self.extra = dict(extra or {})
        self.seed, self.rank, self.follows_up, self.keeps_gradients = seed, rank, follows_up, keeps_gradients
        self.arithmetic = Arithmetic.of(policy, smooth=smooth, jitter=jitter)
        self.first_groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        self.first_schedule: dict[str, Any] = (
            {} if self.scheduler is None else dict(self.scheduler.state_dict())
        )
        self.step = 0
        self.table = GridTable()
        self.base = GridTable()
        self._outgrown: tuple[GridTable, np.ndarray] | None = None
        self.sites: list[SiteSpec] = []
        self.leaves: LeafSites | None = None
        self.listeners = StepListeners()
        self._random = RandomStream(seed)
        self._open: OpenStep | None = None
        self._handles: list[Any] = []

    # -- set-up ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Convert model and state, list the sites, and put hooks on the optimizer.

        Raises:
            Nondeterminism: an optimizer, scheduler or tensor that cannot be repeated elsewhere, by name.
            InvalidInput: a model of the wrong dtype, or parameters that the optimizer and the model do not share.
        """
        for text in find_unrepeatable(self.model, self.optimizer, self.scheduler):
            self.arithmetic.findings.refuse(text)
        self.arithmetic = self.arithmetic.chosen_for(self.optimizer)
        self.tensors = ModelTensors(self.model, self.extra)
        self.tensors.convert(self.arithmetic)
        self.model.zero_grad(set_to_none=True)  # of whoever trained it before: no step's
        self.trained = TrainedParameters(self.model, self.optimizer)
        self.tensors.trained = frozenset(id(p) for _, p in self.trained.named)
        self.state = FloatingState(self.tensors, self.trained)
        self.sites = list_sites(
            self.tensors, self.trained, is_portable=self.arithmetic.is_portable, follows_up=self.follows_up
        )
        if self.policy.activation is not None:
            self.leaves = LeafSites(self.model)
        self._prepared = Prepared(
            self.state, self.scheduler, self.leaves, self.seed, self.rank, self.follows_up, self.keeps_gradients,
            self.listeners,
        )  # fmt: skip
        self._handles = [
            handle
            for part in parts_of(self.optimizer)
            for handle in (
                part.register_step_pre_hook(Hook(self._before_optimizer)),
                part.register_step_post_hook(Hook(lambda *_: self._after_optimizer())),
            )
        ]

    def close(self) -> None:
        """Remove the hooks and give the model back its dtype; the user's objects are as they came, but trained."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.tensors.give_back()

    @property
    def policy(self) -> Policy:
        """The policy of its arithmetic."""
        return self.arithmetic.policy

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer trains, with names."""
        return self.trained.named

    @property
    def seconds(self) -> dict[str, float]:
        """Host clock by phase, over all steps but those of a calibration."""
        return self._prepared.seconds

    def widen(self) -> None:
        """Where operators compute in float64, have them do so with float32 tensors that somebody else hands them too."""
        wide = self.arithmetic.precision == torch.float64
        self.arithmetic = replace(self.arithmetic, widens=self.arithmetic.widens or wide)

    @contextmanager
    def computing(self, arithmetic: Arithmetic) -> Generator[None]:
        """Inside, steps compute so."""
        own, self.arithmetic = self.arithmetic, arithmetic
        try:
            yield
        finally:
            self.arithmetic = own

    @contextmanager
    def drawing(self, stream: RandomStream) -> Generator[None]:
        """Inside, random operators draw from ``stream`` instead of the run's own."""
        own, self._random = self._random, stream
        try:
            yield
        finally:
            self._random = own

    # -- sites and grids ---------------------------------------------------------------------

    def site_name(self, place: tuple[int, int]) -> str:
        """Return what people call the site at ``place``."""
        if self.leaves is not None and place in self.leaves.names:
            return f"{Kind(place[0]).name.lower()} {self.leaves.names[place]}"
        for site in self.sites:
            if (site.kind, site.ordinal) == place:
                kind = site.kind.name.lower()
                return kind if kind == site.name else f"{kind} {site.name}"
        return f"{Kind(place[0]).name.lower()} {place[1]}"

    def recording_context(self, before: GridTable) -> RecordingContext:
        """Return the context that records the next step; ``before`` holds the grids as they were before a calibration."""
        base = GridTable() if self.is_calibration_step(self.step) else self.base
        return RecordingContext(
            self.policy, before, current=self.table, base=base, rank=self.rank, is_first=self.step == 0,
            chooses=self.chooses_grids(self.step),
        )  # fmt: skip

    def following_context(
        self,
        frame: bytes | Frame,
        yardstick: Yardstick | None = None,
        *,
        form: type[Context] = FollowingContext,
        **more: Any,
    ) -> Context:
        """Return the context that follows ``frame`` in the next step, held against ``yardstick`` if there is one.

        ``form`` is its class, ``more`` what that takes besides.

        Raises:
            InvalidInput: the frame is malformed.
        """
        read = decode_frame(frame) if isinstance(frame, bytes) else frame
        base = GridTable() if self.is_calibrated(read) else self.base
        sites = frozenset((int(site.kind), site.ordinal) for site in self.sites)
        return form(
            self.policy, self.table, read, base, self.rank,
            sites=sites, yardstick=yardstick, site_name=self.site_name, is_first=self.step == 0,
            chooses=self.chooses_grids(self.step), **more,
        )  # fmt: skip

    def is_calibrated(self, frame: Frame) -> bool:
        """Whether the trainer measured the noise before the next step, whose log is ``frame``: by schedule, or as it says.

        Raises:
            InvalidInput: it says so in other words than the one, or of a step where that was due.
        """
        said = frame.find(SiteAddress(self.rank, 0, Kind.CALIBRATION, 0))
        due = self.is_calibration_step(self.step)
        if said is not None and (due or said != CALIBRATED):
            raise InvalidInput(
                f"step {self.step}: the log's note of a calibration is {said[:8].hex()}, due {due}"
            )
        return due or said is not None

    def is_calibration_step(self, step: int) -> bool:
        """Whether the noise is measured anew before ``step`` whatever happens."""
        return is_measured_step(self.policy, step)

    def chooses_grids(self, step: int) -> bool:
        """Whether grids are chosen anew before ``step``, and what is noise: as the policy's own interval says."""
        return chooses_grids(self.policy, step)

    def grids_for(
        self, before: GridTable, measured: Calibration, outgrown: frozenset[int] = frozenset()
    ) -> GridTable:
        """Return the grids of the next step, whose noise was just ``measured``, from those ``before`` it.

        Only gradients that have ``outgrown`` what they were, heard or nothing but noise, change that where grids are not chosen,
        and those whose noise is too loud for their scales.
        """
        if self.chooses_grids(self.step):
            return measured.table
        largest = {at[1]: noise.largest for at, noise in measured.noise.items() if at[0] == Kind.GRADIENT}
        return held_grids(self.policy, before, measured.table, outgrown, self.base, largest)

    def has_outgrown(self, doubt: int = 0) -> bool:
        """Whether some trained parameter's gradient is now far larger than when its noise was last measured."""
        return bool(self.outgrown(doubt))

    def outgrown(self, doubt: int = 0, base: GridTable | None = None) -> frozenset[int]:
        """Return which trained parameters' gradients are now far larger than when their noise was last measured.

        Args:
            doubt: octaves that they may be larger elsewhere.
            base: the grids that say how large they were; None for those of the last measurement.
        """
        base = self.base if base is None else base
        if self._outgrown is None or self._outgrown[0] is not base:
            grids = (base.sites.get((Kind.GRADIENT, n)) for n in range(len(self.parameters)))
            pairs = zip(grids, self.parameters, strict=True)
            limits = [outgrown_from(self.policy, grid, p.numel()) for grid, (_, p) in pairs]
            self._outgrown = base, np.array(limits, dtype=np.int64)
        present = [(n, p.grad.detach()) for n, (_, p) in enumerate(self.parameters) if p.grad is not None]
        limits = self._outgrown[1][[n for n, _ in present]]
        found = reaches(sampled_rms([gradient for _, gradient in present]), limits - doubt)
        return frozenset(n for (n, _), far in zip(present, found.tolist(), strict=True) if far)

    def settle(self, context: RecordingContext | FollowingContext) -> None:
        """Take over the grids after the step just done."""
        self.table = context.table
        if context.is_calibrated:
            self.base = context.table

    # -- steps -------------------------------------------------------------------------------

    @contextmanager
    def stepping(
        self,
        context: RoundingContext,
        *,
        probing: bool = False,
        trace: PassTrace | None = None,
        form: type[OpenStep] = OpenStep,
    ) -> Generator[OpenStep]:
        """Be inside step ``self.step``; the flags of ``repeatable`` hold throughout.

        Args:
            context: records, follows or measures.
            probing: whether the step's noise is being measured.
            trace: where the step's operators are written down, if they are.
            form: what becomes of it.

        Raises:
            ProtocolViolation: a step is open already.
        """
        if self._open is not None:
            raise ProtocolViolation(f"step {self.step}: a step is already open")
        opened = self._open = form(
            self._prepared, self.step, context, self.arithmetic, self._random, self.table,
            probing=probing, trace=trace,
        )  # fmt: skip
        try:
            opened.go_on()
            try:
                yield opened
            except BaseException:
                self.model.zero_grad(set_to_none=True)  # half a step's gradients must not enter the next
                raise
            finally:
                opened.update.leave()
        finally:
            self._open = None
            opened.let_go()

    @property
    def open_step(self) -> OpenStep:
        """The step that is open.

        Raises:
            ProtocolViolation: none is.
        """
        if self._open is None:
            raise ProtocolViolation(f"step {self.step}: no step is open")
        return self._open

    @property
    def is_capturing(self) -> bool:
        """Whether a step is open whose operators are captured until its optimizer steps."""
        return self._open is not None and self._open.is_capturing

    @property
    def has_stepped(self) -> bool:
        """Whether a step is open and its optimizer has stepped; of several, all."""
        return self._open is not None and self._open.is_taken

    @contextmanager
    def interlude(self) -> Generator[None]:
        """Between a step's backward pass and its rounding, be where the step has not begun: for other passes over it.

        Inside, buffers are what they were before the step and parameters have no gradients; gradients, buffers and the open
        step are then put back.
        """
        opened, self._open = self.open_step, None
        gradients = [p.grad for _, p in self.parameters]
        before = opened.slow.before()
        after = {name: tensor.clone() for name, tensor in self.tensors.all_buffers() if name in before}
        self.tensors.put_back(before)
        for _, p in self.parameters:
            p.grad = None
        try:
            yield
        finally:
            self._open = opened
            for (_, p), gradient in zip(self.parameters, gradients, strict=True):
                p.grad = gradient
            self.tensors.put_back(after)

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        opened = self._open
        if opened is not None:
            opened.depth += 1
            if opened.depth > 1:
                return  # an optimizer whose step calls that of the class it comes from
        try:
            given = (*args[1:], kwargs.get("closure"))
            if any(value is not None and not isinstance(value, HasRun) for value in given):
                raise Nondeterminism(
                    f"optimizer {type(optimizer).__name__}: a step with a closure computes gradients after they were rounded; "
                    "call backward first and step() without arguments"
                )
            if opened is None:
                self.trained.verify_gradients_are_named()
                raise ProtocolViolation(
                    "optimizer.step outside a recorded step; put the loop's body inside `with recorder.step()`"
                )
            if opened.skipped:
                self.state.verify_left(self.step)
            opened.before_optimizer(optimizer)
        except BaseException:
            if opened is not None:
                opened.depth = 0
            raise

    def _after_optimizer(self) -> None:
        opened = self.open_step
        opened.depth -= 1
        if opened.depth == 0:
            opened.after_optimizer()
