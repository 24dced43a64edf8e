"""A session: one model, optimizer and policy, and what happens to them in every step.

Trainer, auditor and judge hold the same session and differ only in the tape they put in. The
model is converted to the policy's dtype and otherwise untouched; between steps the state holds
float32 values only, so its bytes are the same on every machine.

Inside ``optimizer.step`` (through torch's own step hooks) gradients are rounded. Then either the optimizer is one
whose arithmetic is portable, and its step is done here, or parameters and optimizer state become float64, torch's
optimizer runs, and the results are rounded back to float32.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tallystick.errors import EditedOutside, InvalidInput, Nondeterminism, ProtocolViolation
from tallystick.execution.determinism import repeatable
from tallystick.execution.dispatch.capture import Capture, Findings
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.portable_optimizers import portable_step, why_not_portable
from tallystick.execution.rounding.context import RecordTape, Tape
from tallystick.execution.rounding.follow import FollowTape
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.rounding.leaves import LeafSites
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import CALIBRATED, Frame, Kind, SiteAddress, decode_frame
from tallystick.numerics.optimizers import Marks
from tallystick.numerics.policy import Policy, is_calibration_step
from tallystick.numerics.random import stream_key
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.tensor_measures import fingerprint, fingerprint_all

Site = tuple[Kind, int]
REFUSED_OPTIMIZERS = {
    "LBFGS": "it calls its closure several times a step and branches on the loss",
    "SparseAdam": "it needs sparse gradients, which are summed in an order that differs between devices",
}
REFUSED_SCHEDULERS = {"ReduceLROnPlateau": "it branches on the loss, whose last bits differ between machines"}
OF_A_SCALER = ("grad_scale", "found_inf")  # what a gradient scaler leaves on an optimizer for its next step
SMALL = 1 << 16  # elements up to which a buffer is compared by value
MARKED = 16  # trained parameters of which some values are looked at between two steps
PHASES = ("forward_backward", "gradient_rounding", "optimizer", "state_rounding", "end_of_step")
SCHEDULE_BITS = 40  # hyper-parameters are kept to 40 significant bits: libraries differ in the 53rd


@dataclass(frozen=True)
class SiteSpec:
    """One gradient, state, buffer or loss site as the specification lists it."""

    kind: Kind
    ordinal: int
    name: str
    shape: tuple[int, ...]
    blocks: int = 0


@dataclass
class _Held:
    """A parameter while the optimizer runs: its float32 form and that of its optimizer state."""

    parameter: Tensor
    state: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class StepObserver(Protocol):
    """Who watches a step operator by operator; it changes nothing."""

    def micro_batch(self, number: int, tape: object) -> AbstractContextManager[None]:
        """Be inside the forward and backward pass of one micro-batch."""
        ...

    def clipping(self) -> AbstractContextManager[None]:
        """Be where gradients are clipped."""
        ...

    def load_batch(self, batch: Any) -> Any:
        """Take note of the step's data; what is returned is used."""
        ...

    def before_round(self, x: Tensor, out: Tensor) -> list[Any]:
        """Take note of what a site reads."""
        ...

    def after_round(self, kind: Kind, ordinal: int, out: Tensor, operands: list[Any], name: str) -> None:
        """Take note of what a site wrote."""
        ...

    def before_update(self, session: Session) -> None:
        """Take note of what the optimizer reads."""
        ...

    def after_update(self, session: Session) -> None:
        """Take note of what the optimizer wrote."""
        ...


