"""tally bench training loss: files, plots, and going on where it was broken off."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tallystick_bench import honest as honest_runs
from tallystick_bench.commands import exchange_table
from tallystick_bench.exchange import ExchangeCost, PartyCost
from tallystick_bench.honest import HonestAudit, HonestMatrix

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_dispute_is_measured_and_its_limits_are_judged(tally: Any, tmp_path: Path) -> None:
    path = tmp_path / "learning.py"
    path.write_text(LEARNING)

    result = tally("bench", "evidence", "dispute", "--job", str(path), "--segment", "4", "--json")

    found = json.loads(result.out)
    assert result.code == (0 if found["met"] else 1), result.err
    assert (found["loser"], found["segment"], found["rounds"]["steps"]) == ("trainer", 4, 2)
    names = {kind["name"] for kind in found["kinds"]}
    assert {
        "tallystick::load",
        "tallystick::round",
        "tallystick::store",
        "tallystick::end",
        "aten::addmm",
    } <= names
    assert all(kind["seconds"] > 0.0 and kind["nbytes"] > 100 for kind in found["kinds"])
    assert {"list", "roots", "segment", "traced"} <= found["spent"]["trainer"].keys()
    limits = found["must_steps"], found["must_share"]
    within = (
        found["beyond_segment_steps"]["wall"] <= 3.0
        and max(found["share_of_time"], found["share_of_bytes"]) <= 0.01
    )
    assert limits == (3.0, 0.01)
    assert found["met"] == within


@pytest.mark.slow
def test_a_dispute_by_files_is_measured(tally: Any, tmp_path: Path) -> None:
    """Three processes; tests/e2e/test_exchange.py plays such disputes in every run of the tests."""
    path = tmp_path / "learning.py"
    path.write_text(LEARNING)

    result = tally("bench", "evidence", "exchange", "--job", str(path), "--segment", "4", "--json")

    found = json.loads(result.out)
    assert result.code == 0, result.err
    assert (found["loser"], found["segment"], found["rounds_per_level"]["steps"]) == ("trainer", 4, 2)
    trainer, auditor, referee = (found["parties"][who] for who in ("trainer", "auditor", "referee"))
    assert referee["questions"] == trainer["questions"] + auditor["questions"] >= found["rounds"]
    assert referee["received_bytes"] == trainer["sent_bytes"] + auditor["sent_bytes"]
    assert referee["sent_bytes"] == trainer["received_bytes"] + auditor["received_bytes"]
    assert all(0.0 < each["seconds"] < found["seconds"] for each in (trainer, auditor, referee))


def test_what_a_dispute_by_files_took_is_a_table() -> None:
    parties = {
        "trainer": PartyCost(7, 10_000, 2_000_000, 1.5, 1.25),
        "referee": PartyCost(9, 2_000_000, 10_000, 2.5, 2.0),
    }
    cost = ExchangeCost(
        "text", "fp32", 8, 9, {"steps": 3, "operators": 11}, parties, 12.5, 4_096, "trainer", "aten::mm"
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(exchange_table(cost, {"cores": 2}))
    page = " ".join(console.export_text().split())
    for said in (
        "text, fp32, step 4 of 8",
        "2,000,000",
        "9 rounds",
        "3 of steps, 11 of operators",
        "lost at aten::mm",
    ):
        assert said in page


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["debate"], "part debate: unknown; known are bundle, dispute, exchange"),
        (["dispute", "--policy", "fp33"], "fp33"),
        (["dispute", "--job", "no_such_job"], "no_such_job"),
        (["dispute", "--segment", "1"], "--segment"),
    ],
)
def test_a_wrong_argument_of_a_dispute_is_named(tally: Any, arguments: list[str], reason: str) -> None:
    result = tally("bench", "evidence", *arguments)

    assert result.code == 2
    assert reason in " ".join(result.err.split())


LEARNING = (
    JOB.replace(
        "x = torch.linspace(-1.0, 1.0, 48).reshape(8, 6)",
        "at = lambda step: torch.cos(torch.arange(48.0) * (step + 1)).reshape(8, 6)",
    )
    .replace("batch=lambda step: x,", "batch=at,")
    .replace('settings["init_seed"]', 'settings.get("init_seed", "0")')
)


@pytest.mark.parametrize("verdict", ["match", "not_accepted", None])
def test_the_table_of_honest_audits_shows_moves_beside_their_budget(
    tally: Any, monkeypatch: pytest.MonkeyPatch, verdict: str | None
) -> None:
    error = "audit: no" if verdict is None else None
    first = "step 3: roundings moved so far is 40 at most, stated 1234" if verdict == "not_accepted" else None
    moved, budget = (0, 0) if verdict is None else (1234, 5678)
    audit = HonestAudit(
        "digits", "fp32", "native", 20, verdict=verdict, moved=moved, budget=budget, first=first, error=error
    )
    monkeypatch.setattr(honest_runs, "measure_honest", lambda *_, **__: HonestMatrix((audit,)))

    answer = tally("bench", "honest")
    fields = json.loads(tally("bench", "honest", "--json").out)

    assert answer.code == (0 if verdict == "match" else 1)
    assert ("1,234 / 5,678" in " ".join(answer.out.split())) == (verdict is not None)
    refused = int(verdict == "not_accepted")
    assert f"0 false accusations and {refused} not accepted in 1 audits, must be 0" in answer.err
    assert (fields["not_accepted"], fields["met"], fields["audits"][0]["budget"]) == (
        refused,
        verdict == "match",
        budget,
    )
