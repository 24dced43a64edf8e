"""Whole small runs: recorded, then followed under last-bit noise to the same roots; without the log they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.execution.job import Job
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.numerics.log import Kind
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

STEPS = 30
BOTH = pytest.mark.parametrize("policy", ["fp64", "fp32"])

RUNS: dict[str, dict[str, str]] = {
    **{
        f"optimizer {name}": {"model": "plain", "optimizer": name}
        for name in (
            "sgd sgd-decay momentum dampened nesterov adam adam-single adam-fused amsgrad adamw adamax rmsprop "
            "rmsprop-centered rmsprop-momentum adagrad adagrad-decay adadelta nadam radam adafactor muon"
        ).split()
    },
    **{
        f"general arithmetic for {name}": {"model": "plain", "optimizer": name}
        for name in "momentum adam adamw".split()
    },
    **{
        f"schedule {name}": {"model": "plain", "scheduler": name}
        for name in "lambda cosine onecycle step multistep exponential sequential".split()
    },
    **{
        f"model {name}": {"model": name}
        for name in (
            "classifier convolutions transformer recurrent tied sparse frozen reassigned late branches checkpointed "
            "checkpointed-reentrant"
        ).split()
    },
    "two groups": {"groups": "yes", "optimizer": "momentum"},
    "an averaged copy": {"average": "yes"},
    "accumulation": {"accumulation": "2", "model": "transformer"},
    "clipping": {"clip": "0.05", "optimizer": "sgd"},
    "clipping a sparse gradient": {"clip": "0.05", "model": "sparse", "accumulation": "2"},
    "all at once": {
        "groups": "yes",
        "average": "yes",
        "accumulation": "2",
        "clip": "0.5",
        "scheduler": "onecycle",
        "optimizer": "adam",
        "model": "convolutions",
    },
}


@BOTH
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_followed_to_the_same_roots_under_noise(
    name: str, policy: str, zoo: Any, record_run: Any, follow_run: Any
) -> None:
    make = lambda: zoo.build(RUNS[name])  # noqa: E731
    steps = STEPS if name.startswith("optimizer") else 11  # past the second calibration, at step 8
    run = record_run(make, policy, steps, "general" if name.startswith("general") else "auto")
    done = follow_run(make, policy, run)
    assert [v for step in done.violations for v in step] == []
    assert done.roots == run.roots
    assert [o.loss for o in done.outcomes] == [o.loss for o in run.outcomes]
    assert [o.fingerprint for o in done.outcomes] == [o.fingerprint for o in run.outcomes]
    assert len(set(run.roots)) == steps


def trained_plainly(job: Job, dtype: torch.dtype, jitter: int | None) -> torch.Tensor:
    """All parameters after ``STEPS`` steps of an ordinary loop, with last-bit noise or without."""
    job.model.to(dtype)
    noise = None if jitter is None else Jitter(jitter)
    for step in range(STEPS):
        x, y = job.batch(step)
        if noise is None:
            job.loss(job.model, (x.to(dtype), y)).backward()
        else:
            with JitterMode(noise):
                job.loss(job.model, (x.to(dtype), y)).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in job.model.parameters()])


@BOTH
@pytest.mark.parametrize("model", ["plain", "recurrent", "tied"])
def test_the_same_noise_without_a_log_ends_in_other_weights(policy: str, model: str, zoo: Any) -> None:
    """The control of the test above: were the two sides equal anyway, following would prove nothing."""
    dtype = torch.float64 if policy == "fp64" else torch.float32
    quiet = trained_plainly(zoo.build({"model": model}), dtype, None)
    assert torch.equal(quiet, trained_plainly(zoo.build({"model": model}), dtype, None))
    noisy = trained_plainly(zoo.build({"model": model}), dtype, 5)
    assert (quiet != noisy).double().mean() > 0.3
    torch.testing.assert_close(quiet, noisy, atol=1e-3, rtol=0.0)


REFUSED = {
    "optimizer": {
        "lbfgs": (
            Nondeterminism,
            "optimizer LBFGS: it calls its closure several times .*; take one that steps once",
        ),
        "sparse-adam": (
            Nondeterminism,
            "optimizer SparseAdam: it needs sparse gradients.*; take Adam, they are made dense",
        ),
        "capturable": (Nondeterminism, "optimizer group 0: capturable optimizers keep their counters"),
        "differentiable": (Nondeterminism, "optimizer group 0: differentiable is True, False is needed"),
        "tensor-rate": (Nondeterminism, "optimizer group 0: lr is a tensor; give a plain number"),
    },
    "scheduler": {
        "plateau": (
            Nondeterminism,
            "scheduler ReduceLROnPlateau: it branches on the loss.*; take one of the step number",
        )
    },
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in REFUSED.items() for name in names]
)
def test_what_branches_on_noise_is_refused_with_the_reason(
    kind: str, name: str, zoo: Any, open_job: Any
) -> None:
    from tallystick.numerics.policy import FP64

    error, reason = REFUSED[kind][name]
    with pytest.raises(error, match=reason):
        open_job(zoo.build({kind: name}), FP64)


def test_a_refused_optimizer_under_another_name_is_refused_too(zoo: Any, open_job: Any) -> None:
    from tallystick.numerics.policy import FP64

    class Mine(torch.optim.LBFGS):
        pass

    job = zoo.build({})
    job.optimizer = Mine(job.model.parameters())
    with pytest.raises(Nondeterminism, match="optimizer LBFGS"):
        open_job(job, FP64)


@BOTH
def test_a_sparse_gradient_is_made_dense_and_named(policy: str, zoo: Any, record_run: Any) -> None:
    run = record_run(lambda: zoo.build({"model": "sparse"}), policy, 2)
    assert run.session.trained.densified == {"table.weight"}
    dense = record_run(lambda: zoo.build({"model": "tied"}), policy, 2)
    assert dense.session.trained.densified == set()


@BOTH
def test_the_specification_names_what_was_made_dense(policy: str, zoo: Any, tmp_path: Any) -> None:
    from tallystick.numerics.policy import find_policy

    directory = RunDirectory(tmp_path / "run")
    record(Order(zoo, {"model": "sparse", "steps": "2"}, find_policy(policy)), directory)
    assert directory.load_specification().notes.densified == ("table.weight",)


@BOTH
def test_unused_and_frozen_parameters_stay_as_they_are(policy: str, zoo: Any, record_run: Any) -> None:
    job = zoo.build({"model": "tied"})
    unused = job.model.unused.weight.detach().clone()
    run = record_run(lambda: job, policy, 5)
    assert torch.equal(run.job.model.unused.weight.float(), unused)
    frozen = zoo.build({"model": "frozen"})
    before = frozen.model.first.weight.detach().clone()
    run = record_run(lambda: frozen, policy, 5)
    assert torch.equal(frozen.model.first.weight.float(), before)
    assert int(frozen.model.seen) == 5, "calibration puts its counts back"
    assert frozen.model.average.abs().sum() > 0.0


@BOTH
def test_batch_norm_counts_and_averages_once_a_micro_batch(policy: str, zoo: Any, record_run: Any) -> None:
    job = zoo.build({"model": "convolutions", "accumulation": "2"})
    record_run(lambda: job, policy, 9)  # calibrates twice on the way
    assert int(job.model.norm1.num_batches_tracked) == 18


@BOTH
def test_a_gradient_that_is_only_noise_becomes_zero_on_both_sides(
    policy: str, zoo: Any, record_run: Any, follow_run: Any
) -> None:
    """The bias of a convolution before batch norm, and the key part of an attention's bias, have no signal."""
    make = lambda: zoo.build({"model": "convolutions", "optimizer": "sgd"})  # noqa: E731
    before = make().model.stem.bias.detach().clone()
    run = record_run(make, policy, 11)
    names = [name for name, _ in run.session.parameters]
    noise = {
        names[ordinal]
        for (kind, ordinal), grid in run.initial.sites.items()
        if kind == Kind.GRADIENT and is_noise_only(grid)
    }
    assert noise == {"stem.bias"}
    assert torch.equal(run.job.model.stem.bias.float(), before)
    done = follow_run(make, policy, run)
    assert done.roots == run.roots


