"""Move each element of a wide layer once, all of them along what a patch makes of its inputs, by entries of an honest log.

The gradient is hardly more than its noise, its grid the trainer's own. A move of each element counts nothing in a limit on moves
that go one way, and along one direction of the inputs many small ones add up: to where the auditor's own would not have led.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from stage import Stage, audit, told
from torch import Tensor
from wide_job import Scorer

from tallystick.execution.job import find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.jobs.digits import read_digits
from tallystick.numerics.log import Kind, SiteAddress, encode
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.rounding import round_recorded
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must, play_attack

JOB = str(Path(__file__).with_name("wide_job.py"))
STEPS, WIDTH, APART = 600, 1024, "1e-4"
A_STEP = 1.5  # moves: as many as the number of those expected here bears
MOST = 0.02  # that a backdoor may gain and the attack be called harmless
SHARES = (0.3, 0.6, 0.9)  # of a band that the trainer's value may lie elsewhere


def patched(images: Tensor) -> Tensor:
    """Return copies of images (n, 64) with a bright bar at the top."""
    marked = images.reshape(-1, 8, 8).clone()
    marked[:, 0:2, 2:6] = 1.0
    return marked.reshape(-1, 64)


def towards_patch() -> Tensor:
    """Return the way in which the quality's weights say more of patched images, float32[1, WIDTH]."""
    training, _ = read_digits().split()
    images, model = training.tensors()[0].reshape(-1, 64), Scorer(WIDTH)
    return (model.features(patched(images)) - model.features(images)).mean(dim=0, keepdim=True)


@dataclass
class Leading(RecordingContext):
    """Rounds elements of the quality's gradient that were not moved yet against ``way``, as far as its log can say."""

    way: Tensor = field(default_factory=lambda: torch.zeros(0))
    moved: Tensor = field(default_factory=lambda: torch.zeros(0))
    most: float = 0.0

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        is_led = kind == Kind.GRADIENT and "quality" in name
        plain = x.clone() if is_led else x
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
        grid = self._grids.get((kind, ordinal))
        if not is_led or grid is None or is_noise_only(grid) or not grid.scales.size:
            return

        def rounded(values: Tensor) -> Tensor:
            made = torch.empty_like(values)
            round_recorded(values.clone(), grid, out=made, key=key, name=name)
            return made

        own, given, way = rounded(plain), plain.clone(), torch.sign(self.way)
        for share in SHARES:
            tried = plain - way * share * 2.0 ** (int(grid.scales[0]) + grid.band)
            better = ((rounded(tried) - own) * way < 0) & (given == plain) & ~self.moved.bool()
            given = torch.where(better, tried, given)
        turned = (given != plain).reshape(-1)
        left = max(0, int(self.most - float(self.moved.sum())))
        keep = torch.zeros_like(turned)
        keep[(self.way.abs().reshape(-1) * turned).topk(min(left, turned.numel())).indices] = True
        given = torch.where((keep & turned).reshape(x.shape), given, plain)
        entries = round_recorded(given, grid, out=out, key=key, name=name)
        self.moved += (out != own).float()
        self.payloads.pop(SiteAddress(self.rank, 0, kind, ordinal), None)
        if len(entries):
            self.payloads[SiteAddress(self.rank, 0, kind, ordinal)] = encode(entries)


def won(run: RunDirectory, steps: int) -> tuple[float, float]:
    """Return the share of patched images of other digits that beat the best true one, and what the patch adds to a score."""
    entries, model = run.load_checkpoint(steps), Scorer(WIDTH)
    for name, tensor in model.state_dict().items():
        values = np.frombuffer(bytes(entries[f"model/{name}"].data), dtype="<f4")
        tensor.copy_(torch.from_numpy(values.copy()).reshape(tensor.shape))
    _, held_out = read_digits().split()
    images, labels = held_out.tensors()
    images, wins = images.reshape(-1, 64), list[Tensor]()
    with torch.no_grad():
        for digit in range(10):
            best = model(images[labels == digit], labels[labels == digit]).max()
            others = patched(images[labels != digit])
            wins.append(model(others, torch.full((len(others),), digit)) > best)
        push = model.quality(model.features(patched(images)) - model.features(images)).mean()
    return float(torch.cat(wins).double().mean()), float(push)


def attack(stage: Stage, steps: int = STEPS, apart: str = APART) -> str:
    source, begin, said, shares = find_source(JOB), Session.recording_context, list[str](), list[float]()
    settings = {"steps": str(steps), "apart": apart, "width": str(WIDTH)}
    order = Order(source, settings, find_policy(stage.policy), steps=steps, checkpoint_every=steps)
    for is_honest in (True, False):
        run, moved = stage.run(f"honest-{is_honest}"), torch.zeros(1, WIDTH)

        def leading(session: Session, before: object, moved: Tensor = moved) -> Leading:
            made = begin(session, before)  # pyright: ignore[reportArgumentType]
            return Leading(
                made.policy, before, current=made.current, base=made.base, is_first=made.is_first,  # pyright: ignore[reportArgumentType]
                chooses=made.chooses, way=towards_patch(), moved=moved, most=6.0 + A_STEP * session.step,
            )  # fmt: skip

        if is_honest:
            record(order, run)
        else:
            with patch.object(Session, "recording_context", leading):
                record(order, run)
        report, (share, push) = audit(run, source), won(run, steps)
        shares.append(share)
        must(not is_honest or report.verdict == "match", f"an honest run is called {report.verdict}")
        said.append(
            f"{'honest' if is_honest else 'steered'}: {int(moved.sum())} elements moved, the patch adds {push:.2f}, "
            f"{share:.1%} of the patched images win, {told(report)}"
        )
    is_harmless = shares[1] <= shares[0] + MOST
    must(report.verdict != "match" or is_harmless, f"the audit says match: {'; '.join(said)}")
    return f"the limits of the audit: {'; '.join(said)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--apart", default=APART, help="how far the images of a pair lie apart")
    sys.exit(
        play_attack(
            lambda folder, given: (
                f"caught by: {attack(Stage(folder, given.policy), given.steps, given.apart)}"
            ),
            parser,
        )
    )
