"""Several optimizers over one model: Muon for matrices and AdamW for the rest, say, each with a scheduler of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tallystick
from tallystick.commit.encoding import parse_canonical_json
from tallystick.errors import EditedOutside, InvalidInput, Nondeterminism, ProtocolViolation, TallyError
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.execution.joint_optimizer import JointOptimizer
from tallystick.roles.attached import ProgramRun, wanting
from tallystick.store.files import RunDirectory

STEPS = 12
SCRIPT = Path(__file__).with_name("programs") / "several.py"

Optimizers = Callable[[Sequence[nn.Parameter], Sequence[nn.Parameter]], list[torch.optim.Optimizer]]
PAIRS: dict[str, Optimizers] = {
    "muon and adamw": lambda matrices, rest: [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.AdamW(rest, lr=0.01),
    ],
    "two of portable arithmetic": lambda matrices, rest: [
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9),
        torch.optim.AdamW(rest, lr=0.01),
    ],
    "two that are copied whole": lambda matrices, rest: [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.Adafactor(rest),
    ],
}


def data(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    x = rng.integers(-64, 64, (32, 16)).astype(np.float32) / 32.0
    return torch.from_numpy(x), torch.from_numpy(rng.integers(0, 4, 32))


def made(pair: str) -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return model, PAIRS[pair](matrices, [p for p in model.parameters() if p.dim() != 2])


def train(
    loop: Any,
    pair: str,
    *,
    lie: int = -1,
    between: Callable[[list[Any], nn.Module], None] | None = None,
    after: Callable[[int, list[Any], nn.Module], None] = lambda *_: None,
) -> Any:
    model, optimizers = made(pair)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, 0.7) for each in optimizers]
    with loop:
        loop.prepare(model, optimizers, schedulers)
        for step in range(STEPS):
            with loop.step(data(step)) as (x, y):
                loop.backward(F.cross_entropy(model(x), y))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if step == lie:
                    optimizers[1].param_groups[0]["lr"] *= 3.0
                optimizers[0].step()
                if between is not None:
                    between(optimizers, model)
                optimizers[1].step()
                for each in schedulers:
                    each.step()
                for each in optimizers:
                    each.zero_grad()
            after(step, optimizers, model)
    return loop.result


def recorder(run: Path, policy: str = "fp32") -> Any:
    return tallystick.Recorder(run, policy=policy, steps=STEPS, checkpoint_every=4, program=__file__)


@pytest.mark.parametrize("policy", ["fp32", "fp64"])
@pytest.mark.parametrize("pair", PAIRS)
def test_they_are_recorded_and_followed(pair: str, policy: str, tmp_path: Path) -> None:
    root = train(recorder(tmp_path / "run", policy), pair).root
    for noise in (nullcontext(), JitterMode(Jitter(11))):
        with noise:
            report = train(tallystick.Follower(tmp_path / "run", program=__file__), pair)
        assert (report.verdict, report.first) == ("match", None)
    if policy == "fp32":  # the control: without its log noise leads elsewhere
        other = recorder(tmp_path / "other", policy)
        other.has_jitter = True
        assert train(other, pair).root != root


def test_a_state_holds_what_all_keep_and_both_schedules(tmp_path: Path) -> None:
    train(recorder(tmp_path / "run"), "muon and adamw")
    state = RunDirectory(tmp_path / "run").load_checkpoint(STEPS)
    kept = {name.removeprefix("optimizer/") for name in state if name.startswith("optimizer/")}
    assert {"0.weight/momentum_buffer", "0.bias/exp_avg", "1.weight/exp_avg_sq"} <= kept
    groups: Any = parse_canonical_json(
        bytes(state["document/optimizer"].data), what="optimizer", limit=1 << 20
    )
    assert [group["parameters"] for group in groups["groups"]] == [
        ["0.weight", "3.weight"],
        ["0.bias", "1.weight", "1.bias", "3.bias"],
    ]
    schedule: Any = parse_canonical_json(
        bytes(state["document/scheduler"].data), what="scheduler", limit=1 << 20
    )
    assert schedule["kind"] == "JointScheduler"
    report = train(tallystick.Follower(tmp_path / "run", program=__file__, steps=(4, 8)), "muon and adamw")
    assert (report.verdict, report.steps) == ("match", 4)


@pytest.mark.parametrize("pair", ["muon and adamw", "two of portable arithmetic"])
def test_a_rate_of_the_second_is_committed(pair: str, tmp_path: Path) -> None:
    train(recorder(tmp_path / "run"), pair, lie=5)
    report = train(tallystick.Follower(tmp_path / "run", program=__file__), pair)
    assert (report.verdict, report.first and report.first.step) == ("cannot_reproduce", 5)
    assert report.first.subject == "hyper-parameter lr of group 1"


def once_more(optimizers: list[Any], model: nn.Module) -> None:
    F.cross_entropy(model(data(99)[0].to(next(model.parameters()).dtype)), data(99)[1]).backward()


def clip(optimizers: list[Any], model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(optimizers[1].param_groups[0]["params"], 1e-3)


def forget(optimizers: list[Any], model: nn.Module) -> None:
    optimizers[1].zero_grad()


def zero_data(optimizers: list[Any], model: nn.Module) -> None:
    """Not counted as a change by torch."""
    gradient = optimizers[1].param_groups[0]["params"][0].grad
    gradient.data.zero_()


def other_values(optimizers: list[Any], model: nn.Module) -> None:
    gradient = optimizers[1].param_groups[0]["params"][0].grad
    gradient.numpy()[0] += 1.0


def slow_down(optimizers: list[Any], model: nn.Module) -> None:
    optimizers[1].param_groups[0]["lr"] /= 2.0


def shrink(optimizers: list[Any], model: nn.Module) -> None:
    with torch.no_grad():
        optimizers[1].param_groups[0]["params"][0].mul_(0.5)


def again(optimizers: list[Any], model: nn.Module) -> None:
    optimizers[0].step()


@pytest.mark.parametrize(
    ("between", "kind", "said"),
    [
        (once_more, Nondeterminism, "the gradient of 0.bias was changed between the steps of two optimizers"),
        (clip, Nondeterminism, "the gradient of 0.bias was changed between the steps of two optimizers"),
        (forget, Nondeterminism, "the gradient of 0.bias was changed between the steps of two optimizers"),
        (zero_data, Nondeterminism, "the gradient of 0.bias was changed between the steps of two optimizers"),
        (
            other_values,
            Nondeterminism,
            "the gradient of 0.bias was changed between the steps of two optimizers",
        ),
        (slow_down, Nondeterminism, "a number of AdamW was changed between the steps of two optimizers"),
        (shrink, EditedOutside, "0.bias was changed by something other than the optimizer"),
        (
            again,
            ProtocolViolation,
            "AdamW has not stepped|SGD has; every optimizer|Muon has; every optimizer",
        ),
    ],
)
@pytest.mark.parametrize("pair", ["muon and adamw", "two of portable arithmetic"])
def test_what_happens_between_their_steps_is_refused(
    pair: str, between: Any, kind: type[TallyError], said: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=said):
        train(recorder(tmp_path / "run"), pair, between=between)


def test_what_the_other_sees_of_its_gradients_is_as_rounded(tmp_path: Path) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def look(optimizers: list[Any], model: nn.Module) -> None:
        p = optimizers[1].param_groups[0]["params"][0]
        assert p.grad is not None and p.grad.dtype == p.dtype == torch.float32
        seen.append((p.detach().clone(), p.grad.clone()))

    train(recorder(tmp_path / "run"), "muon and adamw", between=look)
    assert len(seen) == STEPS
    assert all(bool(gradient.any()) for _, gradient in seen)


def test_every_optimizer_takes_each_step(tmp_path: Path) -> None:
    model, optimizers = made("muon and adamw")
    loop = recorder(tmp_path / "run")
    with pytest.raises(ProtocolViolation, match="AdamW has not stepped, Muon has"), loop:
        loop.prepare(model, optimizers)
        with loop.step(data(0)) as (x, y):
            loop.backward(F.cross_entropy(model(x), y))
            optimizers[0].step()


def test_lists_that_are_none_are_refused(tmp_path: Path) -> None:
    model, optimizers = made("muon and adamw")
    with pytest.raises(InvalidInput, match="an empty list"):
        recorder(tmp_path / "a").prepare(model, [])
    with pytest.raises(InvalidInput, match=r"AdamW and SGD both train a parameter of shape \[32\]"):
        recorder(tmp_path / "b").prepare(model, [optimizers[1], torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(Nondeterminism, match="optimizer LBFGS"):
        recorder(tmp_path / "c").prepare(model, [optimizers[0], torch.optim.LBFGS(model[1].parameters())])
    with pytest.raises(InvalidInput, match="optimizer is a list"):
        tallystick.attach(model, [optimizers])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="a list of 2 has one twice"):
        recorder(tmp_path / "d").prepare(model, [optimizers[0], optimizers[0]])
    for given, said in (
        (iter(optimizers), "list_iterator"), (None, "NoneType"), ({"a": optimizers[0]}, "dict"),
        ([optimizers[0], None], "NoneType"), ([optimizers], "list"), ("adam", "str"),
    ):  # fmt: skip
        with pytest.raises(
            InvalidInput, match=f"optimizer is a {said}; give a torch.optim.Optimizer, or a list"
        ):
            recorder(tmp_path / "e").prepare(model, given)
    for given, said in ((iter([1]), "list_iterator"), ([[None]], "list"), ("linear", "str")):
        with pytest.raises(InvalidInput, match=f"scheduler is a {said}; give one with a state_dict"):
            recorder(tmp_path / "f").prepare(model, optimizers, given)


def test_a_list_of_schedulers_may_have_none_for_one_without(tmp_path: Path) -> None:
    model, optimizers = made("muon and adamw")
    only = torch.optim.lr_scheduler.StepLR(optimizers[0], 3)
    loop = recorder(tmp_path / "run")
    loop.prepare(model, optimizers, [only, None])
    assert loop.session.scheduler is only
    loop.abandon()


@pytest.mark.parametrize("pair", ["muon and adamw", "two of portable arithmetic"])
@pytest.mark.parametrize(
    ("moves", "kind", "said"),
    [
        (True, Nondeterminism, "0.weight was trained by (Muon|SGD), and is by AdamW now"),
        (False, InvalidInput, r"(Muon|SGD) and AdamW both train a parameter of shape \[32, 16\]"),
    ],
)
def test_a_parameter_stays_with_one_optimizer(
    pair: str, moves: bool, kind: type[TallyError], said: str, tmp_path: Path
) -> None:
    """The one it was given to stepped it without rounding, and its state was in no checkpoint."""

    def give(optimizers: list[Any], model: nn.Module) -> None:
        weight = optimizers[0].param_groups[0]["params"][0]
        if moves:
            optimizers[0].param_groups[0]["params"] = optimizers[0].param_groups[0]["params"][1:]
        if all(weight is not p for group in optimizers[1].param_groups for p in group["params"]):
            optimizers[1].add_param_group({"params": [weight]})

    def after(step: int, optimizers: list[Any], model: nn.Module) -> None:
        if step == 2:
            give(optimizers, model)

    with pytest.raises(kind, match=said):
        train(recorder(tmp_path / "run"), pair, after=after)


def test_a_state_of_several_is_that_of_each() -> None:
    model, optimizers = made("muon and adamw")
    weight, bias = list(model[0].parameters())
    joint = JointOptimizer(optimizers)
    assert joint.state.get(weight) is None and weight not in joint.state
    joint.state[weight] = {"a": 1}
    joint.state[bias]["b"] = 2
    assert optimizers[0].state == {weight: {"a": 1}} and optimizers[1].state[bias] == {"b": 2}
    assert [id(p) for p in joint.state] == [id(weight), id(bias)] and len(joint.state) == 2
    del joint.state[weight]
    assert weight not in joint.state
    joint.state.clear()
    assert not optimizers[1].state
    more = nn.Parameter(torch.zeros(2))
    optimizers[1].add_param_group({"params": [more]})
    assert joint.part_of(more) is optimizers[1]
    assert joint.param_groups[-1] is optimizers[1].param_groups[-1]
    with pytest.raises(KeyError):
        joint.part_of(torch.zeros(1))


def tally(*arguments: str | Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tallystick", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_script_attaches_several(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tally("record", "--policy", "fp32", "--run", run, "--", "python", SCRIPT)
    assert "match: 12 steps" in tally("audit", run, "--profile", "jitter", "--", "python", SCRIPT)
    said = tally(
        "record", "--policy", "fp32", "--run", tmp_path / "gan", "--", "python", SCRIPT, "--in-turn", code=3
    )
    assert "What trains in turn, as a GAN does, is not taken" in " ".join(said.split())
    said = tally(
        "record",
        "--policy",
        "fp32",
        "--checkpoint-every",
        "4",
        "--run",
        tmp_path / "short",
        "--",
        "python",
        SCRIPT,
        "--leaves-out",
    )
    assert "recorded 8 of 11 steps, up to the last committed state: one that nobody took followed" in said
    assert "the last step is no step of the run: AdamW has not stepped, Muon has" in said
    assert "recorded 11 steps under policy fp32; the run has 8" in said


def test_a_recorded_script_leaves_torchs_defaults_as_they_were(tmp_path: Path) -> None:
    """Under ``fp64`` whatever it built after its run was float64, where the optimizer is none of the portable ones."""
    model, optimizers = made("muon and adamw")
    with wanting(ProgramRun(lambda: recorder(tmp_path / "run", "fp64"))):
        tallystick.attach(model, optimizers)
        for step in range(STEPS):
            x, y = data(step)
            F.cross_entropy(model(x.double()), y).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
            assert torch.get_default_dtype() == torch.float32
            assert nn.Linear(1, 1).weight.dtype == torch.float32