@BOTH
def test_a_recorded_run_trains_like_a_plain_one(policy: str, zoo: Any, record_run: Any) -> None:
    """Rounding is not allowed to cost quality: the loss falls as it does in an ordinary loop."""
    settings = {"model": "plain", "optimizer": "sgd", "batch": "64"}
    plain = zoo.build(settings)
    losses = []
    for step in range(60):
        loss = plain.loss(plain.model, plain.batch(step % 4))
        plain.optimizer.zero_grad()
        loss.backward()
        plain.optimizer.step()
        losses.append(float(loss.detach()))
    job = zoo.build(settings)
    own = job.batch
    job.batch = lambda step: own(step % 4)
    run = record_run(lambda: job, policy, 60)
    recorded = [outcome.loss for outcome in run.outcomes]
    assert losses[-1] < losses[0] - 0.02
    assert recorded[-1] == pytest.approx(losses[-1], abs=2e-3)


@BOTH
def test_gradients_that_begin_late_are_rounded_finely(policy: str, zoo: Any, record_run: Any) -> None:
    """Behind a head of zeros every gradient is zero at step 0; its first real size sets its grid at once."""
    run = record_run(lambda: zoo.build({"model": "late", "optimizer": "sgd"}), policy, 4)
    plain = zoo.build({"model": "late", "optimizer": "sgd"})
    for step in range(4):
        plain.optimizer.zero_grad()
        plain.loss(plain.model, plain.batch(step)).backward()
        plain.optimizer.step()
    start = zoo.build({"model": "late", "optimizer": "sgd"}).model.first.weight.detach()
    moved, wanted = run.job.model.first.weight.float() - start, plain.model.first.weight - start
    assert wanted.norm() > 0.0
    assert (moved - wanted).norm() < 0.2 * wanted.norm()


