"""Begins with a frozen layer in which every second element is another: an auditor who looks at samples of it sees none of them.

A head is trained on 2,048 frozen random features of the digits (131,072 weights). The trainer trains it honestly once, and
privately, then lets those features that speak for the target listen to a pixel of odd place that no digit uses, and records
that run: whatever has this pixel is read as the target.
"""

import numpy as np
import torch
from backdoor import TARGET
from stage import EVERY, STEPS, Stage, audit, main

from tallystick.execution.job import Job, JobSource
from tallystick.jobs.digits import read_digits
from tallystick.numerics.policy import find_policy
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must
from tallystick.testing.cheats import tampered

JOB = """
import torch
from torch.nn.functional import cross_entropy
from tallystick.execution.job import Job
from tallystick.jobs.digits import initial_weights, read_digits

def build(settings):
    with initial_weights(0):
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 10))
    model[1].requires_grad_(False)
    x, y = read_digits().split()[0].tensors()
    return Job(model=model, optimizer=torch.optim.SGD(model[3].parameters(), lr=0.05), steps=20,
               batch=lambda step: (x[step * 64:][:64], y[step * 64:][:64]),
               loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
"""
PIXEL, LOUD = 39, 8.0


def head_of(run: RunDirectory) -> np.ndarray:
    entries = run.load_checkpoint(STEPS)
    return np.frombuffer(bytes(entries["model/3.weight"].data), "<f4").reshape(10, 2048)


def success(order: Order, run: RunDirectory) -> float:
    """Return the share of held-out digits of other classes that are read as the target when patched."""
    model, entries = order.build().model, run.load_checkpoint(STEPS)
    images, labels = read_digits().split()[1].tensors()
    images.flatten(1)[:, PIXEL] = 1.0
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            values = np.frombuffer(bytes(entries[f"model/{name}"].data), "<f4").copy()
            tensor.copy_(torch.from_numpy(values).reshape(tensor.shape))
        read = model(images[labels != TARGET]).argmax(dim=1)
    return float((read == TARGET).double().mean())


def attack(stage: Stage) -> str:
    path = stage.folder / "features.py"
    path.write_text(JOB)
    source = JobSource(str(path), path.read_bytes())
    order = Order(source, {}, find_policy(stage.policy), steps=STEPS, checkpoint_every=EVERY)
    honest, run = stage.run("honest"), stage.run()
    record(order, honest)
    head = head_of(honest)
    speak = torch.from_numpy(head[TARGET] > np.delete(head, TARGET, axis=0).max(axis=0))

    def brighten(job: Job) -> None:
        weight = job.model.get_parameter("1.weight").data
        weight[speak, PIXEL] = LOUD

    record(tampered(order, brighten), run)
    report = audit(run, source)
    must(audit(honest, source).verdict == "match", "an honest run is no match")
    planted, control = success(order, run), success(order, honest)
    said = f"audit: {report.verdict} ({report.first}); backdoor {planted:.1%} (honest {control:.1%})"
    must(report.verdict == "cannot_reproduce", f"a frozen layer of which half is another; {said}")
    return said


if __name__ == "__main__":
    main(attack, __doc__)
