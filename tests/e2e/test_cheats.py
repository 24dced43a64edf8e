"""Every shipped cheat is caught at the right step and the right party is blamed; honest runs are not accused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tallystick.commit.encoding import hex_float
from tallystick.commit.state import Entry, summarise
from tallystick.diagnosis.explain import explain_audit
from tallystick.dispute.operator_list import BATCH, ROUND, SGD
from tallystick.dispute.record import parse_dispute, verify_dispute
from tallystick.dispute.verdict import parse_verdict, verify_verdict
from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.job import Job, find_source
from tallystick.execution.rounding import context
from tallystick.execution.snapshot import load_state
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.roles import step_judge
from tallystick.roles.acceptable_states import AcceptableStates
from tallystick.roles.audit_report import EVERYTHING, About, Deviation
from tallystick.roles.auditor import audit
from tallystick.roles.claim import write_claim
from tallystick.roles.comparison import is_excused
from tallystick.roles.judge import dispute
from tallystick.roles.replay import Replay, open_replay
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import StepRecord
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import CHEATS, claim_path, forge, forge_state, tampered

SETTINGS = {"width": "8", "batch": "16"}
STEPS = 14
EVERY = 5
AT = 7
EXPECTED_VERDICT = {
    "other_data": {"mismatch"},
    "poisoned_label": {"mismatch"},
    "other_rate": {"mismatch", "log_violation"},  # a raised rate also puts state entries out of reach
    "skipped_steps": {"mismatch"},
    "edited_weights": {"mismatch"},
    "forged_entry": {"log_violation"},
    "lying_auditor": {"match"},
}
# Operator and module in which the lie is, where the trainer defends itself with the program that it really ran.
WHERE = {
    "other_data": (BATCH, "batch[0]"),
    "poisoned_label": (BATCH, "batch[1]"),
    "other_rate": (SGD, "conv1.weight"),
    "skipped_steps": (
        ROUND,
        "model/buffer/norm1.running_mean",
    ),  # where the first gradient's rounding should stand
    "edited_weights": (SGD, "hidden.weight"),
    "forged_entry": (ROUND, "gradient of conv1.weight"),
}
# The loss, coarse, goes with the log; the gradient needs other parities than the log's, which are against the rules.
ALSO_UNDER_BF16 = {name: {"log_violation"} for name in ("other_data", "poisoned_label", "skipped_steps")}


def order(policy: str) -> Order:
    return Order(find_source("digits"), SETTINGS, find_policy(policy), steps=STEPS, checkpoint_every=EVERY)


@pytest.fixture(scope="module", params=["fp32", "fp64", "bf16"])
def honest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = RunDirectory(tmp_path_factory.mktemp("honest") / request.param)
    record(order(request.param), run)
    return run


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("name", sorted(CHEATS))
def test_a_cheat_is_caught_at_its_step_and_its_party_is_blamed(
    name: str, policy: str, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    cheat = CHEATS[name](AT)
    crime = cheat.run(order(policy), run)
    source = order(policy).source

    report = audit(run, source)
    claim = claim_path(run)
    if name != "lying_auditor":
        write_claim(run, source, claim)
    result = dispute(run, claim, source, defence=cheat.defence(source))

    if policy == "bf16" and name == "forged_entry":
        # Residues that move more than noise break no rule, and lead to its state: not accepted, and nobody is convicted.
        assert report.verdict == "not_accepted" and report.first is not None
        assert (report.first.step, result.loser) == (crime, "none")
        return
    also = ALSO_UNDER_BF16.get(name, set[str]()) if policy == "bf16" else set[str]()
    assert report.verdict in EXPECTED_VERDICT[name] | also
    if report.verdict != "match":
        assert report.first is not None
        assert report.first.step == crime
    assert (result.loser, result.step) == (cheat.liar, crime)
    if (policy, name) == ("bf16", "skipped_steps"):  # whose log cannot be followed: no game is needed
        assert result.objection is not None and result.objection.site == "log"
        assert not result.rounds_per_level
        return
    assert result.rounds_per_level["checkpoints"] <= 2  # ceil(log2 3)
    assert result.rounds_per_level["steps"] <= 3  # ceil(log2 5)
    found = result.operator
    assert found is not None
    if policy == "bf16":
        assert "has no operator table" in str(found.fields()["fallback"])
        return
    if name == "lying_auditor":
        assert found.loser is None  # it found nothing to object to, and the whole step was judged
        assert result.record is None
        return
    assert result.rounds_per_level["operators"] <= (found.cost.operators - 1).bit_length()
    assert found.operator is not None
    assert (found.loser, found.operator.name, found.operator.module) == ("trainer", *WHERE[name])
    assert result.record is not None
    assert parse_dispute(result.record).encode() == result.record
    checks = verify_dispute(parse_dispute(result.record), run_root=run.load_transcript().root())
    assert [check.outcome for check in checks[:4]] == ["passed"] * 4
    needs_job = name in ("other_data", "poisoned_label", "other_rate", "skipped_steps")
    assert checks[4].outcome == ("needs the job" if needs_job else "passed")
    if name == "forged_entry":
        bare = replace(
            parse_dispute(result.record), frame=b"", grids=()
        )  # whoever passes a record on may not drop the log
        assert [check.outcome for check in verify_dispute(bare)[3:]] == [
            "failed",
            "not reached",
            "not reached",
        ]


ADAMW = """
import torch
from torch.nn.functional import cross_entropy
from tallystick.execution.job import Job

