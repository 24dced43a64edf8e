"""A trainer gains nothing by what it withholds: not its logs, its states, nor a first state that its job cannot have."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tallystick.cli.main import main
from tallystick.commit.state import Entry, summarise
from tallystick.dispute.exchange import Answer, Question, unable
from tallystick.dispute.terms import Party
from tallystick.errors import Mismatch
from tallystick.execution.job import find_source
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session import session
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.roles import step_judge
from tallystick.roles.auditor import audit
from tallystick.roles.claim import write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.panel import Panel
from tallystick.roles.parties import Respondent
from tallystick.roles.referee import DisputeResult
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import (
    EditedWeights,
    claim_path,
    forge,
    forge_state,
    honest_defence,
)

SOURCE = find_source("digits")
Reply = Callable[[Respondent, Question], Answer]


def order(steps: int, every: int) -> Order:
    return Order(
        SOURCE, {"width": "4", "batch": "8"}, find_policy("fp32"), steps=steps, checkpoint_every=every
    )


def trainer_says(
    monkeypatch: pytest.MonkeyPatch, method: str, said: Answer, key: str, *numbers: int | None
) -> None:
    """Have the trainer answer so where the question's ``key`` is one of the numbers."""
    own: Reply = getattr(Respondent, method)

    def answer(party: Respondent, question: Question) -> Answer:
        mine = party.party == "trainer" and question.body.get(key) in numbers
        return said if mine else own(party, question)

    monkeypatch.setattr(Respondent, method, answer)


def judged(run: RunDirectory, level: str = "operators") -> DisputeResult:
    return dispute(run, claim_path(run), SOURCE, defence=honest_defence(SOURCE), level=level)


def misstated(each: StepRecord) -> StepRecord:
    return replace(each, fingerprint=f"{int(each.fingerprint, 16) ^ 1:016x}") if each.step == 1 else each


