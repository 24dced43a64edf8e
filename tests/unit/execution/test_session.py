"""The session around the optimizer: hooks, dtypes, what may happen in a step and what it leaves behind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tallystick.errors import EditedOutside, InvalidInput, Nondeterminism, ProtocolViolation
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.session.hyperparameters import read_hyperparameters, set_hyperparameter, snap
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import state_documents
from tallystick.execution.step import backward_of, run_step
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import FP32, POLICIES, find_policy

BOTH = pytest.mark.parametrize("policy", ["fp64", "fp32"])


def small(
    policy: str, arithmetic: str = "auto", **more: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Session]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    chosen = find_policy(policy, optimizer_arithmetic=arithmetic)
    session = Session(model, optimizer, policy=chosen, seed=1, **more)
    session.prepare()
    return model, optimizer, session


def backward(session: Session, model: nn.Module) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(session.step), dtype=torch.float32)
    x = x.to(session.arithmetic.compute)
    with session.open_step.micro_batch(0):
        loss = model(x).square().mean()
        loss.backward()
    session.open_step.note_loss(loss)


def calibrated(session: Session, model: nn.Module) -> None:
    session.table = calibrate(session, lambda context: backward(session, model)).table


@BOTH
def test_a_step_outside_a_recorded_step_is_refused(policy: str) -> None:
    model, optimizer, session = small(policy)
    model(torch.ones(3, 4, dtype=session.arithmetic.compute)).sum().backward()
    with pytest.raises(ProtocolViolation, match=r"optimizer\.step outside a recorded step"):
        optimizer.step()
    optimizer.zero_grad()
    calibrated(session, model)
    with session.stepping(session.recording_context(session.table)):
        backward(session, model)
        optimizer.step()
        session.open_step.finish()


@BOTH
def test_two_optimizer_steps_in_one_step_are_refused(policy: str) -> None:
    model, optimizer, session = small(policy)
    calibrated(session, model)
    with (
        pytest.raises(ProtocolViolation, match="step 0: the optimizer was stepped twice"),
        session.stepping(session.recording_context(session.table)),
    ):
        backward(session, model)
        optimizer.step()
        optimizer.step()


@BOTH
def test_a_step_inside_a_step_and_an_optimizer_step_while_measuring_are_refused(policy: str) -> None:
    model, optimizer, session = small(policy)

    def stepping_backward(context: Any) -> None:
        backward(session, model)
        optimizer.step()

    with pytest.raises(ProtocolViolation, match="stepped while the noise was being measured"):
        calibrate(session, stepping_backward)
    calibrated(session, model)
    with session.stepping(session.recording_context(session.table)):
        with (
            pytest.raises(ProtocolViolation, match="a step is already open"),
            session.stepping(session.recording_context(session.table)),
        ):
            raise AssertionError("not reached")
        backward(session, model)
        optimizer.step()
        session.open_step.finish()


class Counting(nn.Module):
    """A layer that keeps count beside it: in whole numbers, in a large buffer, and in one that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("large", torch.zeros((1 << 16) + 1))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.seen[1] += 1
            self.large += 1.0
            self.mean = self.mean + 1.0
        return y


@BOTH
def test_between_a_pass_and_its_rounding_all_buffers_are_what_they_were_before_the_step(policy: str) -> None:
    """Passes began from whole numbers and large buffers that the step had written: an honest trainer was called a liar."""
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = Session(model, optimizer, policy=find_policy(policy), seed=1)
    session.prepare()
    calibrated(session, model)

    def counts() -> list[int]:
        return [int(model.seen[1]), int(model.large[0]), int(model.mean[0])]

    assert counts() == [0, 0, 0]
    with session.stepping(session.recording_context(session.table)):
        backward(session, model)
        assert counts() == [1, 1, 1]
        with session.interlude():
            assert counts() == [0, 0, 0]
            calibrated(session, model)
            assert counts() == [0, 0, 0]
        assert counts() == [1, 1, 1]
        optimizer.step()
        session.open_step.finish()
    assert counts() == [1, 1, 1]


