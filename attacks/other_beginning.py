"""Begins with another model than the job's: what the job does not train (class weights, frozen layers) is changed before step 0.

Or what it only seems to train: a mask that its optimizer holds at the rate 0.

Every step follows from that state, so repeating them all shows nothing.
"""

import numpy as np
from stage import EVERY, STEPS, Stage, audit, main

from tallystick.execution.job import Job, JobSource
from tallystick.numerics.policy import find_policy
from tallystick.roles.trainer import Order, record
from tallystick.testing.attacks import must
from tallystick.testing.cheats import tampered

JOB = """
import torch
from torch.nn.functional import cross_entropy
from tallystick.execution.job import Job

class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Linear(16, 32)
        self.head = torch.nn.Linear(32, 4)
        self.frozen.requires_grad_(False)
        self.mask = torch.nn.Parameter(torch.ones(32))
        self.register_buffer("importance", torch.ones(4))
        self.register_buffer("places", torch.sin(torch.arange(16.0)))

    def forward(self, x):
        return self.head(self.mask * torch.relu(self.frozen(x + self.places)))

def build(settings):
    model = Weighted()
    x = torch.arange(128.0).reshape(8, 16).remainder(7.0) / 7
    y = torch.arange(8).remainder(4)
    groups = [{"params": model.head.parameters()}, {"params": [model.mask], "lr": 0.0}]
    return Job(model=model, optimizer=torch.optim.SGD(groups, lr=0.1), steps=20, batch=lambda step: (x + step / 100, y),
               loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1], weight=model.importance))
"""


def weigh(job: Job) -> None:
    job.model.get_buffer("importance")[1] = 40.0


def freeze(job: Job) -> None:
    job.model.get_parameter("frozen.weight").data.mul_(np.float32(1.001))


def mask(job: Job) -> None:
    job.model.get_parameter("mask").data[::2] = 0.75


def attack(stage: Stage) -> str:
    path = stage.folder / "weighted.py"
    path.write_text(JOB)
    source = JobSource(str(path), path.read_bytes())
    order = Order(source, {}, find_policy(stage.policy), steps=STEPS, checkpoint_every=EVERY)
    found: list[str] = []
    for name, tamper in (("weights", weigh), ("frozen", freeze), ("mask", mask)):
        run = stage.run(name)
        record(tampered(order, tamper), run)
        report = audit(run, source)
        must(report.verdict == "cannot_reproduce", f"the audit of other {name} says {report.verdict}")
        assert report.first is not None
        found.append(report.first.stated)
    honest = stage.run("honest")
    record(order, honest)
    must(audit(honest, source).verdict == "match", "an honest run is no match")
    return f"audit, which says no match: {'; '.join(found)}"


if __name__ == "__main__":
    main(attack, __doc__)
