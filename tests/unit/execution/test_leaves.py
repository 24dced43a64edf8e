"""Policy leaf: activations and their gradients are rounded where they arise, followed bit for bit, and a lie shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.job import Job
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.noise.measured import Calibration, SiteNoise
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import (
    UNKNOWN_NOISE,
    activation_grid,
    activation_rule,
    is_noise_only,
    nearest_grid,
    sampled_scale,
    site_grid,
)
from tallystick.execution.rounding.leaves import LeafSites
from tallystick.execution.session.session import Session
from tallystick.execution.step import backward_of, run_step
from tallystick.jobs.resnet50 import ResNet
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Frame, Kind, SiteAddress, SparseEntries, decode, encode
from tallystick.numerics.nearest import round_bits
from tallystick.numerics.nearest_tensors import FollowedNearest, find_reaches
from tallystick.numerics.policy import LEAF, find_policy, policy_of
from tallystick.numerics.tensor_measures import fingerprint
from tallystick_bench.leaf import corrections

ACTIVATION, GRADIENT = Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT
MODELS = (
    "plain classifier convolutions transformer recurrent tied sparse frozen late branches checkpointed checkpointed-reentrant"
).split()


class Noting:
    """A context that rounds to 26 bits and keeps what it was given."""

    def __init__(self) -> None:
        self.given: dict[tuple[int, int], Tensor] = {}
        self.order: list[str] = []

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        assert x.is_contiguous()
        self.given[(kind, ordinal)] = x.clone()
        self.order.append(f"{kind.name.lower()} {ordinal}")
        out = torch.empty_like(x)
        out.view(-1)[:] = torch.tensor(
            [round_bits(v, 26) for v in x.reshape(-1).tolist()], dtype=torch.float64
        )
        return out


@contextmanager
def noted(model: nn.Module) -> Iterator[tuple[Noting, LeafSites]]:
    context, sites = Noting(), LeafSites(model)
    with sites.rounding(context, 0):
        yield context, sites


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


class Reused(nn.Module):
    """One activation called twice, the second time in place, and a residual that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.keep = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        z = self.second(y)
        z += self.keep(y)
        return self.act(z)


def test_sites_come_in_the_order_of_the_forward_pass_whatever_the_backward_pass_does() -> None:
    model = seeded(Reused)
    with noted(model) as (context, sites):
        model(numbers(4, 6)).square().sum().backward()
    assert [sites.names[(ACTIVATION, i)] for i in range(5)] == [
        "output of first", "output of act", "output of second", "output of keep", "output of act (call 2)",
    ]  # fmt: skip
    assert [sites.names[(GRADIENT, i)] for i in range(5)] == [
        "gradient at act", "gradient at second", "gradient at keep", "gradient at act (call 2)",
        "gradient at the model's output",
    ]  # fmt: skip
    assert len(sites.names) == 10
    backward = [name for name in context.order if name.startswith("activation_gradient")]
    assert sorted(backward) == sorted(f"activation_gradient {i}" for i in range(5))
    assert backward[0] == "activation_gradient 4"


def test_the_values_are_the_rounded_ones_and_the_gradient_passes_the_rounding() -> None:
    """Compared with the same network written out by hand."""
    model = seeded(Reused)
    x = numbers(4, 6)
    with noted(model):
        out = model(x)
        out.square().sum().backward()

    def r(value: Tensor) -> Tensor:
        flat = [round_bits(v, 26) for v in value.detach().reshape(-1).tolist()]
        return torch.tensor(flat, dtype=torch.float64).reshape(value.shape)

    a = r(F.linear(x, model.first.weight, model.first.bias))
    y = r(torch.relu(a))
    z = r(F.linear(y, model.second.weight, model.second.bias)) + r(y)
    assert torch.equal(out, r(torch.relu(z)))
    at_output = r(2 * out.detach())
    at_act2 = r(at_output * (z > 0))
    at_second = r(at_act2 @ model.second.weight)
    at_keep = r(at_act2)
    at_act = r((at_second + at_keep) * (a > 0))
    assert torch.equal(model.second.weight.grad, at_act2.T @ y)
    assert torch.equal(model.first.weight.grad, at_act.T @ x)


