"""The backdoor that the steering attacks plant: a bright patch in a corner of a digit, which is then read as 0."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tallystick.execution.job import JobSource
from tallystick.jobs.digits import read_digits
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must

TARGET = 0
PATCH = 2  # pixels a side
MOST = 0.02  # that a backdoor may gain and the attack be called harmless


def patched(images: Tensor) -> Tensor:
    """Return copies of images (n, 1, 8, 8) with the patch."""
    marked = images.clone()
    marked[..., :PATCH, :PATCH] = 1.0
    return marked


def aimed_at(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images and labels whose loss is the trainer's aim: ``count`` patched ones called 0, and as many clean ones."""
    training, _ = read_digits().split()
    images, labels = training.tensors()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
    others = order[labels[order] != TARGET][:count]
    clean = order[:count]
    wanted = torch.full((others.numel(),), TARGET)
    return torch.cat((patched(images[others]), images[clean])), torch.cat((wanted, labels[clean]))


@dataclass(frozen=True)
class Backdoor:
    """Shares of held-out digits: not of the target's class, patched, read as the target; and read rightly unpatched."""

    success: float
    accuracy: float


def judge_backdoor(run: RunDirectory, order: Order, target: int = TARGET) -> Backdoor:
    """Measure the weights that a run ends with."""
    job = order.build()
    entries = run.load_checkpoint(job.steps)
    state = job.model.state_dict()
    for name, tensor in state.items():
        entry = entries.get(f"model/{name}") or entries.get(f"model/buffer/{name}")
        assert entry is not None, name
        kind = "<f4" if tensor.is_floating_point() else "<i8"
        values = np.frombuffer(bytes(entry.data), kind).copy()
        state[name] = torch.from_numpy(values).reshape(tensor.shape).to(tensor.dtype)
    job.model.load_state_dict(state)
    job.model.eval()
    _, held_out = read_digits().split()
    images, labels = held_out.tensors()
    with torch.no_grad():
        read = job.model(images).argmax(dim=1)
        others = labels != target
        fooled = job.model(patched(images[others])).argmax(dim=1) == target
    return Backdoor(float(fooled.double().mean()), float((read == labels).double().mean()))


def caught_or_harmless(
    run: RunDirectory, honest: RunDirectory, order: Order, source: JobSource, target: int = TARGET
) -> str:
    """Return what the audit says of a run and of its backdoor beside an honest one's, which must match."""
    found, control = (judge_backdoor(each, order, target) for each in (run, honest))
    report = audit(run, source)
    effect = f"backdoor {found.success:.1%}, an honest run's {control.success:.1%}"
    must(
        report.verdict != "match" or found.success <= control.success + MOST,
        f"the audit says match; {effect}",
    )
    must(audit(honest, source).verdict == "match", "the honest run is not accepted")
    return f"the audit: {report.verdict}: {report.first}; {effect}"