@BOTH
def test_a_closure_is_refused(policy: str) -> None:
    model, optimizer, session = small(policy)
    calibrated(session, model)
    with (
        pytest.raises(Nondeterminism, match="optimizer Adam: a step with a closure"),
        session.stepping(session.recording_context(session.table)),
    ):
        backward(session, model)
        optimizer.step(lambda: 1.0)
    with session.stepping(session.recording_context(session.table)):
        backward(session, model)
        optimizer.step(None)
        session.open_step.finish()


@BOTH
def test_after_close_the_users_objects_are_as_they_came_but_trained(policy: str) -> None:
    model, optimizer, session = small(policy)
    names = list(model.state_dict())
    identities = [id(p) for p in model.parameters()]
    before = model[0].weight.detach().clone()
    assert all(p.dtype == session.arithmetic.compute for p in model.parameters())
    assert list(model.state_dict()) == names
    calibrated(session, model)
    with session.stepping(session.recording_context(session.table)):
        backward(session, model)
        optimizer.step()
        session.open_step.finish()
    session.close()
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == identities
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {torch.float32}
    assert {t.dtype for s in optimizer.state.values() for t in s.values()} <= {torch.float32, torch.float64}
    assert not torch.equal(model[0].weight, before.to(model[0].weight.dtype))
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()  # no hook is left to refuse it
    session.close()  # a second time does nothing


@BOTH
def test_a_step_restores_every_switch_it_sets(policy: str) -> None:
    model, optimizer, session = small(policy)
    calibrated(session, model)

    def switches() -> list[object]:
        return [
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            torch.backends.cudnn.benchmark,
            torch.backends.cuda.matmul.allow_tf32,
            torch.get_rng_state().tolist(),
        ]

    before = switches()
    with session.stepping(session.recording_context(session.table)):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_default_dtype() == session.arithmetic.compute
        backward(session, model)
        optimizer.step()
        assert torch.get_default_dtype() == session.arithmetic.compute
        session.open_step.finish()
    assert switches() == before
    for place in ("forward", "optimizer"):
        with pytest.raises(ZeroDivisionError), session.stepping(session.recording_context(session.table)):
            if place == "forward":
                raise ZeroDivisionError
            backward(session, model)
            handle = optimizer.register_step_pre_hook(lambda *_: 1 // 0)
            try:
                optimizer.step()
            finally:
                handle.remove()
        assert switches() == before
        assert {p.dtype for p in model.parameters()} == {session.arithmetic.compute}


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_step_and_leaves_a_usable_session(
    policy: str, value: float
) -> None:
    model, optimizer, session = small(policy)
    calibrated(session, model)
    with (
        pytest.raises(Nondeterminism, match=r"step 0: gradient of 3\.weight: element 5 is not finite"),
        session.stepping(session.recording_context(session.table)),
    ):
        backward(session, model)
        model[3].weight.grad.view(-1)[5] = value
        optimizer.step()
    assert {p.dtype for p in model.parameters()} == {session.arithmetic.compute}
    assert all(p.grad is None for p in model.parameters()), "no gradient is left to pile up"
    with session.stepping(session.recording_context(session.table)):
        backward(session, model)
        optimizer.step()
        session.open_step.finish()


@BOTH
def test_gradients_of_a_loss_that_is_not_finite_are_not_what_is_named(policy: str) -> None:
    model, optimizer, session = small(policy)
    calibrated(session, model)
    with (
        pytest.raises(Nondeterminism, match="step 0: the loss is nan"),
        session.stepping(session.recording_context(session.table)),
    ):
        session.open_step.note_loss(torch.tensor(math.nan))
        backward(session, model)
        for p in model.parameters():
            p.grad = torch.full_like(p, math.nan)
        optimizer.step()


@BOTH
def test_a_loss_that_is_not_finite_stops_the_step(policy: str) -> None:
    model, optimizer, session = small(policy)
    calibrated(session, model)
    with (
        pytest.raises(Nondeterminism, match="step 0: the loss is nan"),
        session.stepping(session.recording_context(session.table)),
    ):
        backward(session, model)
        optimizer.step()
        session.open_step.note_loss(torch.tensor(math.nan))
        session.open_step.finish()


@BOTH
def test_a_skipped_optimizer_is_recorded_and_followed(policy: str) -> None:
    """As a gradient scaler does after an overflow: no optimizer step, and yet batch norm has moved."""
    frames, prints = [], []
    model, optimizer, session = small(policy)
    calibrated(session, model)
    start = session.table

    def one(context: Any, skip: bool) -> int:
        with session.stepping(context) as opened:
            backward(session, model)
            if not skip:
                optimizer.step()
            model.zero_grad()
            found = opened.finish()
        session.step += 1
        assert opened.skipped is skip
        assert (opened.schedule == []) is skip
        return found

    for skip in (False, True, False):
        context = session.recording_context(session.table)
        prints.append(one(context, skip))
        frames.append(context.finish())
        session.settle(context)
    assert len(set(prints)) == 3
    from tallystick.execution.dispatch.jitter import Jitter

    model, optimizer, session = small(policy, jitter=Jitter(9))
    session.table = start
    for number, skip in enumerate((False, True, False)):
        context = session.following_context(frames[number])
        assert one(context, skip) == prints[number]
        context.finish()
        assert context.violations == []
        session.settle(context)


@BOTH
def test_an_optimizer_that_calls_its_parents_step_is_one_step(policy: str, zoo: Any, record_run: Any) -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def make(kind: Any) -> Any:
        job = zoo.build({"model": "plain"})
        job.optimizer = kind(job.model.parameters(), lr=0.1, momentum=0.5)
        return job

    assert (
        record_run(lambda: make(Mine), policy, 3).roots
        == record_run(lambda: make(torch.optim.SGD), policy, 3, "general").roots
    )


def prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer, policy: str = "fp32", **more: Any
) -> Session:
    session = Session(model, optimizer, policy=POLICIES[policy], seed=0, **more)
    session.prepare()
    return session