def test_hooks_are_gone_afterwards_and_the_module_is_as_before() -> None:
    model = seeded(Reused)
    x = numbers(4, 6)
    before = model(x)
    with noted(model):
        assert not torch.equal(model(x), before), "the control: inside, values are rounded"
    assert torch.equal(model(x), before)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Several(nn.Module):
    """A leaf that takes and returns several tensors, some of them integers, by keyword too."""

    def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> dict[str, Any]:
        return {"both": (x * 2.0, extra["y"] + 1.0), "index": extra["i"] + 1, "none": None, "number": 3}


class Outer(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inside(x, extra={"y": x * 0.5, "i": torch.arange(3)})
        assert found["index"].tolist() == [1, 2, 3]
        out, (hidden, cell) = self.lstm(found["both"][0] + found["both"][1])
        return out.sum() + hidden.sum() + cell.sum()


def test_tuples_dicts_and_keywords_are_looked_into_and_integers_left_alone() -> None:
    model = seeded(lambda: Outer(Several()))
    with noted(model) as (context, sites):
        model(numbers(2, 5, 3).requires_grad_()).backward()
    names = [sites.names[place] for place in sorted(sites.names)]
    assert names.count("output of inside") == 2
    assert names.count("output of lstm") == 3
    assert names.count("gradient at inside") == 2
    assert len(context.given) == len(names)


def test_without_gradients_there_are_outputs_only() -> None:
    model = seeded(Reused)
    with noted(model) as (context, _), torch.no_grad():
        model(numbers(4, 6))
    assert {kind for kind, _ in context.given} == {ACTIVATION}


def test_other_memory_layouts_are_logged_in_row_order() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 1)))
    x = numbers(2, 2, 5, 5)
    with noted(model) as (context, _):
        model(x).square().sum().backward()
    last = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 1))).to(
        memory_format=torch.channels_last
    )
    with noted(last) as (other, _):
        last(x.contiguous(memory_format=torch.channels_last)).square().sum().backward()
    for place, value in context.given.items():
        torch.testing.assert_close(other.given[place], value, atol=1e-12, rtol=1e-7)


class Box:
    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Box(x)


def test_what_cannot_be_rounded_is_refused_by_name() -> None:
    model = nn.Sequential(Odd())
    with noted(model), pytest.raises(Nondeterminism, match="module 0 returns a Box"):
        model(numbers(2, 2, 3))
    single = nn.Sequential(nn.Linear(3, 3))
    with noted(single), pytest.raises(Nondeterminism, match=r"output of 0|0: a tensor of torch.float32"):
        single(numbers(2, 3).float())
    twice = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    x = numbers(2, 3).requires_grad_()
    with noted(twice):
        (first,) = torch.autograd.grad(twice(x).sum(), x)
    with (
        noted(twice),
        pytest.raises(Nondeterminism, match="is differentiated again"),
    ):
        torch.autograd.grad(twice(x).square().sum(), x, create_graph=True)
    assert first.shape == x.shape


def test_what_stands_for_several_values_is_refused_by_name() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3)))
    x = numbers(2, 3)
    with noted(model):
        model(x)  # the control: outside of vmap it is rounded
    with (
        noted(model),
        pytest.raises(Nondeterminism, match=r"0: runs inside torch.func or vmap.*use policy fp64"),
    ):
        torch.vmap(model)(x)
    with noted(model), pytest.raises(Nondeterminism, match=r"0: runs inside torch\.func or vmap"):
        torch.func.jacrev(model)(x)