def build(settings):
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-32, 32, p.shape, generator=generator) / 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    def batch(step):
        drawn = torch.Generator().manual_seed(step)
        return torch.randint(-16, 16, (16, 6), generator=drawn) / 16, torch.randint(0, 3, (16,), generator=drawn)

    return Job(model=model, optimizer=optimizer, batch=batch, steps=14,
               loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
               scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=14))
"""


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("name", sorted(CHEATS))
def test_every_cheat_is_caught_under_adamw_and_its_cause_is_looked_for(
    name: str, policy: str, tmp_path: Path
) -> None:
    """Two moments, betas, decoupled decay: what is tried out by repetition has other numbers than under plain descent."""
    (tmp_path / "job.py").write_text(ADAMW)
    source, run = find_source(str(tmp_path / "job.py")), RunDirectory(tmp_path / "run")
    cheat = CHEATS[name](AT)
    crime = cheat.run(Order(source, {}, find_policy(policy), steps=STEPS, checkpoint_every=EVERY), run)

    report = audit(run, source)
    claim = claim_path(run)
    if name != "lying_auditor":
        write_claim(run, source, claim)
    result = dispute(run, claim, source, defence=cheat.defence(source))
    found = explain_audit(run, source, report, seconds=2.0)

    if policy == "bf16" and name == "forged_entry":
        assert report.verdict == "not_accepted" and report.first is not None
        assert (report.first.step, result.loser) == (crime, "none")
        return
    also = ALSO_UNDER_BF16.get(name, set[str]()) if policy == "bf16" else set[str]()
    assert report.verdict in EXPECTED_VERDICT[name] | also
    assert (result.loser, result.step) == (cheat.liar, crime)
    if report.verdict == "match":
        assert found is None
        return
    assert report.first is not None and found is not None
    assert report.first.step == found.step == crime
    assert found.findings, "and the search ends with something to say, whatever the optimizer's numbers are"
    assert not [note for note in found.notes if "ended early" in note]


def test_a_false_schedule_convicts_before_any_state_is_looked_at(tmp_path: Path) -> None:
    """The trainer's state is the job's own and the auditor's is not: what the trainer says of the step is false all the same."""
    run, claim = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "claim")
    source = order("fp32").source
    record(order("fp32"), run)
    write_claim(run, source, claim)
    entries = claim.load_checkpoint(EVERY)
    name = "model/hidden.weight"
    values = np.frombuffer(bytes(entries[name].data), dtype="<f4") * np.float32(1.5)
    forge_state(claim, EVERY, {**entries, name: Entry(name, "F32", entries[name].shape, values.tobytes())})
    at = EVERY - 1
    assert dispute(run, claim, source, level="steps").loser == "auditor"

    def raised(r: StepRecord) -> StepRecord:
        rates = [
            (g, n, float.fromhex(v) * 2 if n == "lr" and isinstance(v, str) else v) for g, n, v in r.schedule
        ]
        schedule = tuple((g, n, hex_float(v) if isinstance(v, float) else v) for g, n, v in rates)
        return replace(r, schedule=schedule) if r.step == at else r

    forge(run, raised)
    result = dispute(run, claim, source, level="steps")

    assert (result.loser, result.step) == ("trainer", at)
    assert "hyper-parameter lr of group 0" in result.reason


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16"])
def test_a_header_that_lies_about_a_scale_can_be_disputed(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coarser grids steer by rounding; the entries themselves are honest, and obeying the header gives the same state."""
    run, claim = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "claim")
    honest, real = context.settled_scales, context.RecordingContext.round

    def lying(self: context.RecordingContext, kind: Kind, *arguments: Any, **more: Any) -> None:
        wide = kind == Kind.GRADIENT and more["name"].startswith(f"step {AT}: gradient of hidden.weight")
        with monkeypatch.context() as inside:
            if wide:
                inside.setattr(context, "settled_scales", lambda *given: honest(*given) + 7)
            real(self, kind, *arguments, **more)

    with monkeypatch.context() as while_recording:
        while_recording.setattr(context.RecordingContext, "round", lying)
        record(order(policy), run)
    source = order(policy).source
    report = audit(run, source)
    write_claim(run, source, claim)

    result = dispute(run, claim, source)

    assert report.first is not None
    assert (report.verdict, report.first.step) == ("log_violation", AT)
    assert "hidden.weight" in report.first.subject
    assert (result.loser, result.step, result.outcome) == ("trainer", AT, "fault")
    whole = dispute(
        run, claim, source, level="steps"
    )  # a header is not one operator's: the whole step shows it
    assert (whole.loser, whole.step, whole.outcome) == ("trainer", AT, "fault")
    assert "is too wide" in whole.reason


def test_an_honest_run_and_an_honest_claim_leave_nobody_to_blame(
    honest: RunDirectory, tmp_path: Path
) -> None:
    source = find_source("digits")
    claim = RunDirectory(tmp_path / "claim")

    write_claim(honest, source, claim)
    result = dispute(honest, claim, source)

    assert audit(honest, source).verdict == "match"
    assert (result.loser, result.step, result.rounds) == ("none", None, 0)


def test_a_mismatch_in_one_segment_does_not_hide_the_next(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    CHEATS["other_data"](AT).run(order("fp32"), run)

    report = audit(run, find_source("digits"))

    assert [segment.verdict for segment in report.segments] == ["match", "mismatch", "match"]


def test_a_state_one_rounding_away_at_an_ambiguous_element_is_acceptable_and_elsewhere_is_not(
    honest: RunDirectory, tmp_path: Path
) -> None:
    """Two auditors' claims that differ from the trainer in one weight: nobody's log covers it, so the step decides."""
    source = find_source("digits")
    claim = RunDirectory(tmp_path / "claim")
    write_claim(honest, source, claim)
    entries = claim.load_checkpoint(STEPS)
    name = "model/hidden.weight"
    values = np.frombuffer(bytes(entries[name].data), dtype="<f4").copy()
    values[3] = np.nextafter(values[3], np.float32(np.inf))
    entries[name] = Entry(name, "F32", entries[name].shape, values.tobytes())
    forge_state(claim, STEPS, entries)

    result = dispute(honest, claim, source)

    assert (result.loser, result.step) == ("auditor", STEPS - 1)
    assert "hidden.weight" in result.reason


def test_what_honest_arithmetic_can_give_is_acceptable_and_nothing_else(tmp_path: Path) -> None:
    """Under bf16 every gradient and every statistic may be rounded two ways; each other value is a fault where it stands."""
    source, run = find_source("digits"), RunDirectory(tmp_path / "run")
    record(Order(source, SETTINGS, find_policy("bf16"), steps=2, checkpoint_every=1), run)
    replay = open_replay(run.load_specification(), source)
    assert not isinstance(replay, Deviation)
    load_state(replay.session, run.load_checkpoint(1))
    states = AcceptableStates(replay, run.load_frames(run.load_transcript(), 1, 2)[1])
    replay.session.close()
    own = dict(states.entries)

    def fault(*edits: tuple[str, int, float]) -> str | None:
        stated = dict(own)
        for name, at, value in edits:
            values = np.frombuffer(bytes(stated[name].data), dtype="<f4").copy()
            values[at] = value
            stated[name] = Entry(name, "F32", stated[name].shape, values.tobytes())
        found = states.find_fault(stated)
        return None if found is None else found.subject

    def other(name: str, at: int) -> tuple[str, int, float]:
        return name, at, float(np.frombuffer(states.other_entries[name].data, dtype="<f4")[at])

    assert states.find_fault(run.load_checkpoint(2)) is None
    # A gradient rounded the other way moves the weight and its momentum; one without the other no step gives.
    weight, momentum = "model/hidden.weight", "optimizer/hidden.weight/momentum_buffer"
    pair = [np.frombuffer(e[weight].data, dtype="<f4") for e in (own, states.other_entries)]
    at = int(np.flatnonzero(pair[0] != pair[1])[0])
    assert fault(other(weight, at), other(momentum, at)) is None
    assert fault(other(weight, at)) == weight
    assert fault(other(momentum, at)) == momentum
    place = (int(Kind.GRADIENT), states.parameters.index("hidden.weight"))
    may_flip = states.values[place]
    others = may_flip.index != at
    states.values[place] = type(may_flip)(
        may_flip.index[others], may_flip.lower[others], may_flip.upper[others]
    )
    assert fault(other(weight, at), other(momentum, at)) in (weight, momentum)  # far from a boundary
    # A statistic is one of two neighbours.
    name = "model/buffer/norm2.running_mean"
    (place,) = states.buffers[name]
    near = states.values[place]
    at, lower, upper = int(near.index[0]), float(near.lower[0]), float(near.upper[0])
    assert lower < upper
    assert (fault((name, at, lower)), fault((name, at, upper))) == (None, None)
    assert fault((name, at, 2 * upper - lower)) == fault((name, at, 2 * lower - upper)) == name
    # What is no float of a tensor is as the step leaves it, in its own form.
    for name in ("model/buffer/norm1.num_batches_tracked", "document/grids"):
        entry = own[name]
        turned = bytes([bytes(entry.data)[0] ^ 1]) + bytes(entry.data)[1:]
        found = states.find_fault({**own, name: Entry(name, entry.dtype, entry.shape, turned)})
        assert found is not None and found.subject == name
    wide = own[weight]
    for stated in (
        {**own, weight: Entry(weight, wide.dtype, wide.shape[::-1], wide.data)},
        {name: entry for name, entry in own.items() if name != weight},
    ):
        found = states.find_fault(stated)
        assert found is not None and found.subject == weight


ONE_NUMBER = """
import torch
from tallystick.jobs import digits

def build(settings):
    job = digits.build(settings)
    job.optimizer = torch.optim.NAdam(job.model.parameters(), lr=1e-3)
    job.scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1000)
    return job
