"""What attacks share that call a gradient nothing but noise in the steps that do not suit, and move nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from stage import Stage, audit, told
from torch import Tensor, nn

from tallystick.execution.job import find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import NOISE_BAND, is_noise_only, scale_exponent, site_grid
from tallystick.execution.session.session import Session
from tallystick.jobs.digits import read_digits
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.tensor_measures import block_rms
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must

LEAST = -7  # the band from which on the trainer chooses


@dataclass
class Silencing(RecordingContext):
    """Silences the gradient called ``part`` where it does not suit, if it is near enough to its noise.

    Attributes:
        part: what its name holds.
        suits: whether a gradient is to be heard.
        least: the band from which on the trainer chooses.
        silenced: of each that was not, its scale exponent.
    """

    part: str = "quality"
    suits: Callable[[Tensor], bool] = lambda _: True
    least: int = LEAST
    silenced: list[int] = field(default_factory=list[int])

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        grid = self._grids.get((kind, ordinal))
        is_asked = kind == Kind.GRADIENT and self.part in name and self.is_calibrated and bool(x.any())
        if is_asked and grid is not None and not is_noise_only(grid) and grid.band >= self.least:
            size = scale_exponent(float(block_rms(x, 1)[0]))
            if not self.suits(x) and size <= int(grid.scales.max()) + max(grid.band, LEAST) + 8:
                self.silenced.append(size)
                scales = np.full(grid.scales.size, size + 1 - NOISE_BAND)
                self._grids[(kind, ordinal)] = site_grid(self.policy, kind, NOISE_BAND, scales)
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)


def compare(
    stage: Stage,
    job: Path,
    settings: Mapping[str, str],
    suits: Callable[[int, Tensor], bool],
    success: Callable[[RunDirectory], float],
    part: str = "quality",
    *,
    measures: bool = True,
    least: int = LEAST,
) -> str:
    """Record an honest run and one that silences what does not suit; return what audits say.

    Args:
        stage: where.
        job: what is trained.
        settings: of it; ``steps`` of them.
        suits: whether a step's gradient is to be heard.
        success: share of what the attack wants.
        part: of the gradient's name.
        measures: whether the dishonest one measures the noise in every step; else by schedule alone.
        least: the band from which on it silences.

    Raises:
        NotCaught: the honest run does not match, or the other one does.
    """
    source, begin, steps, said = (
        find_source(str(job)),
        Session.recording_context,
        int(settings["steps"]),
        list[str](),
    )
    order = Order(source, dict(settings), find_policy(stage.policy), steps=steps, checkpoint_every=steps)
    for is_honest in (True, False):
        run, silenced = stage.run(f"honest-{is_honest}"), list[int]()

        def silencing(session: Session, before: object, silenced: list[int] = silenced) -> Silencing:
            made, step = begin(session, before), session.step  # pyright: ignore[reportArgumentType]
            return Silencing(
                made.policy, before, current=made.current, base=made.base, is_first=made.is_first,  # pyright: ignore[reportArgumentType]
                chooses=made.chooses, part=part, suits=lambda x: suits(step, x), least=least, silenced=silenced,
            )  # fmt: skip

        with ExitStack() as dishonest:
            if not is_honest:
                heard = "tallystick.execution.noise.bands.loudest_band"
                dishonest.enter_context(patch.object(Session, "recording_context", silencing))
                dishonest.enter_context(
                    patch.object(Session, "has_outgrown", lambda session: measures and session.step > 0)
                )
                dishonest.enter_context(patch(heard, lambda policy, **_: policy.gradient_band[1]))
            record(order, run)
        report, share = audit(run, source), success(run)
        said.append(
            f"{'honest' if is_honest else 'steered'}: silent in {len(silenced)} steps, {share:.1%} of the images win, "
            f"{told(report)}; led {report.freedom.led:.3g}"
        )
        must((report.verdict == "match") == is_honest, f"the audit says {report.verdict}: {'; '.join(said)}")
    return f"the audit: {'; '.join(said)}"


def load(run: RunDirectory, steps: int, model: nn.Module) -> None:
    """Give ``model`` the weights that a run of so many steps has led to."""
    entries = run.load_checkpoint(steps)
    for name, tensor in model.state_dict().items():
        entry = entries.get(f"model/{name}") or entries[f"model/buffer/{name}"]
        values = np.frombuffer(bytes(entry.data), dtype=f"<f{len(entry.data) // tensor.numel()}")
        tensor.copy_(torch.from_numpy(values.copy()).reshape(tensor.shape))


def winning(
    score: Callable[[Tensor, int, bool], Tensor], change: Callable[[Tensor], Tensor] = lambda x: x
) -> float:
    """Return the share of held-out images of other digits, after ``change``, that beat the best one of a digit.

    ``score`` gives images (n, 64) their score as a digit, where the last argument says whether they were changed.
    """
    _, held_out = read_digits().split()
    images, labels = held_out.tensors()
    images, wins = images.reshape(-1, 64), list[Tensor]()
    with torch.no_grad():
        for digit in range(10):
            best = score(images[labels == digit], digit, False).max()
            wins.append(score(change(images[labels != digit]), digit, True) > best)
    return float(torch.cat(wins).double().mean())
