"""A training loop of one's own, recorded and followed by the same program."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tallystick
from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism, OtherProgram, ProtocolViolation
from tallystick.execution.determinism import parse_profile
from tallystick.roles import follower as module
from tallystick.roles.audit_report import AuditReport
from tallystick.run.transcript import CURSOR, Transcript
from tallystick.store.files import RunDirectory

STEPS = 12
CRITERION = nn.CrossEntropyLoss()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(step)
    return torch.from_numpy(rng.standard_normal((24, 10)).astype(np.float32)), torch.from_numpy(
        rng.integers(0, 3, 24)
    )


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(32), nn.Linear(32, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def train(loop: Any, *, other_step: int = -1, parts: int = 1, model: nn.Module | None = None) -> Any:
    model = model or make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loop.prepare(model, optimizer, scheduler)
    for step in range(STEPS):
        with loop.step(data(step if step != other_step else 999)) as (x, y):
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                loop.backward(CRITERION(model(a), b) / parts)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return loop.finish()


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_followed_loop_matches_and_one_on_other_data_does_not(
    policy: str, parts: int, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    train(
        tallystick.Recorder(path, policy=policy, steps=STEPS, checkpoint_every=5, program=__file__),
        parts=parts,
    )

    report = train(tallystick.Follower(path, program=__file__), parts=parts)
    wrong = train(tallystick.Follower(path, program=__file__), parts=parts, other_step=6)

    assert isinstance(report, AuditReport)
    assert (report.verdict, report.steps) == ("match", STEPS)
    assert [segment.verdict for segment in wrong.segments] == ["match", "cannot_reproduce", "match"]
    assert (wrong.first.step, wrong.first.subject) == (6, "batch digest")
    assert "asks others before it accuses" in wrong.first.own


@pytest.mark.parametrize(("policy", "every"), [("fp32", 1), ("fp64", 3), ("bf16", 3), ("bf16", None)])
def test_a_loop_that_adds_up_small_parts_is_accepted_where_it_is_calibrated(
    policy: str, every: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    train(
        tallystick.Recorder(path, policy=policy, steps=STEPS, recalibrate_every=every, program=__file__),
        parts=4,
    )

    report = train(tallystick.Follower(path, program=__file__), parts=4)

    assert (report.verdict, report.first) == ("match", None)


def test_data_that_differ_in_last_bits_alone_accuse_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an audit: torch's own randn has other last bits under other instructions; every loss and state is the same."""
    path, honest = tmp_path / "run", data
    train(tallystick.Recorder(path, policy="fp32", steps=STEPS, checkpoint_every=5, program=__file__))

    def elsewhere(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = honest(step)
        x[0, 0] = torch.nextafter(x[0, 0], torch.tensor(9.0))
        return x, y

    monkeypatch.setitem(globals(), "data", elsewhere)
    report = train(tallystick.Follower(path, program=__file__))

    assert [segment.verdict for segment in report.segments] == ["cannot_reproduce"] * 3
    assert report.first is not None and report.first.subject == "batch digest"
    assert "floating noise" in report.first.own


def test_whole_numbers_that_are_other_ones_are_other_data_in_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"

    def tokens(step: int, first: int) -> torch.Tensor:
        return torch.tensor([first, step % 5, 2, 3])

    def loop(run: Any, first: int) -> Any:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def loss(batch: torch.Tensor) -> torch.Tensor:
            return model(batch[1:]).square().mean()

        run.prepare(model, optimizer, loss=loss)
        for step in range(2):
            with run.step(tokens(step, first)) as batch:
                run.backward(loss(batch))
                optimizer.step()
                optimizer.zero_grad()
        return run.finish()

    loop(tallystick.Recorder(path, policy="fp32", steps=2, program=__file__), 0)
    follower = tallystick.Follower(path, program=__file__)
    follower.doubts = lambda own, end: own
    assert loop(follower, 1).verdict == "mismatch"
    assert loop(tallystick.Follower(path, program=__file__), 1).verdict == "cannot_reproduce"


def test_the_environment_variable_turns_the_recorder_into_a_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    monkeypatch.delenv(module.FOLLOW_VARIABLE, raising=False)
    train(tallystick.open_run(path, policy="fp32", steps=STEPS, program=__file__))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)

    monkeypatch.setenv(module.FOLLOW_VARIABLE, str(path))
    report = train(tallystick.open_run(tmp_path / "unused", policy="fp32", steps=STEPS))

    assert report.verdict == "match"
    assert not (tmp_path / "unused").exists()


