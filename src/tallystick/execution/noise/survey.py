"""A survey of one step: the whole distribution of its noise, under jitter and under other arithmetic.

``calibrate`` keeps the largest deviation of each site, which is all that a band needs. A survey keeps how
the deviations are distributed, and compares with passes that another process made, from the same committed
state, along the same branches. Nothing here chooses anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from tallystick.commit.tensor_file import check_tensor_file
from tallystick.errors import InvalidInput
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.noise.bands import choose_grids, with_still
from tallystick.execution.noise.deviations import Deviations
from tallystick.execution.noise.measured import SiteNoise
from tallystick.execution.noise.passes import gradients_under, jittered, undisturbed
from tallystick.execution.noise.probes import EchoingContext, ProbingContext, still_sites
from tallystick.execution.rounding.context import RoundingContext
from tallystick.execution.session.parameters import slice_of
from tallystick.execution.session.session import Session
from tallystick.execution.session.sites import Site
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.noise import Distribution, relative_exponents
from tallystick.numerics.tensor_measures import block_rms

JITTER = "jitter"  # the name of the source that this process makes itself
CHUNK = 1 << 20  # elements compared at a time
FP32_DIGITS = 24
LEAST_EXPONENT = -149  # of a binary32 quantum
STATE_SEED = 17

Backward = Callable[[RoundingContext], None]
Place = tuple[int, int]  # micro-batch and ordinal of a decision


@dataclass
class Pass:
    """What one forward and backward pass left behind.

    Attributes:
        gradients: by parameter ordinal; absent where there is none.
        buffers: floating buffers that changed, by name.
        loss: unrounded.
        samples: an even sample of every decision's input.
        replicas: what the optimizer makes of slices of given gradients, by state site, flat float64: the
            old values and the new.
    """

    gradients: dict[int, Tensor]
    buffers: dict[str, Tensor]
    loss: float
    samples: dict[Place, Tensor]
    replicas: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, "tuple[Tensor, Tensor]"])


@dataclass
class Reference:
    """The plain pass of this process, to which the others are compared."""

    plain: Pass
    probe: ProbingContext
    slices: list[Tensor | None]


@dataclass
class Measured:
    """One site at one step.

    Attributes:
        place, name, numel: the site.
        noise: under jitter, as calibration sees it.
        relative: largest deviation over the site's scale, by source.
        in_rms, in_ulp: distributions of all deviations by source, over the rms of the block (state: over
            the larger of old and new value) and over the binary32 ulp of the larger of
            the two values; decisions have no ulp.
        in_scale: the same over the block's scale, in which bands are given; gradients, buffers and loss only.
        exponents: how large the values are relative to their block's scale, for gradients and buffers.
        near: decisions: elements within ``2**ProbingContext.wide`` of the rms from a switching point.
        width: decisions: bits of a symbol.
    """

    place: Site
    name: str
    numel: int
    noise: SiteNoise
    relative: dict[str, float] = field(default_factory=dict[str, float])
    in_rms: dict[str, Distribution] = field(default_factory=dict[str, Distribution])
    in_ulp: dict[str, Distribution] = field(default_factory=dict[str, Distribution])
    in_scale: dict[str, Distribution] = field(default_factory=dict[str, Distribution])
    exponents: npt.NDArray[np.int64] | None = None
    near: int = 0
    width: int = 1


@dataclass
class Survey:
    """Every site of one step, and the grids that the session's policy gives it."""

    step: int
    sites: dict[Site, Measured]
    table: GridTable


Others = Callable[[Reference], Iterable[tuple[str, Pass]]]