@pytest.mark.parametrize("policy", ["fp32", "fp64"])
def test_parameters_that_are_parts_of_one_flat_tensor_get_memory_of_their_own(policy: str) -> None:
    """Flattened recurrent weights and bucketed optimizers leave such: they share a storage, and no number."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    flat = torch.arange(14.0)
    at = 0
    for parameter in model.parameters():
        parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()

    session = prepared(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)

    assert torch.equal(
        torch.cat([p.detach().flatten() for p in model.parameters()]), flat.to(session.arithmetic.compute)
    )
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 4


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_model_is_prepared_as_any_other() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))

    session = prepared(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp64")

    assert [name for name, _ in session.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())


def test_gradients_of_whoever_trained_the_model_before_are_no_part_of_the_first_step() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()

    prepared(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert all(parameter.grad is None for parameter in model.parameters())


def test_models_that_cannot_be_recorded_are_refused_by_name() -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    double = nn.Linear(2, 2).double()
    with pytest.raises(
        InvalidInput,
        match=r"model/weight is torch\.float64; policy fp32 needs float32: convert it by \.float\(\)",
    ):
        prepared(double, sgd(double))
    prepared(double, sgd(double), "fp64").close()

    whole = nn.Linear(2, 2)
    whole.codes = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    with pytest.raises(InvalidInput, match=r"model/codes is torch\.int64; a parameter must be floating"):
        prepared(whole, torch.optim.SGD([whole.weight], lr=0.1))

    rotating = nn.Linear(2, 2)
    rotating.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(InvalidInput, match=r"model/phase is torch\.complex64; a parameter must be floating"):
        prepared(rotating, torch.optim.SGD([rotating.weight], lr=0.1))

    shared = nn.Linear(4, 4)
    shared.part = nn.Parameter(torch.empty(2, 4))
    shared.part.data = shared.weight.data[:2]
    with pytest.raises(
        InvalidInput, match=r"model/part shares memory with model/weight|model/weight shares memory"
    ):
        prepared(shared, sgd(shared))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert [name for name, _ in prepared(tied, sgd(tied)).parameters] == ["0.weight", "0.bias", "1.bias"]

    stranger = nn.Parameter(torch.zeros(3))
    model = nn.Linear(2, 2)
    with pytest.raises(
        InvalidInput, match="the optimizer holds 1 tensors that are no parameters of the model"
    ):
        prepared(model, torch.optim.SGD([*model.parameters(), stranger], lr=0.1))


@BOTH
def test_tensors_that_appear_or_change_identity_during_a_run_are_refused(
    policy: str, zoo: Any, record_run: Any
) -> None:
    class Lazy(nn.Module):
        def __init__(self, late: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 5)
            if not late:
                self.register_buffer("cache", torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "cache"):
                self.register_buffer("cache", torch.ones(5, dtype=x.dtype))
            return self.inner(x) * self.cache

    def make(late: bool) -> Any:
        job = zoo.build({})
        job.model = Lazy(late)
        job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
        return job

    with pytest.raises(
        Nondeterminism, match=r"not those it began with \(model/buffer/cache of shape \[5\]\)"
    ):
        record_run(lambda: make(True), policy, 1)
    record_run(lambda: make(False), policy, 1)

    def growing() -> Any:
        """A table of positions that its first pass makes as large as the input asks for; no auditor could load its state."""
        job = make(False)
        job.model.cache = torch.ones(1)
        job.model.register_forward_pre_hook(
            lambda module, args: setattr(module, "cache", torch.ones(5, dtype=args[0].dtype))
        )
        return job

    with pytest.raises(Nondeterminism, match=r"of shape \[5\]\); register .* of the shape that it keeps"):
        record_run(growing, policy, 1)


@BOTH
@pytest.mark.parametrize("late", [False, True])
def test_a_parameter_changed_outside_the_optimizer_is_refused_by_its_version(
    policy: str, late: bool, zoo: Any, record_run: Any
) -> None:
    """A forward pass that decays its own weights: the gradient is of the decayed ones, the optimizer steps from them."""

    class Decaying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.passes = nn.Linear(12, 5), 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            if not late or self.passes > 40:  # after the measurements of noise
                with torch.no_grad():
                    self.inner.weight.mul_(0.5)
            return self.inner(x)

    def make() -> Any:
        job = zoo.build({})
        job.model = Decaying()
        job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
        return job

    with pytest.raises(Nondeterminism, match=r"inner\.weight"):
        record_run(make, policy, 60)


@BOTH
def test_a_parameter_written_within_a_step_is_refused_though_its_values_stay(policy: str) -> None:
    """Between a forward pass and the optimizer nothing but torch's own count of writes tells."""
    model, _, session = small(policy)
    with session.stepping(session.recording_context(session.table)):
        session.open_step.verify_tensors()
        with torch.no_grad():
            model[0].weight.add_(0.0)
        with pytest.raises(EditedOutside, match=r"step 0: .*0\.weight"):
            session.open_step.verify_tensors()
    session.close()


