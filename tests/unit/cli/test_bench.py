"""tally bench training loss: files, plots, and going on where it was broken off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

JOB = """
import torch
from torch import nn
from tallystick.execution.job import Job

def build(settings):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            spread = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
            parameter.copy_(torch.sin(spread + index + int(settings["init_seed"])))
    x = torch.linspace(-1.0, 1.0, 48).reshape(8, 6)
    return Job(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), batch=lambda step: x,
        loss=lambda net, x: (net(x) - x.sum(1, keepdim=True)).square().mean(), steps=int(settings.get("steps", "6")),
        evaluate=lambda net: {"held_out_loss": float((net(x.to(next(net.parameters()).dtype)) ** 2).mean())},
    )
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(JOB)
    return path


def test_losses_are_written_with_a_plot_and_nothing_is_trained_twice(
    tally: Any, own: Path, tmp_path: Path
) -> None:
    asked = [
        "bench",
        "training",
        "loss",
        "--job",
        own,
        "--policy",
        "fp32",
        "--seeds",
        "2",
        "--out",
        tmp_path / "out",
    ]
    first = tally(*asked, "--json")
    rows = json.loads(first.out)["rows"]
    judged = [row for row in rows if row["must"] is not None]
    assert [row["measure"] for row in judged] == ["held-out loss, recorded: mean from plain fp32"]
    assert first.code == (0 if judged[0]["verdict"] == "met" else 1)
    document = json.loads((tmp_path / "out" / "losses.json").read_text())
    (found,) = document["jobs"]
    assert sorted((one["arithmetic"], one["seed"]) for one in found["trainings"]) == [
        ("fp32", 0), ("fp32", 1), ("plain fp32", 0), ("plain fp32", 1)
    ]  # fmt: skip
    assert all(one["points"][-1][0] == 6 for one in found["trainings"])
    ElementTree.fromstring((tmp_path / "out" / "losses-own.svg").read_text())

    again = tally(*asked, "--json")
    assert json.loads(again.out)["rows"] == rows
    assert "own.py: 0 of 4 trainings to do" in again.err


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["scaling", "--out", "x"], "--out x: only part loss writes files, and it is not among scaling"),
        (["loss", "--seeds", "0"], "--seeds"),
        (["loss", "--policy", "fp8"], "policy fp8: unknown"),
        (["losses"], "part losses: unknown; known are"),
    ],
)
def test_a_wrong_argument_is_named(tally: Any, more: list[str], reason: str) -> None:
    found = tally("bench", "training", *more)
    assert found.code == 2
    assert reason in found.err
