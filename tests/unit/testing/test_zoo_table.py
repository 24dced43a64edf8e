"""What the benchmark of other people's models says of one that two policies were tried on."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

ZOO = Path(__file__).parents[3] / "bench" / "zoo.py"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("zoo_of_a_test", ZOO)
    assert spec is not None and spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    return zoo


class Tiny(NamedTuple):
    name: str
    family: str
    build: Callable[[], Any]


class Model(nn.Module):
    """Has a loss, or none, and calls an operator that nobody can record where it is asked to."""

    def __init__(self, has_loss: bool, fails: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.has_loss, self.fails, self.calls = has_loss, fails, 0

    def forward(self, x: Tensor) -> Namespace:
        self.calls += 1
        if self.fails and self.calls > 1:
            raise TypeError("of the model")
        y = self.layer(x)
        return Namespace(loss=y.square().mean() if self.has_loss else None)


@pytest.mark.parametrize(
    ("has_loss", "fails", "state"),
    [(True, False, "recorded"), (False, False, "untrained"), (True, True, "failed")],
)
def test_what_does_not_train_without_a_recorder_either_is_no_failure_of_it(
    has_loss: bool, fails: bool, state: str, tmp_path: Path
) -> None:
    def build() -> Any:
        return Model(has_loss, fails), lambda step: {"x": torch.full((2, 4), 1.0 + step)}

    given = Namespace(policy="fp32", steps=2)
    found = loaded().done_with("record", tmp_path / "run", Tiny("f/m", "f", build), given)
    assert found["state"] == state, found


def test_a_refusal_hides_nothing_of_what_another_policy_came_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo = loaded()
    then = tmp_path / "then"
    then.mkdir()

    def write(folder: Path, **states: str) -> None:
        lines = [json.dumps({"name": n, "family": "f", "state": s, "why": s}) for n, s in states.items()]
        (folder / "record.jsonl").write_text("\n".join(lines) + "\n")

    given = Namespace(out=tmp_path, only="", then="fp64")
    write(tmp_path, a="match", b="refused", c="not_accepted", d="refused")
    write(then, b="match", c="match", d="refused")
    assert zoo.table(given) == 0
    assert "| all | 4 | 1 | 2 | 1 |" in capsys.readouterr().out
    write(tmp_path, a="match", b="untrained")
    write(then, b="untrained")
    assert zoo.table(given) == 0
    assert "b: untrained" in capsys.readouterr().out
    for first, second in (("refused", "not_accepted"), ("not_accepted", "refused")):
        write(tmp_path, a="match", b=first)
        write(then, b=second)
        assert zoo.table(given) == 1, "neither policy matches, and one does not refuse"
        assert "b: not_accepted" in capsys.readouterr().out