@BOTH
def test_a_parameter_that_begins_to_train_during_the_run_is_refused(policy: str) -> None:
    model, optimizer, session = small(policy)
    session.close()
    model[0].weight.requires_grad_(False)
    session = Session(model, optimizer, policy=POLICIES[policy], seed=1)
    session.prepare()
    calibrated(session, model)
    model[0].weight.requires_grad_(True)
    with (
        pytest.raises(
            Nondeterminism, match=r"optimizer group 0: a parameter of shape \[8, 4\] trains that did not"
        ),
        session.stepping(session.recording_context(session.table)),
    ):
        backward(session, model)
        optimizer.step()


@BOTH
def test_schedules_are_kept_to_forty_bits_everywhere(policy: str, zoo: Any, record_run: Any) -> None:
    """In the groups, and in what a scheduler remembers, those inside a sequence included."""
    run = record_run(
        lambda: zoo.build({"model": "plain", "scheduler": "sequential", "steps": "9"}), policy, 7
    )
    rates = [group["lr"] for group in run.job.optimizer.param_groups]
    for scheduler in (run.job.scheduler, *run.job.scheduler._schedulers):
        rates += scheduler._last_lr
    assert rates
    assert all(snap(rate) == rate for rate in rates)
    assert snap(0.1) != 0.1
    assert abs(snap(0.1) - 0.1) < 2.0**-43
    assert [snap(v) for v in (0.0, 0.5, 1e300 * 1e10)] == [0.0, 0.5, math.inf]