@pytest.mark.parametrize("is_false", [True, False], ids=["and a false state", "alone"])
@pytest.mark.parametrize("level", [pytest.param("operators", marks=pytest.mark.slow), "steps"])
def test_a_false_record_whose_logs_are_withheld_convicts(
    level: str, is_false: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps neither itself from being judged nor the false state behind it."""
    run = RunDirectory(tmp_path / "run")
    if is_false:
        EditedWeights().run(order(4, 2), run)
    else:
        record(order(4, 2), run)
    forge(run, misstated)
    write_claim(run, SOURCE, claim_path(run))
    trainer_says(monkeypatch, "_claim", Answer({"commitment": "ab" * 32}), "index", 1)
    trainer_says(monkeypatch, "_frame", unable("the disk is broken"), "step", 0, 1)
    found = judged(run, level)

    assert (found.loser, found.outcome, found.step) == ("trainer", "fault", 1), found.reason
    assert "a log that leads there from 0 cannot be used: the disk is broken" in found.reason


def test_a_false_record_that_convicts_nobody_keeps_no_false_state_from_being_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    EditedWeights().run(order(4, 2), run)
    forge(run, lambda each: replace(each, loss="0x1.0000000000000p+0") if each.step == 1 else each)
    write_claim(run, SOURCE, claim_path(run))
    monkeypatch.setattr(Panel, "find_dissent", lambda *asked, **more: None)
    monkeypatch.setattr(
        step_judge, "find_unsteady", lambda run, source, step, *more: "they differ" if step == 1 else None
    )
    found = judged(run, "steps")

    assert (found.loser, found.outcome, found.step) == ("trainer", "fault", 3), found.reason


class Opens:
    """A seat whose checkpoints all open."""

    def witness_at(self, index: int) -> None:
        return None

    def find_unopened_checkpoint(self, index: int) -> str | None:
        return None


@pytest.mark.parametrize(("answers", "party", "withheld"), [
    (True, "trainer", True), (False, "trainer", False), (True, "auditor", False),
])  # fmt: skip
def test_a_trainer_that_answers_itself_has_every_state_that_it_claims(
    answers: bool, party: Party, withheld: bool
) -> None:
    seats: Any = {"trainer": Opens(), "auditor": Opens()}
    nothing: Any = None
    judge = step_judge.StepJudge(nothing, nothing, nothing, seats, answers_itself=answers)
    found = judge._find_unopened(party, 1)  # pyright: ignore[reportPrivateUsage]
    assert found == ("the state that it claims after 1 steps is not handed over" if withheld else None)


def narrowest(run: RunDirectory) -> None:
    """Record a run whose bands fit nobody else's noise, then treble its last weights and their fingerprint."""
    honest = session.Session.recording_context

    def make(self: session.Session, before: GridTable) -> Any:
        made = honest(self, before)
        narrow = {
            place: replace(grid, band=self.policy.gradient_band[0])
            if place[0] == Kind.GRADIENT and not is_noise_only(grid) and not grid.residue_bits
            else grid
            for place, grid in made.table.sites.items()
        }
        made.table, made._grids = GridTable(narrow), dict(narrow)  # pyright: ignore[reportPrivateUsage]
        return made

    with patch.object(session.Session, "recording_context", make):
        record(order(2, 2), run)
    entries = dict(run.load_checkpoint(2))
    for name, entry in entries.items():
        if name.startswith("model/") and entry.dtype == "F32":
            data = (3 * np.frombuffer(entry.data, "<f4")).astype("<f4").tobytes()
            entries[name] = Entry(name, "F32", entry.shape, data)
    forge_state(run, 2, entries)


@pytest.mark.slow
def test_a_state_whose_summary_is_handed_over_and_whose_entries_are_not_is_no_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can see how far it is from what noise explains; so its trainer has to show it."""
    monkeypatch.setattr(Panel, "find_dissent", lambda *asked, **more: None)
    monkeypatch.setattr(step_judge, "find_unsteady", lambda *asked: None)
    run = RunDirectory(tmp_path / "run")
    narrowest(run)
    write_claim(run, SOURCE, claim_path(run))
    trainer_says(monkeypatch, "_committed", unable("cannot"), "none", None)
    assert judged(run).loser == "trainer"

    trainer_says(monkeypatch, "_entries", unable("the disk is broken"), "index", 2)
    found = judged(run)

    assert (found.loser, found.outcome, found.step) == ("trainer", "fault", 1), found.reason
    assert "not handed over" in found.reason


def extra(entries: dict[str, Entry]) -> None:
    entries["model/zzz"] = Entry("model/zzz", "F32", (1,), bytes(4))


def grids(entries: dict[str, Entry]) -> None:
    own = entries["document/grids"]
    entries[own.name] = Entry(own.name, own.dtype, (len(own.data) - 1,), bytes(own.data)[:-1])


def missing(entries: dict[str, Entry]) -> None:
    del entries[next(name for name in sorted(entries) if name.startswith("model/"))]


def gridless(entries: dict[str, Entry]) -> None:
    own = entries["document/grids"]
    table = GridTable.decode(bytes(own.data))
    data = GridTable({place: grid for place, grid in table.sites.items() if place[0] != Kind.LOSS}).encode()
    entries[own.name] = Entry(own.name, own.dtype, (len(data),), data)


def folded(entries: dict[str, Entry]) -> None:
    own = entries["document/cursor"]
    entries[own.name] = Entry(own.name, own.dtype, (1, len(own.data)), own.data)


@pytest.mark.parametrize("edit", [extra, grids, missing, gridless, folded], ids=lambda edit: edit.__name__)
def test_a_first_state_that_the_job_cannot_load_is_a_mismatch(
    edit: Callable[[dict[str, Entry]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not an error of the auditor's: it must be able to say so."""
    run, claim = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "claim")
    record(order(1, 1), run)
    entries = dict(run.load_checkpoint(0))
    edit(entries)
    run.write_checkpoint(0, list(entries.values()))
    own = run.load_transcript()
    specification = replace(own.specification, initial_state=summarise(entries.values()).root().hex())
    forged = Transcript(specification, own.records)
    run.write_document(run.specification_path, specification.encode())
    run.write_document(run.statement_path, forged.statement().encode())

    with pytest.raises(Mismatch, match="first state that the run commits to is none of its job's"):
        write_claim(run, SOURCE, claim)
    assert audit(run, SOURCE).verdict == "mismatch"
    code = main(["audit", str(run.path), "--claim", str(tmp_path / "other"), "--json"])
    assert (code, json.loads(capsys.readouterr().out)["kind"]) == (1, "Mismatch")


@pytest.mark.slow
def test_an_honest_trainer_makes_a_state_again_whose_file_it_has_lost(tmp_path: Path) -> None:
    """From the state before, by its own logs; a false one comes to another root, and stays what nobody can open."""
    run = RunDirectory(tmp_path / "run")
    record(order(4, 2), run)
    claim = claim_path(run)
    write_claim(run, SOURCE, claim)
    entries = dict(claim.load_checkpoint(4))
    name = next(
        each for each in sorted(entries) if each.startswith("model/") and entries[each].dtype == "F32"
    )
    values = np.frombuffer(bytes(entries[name].data), dtype="<f4").copy()
    values[0] += 0.5
    entries[name] = Entry(name, "F32", entries[name].shape, values.tobytes())
    forge_state(claim, 4, entries)
    run.checkpoint_path(2).unlink()
    with (
        patch.object(Panel, "find_dissent", lambda *_, **__: None),
        patch.object(step_judge, "find_unsteady", lambda *_, **__: None),
    ):
        assert judged(run, "steps").loser == "auditor"
