"""What may have caused a divergence, and how sure one can be of it; no torch.

A cause is *confirmed* where the documents themselves say so, or where the step, repeated with just that changed, gives
what was stated to the last bit. It *fits* where the differences look as that cause makes them look and nothing that was
tried gives them. No more is ever said.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tallystick.commit.state import Entry
from tallystick.diagnosis.divergence import (
    BUFFER,
    StateDivergence,
    TensorDivergence,
    UpdateDifference,
    compare,
)

if TYPE_CHECKING:
    from tallystick.execution.operations import Operation

Status = Literal["confirmed", "fits", "not_confirmed"]

CAUSES: Mapping[str, str] = {
    "other_data": "other data",
    "other_rate": "another learning rate",
    "other_hyperparameter": "another hyper-parameter",
    "skipped_step": "a skipped step",
    "random_stream": "another random stream",
    "denormals": "subnormal numbers flushed to zero",
    "edited_weights": "edited weights",
    "altered_log": "an altered log",
    "broken_log": "a broken log",
    "broken_state": "a broken committed state",
    "last_bit_noise": "last-bit noise of the arithmetic (instruction set, fused multiply-add, threads)",
    "scatter_order": "sums over look-ups in another order (non-deterministic scatter)",
    "library_version": "another library version",
    "other_specification": "another specification",
    "other_length": "another number of steps",
    "initial_state": "another initial state",
    "unknown": "none of the known causes",
}
NEAR = 2.0**-10  # an update that differs by less, relative to its own size, is the same but for noise
LIKE = 2.0**-5  # an update that differs by less was computed from the same data in nearly the same way
CLOSE = 2.0**-8  # a loss that differs by less is that of the same data computed otherwise
SOFTWARE = ("torch", "numpy", "python", "tallystick")
HARDWARE = ("cpu_capability", "threads", "machine", "cuda_device")
EMBEDDING = ("embed", "wte", "wpe", "lookup")


@dataclass(frozen=True)
class Explanation:
    """One cause and what is known about it.

    Attributes:
        cause: a key of ``CAUSES``.
        status: ``confirmed``, ``fits``, or ``not_confirmed``: it was tried, and the variants tried do not give the state.
        text: what was seen or tried, in words.
    """

    cause: str
    status: Status
    text: str

    @property
    def title(self) -> str:
        """The cause in words."""
        return CAUSES[self.cause]


@dataclass(frozen=True)
class Evidence:
    """What signatures are read from.

    Attributes:
        state: where the states after the step differ; None if only one side's is known.
        update: how the stated change relates to our own; None if unknown.
        loss: our own loss and the stated one; None where unknown.
        environment: what differs between the machines: name to (own, stated).
        scattered: entries of parameters whose gradient a scatter makes; None if the step was not watched.
        random: modules that draw random numbers; None if the step was not watched.
        upstream: modules that run before any random number is drawn.
        violations: breaches that following the log showed.
        keeps_state: whether the optimizer keeps floating state, such as a momentum.
        one_step: whether both states come one step after a common one.
    """

    state: StateDivergence | None
    update: UpdateDifference | None = None
    loss: tuple[float, float] | None = None
    environment: Mapping[str, tuple[str, str]] | None = None
    scattered: frozenset[str] | None = None
    random: tuple[str, ...] | None = None
    upstream: frozenset[str] = frozenset()
    violations: int = 0
    keeps_state: bool = False
    one_step: bool = True

    @property
    def loss_gap(self) -> float | None:
        """Relative difference of the losses."""
        if self.loss is None:
            return None
        own, stated = self.loss
        if own == stated:
            return 0.0
        return abs(own - stated) / max(abs(own), abs(stated)) if math.isfinite(own - stated) else math.inf

    def environment_of(self, names: Collection[str]) -> str:
        """Return in words what differs among ``names``; empty if nothing does."""
        pairs = self.environment or {}
        return ", ".join(
            f"{name} {own} against {stated}" for name, (own, stated) in pairs.items() if name in names
        )


def fitting(seen: Evidence) -> list[Explanation]:
    """Return every cause whose signature the evidence has; ``unknown`` if there is none."""
    found = [finding for test in _TESTS if (finding := test(seen)) is not None]
    causes = {finding.cause for finding in found}
    if "scatter_order" in causes:
        found = [f for f in found if f.cause not in ("last_bit_noise", "edited_weights")]
    elif causes & {"denormals", "edited_weights"}:
        found = [f for f in found if f.cause in ("denormals", "edited_weights", "library_version")]
    return found or [Explanation("unknown", "fits", "the differences have no signature that is known here")]


def _parameters(state: StateDivergence) -> list[TensorDivergence]:
    return [t for t in state.tensors if not t.name.startswith("optimizer/") and BUFFER not in t.name]


def _all_parameters(state: StateDivergence) -> list[str]:
    return [name for name in state.names if not name.startswith("optimizer/") and BUFFER not in name]


def _is_noise(seen: Evidence) -> bool:
    """Whether the differences are as small as noise: of the update where it is known, else of the values."""
    state = seen.state
    if state is None or not state.tensors or state.odd:
        return False
    if seen.loss_gap is not None and seen.loss_gap > NEAR:
        return False
    if seen.one_step and seen.update is not None:
        return abs(seen.update.factor - 1.0) <= NEAR and seen.update.residual <= NEAR
    floating = [t for t in state.tensors if t.distances is not None]
    return bool(floating) and all(t.relative <= 2.0**-16 for t in floating)


def _denormals(seen: Evidence) -> Explanation | None:
    state = seen.state
    if state is None or not state.tensors or state.odd:
        return None
    if any(t.flushed != t.differing for t in state.tensors):
        return None
    text = f"all {state.differing:,} differing elements are zero on one side and subnormal on the other"
    return Explanation("denormals", "fits", text)


def _edited(seen: Evidence) -> Explanation | None:
    state = seen.state
    if state is None or state.odd or len(state.tensors) != 1 or len(_all_parameters(state)) < 2:
        return None
    only = state.tensors[0]
    if (
        only not in _parameters(state)
        or only.flushed == only.differing
        or (seen.scattered and only.name in seen.scattered)
    ):
        return None
    if seen.loss_gap not in (None, 0.0):
        return None
    reason = (
        "its optimizer state does not, so its gradient was the same"
        if seen.keeps_state and seen.one_step
        else "no other tensor does"
    )
    text = f"{only.differing:,} of {only.elements:,} elements of {only.name} differ; {reason}"
    return Explanation("edited_weights", "fits", text)


def _rate(seen: Evidence) -> Explanation | None:
    update = seen.update
    if update is None or not seen.one_step or update.residual > NEAR or abs(update.factor - 1.0) <= NEAR:
        return None
    if abs(update.factor) <= NEAR or seen.loss_gap not in (None, 0.0):
        return None
    text = (
        f"the stated update is {update.factor:.7g} times our own, with {update.residual:.2g} of it left over"
    )
    return Explanation("other_rate", "fits", text)


def _skipped(seen: Evidence) -> Explanation | None:
    update = seen.update
    if update is None or not seen.one_step or update.stated != 0.0:
        return None
    return Explanation("skipped_step", "fits", "the stated parameters are those from before the step")


def _scatter(seen: Evidence) -> Explanation | None:
    state = seen.state
    if state is None or not _is_noise(seen):
        return None
    touched, every = {t.name for t in _parameters(state)}, set(_all_parameters(state))
    if not touched or touched == every:
        return None
    if seen.scattered is not None:
        if not touched <= seen.scattered:
            return None
        text = f"only {', '.join(sorted(touched))} differ, whose gradient is a sum over look-ups; other tensors do not"
    else:
        if not all(any(word in name.lower() for word in EMBEDDING) for name in touched):
            return None
        text = (
            f"only {', '.join(sorted(touched))} differ, by their names look-up tables; other tensors do not"
        )
    return Explanation("scatter_order", "fits", text)


def _noise(seen: Evidence) -> Explanation | None:
    state = seen.state
    if state is None or not _is_noise(seen):
        return None
    touched, every = _parameters(state), _all_parameters(state)
    if len(touched) < 2 or 4 * len(touched) < len(every):
        return None
    text = f"{len(touched)} of {len(every)} parameters differ, all by little"
    hardware = seen.environment_of(HARDWARE)
    return Explanation(
        "last_bit_noise", "fits", f"{text}; machines differ in {hardware}" if hardware else text
    )


def _library(seen: Evidence) -> Explanation | None:
    software = seen.environment_of(SOFTWARE)
    near = seen.update is not None and max(abs(seen.update.factor - 1.0), seen.update.residual) < LIKE
    if not software or seen.loss_gap is None or seen.loss_gap > CLOSE or not near or not seen.one_step:
        return None
    if seen.state is None or len(_parameters(seen.state)) < 2:
        return None
    return Explanation(
        "library_version", "fits", f"software differs in {software}, and the step's results by little"
    )


def _data(seen: Evidence) -> Explanation | None:
    gap, touched = seen.loss_gap, _touched_upstream(seen)
    if _is_noise(seen) or not (gap or touched):
        return None
    parts: list[str] = []
    if gap and seen.loss is not None:
        own, stated = seen.loss
        parts.append(
            f"the loss, computed before the update from a state that both agree on, is {own:.6g} here and {stated:.6g} there: "
            "the forward pass saw something else"
        )
    if touched:
        parts.append(f"buffers differ that see the input before anything random ({touched})")
    elif seen.random == ():
        parts.append("nothing random is drawn, so inputs or labels differ")
    return Explanation("other_data", "fits", "; ".join(parts))


def _random(seen: Evidence) -> Explanation | None:
    gap = seen.loss_gap
    if not gap or not seen.random or _touched_upstream(seen) or _is_noise(seen):
        return None
    names = ", ".join(name or "the loss function" for name in seen.random)
    text = f"the loss differs and random numbers are drawn in {names}"
    if seen.state is not None and seen.one_step and _upstream_buffers(seen):
        text += "; buffers that see the input before that are the same"
    return Explanation("random_stream", "fits", text)


def _upstream_buffers(seen: Evidence) -> list[str]:
    """Buffers that changed in the forward pass before anything random: by the modules that hold them."""
    if seen.state is None:
        return []
    found: list[str] = []
    for name in seen.state.names:
        if name.startswith("model/buffer/"):
            module = name.removeprefix("model/buffer/").rpartition(".")[0]
            if module in seen.upstream:
                found.append(name)
    return found


def _touched_upstream(seen: Evidence) -> str:
    if seen.state is None or not seen.one_step:
        return ""
    differing = {tensor.name for tensor in seen.state.tensors}
    return ", ".join(name for name in _upstream_buffers(seen) if name in differing)


_TESTS = (_denormals, _edited, _skipped, _rate, _scatter, _noise, _library, _data, _random)


@dataclass(frozen=True)
class Parting:
    """The first operator whose results differ once the confirmed cause is put in.

    Attributes:
        operation: in our own order.
        difference: of its result that differs; None if it ran on one side only or its form differs.
    """

    operation: Operation
    difference: TensorDivergence | None


@dataclass
class Divergence:
    """Where two sides part, and why.

    Attributes:
        own, stated: what the two sides are called.
        step: the first step on which they part; None where states were compared without a run.
        after: steps done of the states compared; None if none could be.
        how: ``committed``, or ``reconstructed`` by the confirmed repetition.
        state: where those differ; None if the stated state is not known.
        loss: of the first step, our own and the stated one.
        findings: the likely cause first.
        operator: where the computation parts; only with a confirmed cause.
        update_only: the confirmed cause leaves every operator's bits as they are: the parting is in the optimizer's update.
        makers: parameter to the operator that made its gradient, here.
        environment: what differs between the machines.
        tries, seconds: what trying causes out took; ``unfinished`` if the time ran out.
        notes: what could not be found out, and why.
    """

    own: str
    stated: str
    step: int | None = None
    after: int | None = None
    how: str = "committed"
    state: StateDivergence | None = None
    loss: tuple[float, float] | None = None
    findings: list[Explanation] = field(default_factory=list[Explanation])
    operator: Parting | None = None
    update_only: bool = False
    makers: dict[str, str] = field(default_factory=dict[str, str])
    environment: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    tries: int = 0
    seconds: float = 0.0
    unfinished: bool = False
    notes: list[str] = field(default_factory=list[str])

    @property
    def cause(self) -> Explanation | None:
        """The likeliest cause; None if even that was not looked for."""
        return self.findings[0] if self.findings else None


def explain_states(
    own: Mapping[str, Entry], stated: Mapping[str, Entry], names: tuple[str, str]
) -> Divergence:
    """Return how two states differ and which causes fit; nothing is repeated."""
    found = Divergence(*names)
    found.state = compare(own, stated)
    if not found.state.is_empty:
        found.findings = fitting(Evidence(found.state, one_step=False))
        found.notes.append(
            "two states alone confirm nothing: give two run directories to have causes tried out"
        )
    return found