class Session:
    """The state of a run and the arithmetic of a step; ``tape`` decides whether it records or follows.

    Args:
        model: converted in place to the policy's storage dtype by ``prepare``.
        optimizer: a ``torch.optim`` optimizer over ``model``'s parameters.
        policy: dtype, grids and bands.
        seed: of the portable random streams.
        scheduler: part of the state, if given.
        extra: further modules whose tensors are part of the state.
        smooth: operators outside the table that the job declares continuous.
        jitter: last-bit noise for the whole step; None for the machine's own arithmetic.
        rank: of this process in a data-parallel run.
        follows_up: whether something changes averages or other slow values after the optimizer (``following_up``).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        policy: Policy,
        seed: int,
        scheduler: Any = None,
        extra: Mapping[str, nn.Module] | None = None,
        smooth: frozenset[str] = frozenset(),
        jitter: Jitter | None = None,
        rank: int = 0,
        follows_up: bool = False,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.policy, self.seed, self.rank = policy, seed, rank
        self.extra = dict(extra or {})
        self.smooth = smooth
        self.follows_up = follows_up
        self.jitter = jitter
        self.compute: torch.dtype = getattr(torch, policy.storage)
        self.precision: torch.dtype = getattr(torch, policy.compute)
        self.findings = Findings()
        self.densified: set[str] = set()
        self.step = 0
        self.skipped = False
        self.loss = 0.0
        self.gradient_norm: float | None = None
        self.schedule: list[tuple[int, str, float]] = []
        self.table = GridTable()
        self.base = GridTable()
        self.sites: list[SiteSpec] = []
        self.leaves: LeafSites | None = None
        self._tape: Tape | None = None
        self._jitter_mode: JitterMode | None = None
        self._marks: Marks | None = None
        self._left: tuple[list[int], int] | None = None
        self._bracket: ExitStack | None = None
        self._random = RandomStream(seed)
        self._held: dict[int, _Held] = {}
        self._handles: list[Any] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._watched: dict[str, tuple[int, int, Tensor | int]] = {}
        self._versions: list[int] = []
        self._names: list[object] = []
        self._places: list[tuple[str, nn.Module, str]] = []
        self.optimizer_form: dict[int, dict[str, Any]] = {}
        self._outer_dtype: torch.dtype | None = None
        self._depth = 0  # of optimizer.step calls within each other
        self.on_schedule: Callable[[list[tuple[int, str, float]]], None] | None = None
        self.before_change: Callable[[], None] | None = None  # called before the optimizer changes the state
        self.on_gradients: Callable[[], None] | None = (
            None  # called when a step's gradients are there, unrounded
        )
        self.probing = False
        self.widens = False  # whether operators compute in float64 whatever they are given
        self.tracer: StepObserver | None = None
        self.seconds: dict[str, float] = dict.fromkeys(
            PHASES, 0.0
        )  # host clock, over all steps but those of a calibration
        self._clock = 0.0

    # -- set-up ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Convert model and state, list the sites, and put hooks on the optimizer.

        Raises:
            Nondeterminism: an optimizer, scheduler or tensor that cannot be repeated elsewhere, by name.
            InvalidInput: a model of the wrong dtype, or parameters that the optimizer and the model do not share.
        """
        self._refuse_what_cannot_repeat()
        self._choose_arithmetic()
        self._places = list(self._floating_places())
        self._convert()
        self.parameters = self._trainable()
        self.optimizer_keys = self._optimizer_keys()
        self.sites = self._list_sites()
        self._names = self._tensor_names()
        if self.policy.activation is not None:
            self.leaves = LeafSites(self.model)
        self._handles = [
            self.optimizer.register_step_pre_hook(self._hook_before),
            self.optimizer.register_step_post_hook(lambda *_: self._hook_after()),
        ]

    @property
    def is_portable(self) -> bool:
        """Whether the optimizer's arithmetic is portable, so that the state has no sites."""
        return self.policy.optimizer_arithmetic == "portable"

    def _choose_arithmetic(self) -> None:
        reason = why_not_portable(self.optimizer)
        if self.policy.optimizer_arithmetic == "auto":
            chosen = "portable" if reason is None else "general"
            self.policy = replace(self.policy, optimizer_arithmetic=chosen)
        elif self.is_portable and reason is not None:
            raise Nondeterminism(f"optimizer: its arithmetic is to be portable, but {reason}")

    def _hook_before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._depth += 1
        if self._depth > 1:
            return  # an optimizer whose step calls that of the class it comes from
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
            self._depth = 0
            raise Nondeterminism(
                f"optimizer {type(optimizer).__name__}: a step with a closure computes gradients after they were rounded; "
                "call backward first and step() without arguments"
            )
        try:
            self._before_optimizer()
        except BaseException:
            self._depth = 0
            raise

    def _hook_after(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._after_optimizer()

    def close(self) -> None:
        """Remove the hooks and give the model back its dtype; the user's objects are as they came, but trained."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        with torch.no_grad():
            for name, tensor in self._all_floating():
                if name in self._dtypes and tensor.dtype != self._dtypes[name]:
                    tensor.data = tensor.data.to(self._dtypes[name])

    def _refuse_what_cannot_repeat(self) -> None:
        for what, thing, refused in (
            ("optimizer", self.optimizer, REFUSED_OPTIMIZERS),
            ("scheduler", self.scheduler, REFUSED_SCHEDULERS),
        ):
            for kind in (base.__name__ for base in type(thing).__mro__):
                if kind in refused:
                    raise Nondeterminism(f"{what} {kind}: {refused[kind]}")
        for name, value in vars(self.optimizer).items():
            if isinstance(value, torch.optim.Optimizer):
                raise Nondeterminism(
                    f"optimizer {type(self.optimizer).__name__}: holds another one, a {type(value).__name__}, as {name}; "
                    "give that one, with its parameters in groups"
                )
        for index, group in enumerate(self.optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, Tensor):
                    raise Nondeterminism(f"optimizer group {index}: {name} is a tensor; give a plain number")
            if group.get("capturable"):
                raise Nondeterminism(
                    f"optimizer group {index}: capturable optimizers keep their counters on the device; switch it off"
                )
            if group.get("differentiable"):
                raise Nondeterminism(
                    f"optimizer group {index}: differentiable is {group['differentiable']}, False is needed: what is trained is "
                    "rounded in place, which has no derivative; leave it out"
                )
        for name, module in self.model.named_modules():
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                raise Nondeterminism(
                    f"module {name or 'model'} is compiled; give the module before torch.compile"
                )

    def _all_floating(self) -> Iterator[tuple[str, Tensor]]:
        """Every floating parameter and buffer the model has now, of those it was prepared with.

        ``verify_tensors`` goes through the modules themselves, and refuses a step after which there are others.
        """
        for name, owner, key in self._places:
            tensor = getattr(owner, key, None)
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                yield name, tensor

    def _floating_places(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield each floating tensor's name, the module that holds it, and what it is called there."""
        for prefix, module in (("model", self.model), *((f"extra/{n}", m) for n, m in self.extra.items())):
            for name, parameter in module.named_parameters():
                if parameter.is_floating_point():
                    path, _, key = name.rpartition(".")
                    yield f"{prefix}/{name}", module.get_submodule(path), key
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point():
                    path, _, key = name.rpartition(".")
                    yield f"{prefix}/buffer/{name}", module.get_submodule(path), key

    def _convert(self) -> None:
        storages: dict[int, str] = {}
        for prefix, module in (("model", self.model), *((f"extra/{n}", m) for n, m in self.extra.items())):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if is_lazy(tensor):
                    raise InvalidInput(
                        f"{prefix}/{name} has no shape yet ({type(tensor).__name__}); a tensor needs its shape and values before "
                        "step 0: let build call the model once on a batch, or give the layer its input size"
                    )
            for name, parameter in module.named_parameters():
                if not parameter.is_floating_point():
                    raise InvalidInput(
                        f"{prefix}/{name} is {parameter.dtype}; a parameter must be floating: of complex numbers keep a real "
                        "one and use view_as_complex, register what is not trained as a buffer"
                    )
        with torch.no_grad():
            for name, tensor in self._all_floating():
                if self.compute == torch.float32 and tensor.dtype != torch.float32:
                    raise InvalidInput(f"{name} is {tensor.dtype}; policy {self.policy.name} needs float32")
                pointer = tensor.untyped_storage().data_ptr()
                if tensor.numel() and pointer in storages:
                    raise InvalidInput(
                        f"{name} shares memory with {storages[pointer]} without being the same parameter; tie them as one"
                    )
                storages[pointer] = name
                self._dtypes[name] = tensor.dtype
                if tensor.dtype != self.compute:
                    tensor.data = tensor.data.to(torch.float32).to(self.compute)
                elif self.compute == torch.float64:
                    tensor.data = tensor.data.to(torch.float32).to(torch.float64)
                if not tensor.is_contiguous():
                    tensor.data = tensor.data.contiguous()

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = [(name, p) for name, p in self.model.named_parameters() if id(p) in owned]
        unknown = owned - {id(p) for _, p in named}
        if unknown:
            raise InvalidInput(
                f"the optimizer holds {len(unknown)} tensors that are no parameters of the model; nobody could name their updates"
            )
        return [(name, p) for name, p in named if p.requires_grad]

    def _optimizer_keys(self) -> list[str]:
        """Return the names of the optimizer's floating state tensors, having tried it on a small copy.

        What the copy keeps stays in ``optimizer_form``, by parameter position: the form of a state that can be loaded.
        """
        self.optimizer_form = self.replica_step(2)
        keys: set[str] = set()
        for values in self.optimizer_form.values():
            for key, value in values.items():
                if (
                    isinstance(value, Tensor)
                    and value.is_floating_point()
                    and key not in ("step", "parameter")
                ):
                    keys.add(key)
        return sorted(keys)

    def replica_step(
        self,
        steps: int,
        jitter: Jitter | None = None,
        gradients: Sequence[Tensor | None] | None = None,
        *,
        exact: bool = False,
    ) -> dict[int, dict[str, Any]]:
        """Run the optimizer on slices of the parameters in float64 and return its state by parameter position.

        The parameters' slices stand under the key ``parameter``. ``gradients`` (made-up ones by default) are used for
        the first step and, with random factors, for the others; with ``jitter`` the last step's arithmetic is disturbed.
        Random factors differ between instruction sets; if ``exact``, -3/4 of the same gradients, in reverse order along
        dimension 0, takes their place: the same numbers everywhere.
        """
        generator = torch.Generator().manual_seed(1)
        order = {id(p): position for position, (_, p) in enumerate(self.parameters)}
        clone = copy.copy(self.optimizer)
        for name, value in vars(self.optimizer).items():  # those of a subclass, which copying leaves out
            if name not in vars(clone) and not callable(value) and name not in OF_A_SCALER:
                setattr(clone, name, value)
        clone.param_groups = []
        clone.state = defaultdict(dict)
        for name in list(vars(clone)):
            if name.endswith("_hooks") and isinstance(getattr(clone, name), OrderedDict):
                setattr(clone, name, OrderedDict())
        chosen: dict[int, nn.Parameter] = {}
        for group in self.optimizer.param_groups:
            params: list[nn.Parameter] = []
            for p in group["params"]:
                params.append(nn.Parameter(slice_of(p), requires_grad=p.requires_grad))
                if id(p) in order:
                    chosen[order[id(p)]] = params[-1]
            clone.param_groups.append({**group, "params": params})
        for number in range(steps):
            for position, replica in chosen.items():
                factor = torch.randn(replica.shape, generator=generator, dtype=torch.float64).float().double()
                given = gradients[position] if gradients is not None else None
                if gradients is not None and given is None:
                    continue
                real = None if given is None else slice_of(given).float().double()
                if exact and real is not None and number % 2:
                    replica.grad = -0.75 * (real.flip(0) if real.dim() else real)
                else:
                    replica.grad = (
                        factor
                        if real is None
                        else real
                        if number == 0 or exact
                        else (real * factor).float().double()
                    )
            with ExitStack() as stack:
                if jitter is not None and number == steps - 1:
                    stack.enter_context(JitterMode(jitter))
                stack.enter_context(default_dtype(torch.float64))
                clone.step()
        return {
            position: {"parameter": r.detach(), **clone.state.get(r, {})} for position, r in chosen.items()
        }

    def _slow_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that something other than the optimizer changes: buffers, frozen parameters, extra modules."""
        trained = {id(p) for _, p in self.parameters}
        for name, tensor in self._all_floating():
            if id(tensor) not in trained:
                yield name, tensor

    def _floating_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The same tensors without their history."""
        for name, tensor in self._slow_tensors():
            yield name, tensor.detach()

    def floating_buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Return every registered floating buffer with the module that holds it and what it is called there."""
        return [
            (owner, key, getattr(owner, key))
            for name, owner, key in self._places
            if "/buffer/" in name and getattr(owner, key).is_floating_point()
        ]

    def _list_sites(self) -> list[SiteSpec]:
        sites = [SiteSpec(Kind.LOSS, 0, "loss", (), 1)]
        for ordinal, (name, p) in enumerate(self.parameters):
            sites.append(SiteSpec(Kind.GRADIENT, ordinal, name, tuple(p.shape), 1))
        names = ["parameter", *self.optimizer_keys]
        for position, (name, p) in enumerate([] if self.is_portable else self.parameters):
            for offset, key in enumerate(names):
                sites.append(
                    SiteSpec(Kind.STATE, position * len(names) + offset, f"{name}/{key}", tuple(p.shape))
                )
        for ordinal, (name, buffer) in enumerate(self._floating_buffers()):
            sites.append(SiteSpec(Kind.BUFFER, ordinal, name, tuple(buffer.shape), 1))
            if self.follows_up:
                sites.append(SiteSpec(Kind.STATE, self._slow_ordinal(ordinal), name, tuple(buffer.shape)))
        return sites

    def _slow_ordinal(self, buffer: int) -> int:
        """Return the state site of a buffer that changes after the optimizer: those of the optimizer come first."""
        return buffer + (0 if self.is_portable else len(self.parameters) * (1 + len(self.optimizer_keys)))

    def site_name(self, place: tuple[int, int]) -> str:
        """Return what people call the site at ``place``."""
        if self.leaves is not None and place in self.leaves.names:
            return f"{Kind(place[0]).name.lower()} {self.leaves.names[place]}"
        for site in self.sites:
            if (site.kind, site.ordinal) == place:
                kind = site.kind.name.lower()
                return kind if kind == site.name else f"{kind} {site.name}"
        return f"{Kind(place[0]).name.lower()} {place[1]}"

    def all_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that a forward pass may change, integer buffers included."""
        yield from self._floating_buffers()
        for prefix, module in (("model", self.model), *((f"extra/{n}", m) for n, m in self.extra.items())):
            for name, buffer in module.named_buffers():
                if not buffer.is_floating_point():
                    yield f"{prefix}/buffer/{name}", buffer

    def record_tape(self, before: GridTable) -> RecordTape:
        """Return the tape that records the next step; ``before`` holds the grids as they were before a calibration."""
        base = GridTable() if self.is_calibration_step(self.step) else self.base
        return RecordTape(self.policy, before, current=self.table, base=base, rank=self.rank)

    def follow_tape(self, frame: bytes, yardstick: Yardstick | None = None) -> FollowTape:
        """Return the tape that follows ``frame`` in the next step, held against ``yardstick`` if there is one.

        Raises:
            InvalidInput: the frame is malformed.
        """
        read = decode_frame(frame)
        base = GridTable() if self.is_calibrated(read) else self.base
        sites = frozenset((int(site.kind), site.ordinal) for site in self.sites)
        return FollowTape(
            self.policy, self.table, read, base, self.rank,
            sites=sites, yardstick=yardstick, site_name=self.site_name,
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
        return is_calibration_step(step, self.policy.recalibrate_every, bool(self.policy.residue_bits))

    def settle(self, tape: RecordTape | FollowTape) -> None:
        """Take over the grids after the step just done."""
        self.table = tape.table
        if tape.is_calibrated:
            self.base = tape.table

    @contextmanager
    def drawing(self, stream: RandomStream) -> Generator[None]:
        """Inside, random operators draw from ``stream`` instead of the run's own."""
        own, self._random = self._random, stream
        try:
            yield
        finally:
            self._random = own

    # -- one step ----------------------------------------------------------------------------

    @contextmanager
    def stepping(self, tape: Tape) -> Generator[None]:
        """Be inside step ``self.step`` with ``tape`` in place; the flags of ``repeatable`` hold throughout."""
        if self._tape is not None:
            raise ProtocolViolation(f"step {self.step}: a step is already open")
        self._tape = tape
        self._clock = time.perf_counter()
        self.skipped, self.loss, self.schedule = True, 0.0, []
        self._watched = {name: _watch(t) for name, t in self._floating_buffers()}
        self._versions = [p._version for _, p in self.parameters]
        self._charge("end_of_step")
        try:
            with repeatable(self.policy.storage):
                try:
                    yield
                except BaseException:
                    self.model.zero_grad(set_to_none=True)  # half a step's gradients must not enter the next
                    raise
                finally:
                    self._leave_optimizer()
        finally:
            self._tape = None
            self._depth = 0
            self._let_go()
            self.close_capture()

    @contextmanager
    def interlude(self) -> Generator[None]:
        """Between a step's backward pass and its rounding, be where the step has not begun: for other passes over it.

        Inside, floating buffers of at most ``SMALL`` elements are what they were before the step and parameters have no
        gradients; gradients, buffers, loss and tape are then put back.
        """
        held = self._tape, self._watched, self._versions, self._depth, self.loss, self.schedule, self.skipped
        gradients = [p.grad for _, p in self.parameters]
        after: list[tuple[Tensor, Tensor]] = []
        for name, buffer in self._floating_buffers():
            before = self._watched[name][2]
            if isinstance(before, Tensor) and not torch.equal(buffer, before):
                after.append((buffer, buffer.clone()))
                with torch.no_grad():
                    buffer.copy_(before)
        for _, p in self.parameters:
            p.grad = None
        self._tape = None
        try:
            yield
        finally:
            self._tape, self._watched, self._versions, self._depth = held[:4]
            self.loss, self.schedule, self.skipped = held[4:]
            for (_, p), gradient in zip(self.parameters, gradients, strict=True):
                p.grad = gradient
            with torch.no_grad():
                for buffer, values in after:
                    buffer.copy_(values)

    @contextmanager
    def micro_batch(self, number: int) -> Generator[None]:
        """Capture the operators of one micro-batch's forward and backward pass, under autocast if the policy says so."""
        assert self._tape is not None
        self._tape.start_micro_batch(number)
        self._random.start(self.step, self.rank, number)
        outside = _outside_generators()
        capture = Capture(
            self._tape,
            self._random,
            compute=self.precision,
            findings=self.findings,
            smooth=self.smooth,
            jitter=self.jitter,
            widens=self.widens,
        )
        leaves = nullcontext() if self.leaves is None else self.leaves.rounding(self._tape, self.step)
        with leaves, capture, self._autocast(True), self._observed(number):
            yield
        for name, state in _outside_generators().items():
            if state != outside[name]:
                raise Nondeterminism(
                    f"step {self.step}: the model or the loss draws from {name}, which no other machine can repeat at this step; "
                    "draw with torch, whose random operators are replaced, or make it part of the batch"
                )

    def _observed(self, number: int) -> AbstractContextManager[object]:
        return nullcontext() if self.tracer is None else self.tracer.micro_batch(number, self._tape)

    def _rounded(
        self, kind: Kind, ordinal: int, x: Tensor, out: Tensor, key: Key, name: str, site: str
    ) -> None:
        """Round a site of the step, and let whoever watches the step write it down."""
        assert self._tape is not None
        operands = None if self.tracer is None else self.tracer.before_round(x, out)
        self._tape.round(kind, ordinal, x, out=out, key=key, name=name)
        if self.tracer is not None and operands is not None:
            self.tracer.after_round(kind, ordinal, out, operands, site)

    def _autocast(self, enabled: bool) -> AbstractContextManager[object]:
        if not self.policy.autocast:
            return nullcontext()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(device, self.precision, enabled=enabled)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of one micro-batch: autocast, where there is one, chose its precisions going forward."""
        with self._autocast(False):
            torch.autograd.backward(loss)

    def open_capture(self, number: int) -> None:
        """Capture operators from here until the optimizer steps, for loops that are not ours to bracket."""
        self.close_capture()
        self._bracket = ExitStack()
        self._bracket.enter_context(self.micro_batch(number))

    @property
    def is_capturing(self) -> bool:
        """Whether ``open_capture`` is in force."""
        return self._bracket is not None

    @property
    def has_stepped(self) -> bool:
        """Whether a step is open and its optimizer has stepped."""
        return self._tape is not None and not self.skipped

    def close_capture(self) -> None:
        """Stop capturing, if ``open_capture`` started it."""
        if self._bracket is not None:
            bracket, self._bracket = self._bracket, None
            bracket.close()

    def note_loss(self, loss: Tensor) -> None:
        """Add a micro-batch's share to the step's loss."""
        self.loss += float(loss.detach().double().item())

    def finish_step(self) -> int:
        """Round the loss and whatever buffers changed; return the fingerprint of the state. Call inside ``stepping``."""
        assert self._tape is not None
        if self.skipped:
            self._charge("forward_backward")
        self.verify_tensors()
        self._snap_schedule()
        self._round_buffers()
        if not math.isfinite(self.loss):
            raise Nondeterminism(f"step {self.step}: the loss is {self.loss}, it cannot be rounded")
        loss = torch.tensor([self.loss], dtype=torch.float64)
        self._tape.round(Kind.LOSS, 0, loss, out=loss, name="loss")
        self.loss = float(loss.item())
        found = self._closing_fingerprint()
        self._charge("end_of_step")
        return found

    def _round_buffers(self) -> None:
        """Round the buffers that changed since they were last looked at."""
        for ordinal, (name, buffer) in enumerate(self._floating_buffers()):
            if self._has_changed(name, buffer):
                if "/buffer/" not in name:
                    raise Nondeterminism(
                        f"step {self.step}: {name} is a parameter that no optimizer trains, and it was changed where the grid of "
                        "running statistics would hold it still; change averages of weights and such in a job's `after_step`, "
                        "or in `with recorder.follow_up()` after prepare(.., follows_up=True)"
                    )
                with torch.no_grad():
                    dense = buffer.contiguous()  # a buffer assigned anew may have any layout
                    key = self._buffer_key(ordinal)
                    self._rounded(Kind.BUFFER, ordinal, dense, dense, key, name, name)
                    if dense is not buffer:
                        buffer.copy_(dense)
                if self.follows_up:
                    self._watched[name] = _watch(buffer)

    @contextmanager
    def following_up(self) -> Generator[None]:
        """After the optimizer, be where averages and other slow values change: in float64, from numbers both sides know.

        What is changed inside is rounded as the optimizer's state is, to float32 with a band of a few last bits of float64:
        a coarser grid would hold a slow average where it is.

        Raises:
            Nondeterminism: a trained parameter was changed, which is the optimizer's to do; by name.
        """
        assert self._tape is not None and self.follows_up
        self._round_buffers()
        with torch.no_grad():
            trained = [(name, p, p.data) for name, p in self.parameters]
            slow = {
                name: (t, t.data.to(torch.float32, copy=t.dtype == torch.float64))
                for name, t in self._slow_tensors()
            }
            for _, p, _ in trained:
                p.data = p.data.double()
            for tensor, _ in slow.values():
                tensor.data = tensor.data.double()
        try:
            with ExitStack() as stack:
                stack.enter_context(default_dtype(torch.float64))
                if self.jitter is not None:
                    stack.enter_context(JitterMode(self.jitter))
                yield
            for name, p, narrow in trained:
                if not torch.equal(p.data, narrow.double()):
                    raise _changed_outside(self.step, name)
        finally:
            for _, p, narrow in trained:
                p.data = narrow
            self._versions = [p._version for _, p in self.parameters]
        self._round_slow({name: narrow for name, (_, narrow) in slow.items()})

    def _round_slow(self, before: Mapping[str, Tensor]) -> None:
        """Round what changed of buffers that are float64, and were ``before``, and give them back their dtype."""
        with torch.no_grad():
            for ordinal, (name, tensor) in enumerate(self._slow_tensors()):
                old, new = before[name], tensor.data.double().contiguous()
                if torch.equal(new, old.double()):
                    tensor.data = old.to(self.compute)
                    continue
                out = new if self.compute == torch.float64 else torch.empty_like(new, dtype=torch.float32)
                self._round_state(self._slow_ordinal(ordinal), new, old, out, name)
                tensor.data = out
                self._watched[name] = _watch(tensor)

    def _charge(self, phase: str) -> None:
        """Add the time since the last call to ``phase``."""
        now = time.perf_counter()
        if not self.probing:
            self.seconds[phase] += now - self._clock
        self._clock = now

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        """Compare values, or for large buffers a sum over their bits: batch norm and ``.data`` do not count their writes."""
        pointer, version, before = self._watched[name]
        if isinstance(before, Tensor):
            return not torch.equal(buffer, before)
        return (pointer, version) != (buffer.data_ptr(), buffer._version) or _mark(buffer) != before

    def trained_marks(self) -> dict[str, int]:
        """Return a number for every parameter and optimizer tensor that changes with each of its bits."""
        return {name: _mark(p) for name, p in self.parameters} | {
            f"{name}/{key}": _mark(value)
            for name, p in self.parameters
            for key, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def verify_trained(self, before: Mapping[str, int]) -> None:
        """Return if what the optimizer trains is what it was when ``before`` was taken.

        Raises:
            Nondeterminism: it is not; the message names the tensor.
        """
        after = self.trained_marks()
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                raise _changed_outside(self.step, name)

    def modes(self) -> dict[str, bool]:
        """Return of every module whether it is in training mode, by name."""
        modules = (("model", self.model), *((f"extra/{n}", m) for n, m in self.extra.items()))
        return {
            f"{prefix}/{name}".rstrip("/"): each.training
            for prefix, module in modules
            for name, each in module.named_modules()
        }

    def verify_modes(self, before: Mapping[str, bool]) -> None:
        """Return if every module is in the mode that it was in when ``before`` was taken: no checkpoint holds it.

        Raises:
            EditedOutside: one is not; by name.
        """
        for name, mode in self.modes().items():
            if before.get(name, mode) != mode:
                word = "train" if before[name] else "eval"
                raise EditedOutside(
                    f"step {self.step}: after the step {name} is no longer in {word} mode, and no checkpoint says so: whoever "
                    f"begins at one computes otherwise; put it back with .{word}()"
                )

    def _tensor_names(self) -> list[object]:
        modules = (("model", self.model), *((f"extra/{n}", m) for n, m in self.extra.items()))
        found: list[object] = []
        for prefix, module in modules:
            found += [(f"{prefix}/{name}", id(p)) for name, p in module.named_parameters()]
            found += [f"{prefix}/buffer/{name}" for name, _ in module.named_buffers()]
        return found

    def verify_tensors(self) -> None:
        """Return if the model holds the tensors it was prepared with, and only the optimizer has changed what it trains.

        Raises:
            Nondeterminism: it does not; the message names the tensor.
        """
        now = self._tensor_names()
        if now != self._names:
            changed = [str(name) for name in now if name not in self._names] or ["a tensor is gone"]
            raise Nondeterminism(
                f"step {self.step}: the model's tensors are not those it began with ({changed[0]}); "
                "register every parameter and buffer when the model is built"
            )
        for (name, p), version in zip(self.parameters, self._versions, strict=True):
            if p._version != version:
                raise _changed_outside(self.step, name)

    def marks(self) -> list[int]:
        """Return by what a change of each trained parameter shows: how often torch has seen one, and some of its values.

        The values are what shows a change through ``.data``; they are taken of ``MARKED`` parameters in host memory.
        """
        every = -(-len(self.parameters) // MARKED) or 1
        return [
            p._version
            + (
                fingerprint_all([p.detach().reshape(-1)[:SMALL]]) << 64
                if n % every == 0 and _is_plain(p)
                else 0
            )
            for n, (_, p) in enumerate(self.parameters)
        ]

    def verify_unedited(self, marks: list[int], fingerprint: int) -> None:
        """Return if nobody has changed what is trained since a step ended with these ``marks`` and this ``fingerprint``.

        Values that were changed and put back are as they were.

        Raises:
            Nondeterminism: somebody has; by name.
        """
        now = self.marks()
        if now == marks or self.state_fingerprint() == fingerprint:
            return
        changed = next(n for n, (a, b) in enumerate(zip(now, marks, strict=True)) if a != b)
        raise _changed_outside(self.step, self.parameters[changed][0])

    def leave(self, fingerprint: int | None) -> None:
        """Note how a step has left the state, and its fingerprint; None where the state was put here instead."""
        self._left = None if fingerprint is None else (self.marks(), fingerprint)

    def note_state(self) -> None:
        """Note how the state is, unless a step has: before anything of the job's own is called between two steps."""
        if self._left is None:
            self.leave(self.state_fingerprint())

    def verify_left(self) -> None:
        """Return if nobody has changed what is trained since the last step ended, or the state was noted.

        Raises:
            EditedOutside: somebody has; by name.
        """
        if self._left is not None:
            self.verify_unedited(*self._left)

    def state_fingerprint(self) -> int:
        """Return the 64-bit fingerprint over all floating state tensors, in order of their names."""
        return fingerprint_all(self._ordered_state())

    def _closing_fingerprint(self) -> int:
        """Return ``state_fingerprint`` without reading again what the optimizer's own pass took the fingerprint of.

        What is written to a tensor behind autograd's back after that is not seen here. The state committed at a checkpoint
        then has another fingerprint, which is refused.
        """
        marks, self._marks = self._marks, None
        if marks is None:
            return self.state_fingerprint()
        state = self._ordered_state()
        found = {tensor.data_ptr(): ordinal for ordinal, tensor in enumerate(state) if tensor.numel()}
        if any(found.get(address) != marks.ordinals[address] for address in marks.held):
            return fingerprint_all(state)
        return (fingerprint_all(state, marks.held) + marks.taken) % (1 << 64)

    def _ordered_state(self) -> list[Tensor]:
        return [tensor for _, tensor in sorted(self.floating_state(), key=lambda pair: pair[0])]

    def floating_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every floating tensor of the state, by entry name; values are float32 values whatever the dtype."""
        for name, tensor in self._all_floating():
            yield name, tensor.detach()
        for name, p in self.parameters:
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    yield f"optimizer/{name}/{key}", value

    # -- around the optimizer ----------------------------------------------------------------

    def _before_optimizer(self) -> None:
        self.close_capture()
        if self.probing:
            raise ProtocolViolation("the optimizer was stepped while the noise was being measured")
        tape = self._tape
        self._verify_gradients_are_named()
        if tape is None:
            raise ProtocolViolation(
                "optimizer.step outside a recorded step; put the loop's body inside `with recorder.step()`"
            )
        if not self.skipped:
            raise ProtocolViolation(
                f"step {self.step}: the optimizer was stepped twice; one recorded step is one optimizer step"
            )
        self.skipped = False
        self._charge("forward_backward")
        if self.before_change is not None:
            self.before_change()
            self._clock = time.perf_counter()  # waiting for a commitment is no phase of a step
        self.schedule = self.hyperparameters()
        if self.on_schedule is not None:
            self.on_schedule(self.schedule)
        self.densify_gradients()
        if self.on_gradients is not None and not self.probing:
            self.on_gradients()
            self._clock = time.perf_counter()
        self._round_gradients(tape)
        self._charge("gradient_rounding")
        if self.is_portable:
            names = {id(p): name for name, p in self.parameters}
            with torch.no_grad():
                if self.tracer is not None:
                    self.tracer.before_update(self)
                self._marks = Marks(
                    {t.data_ptr(): i for i, t in enumerate(self._ordered_state()) if t.numel()}
                )
                portable_step(self.optimizer, names, self.step, self._marks)
                if self.tracer is not None:
                    self.tracer.after_update(self)
            return
        self._outer_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # optimizers make their scalars in it
        if self.jitter is not None:
            self._jitter_mode = JitterMode(self.jitter)
            self._jitter_mode.__enter__()

    def _round_gradients(self, tape: Tape) -> None:
        """Round all gradients, those that are noise only last: their floors move with the largest of the others."""
        with torch.no_grad():
            later: list[int] = []
            for ordinal, (_, p) in enumerate(self.parameters):
                if p.grad is None:
                    continue
                if self._is_noise_only(ordinal):
                    later.append(ordinal)
                else:
                    self._round_gradient(ordinal)
            if isinstance(tape, (RecordTape, FollowTape)):
                tape.settle_noise()
            for ordinal in later:
                self._round_gradient(ordinal)

    def densify_gradients(self) -> None:
        """Make sparse gradients dense, and keep the names of their parameters."""
        for name, p in self.parameters:
            if p.grad is not None and p.grad.is_sparse:
                self.densified.add(name)
                p.grad = p.grad.to_dense()

    def _leave_optimizer(self) -> None:
        if self._jitter_mode is not None:
            self._jitter_mode.__exit__(None, None, None)
            self._jitter_mode = None
        if self._outer_dtype is not None:
            torch.set_default_dtype(self._outer_dtype)
            self._outer_dtype = None

    def _let_go(self) -> None:
        """After a step that failed in or around the optimizer: give parameters and optimizer state their dtypes back."""
        for position, held in self._held.items():
            _, p = self.parameters[position]
            p.grad = None
            p.data = held.parameter if self.compute == torch.float32 else p.data
            state = self.optimizer.state.get(p, {})
            for key in self.optimizer_keys:
                if key in state:
                    state[key] = held.state.get(key, state[key].float())
        self._held.clear()

    def _verify_gradients_are_named(self) -> None:
        known = {id(p) for _, p in self.parameters}
        for index, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if p.grad is not None and id(p) not in known:
                    raise Nondeterminism(
                        f"optimizer group {index}: a parameter of shape {list(p.shape)} trains that did not when the run was "
                        "prepared; freeze and unfreeze by way of learning rates"
                    )

    def _is_noise_only(self, ordinal: int) -> bool:
        assert self._tape is not None
        grid = getattr(self._tape, "table", self.table).sites.get((Kind.GRADIENT, ordinal))
        return grid is not None and is_noise_only(grid)

    def gradient_key(self, ordinal: int) -> Key:
        """Return the dither stream of a gradient site in this step."""
        return (
            stream_key(self.seed, "dither", self.step, self.rank, 0, ordinal)
            if self.policy.dithered
            else NO_KEY
        )

    def _buffer_key(self, ordinal: int) -> Key:
        if not self.policy.dithered_buffers:
            return NO_KEY
        return stream_key(self.seed, "dither-buffer", self.step, self.rank, 0, ordinal)

    def _round_gradient(self, ordinal: int) -> None:
        """Round one gradient; for general arithmetic widen it, the parameter and its optimizer state to float64."""
        assert self._tape is not None
        name, p = self.parameters[ordinal]
        assert p.grad is not None
        gradient = p.grad.contiguous()
        in_place = self.is_portable or gradient.dtype == torch.float64
        wide = gradient if in_place else torch.empty_like(gradient, dtype=torch.float64)
        p.grad = None
        self._rounded(
            Kind.GRADIENT, ordinal, gradient, wide, self.gradient_key(ordinal),
            f"step {self.step}: gradient of {name}", f"gradient of {name}",
        )  # fmt: skip
        if self.is_portable:
            p.grad = wide
            return
        held = _Held(p.data if p.dtype == torch.float32 else p.data.to(torch.float32))
        if p.dtype != torch.float64:
            p.data = p.data.double()
        p.grad = wide
        state = self.optimizer.state.get(p)
        if state:
            for key in self.optimizer_keys:
                if key in state:
                    held.state[key] = state[key]
                    state[key] = state[key].double()
        self._held[ordinal] = held

    def _after_optimizer(self) -> None:
        self._leave_optimizer()
        self._charge("optimizer")
        assert self._tape is not None
        names = ["parameter", *self.optimizer_keys]
        with torch.no_grad():
            for position, held in self._held.items():
                name, p = self.parameters[position]
                new = p.data
                old = held.parameter
                first = position * len(names)
                out = new if self.compute == torch.float64 else old
                self._round_state(first, new, old, out, f"{name}")
                p.grad = None
                p.data = out
                state = self.optimizer.state.get(p, {})
                for offset, key in enumerate(self.optimizer_keys, start=1):
                    if key not in state:
                        continue
                    narrow = held.state.get(key)
                    if narrow is None:
                        narrow = torch.zeros_like(state[key], dtype=torch.float32)
                    self._round_state(first + offset, state[key], narrow, narrow, f"{name}/{key}")
                    state[key] = narrow
        self._held.clear()
        self._versions = [p._version for _, p in self.parameters]
        self._charge("state_rounding")

    def _round_state(self, ordinal: int, new: Tensor, old: Tensor, out: Tensor, name: str) -> None:
        assert self._tape is not None
        new = new.double().contiguous()
        if self.tracer is not None:
            self.tracer.after_round(Kind.STATE, ordinal, out, [], name)
        self._tape.round(
            Kind.STATE, ordinal, new, out=out, old=old, name=f"step {self.step}: {name} after the optimizer"
        )

    # -- hyper-parameters --------------------------------------------------------------------

    def hyperparameters(self) -> list[tuple[int, str, float]]:
        """Return the optimizer's numbers now: (group, name, value); pairs as ``betas.0`` and ``betas.1``, without None."""
        found: list[tuple[int, str, float]] = []
        for index, group in enumerate(self.optimizer.param_groups):
            for name, value in sorted(group.items()):
                if isinstance(value, float):
                    found.append((index, name, value))
                elif isinstance(value, (tuple, list)) and name != "params":
                    found += [(index, f"{name}.{i}", float(v)) for i, v in enumerate(value) if v is not None]
        return found

    def set_hyperparameter(self, index: int, name: str, value: float) -> None:
        """Set one number under the name ``hyperparameters`` gives it; what has that value already stays the object it is.

        A whole number in a pair, and a list, are committed as such.
        """
        group = self.optimizer.param_groups[index]
        base, _, position = name.partition(".")
        if position:
            values = list(group[base])
            if values[int(position)] == value:
                return
            values[int(position)] = value
            group[base] = values if isinstance(group[base], list) else tuple(values)
        else:
            group[name] = value

    def _snap_schedule(self) -> None:
        for index, name, value in self.hyperparameters():
            snapped = snap(value)
            if snapped != value:
                self.set_hyperparameter(index, name, snapped)
        schedulers = [] if self.scheduler is None else [self.scheduler]
        for scheduler in schedulers:
            schedulers += getattr(scheduler, "_schedulers", [])  # of a sequence, each holds its own
            rates = getattr(scheduler, "_last_lr", None)
            if isinstance(rates, list):
                scheduler._last_lr = [snap(float(rate)) for rate in rates]


def _outside_generators() -> dict[str, object]:
    """The states of generators that a step must not draw from, by name."""
    numpy_state: Any = np.random.get_state(legacy=False)
    words = numpy_state["state"]
    return {"Python's random": random.getstate(), "numpy.random": (words["pos"], words["key"].tobytes())}


def _is_plain(p: Tensor) -> bool:
    return p.device.type == "cpu" and p.is_contiguous()


def _changed_outside(step: int, name: str) -> EditedOutside:
    return EditedOutside(
        f"step {step}: {name} was changed by something other than the optimizer, and that is not rounded; "
        "let the optimizer do it, or train another parameter from which this one follows"
    )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Inside, torch makes new floating tensors in ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _watch(tensor: Tensor) -> tuple[int, int, Tensor | int]:
    """Return what shows later whether a buffer was changed."""
    return tensor.data_ptr(), tensor._version, tensor.clone() if tensor.numel() <= SMALL else _mark(tensor)


def _mark(tensor: Tensor) -> int:
    """Return a number that changes with every bit of a tensor, up to 2**-64."""
    return fingerprint(tensor.detach().contiguous().reshape(-1).view(torch.float32), 0)


def slice_of(tensor: Tensor) -> Tensor:
    """Return a corner of at most 4096 elements, float64 on the CPU, the number of dimensions kept."""
    small = tensor.detach()
    while small.numel() > 4096:
        axis = int(np.argmax(small.shape))
        small = small.narrow(axis, 0, max(1, small.shape[axis] // 2))
    return small.cpu().double().clone()


def snap(value: float) -> float:
    """Return ``value`` rounded to 40 significant bits, ties to even."""
    if value == 0.0 or not math.isfinite(value):
        return value
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, SCHEDULE_BITS)), exponent - SCHEDULE_BITS)