"""


@pytest.mark.parametrize("policy", ["fp32", "fp64"])
def test_a_number_that_an_optimizer_keeps_for_a_whole_tensor_is_judged_too(
    policy: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(ONE_NUMBER)
    source, run = find_source(str(tmp_path / "job.py")), RunDirectory(tmp_path / "run")
    record(Order(source, SETTINGS, find_policy(policy), steps=2, checkpoint_every=1), run)
    replay = open_replay(run.load_specification(), source)
    assert not isinstance(replay, Deviation)
    load_state(replay.session, run.load_checkpoint(1))
    states = AcceptableStates(replay, run.load_frames(run.load_transcript(), 1, 2)[1])
    replay.session.close()
    honest, name = run.load_checkpoint(2), "optimizer/conv2.weight/mu_product"
    assert states.find_fault(honest) is None
    assert honest[name].shape == ()
    false = (np.frombuffer(bytes(honest[name].data), dtype="<f4") * np.float32(1.5)).tobytes()
    found = states.find_fault({**honest, name: Entry(name, "F32", (), false)})
    assert found is not None
    assert (found.subject, found.step) == (name, 1)


@pytest.mark.slow
def test_a_fault_that_the_judges_own_noise_explains_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = find_source("digits"), RunDirectory(tmp_path / "run")
    record(Order(source, SETTINGS, find_policy("fp64"), steps=2, checkpoint_every=1), run)
    false_state, false_loss = RunDirectory(tmp_path / "state"), RunDirectory(tmp_path / "loss")
    for claim in (false_state, false_loss):
        write_claim(run, source, claim)
    forge(false_loss, lambda r: replace(r, loss="0x1.0000000000000p+0") if r.step == 1 else r)
    entries = false_state.load_checkpoint(2)
    name = "model/hidden.weight"
    values = np.frombuffer(bytes(entries[name].data), dtype="<f4").copy()
    values[3] = np.nextafter(values[3], np.float32(np.inf))
    entries[name] = Entry(name, "F32", entries[name].shape, values.tobytes())
    forge_state(false_state, 2, entries)
    contradicted = RunDirectory(tmp_path / "contradicted")
    write_claim(run, source, contradicted)
    contradicted.write_checkpoint(2, list(entries.values()))
    root = summarise(entries.values()).root().hex()
    forge(contradicted, lambda r: replace(r, state_root=root) if r.step == 1 else r)
    far = RunDirectory(tmp_path / "far")
    write_claim(run, source, far)
    forge_state(far, 2, {**entries, name: Entry(name, "F32", entries[name].shape, (3 * values).tobytes())})

    def ruled(claim: RunDirectory, *noisy: str) -> tuple[str, str]:
        found = [
            Deviation(1, "cannot_reproduce", site, None, "noise 1", "band 0.1", "noise") for site in noisy
        ]
        monkeypatch.setattr(step_judge, "find_noisy_sites", lambda *given: found)
        result = dispute(run, claim, source, level="steps")
        return result.loser, result.outcome

    nobody, auditor = ("none", "cannot_reproduce"), ("auditor", "fault")
    for claim in (false_state, false_loss):
        assert ruled(claim) == auditor
        assert ruled(claim, EVERYTHING) == nobody
    assert ruled(false_state, "gradient hidden.weight") == nobody
    # No noise makes a record contradict its own state, or a step many times as long as it is.
    assert ruled(contradicted, EVERYTHING) == ruled(far, EVERYTHING) == auditor
    for claim in (false_state, false_loss):
        assert ruled(claim, "gradient conv1.weight") == auditor  # noise elsewhere explains nothing here
    # Nor does it have a party lose the file of a state that it committed to.
    far.checkpoint_path(2).unlink()
    assert ruled(far, EVERYTHING) == auditor
    forge_state(far, 2, {**entries, name: Entry(name, "F32", entries[name].shape, (3 * values).tobytes())})
    # Nor does a job that is another one in each process.
    monkeypatch.setattr(step_judge, "find_unsteady", lambda *given: "two processes do not agree")
    assert ruled(false_state) == ruled(far) == ("none", "not_proven")
    assert ruled(contradicted) == auditor


NOT_NOISE: dict[str, About] = {
    "batch digest": "data",
    "hyper-parameter lr of group 0": "schedule",
    "skipped optimizer": "schedule",
    "micro-batches": "schedule",
    "evidence": "committed state",
}


@pytest.mark.parametrize(
    ("noisy", "excused", "held"),
    [
        (
            "gradient 1.weight",
            ("model/1.weight", "optimizer/1.weight/momentum_buffer", "gradient of 1.weight"),
            ("model/11.weight", "gradient of 11.weight", "model/1.weight_g", "optimizer/11.weight/exp_avg"),
        ),
        ("buffer model/buffer/a.mean", ("model/buffer/a.mean",), ("model/buffer/a.mean2", "model/a.mean")),
        ("activation 3 at relu", ("model/a",), ("batch digest", "hyper-parameter lr of group 0", "evidence")),
        ("loss", ("loss",), ("model/1.weight", "log_violation")),  # a site whose name is its kind
        (EVERYTHING, ("loss",), ("skipped optimizer", "micro-batches")),  # a loss of twice as much, too
    ],
)
def test_noise_excuses_what_it_can_reach(noisy: str, excused: tuple[str, ...], held: tuple[str, ...]) -> None:
    def is_free(subject: str) -> bool:
        about = NOT_NOISE.get(subject, "state")
        one = Deviation(1, "mismatch", subject, 0 if about == "state" else None, "0x1", "0x2", about)
        site = replace(one, subject=noisy, about="noise")
        of_form = subject.startswith("model/") and is_excused(replace(one, element=None), [site])
        assert not of_form  # which entries a state has, and their shapes, no noise reaches
        return is_excused(one, [site])

    assert all(is_free(subject) for subject in excused)
    assert not any(is_free(subject) for subject in held)


def test_runs_of_different_orders_cannot_be_disputed(honest: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "other")
    record(
        Order(
            find_source("digits"),
            {**SETTINGS, "batch": "8"},
            find_policy("fp32"),
            steps=5,
            checkpoint_every=5,
        ),
        other,
    )

    with pytest.raises(InvalidInput, match="their specifications differ in"):
        dispute(honest, other, find_source("digits"))


def test_a_verdict_is_one_canonical_json_object(honest: RunDirectory, tmp_path: Path) -> None:
    claim = RunDirectory(tmp_path / "claim")
    write_claim(honest, find_source("digits"), claim)

    verdict = json.loads(dispute(honest, claim, find_source("digits")).encode())

    assert verdict["loser"] == "none"
    assert verdict["format"] == "tallystick/dispute-verdict/1"


def test_an_audit_of_an_edited_job_cannot_reproduce_and_does_not_accuse(honest: RunDirectory) -> None:
    source = find_source("digits")
    edited = type(source)(source.path, source.source + b"\n# edited\n")

    report = audit(honest, edited)

    assert report.verdict == "cannot_reproduce", report.first
    assert report.first is not None
    assert report.first.subject == "program file tallystick/jobs/digits.py"


def test_only_committed_checkpoints_bound_a_segment(honest: RunDirectory) -> None:
    assert audit(honest, find_source("digits"), steps=(5, 10)).verdict == "match"
    with pytest.raises(InvalidInput, match="4 is no committed checkpoint"):
        audit(honest, find_source("digits"), steps=(4, 10))


@pytest.mark.parametrize("setting", ["lr", "weight_decay"])
def test_a_first_state_with_another_hyper_parameter_is_not_the_jobs(setting: str, tmp_path: Path) -> None:
    """Every later step follows from it, so repeating the steps alone would show nothing."""
    source = find_source("digits")
    run, claim, honest = (RunDirectory(tmp_path / name) for name in ("run", "claim", "honest"))

    def order() -> Order:
        return Order(source, {}, find_policy("fp64"), steps=4, checkpoint_every=2)

    def change(job: Job) -> None:
        for group in job.optimizer.param_groups:
            group[setting] = 4.0 * group[setting] + 0.01

    record(tampered(order(), change), run)
    report = audit(run, source)
    assert report.verdict == "mismatch"
    assert report.first is not None
    assert (report.first.step, report.first.subject) == (0, "first state")
    assert setting in report.first.stated

    write_claim(run, source, claim)
    ruling = dispute(run, claim, source)
    assert (ruling.loser, ruling.step) == ("trainer", 0)
    assert setting in ruling.reason
    written = parse_verdict(ruling.encode())
    statements = [each.load_transcript().statement() for each in (run, claim)]
    specification = run.load_specification()
    assert "first state" in verify_verdict(written, statements[0], statements[1], specification)

    record(order(), honest)  # the control
    assert audit(honest, source).verdict == "match"


def test_a_momentum_that_no_step_made_is_no_match(tmp_path: Path) -> None:
    """The first step would carry it over into the weights, and repeats to the last bit."""
    source, run = find_source("digits"), RunDirectory(tmp_path / "run")

    def change(job: Job) -> None:
        for group in job.optimizer.param_groups:
            for parameter in group["params"]:
                job.optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)

    ordered = Order(source, SETTINGS, find_policy("fp64"), steps=2, checkpoint_every=2)
    record(tampered(ordered, change), run)
    report = audit(run, source)
    assert report.verdict == "cannot_reproduce"
    assert report.first is not None
    assert "momentum_buffer: the optimizer has been at work before" in report.first.stated


def test_a_judge_who_cannot_repeat_an_agreed_step_blames_nobody_for_its_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, run, claim = (
        find_source("digits"),
        RunDirectory(tmp_path / "run"),
        RunDirectory(tmp_path / "claim"),
    )
    record(Order(source, SETTINGS, find_policy("fp64"), steps=4, checkpoint_every=2), run)
    write_claim(run, source, claim)
    forge(claim, lambda each: replace(each, loss="0x1.0000000000000p+0") if each.step == 3 else each)
    ruling = dispute(run, claim, source)
    assert (ruling.loser, ruling.outcome, ruling.step) == ("auditor", "fault", 3)  # the control

    def follow(self: Replay, stated: StepRecord, frame: bytes) -> None:
        raise Nondeterminism("this machine's data differ from one reading to the next")

    monkeypatch.setattr(Replay, "follow", follow)
    ruling = dispute(run, claim, source)
    assert (ruling.loser, ruling.outcome, ruling.step) == ("none", "cannot_reproduce", 3)


def test_a_judge_whose_own_step_comes_to_no_end_blames_nobody(tmp_path: Path) -> None:
    """The job gives the judge, and nobody else, a loss that is not a number: it cannot tell who of the two is right."""
    order = Order(find_source("digits"), SETTINGS, find_policy("fp64"), steps=3, checkpoint_every=1)
    run, claim = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "claim")
    record(order, run)

    def other_data(job: Job) -> None:
        honest = job.batch
        job.batch = lambda step: honest(step + (1000 if step == 1 else 0))

    def poison(job: Job) -> None:
        honest = job.loss
        job.loss = lambda *given: honest(*given) * float("nan")

    write_claim(run, tampered(order, other_data).source, claim)
    ruling = dispute(run, claim, order.source)
    assert (ruling.loser, ruling.outcome, ruling.step) == ("auditor", "fault", 1)  # the control
    ruling = dispute(run, claim, tampered(order, poison).source)
    assert (ruling.loser, ruling.outcome, ruling.step) == ("none", "cannot_reproduce", 1)
    assert "cannot repeat the job's own step" in ruling.reason


def test_an_epsilon_without_end_trains_nothing_and_is_not_the_jobs(tmp_path: Path) -> None:
    """Adam then divides every update by infinity: each step repeats to the last bit, and none of them moves a weight."""
    source = find_source("text")
    settings = {"width": "16", "layers": "1", "heads": "2", "block": "8", "batch": "2", "weight_decay": "0"}

    def order() -> Order:
        return Order(source, settings, find_policy("fp64"), steps=2, checkpoint_every=2)

    def change(job: Job) -> None:
        for group in job.optimizer.param_groups:
            group["eps"] = math.inf

    run, honest = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "honest")
    record(tampered(order(), change), run)
    record(order(), honest)
    for made, moved in ((run, False), (honest, True)):
        first, last = (
            made.load_committed(point.steps_done, point.state_root)
            for point in made.load_transcript().checkpoints()
        )
        models = [name for name in first if name.startswith("model/")]
        assert any(bytes(first[name].data) != bytes(last[name].data) for name in models) is moved

    report = audit(run, source)
    assert report.verdict == "mismatch"
    assert report.first is not None
    assert "eps is inf" in report.first.stated
    assert audit(honest, source).verdict == "match"