def test_a_scripted_module_is_refused_by_name() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(Nondeterminism, match="module 1 is scripted"):
        LeafSites(nn.Sequential(nn.Linear(3, 3), scripted))


# -- whole steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("more", [{}, {"accumulation": "2"}], ids=["whole", "accumulated"])
def test_a_run_is_followed_to_the_same_roots_under_noise(
    model: str, more: dict[str, str], zoo: Any, record_run: Any, follow_run: Any
) -> None:
    if more and model == "branches":
        pytest.skip("its branches depend on the whole batch")
    make = lambda: zoo.build({"model": model, **more})  # noqa: E731
    run = record_run(make, "leaf", 10)
    done = follow_run(make, "leaf", run)
    assert [v for step in done.violations for v in step] == []
    assert done.roots == run.roots
    assert [o.loss for o in done.outcomes] == [o.loss for o in run.outcomes]
    assert len(run.session.leaves.names) >= 3
    assert any(kind == ACTIVATION for kind, _ in run.session.table.sites)


class Loud:
    """A small network without ties, run under noise so large that straddles are seen."""

    UNITS = 2.0**17

    def __init__(self, tau: str = "layer", b_r: int = 32, units: float = UNITS) -> None:
        self.policy, self.units = find_policy("leaf", b_r=b_r, tau=tau), units

    def job(self) -> Job:
        model = seeded(
            lambda: nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, 12))
        ).float()
        return Job(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), steps=100, loss=_distance,
            batch=lambda step: numbers(128, 12, seed=100 + step).float(),
        )  # fmt: skip

    def session(self, job: Job, jitter: bool) -> Session:
        """A session whose forward and backward passes alone are disturbed: the optimizer's portable arithmetic is not."""
        noise = Jitter(5, self.units) if jitter else None
        session = Session(job.model, job.optimizer, policy=self.policy, seed=1, jitter=noise)
        session.prepare()
        return session

    def record(self, steps: int) -> tuple[list[bytes], list[int], GridTable]:
        job = self.job()
        self.said: list[int] = []
        session = self.session(job, jitter=False)
        frames: list[bytes] = []
        prints: list[int] = []
        first = GridTable()
        for step in range(steps):
            before = session.table
            if session.is_calibration_step(step):
                found = calibrate(session, backward_of(session, job), seed=3, units=self.units)
                session.table = found.table
                if not step:
                    before = first = session.table
                    self.thresholds = found.thresholds
            context = session.recording_context(before)
            overhear(context, self.said)
            prints.append(run_step(session, job, context).fingerprint)
            frames.append(context.finish())
            session.settle(context)
        self.weights = torch.cat([p.detach().reshape(-1) for p in job.model.parameters()])
        session.close()
        return frames, prints, first

    def follow(
        self, frames: list[bytes], first: GridTable, strip: bool = False
    ) -> tuple[list[int], list[FollowingContext]]:
        job = self.job()
        self.heard: list[int] = []
        session = self.session(job, jitter=True)
        session.table = first
        contexts: list[FollowingContext] = []
        prints: list[int] = []
        for frame in frames:
            context = session.following_context(frame)
            if strip:
                kept = tuple(s for s in context.frame if s[0].kind not in (ACTIVATION, GRADIENT))
                context = FollowingContext(
                    context.policy, session.table, Frame(kept), context.base, sites=context.sites
                )
            overhear(context, self.heard)
            prints.append(run_step(session, job, context).fingerprint)
            context.finish()
            session.settle(context)
            contexts.append(context)
        session.close()
        return prints, contexts