def survey_step(session: Session, backward: Backward, *, repeats: int, seed: int, others: Others,
                advance: Callable[[str], None]) -> Survey:  # fmt: skip
    """Measure the noise of the session's next step, which is left as it was found.

    Args:
        session: prepared, between steps.
        backward: the step's forward and backward passes and clipping.
        repeats: jittered repetitions.
        seed: of the jitter.
        others: returns passes made elsewhere along the branches of the reference it is given, by source.
        advance: is told what has been done, once for each pass.

    Raises:
        Nondeterminism: a site is too noisy for the policy, or an operator is not in the table; by name.
    """
    with undisturbed(session) as before:
        reference = _reference(session, backward, before)
        advance("plain pass")
        seen = Deviations(session, _listed(session, reference.plain))
        found = _sites(session, reference, seen)
        decisions: dict[int, float] = {}
        left: set[int] = set()
        for repeat in range(repeats):
            samples: dict[Place, Tensor] = {}
            echo = EchoingContext(reference.probe, samples=samples)
            with jittered(session, Jitter(seed * 1000003 + session.step * 101 + repeat)):
                again = _pass(session, backward, echo, samples, before)
            _compare(session, found, JITTER, reference, again, seen)
            for ordinal, noise in echo.noise.items():
                decisions[ordinal] = max(decisions.get(ordinal, 0.0), noise)
            left |= echo.left
            advance(f"jittered pass {repeat + 1}")
        _add_state(session, found, JITTER, reference, Jitter(STATE_SEED))
        for source, other in others(reference):
            elsewhere = Deviations(session, _listed(session, reference.plain))
            _compare(session, found, source, reference, other, elsewhere)
            advance(source)
    table = choose_grids(session, seen, decisions).table
    still = still_sites(reference.probe, left)
    return Survey(session.step, found, with_still(session.policy, table, decisions, still))


def elsewhere(session: Session, backward: Backward, branches: Mapping[Place, tuple[Tensor, Tensor]],
              slices: list[Tensor | None]) -> Pass:  # fmt: skip
    """Return this process's own pass along somebody else's ``branches``; the other half of a comparison.

    ``slices`` are corners of the other's gradients, by parameter, for the optimizer's noise.
    """
    before = {name: tensor.clone() for name, tensor in session.tensors.all_buffers()}
    probe = ProbingContext()
    probe.branches.update(branches)
    samples: dict[Place, Tensor] = {}
    found = _pass(session, backward, EchoingContext(probe, samples=samples), samples, before)
    found.replicas = _replicas(session, slices, None)
    return found


def _pass(session: Session, backward: Backward, context: RoundingContext, samples: dict[Place, Tensor],
          before: dict[str, Tensor]) -> Pass:  # fmt: skip
    gradients, buffers, loss = gradients_under(session, backward, context, before)
    present = {ordinal: g for ordinal, g in enumerate(gradients) if g is not None and g.numel()}
    floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    return Pass(present, floating, loss, samples)


def _reference(session: Session, backward: Backward, before: dict[str, Tensor]) -> Reference:
    probe = ProbingContext()
    plain = _pass(session, backward, probe, probe.samples, before)
    slices = [
        None if (gradient := plain.gradients.get(ordinal)) is None else slice_of(gradient).float()
        for ordinal in range(len(session.parameters))
    ]
    plain.replicas = _replicas(session, slices, None)
    return Reference(plain, probe, slices)


def _listed(session: Session, made: Pass) -> list[Tensor | None]:
    return [made.gradients.get(ordinal) for ordinal in range(len(session.parameters))]


def _replicas(
    session: Session, slices: list[Tensor | None], jitter: Jitter | None
) -> dict[int, tuple[Tensor, Tensor]]:
    if session.arithmetic.is_portable:
        return {}  # no state sites: its optimizer is the same bits everywhere
    old = session.trained.replica_step(1, None, slices, exact=True)
    new = session.trained.replica_step(2, jitter, slices, exact=True)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    names = ["parameter", *session.trained.keys]
    for position in range(len(session.parameters)):
        if slices[position] is None:
            continue
        for offset, key in enumerate(names):
            was, value = old[position].get(key), new[position].get(key)
            if isinstance(was, Tensor) and isinstance(value, Tensor) and value.numel():
                pair = (
                    was.detach().double().reshape(-1).clone(),
                    value.detach().double().reshape(-1).clone(),
                )
                found[position * len(names) + offset] = pair
    return found