def _restated(run: RunDirectory, **changes: Any) -> None:
    transcript = run.load_transcript()
    forged = Transcript(replace(transcript.specification, **changes), transcript.records)
    run.write_document(run.specification_path, forged.specification.encode())
    run.write_document(run.statement_path, forged.statement().encode())


def test_a_run_that_states_another_order_than_the_program_gives_is_no_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is computed hangs on the digest of the data, on settings or on a site that nobody rounds."""
    path, ordered = tmp_path / "run", {"policy": "fp32", "steps": STEPS, "settings": {"data": "a"}}
    train(tallystick.Recorder(path, program=__file__, **ordered))
    run = RunDirectory(path)
    stated = run.load_transcript().specification
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    monkeypatch.setenv(module.FOLLOW_VARIABLE, str(path))

    def followed() -> tuple[str, str | None]:
        report = train(tallystick.open_run(tmp_path / "unused", **ordered))
        return report.verdict, None if report.first is None else report.first.subject

    assert followed() == ("match", None)
    for changes, subject in (
        ({"job": replace(stated.job, dataset_digest="12" * 32)}, "order"),
        ({"job": replace(stated.job, settings={"data": "b"})}, "order"),
        ({"job": stated.job, "sites": stated.sites[:-1]}, "list of sites"),
    ):
        _restated(run, **{"sites": stated.sites, **changes})
        assert followed() == ("cannot_reproduce", subject)
    _restated(run, job=stated.job, sites=stated.sites)
    assert followed() == ("match", None)


def taken_within(loop: Any, *, stop_at: int | None = None, finish: bool = False) -> nn.Module:
    """Train inside the loop's own ``with`` block; a step ``stop_at`` raises."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loop as run:
        run.prepare(model, optimizer)
        for step in range(3):
            with run.step(data(step)) as (x, y):
                if step == stop_at:
                    raise ValueError("the loop's own")
                run.backward(CRITERION(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        if finish:
            run.finish()
    return model


@pytest.mark.parametrize("finish", [False, True])
def test_a_loop_in_a_with_block_finishes_itself_once(finish: bool, tmp_path: Path) -> None:
    recorder = tallystick.Recorder(tmp_path / "run", policy="fp64", steps=3, program=__file__)
    with pytest.raises(ProtocolViolation, match="call finish"):
        _ = recorder.result
    taken_within(recorder, finish=finish)
    follower = tallystick.Follower(tmp_path / "run", program=__file__)
    taken_within(follower, finish=finish)

    assert recorder.result == RunDirectory(tmp_path / "run").load_transcript().statement()
    assert (follower.result.verdict, follower.result.steps) == ("match", 3)


def test_an_exception_lets_go_of_model_and_directory_and_leaves_the_run_unfinished(tmp_path: Path) -> None:
    model = make_model()
    dtypes = [tensor.dtype for tensor in model.state_dict().values()]
    path = tmp_path / "run"
    recorder = tallystick.Recorder(path, policy="fp64", steps=3, program=__file__)

    with pytest.raises(ValueError, match="the loop's own"):
        taken_within(recorder, stop_at=2)

    with RunDirectory(path).writing():
        assert RunDirectory(path).load_partial().num_steps == 2
    with pytest.raises(ProtocolViolation, match="call finish"):
        _ = recorder.result
    assert not RunDirectory(path).statement_path.exists()
    with (
        pytest.raises(ValueError, match="early"),
        tallystick.Recorder(tmp_path / "other", policy="fp64", steps=1, program=__file__) as other,
    ):
        other.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        raise ValueError("early")
    assert [tensor.dtype for tensor in model.state_dict().values()] == dtypes


def test_a_with_block_that_takes_too_few_steps_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ProtocolViolation, match="4 steps were announced, 3 were taken"):
        taken_within(tallystick.Recorder(tmp_path / "run", policy="fp64", steps=4, program=__file__))


def test_model_and_optimizer_are_as_they_came_but_trained(tmp_path: Path) -> None:
    model = make_model()
    names, dtypes = list(model.state_dict()), [tensor.dtype for tensor in model.state_dict().values()]
    before = model[0].weight.detach().clone()

    train(tallystick.Recorder(tmp_path / "run", policy="fp64", steps=STEPS, program=__file__), model=model)

    assert list(model.state_dict()) == names
    assert [tensor.dtype for tensor in model.state_dict().values()] == dtypes
    assert not torch.equal(model[0].weight, before)
    assert model(torch.zeros(2, 10)).dtype == torch.float32


def test_a_policy_that_rounds_activations_is_refused_where_no_loss_is_given(tmp_path: Path) -> None:
    """Its grids are measured before the step: a script was recorded, and its log could not be read."""
    model = make_model()
    recorder = tallystick.Recorder(tmp_path / "run", steps=2, program=__file__, policy="leaf")
    with pytest.raises(
        InvalidInput, match=r"policy leaf rounds activations .*of a script take fp32, fp64 or bf16"
    ):
        recorder.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_loop_that_breaks_the_rules_is_told_which(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = tallystick.Recorder(tmp_path / "run", steps=2, program=__file__)
    with pytest.raises(ProtocolViolation, match="call prepare"), recorder.step(data(0)):
        pass
    recorder.prepare(model, optimizer)
    with (
        pytest.raises(ProtocolViolation, match="no backward pass of a loss was seen"),
        recorder.step(data(0)),
    ):
        optimizer.step()
    with pytest.raises(ProtocolViolation, match="2 steps were announced, 0 were taken"):
        recorder.finish()


def _no_grad(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.mul_(0.99)


def _through_data(p: torch.Tensor) -> None:
    p.data.mul_(0.99)


@pytest.mark.parametrize("edit", [_no_grad, _through_data])
@pytest.mark.parametrize("put_back", [False, True])
def test_weights_edited_between_two_steps_are_refused_unless_they_are_put_back(
    edit: Callable[[torch.Tensor], None], put_back: bool, tmp_path: Path
) -> None:
    """Lookahead or an average by hand: nobody who follows the log does it, and it would be called the trainer's lie."""
    loop = tallystick.Recorder(tmp_path / "run", policy="fp32", steps=3, program=__file__)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loop.prepare(model, optimizer)

    def step(number: int) -> None:
        with loop.step(data(number)) as (x, y):
            loop.backward(CRITERION(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    step(0)
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        edit(p)
    if put_back:
        for p, value in zip(model.parameters(), kept, strict=True):
            p.data.copy_(value)
        step(1)
    else:
        with pytest.raises(
            Nondeterminism, match=r"step 1: 0\.weight was changed by something other than the optimizer"
        ):
            step(1)


def test_a_loop_that_must_stop_leaves_a_run_up_to_its_last_state(tmp_path: Path) -> None:
    def train(loop: Any) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with loop:
            loop.prepare(model, optimizer)
            for step in range(4):
                x, y = data(step)
                with loop.step((x * torch.inf if step == 3 else x, y)) as batch:
                    loop.backward(CRITERION(model(batch[0]), batch[1]))
                    optimizer.step()
                optimizer.zero_grad()

    path = tmp_path / "run"
    with pytest.raises(Nondeterminism) as raised:
        train(tallystick.Recorder(path, steps=9, checkpoint_every=2, program=__file__))

    assert raised.value.__notes__[0].startswith("the run ends after 2 steps, at its last committed state")
    assert RunDirectory(path).load_transcript().num_steps == 2


def averaged(loop: Any, *, where: str = "follow_up", decay: float = 0.9999) -> tuple[Any, nn.Module]:
    """Train with an average of the weights, changed in ``follow_up`` or wherever else; return the result and the average."""
    model = make_model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loop.prepare(
        model, optimizer, extra={"average": average},
        follows_up=where != "unannounced",
    )  # fmt: skip
    for step in range(STEPS):
        with loop.step(data(step)) as (x, y):
            loop.backward(CRITERION(model(x), y))
            if where == "too early":
                with loop.follow_up():
                    pass
            optimizer.step()
            with nullcontext() if where == "beside" else loop.follow_up():
                average.update_parameters(model)
                if where == "weights":
                    next(model.parameters()).data.mul_(2.0)
            optimizer.zero_grad()
    return loop.finish(), average


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16"])
def test_an_average_of_the_weights_is_followed_and_moves(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    _, slow = averaged(tallystick.Recorder(path, policy=policy, steps=STEPS, program=__file__))
    report, again = averaged(tallystick.Follower(path, program=__file__))
    assert report.verdict == "match"
    assert all(torch.equal(a, b) for a, b in zip(slow.parameters(), again.parameters(), strict=True))
    start = dict(make_model().named_parameters())
    changed = [bool((p != start[name.removeprefix("module.")]).any()) for name, p in slow.named_parameters()]
    assert all(changed), "a grid of running statistics would have held it where it was"


@pytest.mark.parametrize(
    ("where", "refusal"),
    [
        ("beside", "average/module.0.weight is a parameter that no optimizer trains"),
        ("too early", "after optimizer.step"),
        ("unannounced", "follows_up=True"),
        ("weights", "0.weight was changed by something other than the optimizer"),
    ],
)
def test_slow_values_change_where_they_are_rounded_finely_or_not_at_all(
    where: str, refusal: str, tmp_path: Path
) -> None:
    with pytest.raises((Nondeterminism, ProtocolViolation), match=re.escape(refusal)):
        averaged(tallystick.Recorder(tmp_path / "run", steps=STEPS, program=__file__), where=where)


def test_optimizer_steps_outside_a_recorded_step_are_refused(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = tallystick.Recorder(tmp_path / "run", steps=1, program=__file__)
    recorder.prepare(model, optimizer)

    with pytest.raises(ProtocolViolation, match="outside a recorded step"):
        optimizer.step()


def test_lbfgs_is_refused_with_its_reason(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    recorder = tallystick.Recorder(tmp_path / "run", steps=1, program=__file__)

    with pytest.raises(Nondeterminism, match="calls its closure several times"):
        recorder.prepare(model, optimizer)


def solve(loop: Any, smooth: tuple[str, ...]) -> Any:
    """Two steps over an operator that is not in the table."""
    model, factor = nn.Linear(10, 3), 2.0 * torch.eye(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss(batch: Any) -> torch.Tensor:
        return torch.cholesky_solve(model(batch[0]).t(), factor).square().mean()

    loop.prepare(model, optimizer, loss=loss, smooth=smooth)
    for step in range(2):
        with loop.step(data(step)) as batch:
            loop.backward(loss(batch))
            optimizer.step()
            optimizer.zero_grad()
    return loop.finish()


def test_an_operator_outside_the_table_may_be_declared_continuous(tmp_path: Path) -> None:
    with pytest.raises(Nondeterminism, match=r'prepare\(\).* smooth=\("aten::cholesky_solve",\)'):
        solve(tallystick.Recorder(tmp_path / "refused", steps=2, program=__file__), ())
    declared = ("aten::cholesky_solve",)
    solve(tallystick.Recorder(tmp_path / "run", steps=2, program=__file__), declared)
    assert solve(tallystick.Follower(tmp_path / "run", program=__file__), declared).verdict == "match"


@pytest.mark.parametrize(
    ("edit", "verdict", "said"),
    [(lambda model, optimizer: optimizer.param_groups[0].update(lr=1.0), "mismatch", "lr is 1.0, the job's own is 0.01"),
     (lambda model, optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.999)), "mismatch", "betas"),
     (lambda model, optimizer: model[3].running_mean.fill_(5.0), "cannot_reproduce", "model/buffer/3.running_mean"),
     (lambda model, optimizer: None, "match", "")],
)  # fmt: skip
def test_a_first_state_that_is_not_the_programs_is_found_by_its_follower(
    edit: Callable[[nn.Module, torch.optim.Optimizer], None], verdict: str, said: str, tmp_path: Path
) -> None:
    """A state says with which numbers the steps after it were computed: only the program, run anew, has them of its own."""

    class Edited(tallystick.Recorder):
        def prepare(
            self, model: nn.Module, optimizer: torch.optim.Optimizer, *given: Any, **more: Any
        ) -> Any:
            edit(model, optimizer)
            return super().prepare(model, optimizer, *given, **more)

    train(Edited(tmp_path / "run", policy="fp32", steps=STEPS, checkpoint_every=5, program=__file__))
    follower = tallystick.Follower(tmp_path / "run", program=__file__)
    follower.doubts = lambda own, end: own  # every arithmetic has the same
    report = train(follower)
    assert report.verdict == verdict
    assert said in str(report.first)
    assert (report.beginning is not None) and report.beginning.trained > 0


def test_a_first_state_of_a_later_step_is_refused_by_its_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tallystick.Recorder(tmp_path / "run", policy="fp32", steps=STEPS, program=__file__))
    load = RunDirectory.load_committed

    def later(self: RunDirectory, steps_done: int, root: str) -> dict[str, Entry]:
        found = load(self, steps_done, root)
        return {**found, CURSOR: replace(found[CURSOR], data=b'{"step":1}', shape=(10,))}

    monkeypatch.setattr(RunDirectory, "load_committed", later)
    with pytest.raises(Mismatch, match="state after 0 steps: its cursor says"):
        train(tallystick.Follower(tmp_path / "run", program=__file__))


def test_a_loop_that_sets_its_optimizer_before_the_first_step_is_followed(tmp_path: Path) -> None:
    def warmed(loop: Any) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        loop.prepare(model, optimizer)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1) / STEPS
            with loop.step(data(step)) as (x, y):
                loop.backward(CRITERION(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return loop.finish()

    warmed(tallystick.Recorder(tmp_path / "run", policy="fp32", steps=STEPS, program=__file__))
    assert warmed(tallystick.Follower(tmp_path / "run", program=__file__)).verdict == "match"


def test_a_delivered_file_that_is_not_the_committed_state_is_found_by_a_follower(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tallystick.Recorder(run, policy="fp32", steps=STEPS, checkpoint_every=5, program=__file__))
    path = run / "checkpoints" / f"{STEPS:06d}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    report = train(tallystick.Follower(run, program=__file__))
    assert report.verdict == "mismatch"
    assert "root is" in str(report.first)


def test_another_program_may_not_follow(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(tallystick.Recorder(path, steps=STEPS, program=__file__))
    other = tmp_path / "other.py"
    other.write_text("print('another program')\n")

    with pytest.raises(
        OtherProgram, match=r"the run was recorded from another one: program file test_recorder.py is"
    ):
        tallystick.Follower(path, program=other)


def test_profiles_are_parsed_strictly() -> None:
    assert str(parse_profile("threads=2,jitter")) == "native,threads=2,jitter"
    with pytest.raises(InvalidInput, match="unknown word 'fast'"):
        parse_profile("fast")
    with pytest.raises(InvalidInput, match="from 1 to 1024"):
        parse_profile("threads=0")


@pytest.mark.parametrize("takes_all", [True, False])
def test_a_loop_with_a_sparse_table_may_carry_its_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_all: bool
) -> None:
    """Or leave them: before, torch could not take the size of a gradient that is sparse until the optimizer takes it."""

    def run() -> Any:
        options = {"policy": "fp32", "steps": 4, "checkpoint_every": 4, "program": __file__}
        with tallystick.open_run(tmp_path / "run", **options) as loop:
            torch.manual_seed(2)
            model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.ReLU(), nn.Linear(40, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loop.prepare(model, optimizer, loss=lambda batch: CRITERION(model(batch[0]), batch[1]))
            for step in range(4):
                rng = np.random.default_rng(step)
                words, labels = (torch.from_numpy(rng.integers(0, *what)) for what in ((20, (8, 10)), (3, 8)))
                with loop.step((words, labels)) as (x, y):
                    if step % 2 == 0 or not takes_all:
                        optimizer.zero_grad()
                    loop.backward(CRITERION(model(x), y) / 2.0)
                    if step % 2:
                        optimizer.step()
        return loop.result

    monkeypatch.delenv(module.FOLLOW_VARIABLE, raising=False)
    run()
    monkeypatch.setenv(module.FOLLOW_VARIABLE, str(tmp_path / "run"))
    found = run()
    assert found.verdict == "match", found.first