@BOTH
def test_record_and_audit_agree_through_a_directory(policy: str, zoo: Any, tmp_path: Any) -> None:
    from tallystick.numerics.policy import find_policy

    directory = RunDirectory(tmp_path / "run")
    settings = {
        "model": "transformer",
        "accumulation": "2",
        "scheduler": "sequential",
        "average": "yes",
        "steps": "21",
    }
    record(Order(zoo, settings, find_policy(policy), checkpoint_every=7), directory)
    report = audit(directory, zoo, jitter=True)
    assert report.verdict == "match", str(report.first)
    assert report.steps == 21
    assert report.differing_elements == 0
    assert report.freedom.fraction < (1e-3 if policy == "fp64" else 0.1)
    part = audit(directory, zoo, steps=(7, 21), jitter=True)
    assert (part.verdict, part.steps) == ("match", 14)
    with pytest.raises(InvalidInput, match="8 is no committed checkpoint"):
        audit(directory, zoo, steps=(8, 21))


def step_of(job: Job, change: Any) -> Job:
    job.after_step = change
    return job


@BOTH
@pytest.mark.parametrize("way", ["in place", "through data"])
def test_weights_changed_after_the_optimizer_are_refused_by_name(
    policy: str, way: str, zoo: Any, record_run: Any
) -> None:
    def make(bound: float | None) -> Job:
        job = zoo.build({"model": "plain"})
        weight = job.model[0].weight

        def clip(step: int) -> None:
            with torch.no_grad():
                if bound is not None:
                    (weight if way == "in place" else weight.data).clamp_(-bound, bound)

        return step_of(job, clip)

    with pytest.raises(
        Nondeterminism, match=r"step 0: 0\.weight was changed by something other than the optimizer"
    ):
        record_run(lambda: make(0.1), policy, 1)
    record_run(lambda: make(None), policy, 1)


@BOTH
def test_weights_changed_by_a_hook_before_the_optimizer_are_refused_by_name(
    policy: str, zoo: Any, record_run: Any
) -> None:
    """A hook that undoes an optimizer's decay makes more of a move than the optimizer's own steps say."""

    def make(factor: float) -> Job:
        job = zoo.build({"model": "plain"})
        weight = job.model[0].weight

        def scale(*given: object) -> None:
            with torch.no_grad():
                weight.mul_(factor)

        job.optimizer.register_step_pre_hook(scale)
        return job

    with pytest.raises(Nondeterminism, match=r"0\.weight was changed by something other than the optimizer"):
        record_run(lambda: make(1.25), policy, 3)
    record_run(lambda: make(1.0), policy, 3)


@BOTH
def test_a_large_average_changed_through_data_is_rounded(
    policy: str, around: Any, record_run: Any, follow_run: Any
) -> None:
    """Writes through ``.data`` are not counted by torch; the change must be seen all the same."""

    def make() -> Job:
        job = around(lambda: lambda x: x)()
        average = nn.Linear(300, 300, bias=False).requires_grad_(False)
        with torch.no_grad():
            average.weight.copy_(torch.linspace(0.1, 0.9, 90_000).reshape(300, 300))
        job.extra = {"average": average}
        first = job.model.first.weight

        def after(step: int) -> None:
            average.weight.data.mul_(0.9).add_(float(first.detach()[0, 0]), alpha=0.1)

        return step_of(job, after)

    run = record_run(make, policy, 3)
    done = follow_run(make, policy, run)
    assert done.roots == run.roots
    average = run.session.extra["average"].weight
    if policy == "fp64":
        assert torch.equal(average, average.float().double()), "between steps the state holds float32 values"


@BOTH
def test_a_parameter_outside_the_optimizer_does_not_leak_from_step_to_step(
    policy: str, zoo: Any, record_run: Any, follow_run: Any
) -> None:
    """Its gradient counts in the norm at which gradients are clipped, so it must not pile up (or stay after a calibration)."""

    def make() -> Job:
        job = zoo.build({"model": "plain", "clip": "0.1"})
        job.optimizer = torch.optim.SGD(job.model[2].parameters(), lr=0.1)
        return job

    run = record_run(make, policy, 5)
    assert all(p.grad is None for p in run.job.model.parameters())
    done = follow_run(make, policy, run)
    assert done.roots == run.roots


@BOTH
def test_the_derivative_of_a_sign_is_recorded_and_followed(
    policy: str, zoo: Any, record_run: Any, follow_run: Any
) -> None:
    """Autograd adds zeros without memory there, and asks the device `meta` for the sum's shape: no operator of the model's."""

    def make() -> Job:
        job = zoo.build({"model": "plain"})
        plain = job.loss

        def loss(model: nn.Module, batch: Any) -> Tensor:
            return plain(model, batch) + 0.01 * sum((p.sgn() * p).sum() for p in model.parameters())

        job.loss = loss
        return job

    run = record_run(make, policy, 4)
    assert follow_run(make, policy, run).roots == run.roots