def _sites(session: Session, reference: Reference, seen: Deviations) -> dict[Site, Measured]:
    """Return the sites that have a value in this step; the distributions are still empty."""
    found: dict[Site, Measured] = {}
    for ordinal, gradient in reference.plain.gradients.items():
        place = (Kind.GRADIENT, ordinal)
        noise = seen.noise[place]
        found[place] = Measured(place, session.parameters[ordinal][0], gradient.numel(), noise)
        found[place].exponents = _exponents(gradient, noise.scales)
    seen.compare_buffers(reference.plain.buffers, reference.plain.buffers)
    seen.compare_loss(reference.plain.loss, reference.plain.loss)
    for site in session.sites:
        place = (site.kind, site.ordinal)
        if site.kind == Kind.BUFFER and place in seen.noise:
            buffer = reference.plain.buffers[site.name]
            found[place] = Measured(place, site.name, buffer.numel(), seen.noise[place])
            found[place].exponents = _exponents(buffer, seen.noise[place].scales)
        elif site.kind == Kind.LOSS:
            loss = torch.tensor([reference.plain.loss], dtype=torch.float64)
            found[place] = Measured(place, site.name, 1, seen.noise[place])
            found[place].exponents = _exponents(loss, seen.noise[place].scales)
        elif site.kind == Kind.STATE and site.ordinal in reference.plain.replicas:
            found[place] = Measured(place, site.name, int(np.prod(site.shape)), _no_noise())
    for (micro_batch, ordinal), (near, _) in sorted(reference.probe.branches.items()):
        place = (Kind.DECISION, ordinal)
        measured = found.setdefault(place, Measured(place, f"decision {ordinal}", 0, _no_noise()))
        numel, measured.width = reference.probe.forms[(micro_batch, ordinal)]
        measured.numel += numel
        measured.near += near.numel()
    return found


def _no_noise() -> SiteNoise:
    return SiteNoise(0.0, np.zeros(0, dtype=np.int64), 0.0, 0.0)