def test_hyperparameters_have_names_and_can_be_set() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25, betas=(0.5, 0.75), eps=0.125)
    session = prepared(model, optimizer)
    assert read_hyperparameters(session.optimizer) == [
        (0, "betas.0", 0.5),
        (0, "betas.1", 0.75),
        (0, "eps", 0.125),
        (0, "lr", 0.25),
    ]
    set_hyperparameter(session.optimizer, 0, "betas.1", 0.5)
    set_hyperparameter(session.optimizer, 0, "lr", 0.5)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("pair", [(0, 0.75), [0.5, 0.75], [0, 1]])
def test_adopting_the_numbers_an_optimizer_has_changes_no_committed_byte(pair: Any) -> None:
    """Rprop's ``step_sizes=(1e-06, 50)`` has a whole number, a configuration file gives a list: both stay as they are."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    optimizer.param_groups[0]["pair"] = pair
    session = prepared(model, optimizer)
    before = state_documents(session)["document/optimizer"]
    for index, name, value in read_hyperparameters(session.optimizer):
        set_hyperparameter(session.optimizer, index, name, value)
    assert state_documents(session)["document/optimizer"] == before
    set_hyperparameter(session.optimizer, 0, "pair.1", 0.25)
    assert optimizer.param_groups[0]["pair"] == type(pair)((pair[0], 0.25))


def test_a_pair_may_have_a_none() -> None:
    """Adafactor's ``eps`` is ``(None, 0.001)``."""
    model = nn.Linear(2, 2)
    session = prepared(model, torch.optim.Adafactor(model.parameters(), lr=0.25))
    named = {name: value for _, name, value in read_hyperparameters(session.optimizer)}
    assert named["eps.1"] == 0.001
    assert "eps.0" not in named


@BOTH
def test_sites_are_listed_in_order_with_names_and_shapes(policy: str) -> None:
    _, _, portable = small(policy)
    assert not any(s.kind == Kind.STATE for s in portable.sites)
    _, _, session = small(policy, "general")
    assert [s for s in session.sites if s.kind != Kind.STATE] == portable.sites
    listed = [(s.kind, s.name) for s in session.sites]
    assert listed[0] == (Kind.LOSS, "loss")
    assert listed[1:7] == [
        (Kind.GRADIENT, n) for n in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
    ]
    assert listed[7:10] == [(Kind.STATE, f"0.weight/{k}") for k in ("parameter", "exp_avg", "exp_avg_sq")]
    assert listed[-2:] == [
        (Kind.BUFFER, "model/buffer/1.running_mean"),
        (Kind.BUFFER, "model/buffer/1.running_var"),
    ]
    assert session.site_name((Kind.GRADIENT, 1)) == "gradient 0.bias"
    assert len({(s.kind, s.ordinal) for s in session.sites}) == len(session.sites)


@BOTH
def test_preparing_does_not_train(policy: str, zoo: Any, open_job: Any) -> None:
    """The optimizer is tried on a copy, whatever a scheduler has wrapped around its step."""
    job = zoo.build({"optimizer": "adam", "scheduler": "onecycle"})
    before = [p.detach().clone() for p in job.model.parameters()]
    session = open_job(job, POLICIES[policy])
    assert all(torch.equal(p.float(), q) for p, q in zip(job.model.parameters(), before, strict=True))
    assert not any(job.optimizer.state.values())
    assert session.trained.keys == ["exp_avg", "exp_avg_sq"]


