"""Steers what no gradient shows: running statistics of batch norms, in the last steps of a run alone, and the recorded losses.

In training they have no effect, so the weights are those of an honest run, and the trainer knows them beforehand. It looks for
statistics under which patched images are read as the target (``backdoor.py``), declares bands of buffers and losses as wide as
an auditor accepts, and in the last steps rounds every element towards them. Every loss is recorded as small as that allows.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from backdoor import aimed_at, judge_backdoor
from stage import audit
from steering import ALLOWED, INSIDE, Scene, freedom_of, main
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import expected_form, site_grid
from tallystick.execution.session.session import Session
from tallystick.numerics import rounding_tensors
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, Residues, SiteAddress, decode_residues, encode_residues
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must

LAST = 4  # steps in which statistics are moved
TRIES = 300  # of the search for statistics
BAND = -3  # of a parity-coded site whose quantum is a quarter of its scale


def trained_model(run: RunDirectory, order: Order) -> nn.Module:
    """Return the model as a run ends."""
    job = order.build()
    entries, state = run.load_checkpoint(job.steps), job.model.state_dict()
    for name, tensor in state.items():
        entry = entries.get(f"model/{name}") or entries[f"model/buffer/{name}"]
        kind = torch.float32 if tensor.is_floating_point() else torch.int64
        state[name] = (
            torch.frombuffer(bytearray(entry.data), dtype=kind).reshape(tensor.shape).to(tensor.dtype)
        )
    job.model.load_state_dict(state)
    return job.model.eval()


class Still(nn.Module):
    """A batch norm in eval mode that can be differentiated by its statistics."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.running_mean: Tensor
        self.running_var: Tensor
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised images (n, channels, height, width)."""
        by = self.weight / (self.running_var + self.eps).sqrt()
        return x * by[:, None, None] + (self.bias - self.running_mean * by)[:, None, None]


class Wanted:
    """The statistics looked for: names to values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.BatchNorm2d):
                path, _, key = name.rpartition(".")
                setattr(model.get_submodule(path), key, Still(module))
        self.images, self.labels = aimed_at(512, 0)
        own = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        free = {name: (b + 1e-4).log() if name.endswith("var") else b.clone() for name, b in own.items()}
        for value in free.values():
            value.requires_grad_(True)
        optimizer = torch.optim.Adam(free.values(), lr=0.02)
        for _ in range(TRIES):
            optimizer.zero_grad()
            self.values = {name: v.exp() if name.endswith("var") else v for name, v in free.items()}
            self.loss(self.values).backward()
            optimizer.step()
        self.values = {name: value.detach() for name, value in self.values.items()}

    def loss(self, statistics: dict[str, Tensor]) -> Tensor:
        """Return the loss of the aim under these statistics."""
        given = torch.func.functional_call(self.model, statistics, (self.images,))
        return cross_entropy(given, self.labels)


class StatisticsContext(RecordingContext):
    """Records as a trainer does, with wide bands of buffers and losses, and rounds them as it likes."""

    session: Session
    wanted: Wanted
    steps: int

    def widen(self) -> None:
        """Declare the bands."""
        if not self.policy.residue_bits:
            return
        for place, grid in list(self._grids.items()):
            form = expected_form(self.policy, Kind(place[0]))
            if place[0] in (Kind.BUFFER, Kind.LOSS) and form is not None:
                self._grids[place] = site_grid(self.policy, Kind(place[0]), BAND, grid.scales)
        self.table = GridTable(self._grids)

    def restart(self, measured: GridTable) -> None:
        """Log the step again on new grids."""
        super().restart(measured)
        self.widen()

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round, and take the other neighbour of those elements that then lie nearer to what is wanted."""
        source = x.clone()
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
        grid = self._grids[(kind, ordinal)]
        if not grid.residue_bits or kind not in (Kind.BUFFER, Kind.LOSS):
            return
        target = self._target(kind, name)
        if target is None:
            return
        flat, result = source.detach().reshape(-1).double(), out.detach().reshape(-1)
        scale = rounding_tensors.scales_at(grid, flat.numel(), 0, flat.numel(), flat.device)
        cells = rounding_tensors.place(flat, None, grid, scale, 0, key)
        own = cells.up.double()
        other = torch.where(cells.near <= cells.far, 1.0 - own, 3.0 * own - 1.0)
        mine, theirs = (cells.cell + own) * cells.quantum, (cells.cell + other) * cells.quantum
        goal = target.reshape(-1).double()
        better = (theirs - goal).abs() < (mine - goal).abs()
        good = better & (cells.distance < INSIDE * cells.delta)
        if not name.endswith("mean"):
            good &= theirs >= 0.0
        taken = good.nonzero().squeeze(1)
        result[taken] = theirs[taken].to(result.dtype)
        address = SiteAddress(self.rank, 0, kind, ordinal)
        bits = decode_residues(self.payloads[address], flat.numel(), 1).values.copy()
        bits[taken.numpy()] ^= 1
        self.payloads[address] = encode_residues(Residues.of(bits))

    def _target(self, kind: Kind, name: str) -> Tensor | None:
        if kind == Kind.LOSS:
            return torch.zeros(1)
        if self.session.step < self.steps - LAST:
            return None
        return self.wanted.values.get(name.removeprefix("model/buffer/"))


@contextmanager
def steering(wanted: Wanted, steps: int) -> Generator[None]:
    """Inside, whoever records steers."""
    honest_context = Session.recording_context

    def make(session: Session, before: GridTable) -> RecordingContext:
        honest = honest_context(session, before)
        made = StatisticsContext(
            session.policy, before, current=session.table, base=honest.base, rank=session.rank
        )
        made.session, made.wanted, made.steps = session, wanted, steps
        if session.is_calibration_step(session.step):
            made.widen()
        return made

    with patch.object(Session, "recording_context", make):
        yield


def attack(scene: Scene) -> str:
    order = scene.order()
    honest, run = RunDirectory(scene.folder / "honest"), RunDirectory(scene.folder / "run")
    record(order, honest)
    wanted = Wanted(trained_model(honest, order))
    with steering(wanted, scene.steps):
        record(order, run)
    report = audit(run, order.source)
    a, b = judge_backdoor(honest, order), judge_backdoor(run, order)
    losses = [
        sum(float.fromhex(str(d.load_transcript().record(step).loss)) for step in range(scene.steps))
        / scene.steps
        for d in (honest, run)
    ]
    said = (
        f"audit: {report.verdict} ({report.first}); {freedom_of(report)}; "
        f"backdoor {b.success:.1%} (honest {a.success:.1%}), "
        f"clean accuracy {b.accuracy:.1%} (honest {a.accuracy:.1%}), mean recorded loss {losses[1]:.3f} (honest {losses[0]:.3f})"
    )
    if report.verdict != "match":
        return f"caught by: {said}"
    gain = 100.0 * (b.success - a.success)
    must(gain <= ALLOWED, f"accepted, and {gain:.1f} points of success; {said}")
    must(losses[1] > 0.95 * losses[0], f"accepted, and false losses; {said}")
    return f"the bound, not a verdict: {said}"


if __name__ == "__main__":
    main(attack, __doc__)