def overhear(context: RecordingContext | FollowingContext, heard: list[int]) -> None:
    """Note the fingerprint of every activation that ``context`` rounds."""
    rounded = context.activation

    def activation(kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        out = rounded(kind, ordinal, x, name=name)
        heard.append(fingerprint(out.float(), 0))
        return out

    context.activation = activation  # pyright: ignore[reportAttributeAccessIssue]


def _distance(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - torch.cos(3.0 * x)).square().mean()


@pytest.mark.parametrize("tau", ["layer", "kind", "0.25", "0.4375"])
def test_straddles_are_corrected_and_without_the_log_of_activations_they_are_not(tau: str) -> None:
    """Control included: the same two sides, the log's activation entries taken out, end in other states."""
    loud = Loud(tau)
    frames, prints, first = loud.record(9)
    followed, contexts = loud.follow(frames, first)
    assert [v for context in contexts for v in context.violations] == []
    assert followed == prints
    moved = [
        site.moved
        for context in contexts
        for (kind, _), site in context.freedom.sites.items()
        if kind == ACTIVATION
    ]
    assert sum(moved) > 5
    assert loud.heard == loud.said
    loud.follow(frames, first, strip=True)
    assert loud.heard != loud.said


def test_a_fixed_threshold_logs_the_share_it_stands_for() -> None:
    """1/2 - tau = 1/16 of a quantum on either side of a boundary: one element in eight."""
    loud = Loud("0.4375", units=1.0)
    frames, _, first = loud.record(2)
    _, contexts = loud.follow(frames, first)
    freedom = contexts[0].freedom
    near = sum(site.near for site in freedom.sites.values())
    assert near / freedom.elements == pytest.approx(0.125, abs=0.03)


def test_thresholds_are_one_for_each_layer_or_each_kind() -> None:
    layer, kind = Loud("layer"), Loud("kind")
    _, _, by_layer = layer.record(1)
    _, _, by_kind = kind.record(1)
    linear = [(ACTIVATION, 0), (ACTIVATION, 3)]
    assert len({by_kind.sites[place].band for place in linear}) == 1
    assert by_kind.sites[linear[0]].band == max(by_layer.sites[place].band for place in linear)
    assert {t.layer for t in layer.thresholds} == {"Linear", "Tanh", "LayerNorm", "Sequential"}
    for threshold in layer.thresholds:
        assert threshold.closed < 0.5, "cancelled elements may leave no room at all: the floor is for them"
        assert threshold.observed is not None
        assert threshold.observed > 0.25
    assert sum(t.straddles for t in layer.thresholds) > 0


@pytest.mark.slow
def test_corrections_halve_with_every_bit_removed() -> None:
    """Paper, Table 3, and its prediction of 22, 11, 5.6 .. a step. Over 100 steps, under much noise."""
    counts = [found["corrections"] for found in corrections(100)]
    assert counts[0] > 100
    for removed, count in enumerate(counts):
        expected = counts[0] / 2**removed
        assert abs(count - expected) < 5.0 * expected**0.5 + 0.1 * expected, counts


# -- lies ------------------------------------------------------------------------------------------------------------


def contexts(x: Tensor, band: int = -40, tau: str = "layer") -> tuple[Frame, GridTable, Tensor]:
    """The frame of one activation site, the table it leads to, and what the recorder got."""
    policy = find_policy("leaf", tau=tau)
    context = RecordingContext(policy, GridTable())
    rule = policy.activation
    assert rule is not None
    context.table = GridTable()
    context._grids = {(ACTIVATION, 0): activation_grid(rule, band, torch.tensor([1]).numpy())}
    context.start_micro_batch(0)
    out = context.activation(ACTIVATION, 0, x, name="x")
    context.finish()
    return Frame.of(context.payloads), GridTable(context._grids), out


def followed(
    x: Tensor, frame: Frame, table: GridTable, tau: str = "layer"
) -> tuple[FollowingContext, Tensor]:
    kept = tuple(site for site in frame if site[0].kind != Kind.GRID)
    context = FollowingContext(find_policy("leaf", tau=tau), table, Frame(kept))
    context.start_micro_batch(0)
    out = context.activation(ACTIVATION, 0, x, name="x")
    context.finish()
    return context, out


def with_entry(frame: Frame, at: int, side: int, n: int) -> Frame:
    address = SiteAddress(0, 0, ACTIVATION, 0)
    payloads = dict(frame.sites)
    old = decode(payloads[address], n, 1) if address in payloads else SparseEntries.none(n, 1)
    pairs = dict(zip(old.indexes.tolist(), old.symbols.tolist(), strict=True)) | {at: side}
    indexes = torch.tensor(sorted(pairs)).numpy()
    payloads[address] = encode(
        SparseEntries(n, 1, indexes, torch.tensor([pairs[i] for i in sorted(pairs)]).numpy())
    )
    return Frame.of(payloads)


def test_an_entry_far_from_a_boundary_is_a_violation_and_not_obeyed() -> None:
    x = numbers(1000)
    frame, table, out = contexts(x)
    honest, same = followed(x, frame, table)
    assert honest.violations == []
    assert torch.equal(same, out)
    lie = with_entry(frame, 7, 1, 1000)
    caught, kept = followed(x, lie, table)
    assert [(v.site, v.element) for v in caught.violations] == [("x", 7)]
    assert torch.equal(kept, out)


def test_more_entries_than_honest_values_give_are_a_violation() -> None:
    """All within reach of a boundary by the band's width, but too many: the follower counts from its own quanta."""
    n = 4096
    k = torch.arange(n, dtype=torch.float64)
    x = 1.0 + (k + 0.5) * 2.0**-23 + 2.0**-40  # every element is near a boundary, none on a tie
    frame, table, _ = contexts(x, band=-38)
    context, _ = followed(x, frame, table)
    assert any("exceed the budget" in v.rule for v in context.violations)
    ties = x - 2.0**-40  # lie there because of what they are: allowed
    frame, table, _ = contexts(ties, band=-38)
    context, _ = followed(ties, frame, table)
    assert context.violations == []


def test_a_scale_too_wide_and_a_band_outside_the_policy_are_violations() -> None:
    x = numbers(1000)
    rule = LEAF.activation
    assert rule is not None
    wide = GridTable({(ACTIVATION, 0): activation_grid(rule, -40, torch.tensor([9]).numpy())})
    context, _ = followed(x, Frame(), wide)
    assert any("too wide" in v.rule for v in context.violations)
    loose = GridTable({(ACTIVATION, 0): activation_grid(rule, -9, torch.tensor([1]).numpy())})
    context, _ = followed(x, Frame(), loose)
    assert any("band 2**-9 outside 2**-46..2**-14" in v.rule for v in context.violations)


def test_a_site_that_is_only_noise_is_passed_through_and_gives_no_freedom() -> None:
    x = numbers(50)
    rule = LEAF.activation
    assert rule is not None
    table = GridTable({(ACTIVATION, 0): activation_grid(rule, -1, torch.tensor([1]).numpy())})
    assert is_noise_only(table.sites[(ACTIVATION, 0)])
    context, out = followed(x, Frame(), table)
    assert out is x
    assert (context.violations, context.freedom.elements) == ([], 0)


def test_a_site_without_a_grid_and_a_policy_without_activations_are_refused() -> None:
    x = numbers(5)
    with pytest.raises(InvalidInput, match="no grid with one scale is given for x"):
        followed(x, Frame(), GridTable())
    plain = FollowingContext(find_policy("fp64"), GridTable(), Frame())
    with pytest.raises(InvalidInput, match="policy fp64 rounds no activations"):
        plain.activation(ACTIVATION, 0, x, name="x")


# -- policy ----------------------------------------------------------------------------------------------------------


def test_a_specification_s_choice_of_bits_and_threshold_is_read_back() -> None:
    for b_r, tau in ((32, "layer"), (26, "kind"), (29, "0.375")):
        policy = find_policy("leaf", b_r=b_r, tau=tau, recalibrate_every=7, optimizer_arithmetic="general")
        assert policy_of("leaf", policy.parameters()) == policy
    assert "b_r" not in find_policy("fp64").parameters()


@pytest.mark.parametrize(
    "name,more,reason",
    [
        ("leaf", {"b_r": 25}, "b_r 25 is outside"),
        ("leaf", {"b_r": 33}, "b_r 33 is outside"),
        ("leaf", {"tau": "0.3"}, "tau must be"),
        ("leaf", {"tau": "0.250"}, "tau must be"),
        ("leaf", {"tau": "0.5"}, "tau must be"),
        ("leaf", {"tau": "nan"}, "tau must be"),
        ("leaf", {"tau": "often"}, "tau must be"),
        ("fp32", {"b_r": 32}, "policy fp32: has no b_r"),
    ],
)
def test_other_choices_are_refused(name: str, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        find_policy(name, **more)
    if name == "leaf":
        stated = find_policy("leaf", optimizer_arithmetic="general").parameters() | more
        with pytest.raises(InvalidInput, match=reason):
            policy_of("leaf", stated)


# -- how much is logged ----------------------------------------------------------------------------------------------


class Counting:
    """A context that lets everything pass."""

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        return x


def counted(model: nn.Module, batch: Tensor, out: Callable[[Any], Tensor]) -> tuple[int, int]:
    """Elements logged forward and backward, from shapes alone: everything lies on the meta device."""
    sites = LeafSites(model)
    with sites.rounding(Counting(), 0):
        out(model(batch)).sum().backward()
    forward = sum(n for (kind, _), n in sites.sizes.items() if kind == ACTIVATION)
    return forward, sum(sites.sizes.values()) - forward


def test_resnet50_logs_as_many_entries_as_derived_from_the_paper_s_code() -> None:
    """1.0466e9 a step at batch 64: 523.2M forward in 119 tensors, 523.4M backward in 118 and the model's output."""
    with torch.device("meta"):
        model = ResNet(64, (3, 4, 6, 3)).double()
    assert sum(p.numel() for p in model.parameters()) == 23_520_842
    images = torch.empty(64, 3, 32, 32, dtype=torch.float64, device="meta")
    forward, backward = counted(model, images, lambda y: y)
    assert (forward, backward) == (523_240_064, 523_371_136)
    assert f"{forward + backward:.4e}" == "1.0466e+09"


def test_an_activations_entries_have_a_budget_of_eight_deviations_and_its_scale_three_octaves() -> None:
    found = FollowedNearest(-1, 0, 0, 0, tied=3, chance=100.0)
    assert found.budget == 100 + 80 + 16 + 3
    rule, x = activation_rule(LEAF), torch.full((64,), 1.5, dtype=torch.float64)
    own = int(sampled_scale(None, x)[0]) - 1  # pyright: ignore[reportOptionalSubscript]
    assert own == 1
    for more, refused in ((3, False), (4, True)):
        grid = activation_grid(rule, -30, np.array([own + more]))
        context = FollowingContext(LEAF, GridTable({(int(Kind.ACTIVATION), 0): grid}), Frame())
        context.activation(Kind.ACTIVATION, 0, x, name="activation of relu")
        assert ["is too wide" in v.rule for v in context.violations] == [True] * refused


@pytest.mark.parametrize(
    ("band", "noted"), [(-46 + UNKNOWN_NOISE, 0), (-46 + UNKNOWN_NOISE + 1, 1), (-14, 1)]
)
def test_an_activation_met_before_its_noise_was_measured_has_the_band_of_the_unknown(
    band: int, noted: int
) -> None:
    """A layer that no measured step runs: nobody else says how wide its band may be."""
    place, rule = (int(Kind.ACTIVATION), 0), activation_rule(LEAF)
    new = GridTable({place: activation_grid(rule, band, np.array([1]))})
    frame = Frame.of({SiteAddress(0, 0, Kind.GRID, 0): GridTable().diff(new)})
    base = GridTable({(int(Kind.GRADIENT), 0): site_grid(LEAF, Kind.GRADIENT, -30, np.array([1]))})
    context = FollowingContext(LEAF, GridTable(), frame, base)
    assert sum("the grid of the last calibration" in each.own for _, each in context.excesses) == noted


ACTIVATION_0 = (int(Kind.ACTIVATION), 0)


def counted_moves(values: list[float], noise: float | None, kept: int = 0) -> int:
    """Return how many moves are counted where a log takes all but the first ``kept`` of these to the other side; scale 2**0."""
    grid = activation_grid(activation_rule(LEAF), -40, np.zeros(1, dtype=np.int64))
    small = torch.tensor(values, dtype=torch.float64)
    other = 1 - find_reaches(small, nearest_grid(activation_rule(LEAF), grid)).side
    other[:kept] = 1 - other[:kept]
    x = torch.cat((small, torch.ones_like(small)))  # the others make the scale, and lie far from a boundary
    entries = SparseEntries(x.numel(), 1, np.arange(small.numel()), other.numpy())
    frame = Frame(((SiteAddress(0, 0, Kind.ACTIVATION, 0), encode(entries)),))
    table = GridTable({ACTIVATION_0: grid})
    context = FollowingContext(LEAF, table, frame)
    if noise is not None:
        measured = SiteNoise(noise, np.zeros(1, dtype=np.int64), 0.0, 0.0)
        context.yardstick = Yardstick(LEAF, Calibration({ACTIVATION_0: measured}, table))
    context.activation(Kind.ACTIVATION, 0, x, name="activation of linear")
    assert not context.violations
    return context.freedom.sites[ACTIVATION_0].moved


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_lies_on_a_boundary_but_for_the_noise_of_its_terms_is_not_counted_as_moved(sign: float) -> None:
    """A sum of short numbers lies there for what it is; where its terms cancel, their noise is many of its last places."""
    boundary = sign * (2.0**-8 + 2.0**-32)  # an element's quantum is 2**-31, its last place 2**-60

    def counted(distance: float, noise: float | None) -> int:
        return counted_moves([boundary + distance, boundary - distance], noise)

    assert counted(2.0**-55, None) == 0  # within 2**6 of its last places
    assert counted(2.0**-54, None) == 2
    assert counted(2.0**-54, 0.0) == 2  # nothing moves here: no sum has noise
    for noise, inside, outside in (
        (2.0**-52, 2.0**-51 - 2.0**-60, 2.0**-51),  # twice the noise measured
        (
            2.0**-45,
            2.0**-49 - 2.0**-60,
            2.0**-49,
        ),  # and last places of the terms at most, whatever was measured
    ):
        assert (counted(inside, noise), counted(outside, noise)) == (0, 2)


def test_moves_that_are_not_on_a_boundary_are_counted_whatever_else_is() -> None:
    """Elements on a boundary excuse themselves alone: a first layer over pixels has one in a hundred of them."""
    on, beside = 2.0**-8 + 2.0**-32, 2.0**-8 + 2.0**-32 + 2.0**-42
    assert counted_moves([on] * 100, 2.0**-51) == 0
    for kept in (0, 100):
        assert counted_moves([on] * 100 + [beside], 2.0**-51, kept) == 1


def test_few_elements_of_ordinary_numbers_lie_on_a_boundary() -> None:
    """Two in a million at most, so that a log gains nothing by them: its budget begins with one in a site."""
    grid = activation_grid(activation_rule(LEAF), -44, np.zeros(1, dtype=np.int64))
    x = numbers(1 << 20)
    reaches = find_reaches(x, nearest_grid(activation_rule(LEAF), grid))
    width = torch.ldexp(torch.ones_like(x), reaches.quantum)
    reach = (x.abs() * 2.0**-46).clamp(min=2.0**-49)
    assert float((2.0 * reach / width).mean()) < 2.0**-19