class Scaled(torch.optim.SGD):
    """Has an attribute of its own, which copying an optimizer leaves out."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.scale = 2.0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] *= self.scale
        super().step(closure)


class Wrapped(torch.optim.SGD):
    """Holds the optimizer that does its work."""

    def __init__(self, params: Any, base: torch.optim.Optimizer) -> None:
        super().__init__(params, 0.1)
        self.base = base


def test_an_optimizer_may_have_attributes_and_no_other_optimizer(zoo: Any, open_job: Any) -> None:
    job = zoo.build({"model": "plain"})
    job.optimizer = Scaled(job.model.parameters(), 0.1)
    assert open_job(job, FP32).trained.keys == []
    for several in (False, True):
        job = zoo.build({"model": "plain"})
        job.optimizer = Wrapped(job.model.parameters(), [job.optimizer] if several else job.optimizer)
        with pytest.raises(Nondeterminism, match=r"optimizer Wrapped: holds another one, a .*, as base"):
            open_job(job, FP32)


def test_a_loss_without_gradient_is_refused(zoo: Any, open_job: Any) -> None:
    job = zoo.build({"model": "plain"})
    session = open_job(job, FP32)
    job.loss = lambda model, batch: model(batch[0]).detach().mean()
    with pytest.raises(InvalidInput, match="loss depends on no parameter by way of gradients"):
        calibrate(session, backward_of(session, job))


def test_loss_must_be_one_number(zoo: Any, open_job: Any) -> None:
    job = zoo.build({"model": "plain"})
    session = open_job(job, FP32)
    session.table = calibrate(session, backward_of(session, job)).table
    job.loss = lambda model, batch: model(batch[0])
    with pytest.raises(InvalidInput, match=r"loss must be one number, got shape \[8, 5\]"):
        run_step(session, job, session.recording_context(session.table))


class Refusing(dict[Any, float]):
    """Rates that nobody may look up."""

    def __getitem__(self, key: Any) -> float:
        raise Nondeterminism("own words")


class OwnRates(torch.optim.SGD):
    """Descent whose rates of single parameters it keeps itself, by the parameter or by its number."""

    def __init__(self, params: Any, *, by_number: bool) -> None:
        super().__init__(params, lr=0.1)
        self.by_number = by_number
        self.rates = {self.key(p): 0.5 for group in self.param_groups for p in group["params"]}

    def key(self, p: Tensor) -> Any:
        return id(p) if self.by_number else p

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(self.rates[self.key(p)])
        super().step(closure)


def test_what_an_optimizer_keeps_by_its_parameters_is_copied_with_them() -> None:
    """A copy of it looks its own parameters up; where that finds nothing, the reason is said and not a traceback."""
    model = nn.Linear(4, 2)
    Session(model, OwnRates(model.parameters(), by_number=False), policy=FP32, seed=1).prepare()
    with pytest.raises(
        InvalidInput, match=r"optimizer OwnRates: a copy of it, .* cannot take a step \(KeyError"
    ):
        Session(model, OwnRates(model.parameters(), by_number=True), policy=FP32, seed=1).prepare()
    refusing = OwnRates(model.parameters(), by_number=False)
    refusing.rates = Refusing(refusing.rates)
    with pytest.raises(Nondeterminism, match=r"^own words$"):  # as of an operator that is in no table
        Session(model, refusing, policy=FP32, seed=1).prepare()


class OwnCount(torch.optim.SGD):
    """Descent that keeps what it needs for its next step in attributes of its own, or in its state."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params, lr=0.1)
        self.where, self.taken, self.norms = where, 0, dict[Tensor, list[Tensor]]()

    def step(self, closure: Any = None) -> None:
        self.taken += self.where == "number"
        for group in self.param_groups:
            for p in group["params"]:
                if self.where == "tensors":
                    self.norms.setdefault(p, []).append(p.grad.norm())
                if self.where == "state":
                    self.state[p]["taken"] = self.state[p].get("taken", torch.zeros(())) + 1.0
        super().step(closure)


def test_what_an_optimizers_steps_change_is_what_a_checkpoint_holds() -> None:
    """An audit of a segment began it anew: an honest run was called a mismatch."""
    model = nn.Linear(4, 2)
    Session(model, OwnCount(model.parameters(), "state"), policy=FP32, seed=1).prepare()
    for where, name in (("number", "taken"), ("tensors", "norms")):
        with pytest.raises(
            Nondeterminism, match=f"optimizer OwnCount: a step changes its attribute {name}, which"
        ):
            Session(model, OwnCount(model.parameters(), where), policy=FP32, seed=1).prepare()