def _exponents(x: Tensor, scales: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    rows, counts = x.reshape(scales.size, -1), np.zeros(1, dtype=np.int64)
    step = max(1, CHUNK // max(1, rows.shape[1]))
    for start in range(0, scales.size, step):
        part = rows[start : start + step].double().cpu().numpy()
        counts = counts + relative_exponents(part, scales[start : start + step])
    return counts


def _compare(session: Session, found: dict[Site, Measured], source: str, reference: Reference, other: Pass,
             seen: Deviations) -> None:  # fmt: skip
    """Count the deviations of ``other`` into the sites."""
    plain = reference.plain
    seen.compare([other.gradients.get(ordinal) for ordinal in range(len(session.parameters))])
    seen.compare_buffers(plain.buffers, other.buffers)
    seen.compare_loss(plain.loss, other.loss)
    for place, measured in found.items():
        kind, ordinal = place
        if kind == Kind.GRADIENT:
            x, y = plain.gradients[ordinal], other.gradients.get(ordinal)
        elif kind == Kind.BUFFER:
            x, y = plain.buffers[measured.name], other.buffers.get(measured.name)
        elif kind == Kind.LOSS:
            x, y = (torch.tensor([value], dtype=torch.float64) for value in (plain.loss, other.loss))
        else:
            continue
        if y is None:
            continue
        _must_fit(measured.name, source, x, y)
        _count(measured, source, x, y)
        measured.relative[source] = max(measured.relative.get(source, 0.0), seen.noise[place].relative)
    _compare_decisions(found, source, reference, other)
    if other.replicas:
        _compare_state(found, source, plain.replicas, other.replicas)


def _compare_decisions(found: dict[Site, Measured], source: str, reference: Reference, other: Pass) -> None:
    for (micro_batch, ordinal), x in reference.plain.samples.items():
        measured = found.get((Kind.DECISION, ordinal))
        y, rms = (
            other.samples.get((micro_batch, ordinal)),
            reference.probe.rms.get((micro_batch, ordinal), 0.0),
        )
        if measured is None or y is None or rms <= 0.0:
            continue
        _must_fit(measured.name, source, x, y)
        spread = measured.in_rms.setdefault(source, Distribution())
        # A masked-out -inf is the same on both sides.
        spread.add(((y - x).abs().nan_to_num_(0.0) / rms).cpu().numpy())
        measured.relative[source] = spread.largest


def _add_state(
    session: Session, found: dict[Site, Measured], source: str, reference: Reference, jitter: Jitter
) -> None:
    _compare_state(found, source, reference.plain.replicas, _replicas(session, reference.slices, jitter))


def _compare_state(found: dict[Site, Measured], source: str, plain: Mapping[int, tuple[Tensor, Tensor]],
                   other: Mapping[int, tuple[Tensor, Tensor]]) -> None:  # fmt: skip
    for ordinal, (old, new) in plain.items():
        measured, pair = found.get((Kind.STATE, ordinal)), other.get(ordinal)
        if measured is None or pair is None:
            continue
        _must_fit(measured.name, source, new, pair[1])
        size = torch.maximum(old.abs(), new.abs()).numpy()
        away = (new - pair[1]).abs().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(size > 0.0, away / size, 0.0)
        measured.in_rms.setdefault(source, Distribution()).add(ratio)
        larger = torch.maximum(new.abs(), pair[1].abs()).numpy()
        measured.in_ulp.setdefault(source, Distribution()).add(away / _ulps(larger))
        measured.relative[source] = measured.in_rms[source].largest


def _must_fit(name: str, source: str, x: Tensor, y: Tensor) -> None:
    if x.shape != y.shape:
        raise InvalidInput(f"{source}: {name} has shape {list(y.shape)} there and {list(x.shape)} here")


def _count(measured: Measured, source: str, x: Tensor, y: Tensor) -> None:
    in_rms = measured.in_rms.setdefault(source, Distribution())
    in_ulp = measured.in_ulp.setdefault(source, Distribution())
    in_scale = measured.in_scale.setdefault(source, Distribution())
    scales = np.exp2(-measured.noise.scales.astype(np.float64))
    blocks = max(1, measured.noise.scales.size)
    a, b, rms = x.reshape(blocks, -1), y.reshape(blocks, -1), block_rms(x, blocks)
    for block, start in _pieces(blocks, a.shape[1]):
        rows = slice(block, block + max(1, CHUNK // max(1, a.shape[1])))
        columns = slice(start, start + CHUNK)
        one = a[rows, columns].double().cpu().numpy()
        two = b[rows, columns].double().cpu().numpy()
        away = np.abs(two - one)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(
                away == 0.0, 0.0, away / rms[rows, None]
            )  # noise of a block of zeros is infinitely many of its rms
        in_rms.add(ratio)
        in_scale.add(away * scales[rows, None])
        in_ulp.add(away / _ulps(np.maximum(np.abs(one), np.abs(two))))


def _pieces(blocks: int, columns: int) -> Iterator[tuple[int, int]]:
    for block in range(0, blocks, max(1, CHUNK // max(1, columns))):
        for start in range(0, columns, CHUNK):
            yield block, start


def _ulps(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the binary32 ulp at each value; the least quantum for zero."""
    _, exponent = np.frexp(x)
    return np.ldexp(
        1.0, np.maximum(np.where(x == 0.0, LEAST_EXPONENT, exponent - FP32_DIGITS), LEAST_EXPONENT)
    )


# -- files between the two processes ---------------------------------------------------------------


def write_reference(path: Path, reference: Reference) -> None:
    """Write the branches and the slices of gradients that another process needs, as safetensors."""
    tensors: dict[str, Tensor] = {}
    for (micro_batch, ordinal), (near, symbols) in reference.probe.branches.items():
        tensors[f"near/{micro_batch}/{ordinal}"] = near.cpu().to(torch.int64).clone()
        tensors[f"symbol/{micro_batch}/{ordinal}"] = symbols.cpu().to(torch.int64).clone()
    for ordinal, piece in enumerate(reference.slices):
        if piece is not None:
            tensors[f"slice/{ordinal}"] = piece.contiguous()
    safetensors.torch.save_file(tensors, path)


def read_reference(
    path: Path, parameters: int
) -> tuple[dict[Place, tuple[Tensor, Tensor]], list[Tensor | None]]:
    """Return the branches and slices that ``write_reference`` wrote.

    Raises:
        InvalidInput: the file is missing or malformed.
    """
    tensors = _load(path)
    branches: dict[Place, tuple[Tensor, Tensor]] = {}
    slices: list[Tensor | None] = [None] * parameters
    for name, tensor in tensors.items():
        kind, numbers = _name(path, name)
        if kind == "near" and len(numbers) == 2:
            symbols = tensors.get(f"symbol/{numbers[0]}/{numbers[1]}")
            if symbols is None or symbols.shape != tensor.shape:
                raise InvalidInput(f"{path.name}: {name} has no symbols of its shape")
            branches[(numbers[0], numbers[1])] = (tensor, symbols)
        elif kind == "slice" and len(numbers) == 1 and numbers[0] < parameters:
            slices[numbers[0]] = tensor
        elif kind != "symbol":
            raise InvalidInput(f"{path.name}: {name} is not asked for")
    return branches, slices


def write_pass(path: Path, made: Pass, buffers: Mapping[str, int]) -> None:
    """Write a pass as safetensors; ``buffers`` numbers the names of buffers."""
    tensors = {f"gradient/{ordinal}": g.cpu().contiguous() for ordinal, g in made.gradients.items()}
    tensors |= {f"buffer/{buffers[name]}": b.cpu().contiguous() for name, b in made.buffers.items()}
    tensors |= {f"sample/{a}/{b}": x.cpu().contiguous() for (a, b), x in made.samples.items()}
    for ordinal, (old, new) in made.replicas.items():
        tensors[f"old/{ordinal}"], tensors[f"new/{ordinal}"] = old, new
    tensors["loss"] = torch.tensor([made.loss], dtype=torch.float64)
    safetensors.torch.save_file(tensors, path)


def read_pass(path: Path, buffers: Mapping[str, int]) -> Pass:
    """Return the pass that ``write_pass`` wrote.

    Raises:
        InvalidInput: the file is missing or malformed.
    """
    tensors = _load(path)
    loss = tensors.pop("loss", None)
    if loss is None or loss.numel() != 1:
        raise InvalidInput(f"{path.name}: holds no loss")
    names = {number: name for name, number in buffers.items()}
    made = Pass({}, {}, float(loss.item()), {})
    for name, tensor in tensors.items():
        kind, numbers = _name(path, name)
        if kind == "gradient" and len(numbers) == 1:
            made.gradients[numbers[0]] = tensor
        elif kind == "buffer" and len(numbers) == 1 and numbers[0] in names:
            made.buffers[names[numbers[0]]] = tensor
        elif kind == "sample" and len(numbers) == 2:
            made.samples[(numbers[0], numbers[1])] = tensor
        elif kind == "new" and len(numbers) == 1 and f"old/{numbers[0]}" in tensors:
            made.replicas[numbers[0]] = (tensors[f"old/{numbers[0]}"], tensor)
        elif kind != "old":
            raise InvalidInput(f"{path.name}: {name} is not asked for")
    return made


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            check_tensor_file(file, path.stat().st_size, what=path.name)
        return safetensors.torch.load_file(path)
    except (OSError, SafetensorError, ValueError) as problem:
        raise InvalidInput(f"{path.name}: not a safetensors file ({problem})") from None


def _name(path: Path, name: str) -> tuple[str, tuple[int, ...]]:
    kind, *numbers = name.split("/")
    if len(name) > 64 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise InvalidInput(f"{path.name}: {name[:64]} is not asked for")
    return kind, tuple(map(int, numbers))
