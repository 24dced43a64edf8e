"""What moves of a gradient come to in the optimizer: held against what the optimizer itself makes of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tallystick.execution.noise.freedom import WEIGHED, Freedom, StepFreedom
from tallystick.execution.noise.gradients import WEIGHED_AT_ONCE, WEIGHED_FADE
from tallystick.execution.noise.weighing import CHUNK, DECAY, Weighing, is_linear

N = 200
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
KNOWN: dict[str, Make] = {
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1.0, betas=(0.0, 0.997), eps=1e-12),
    "AdamW amsgrad": lambda ps: torch.optim.AdamW(
        ps, lr=1.0, betas=(0.0, 0.997), eps=1e-12, weight_decay=0.0, amsgrad=True
    ),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1.0, alpha=0.997, eps=1e-12),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1.0, eps=1e-12),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=1.0, betas=(0.0, 0.997), eps=1e-12),
}


def gradients(step: int) -> Tensor:
    """Elements between 1e-4 and 1 of size, each of its own."""
    drawn = torch.Generator().manual_seed(step)
    sizes = torch.logspace(-4, 0, N, dtype=torch.float64)
    return sizes * torch.randn(N, generator=drawn, dtype=torch.float64)


def stepped(make: Make, steps: int) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    p = nn.Parameter(torch.zeros(N, dtype=torch.float64))
    optimizer = make([p])
    for step in range(steps):
        p.grad = gradients(step)
        optimizer.step()
    p.grad = None
    return p, optimizer


@pytest.mark.parametrize("name", KNOWN)
def test_small_moves_weigh_what_they_make_of_the_update_itself(name: str) -> None:
    """The update with and without the moves, without momentum: their difference is the moves, divided as the optimizer does."""
    steps = 2000
    p, optimizer = stepped(KNOWN[name], steps)
    at = torch.arange(0, N, 3)
    moves = 1e-6 * torch.logspace(-4, 0, N, dtype=torch.float64)[at]
    g = gradients(steps)
    weight = Weighing(optimizer).weigh(0, p, g, at, moves.float())
    ends: list[Tensor] = []
    for moved in (False, True):
        held = copy.deepcopy({"p": p, "state": optimizer.state_dict()})
        other = KNOWN[name]([held["p"]])
        other.load_state_dict(held["state"])
        held["p"].grad = g.clone()
        if moved:
            held["p"].grad[at] += moves
        other.step()
        ends.append(held["p"].detach())
    made = float((ends[1] - ends[0]).square().sum())
    # A move also changes the size that it is divided by, by less than the step's own share of it; in Adamax by all of it.
    assert weight.moved == pytest.approx(made, rel=0.05 if name != "Adamax" else 0.2)
    assert weight.whole == pytest.approx(float((ends[0] - p.detach()).square().sum()), rel=0.02)


def test_what_an_optimizer_of_another_kind_divides_by_is_kept_here() -> None:
    p = nn.Parameter(torch.zeros(N))
    weighing = Weighing(torch.optim.Rprop([p], lr=1.0))
    mean = torch.zeros(N, dtype=torch.float64)
    for step in range(5):
        g = gradients(step)
        mean = DECAY * mean + (1.0 - DECAY) * g.square()
        wanted = float((g.square() / (mean / (1.0 - DECAY ** (step + 1)))).sum())
        found = weighing.weigh(0, p, g, torch.empty(0, dtype=torch.int64), torch.empty(0))
        assert found.moved == 0.0
        assert found.whole == pytest.approx(wanted, rel=1e-5)


def test_the_same_move_weighs_more_where_gradients_are_small_and_never_without_end() -> None:
    p, optimizer = stepped(KNOWN["Adam"], 400)
    g, move = gradients(400), torch.tensor([1e-3])
    weights = [Weighing(optimizer).weigh(0, p, g, torch.tensor([i]), move).moved for i in (0, N // 2, N - 1)]
    assert weights[0] > 10.0 * weights[1] > 1000.0 * weights[2] > 0.0
    nothing = nn.Parameter(torch.zeros(N, dtype=torch.float64))
    optimizer = torch.optim.Adam([nothing], betas=(0.9, 0.999))
    for _ in range(10):
        nothing.grad = torch.zeros(N, dtype=torch.float64)
        optimizer.step()
    found = Weighing(optimizer).weigh(0, nothing, torch.zeros(N), torch.tensor([3]), torch.tensor([1.0]))
    assert 10.0 < found.moved <= 1.0 / (1.0 - 0.999)


def test_a_large_tensor_weighs_what_its_parts_do() -> None:
    n = CHUNK + 7
    p = nn.Parameter(torch.zeros(n))
    g = torch.linspace(0.5, 1.5, n)
    at, moves = torch.tensor([0, CHUNK - 1, CHUNK, n - 1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    whole = Weighing(torch.optim.Rprop([p], lr=1.0))
    for _ in range(2):
        found = whole.weigh(0, p, g, at, moves)
    size = g[at].double().square() + (1.0 - DECAY) / (1.0 - DECAY**2) * moves.double().square()
    assert found.moved == pytest.approx(float((moves.double().square() / size).sum()), rel=1e-5)
    assert found.whole == pytest.approx(n, rel=1e-5)


def test_moves_may_weigh_a_share_of_what_was_trained_and_of_some_steps_at_once_and_no_more() -> None:
    freedom, trained = Freedom(), 1024.0
    each = (
        1.0 + WEIGHED_AT_ONCE * WEIGHED_FADE
    )  # what a step adds, and what is forgotten of all that there is at once
    for step, (weighed, excesses) in enumerate(
        [
            (WEIGHED * trained * (1.0 + WEIGHED_AT_ONCE), 0),  # all that is there at the beginning
            (WEIGHED * trained * each * 0.99999, 0),
            (WEIGHED * trained * each * 1.001, 1),
        ]
    ):
        found = freedom.add(StepFreedom(weighed=weighed, trained=trained))
        assert len([excess for _, excess in found if "weighs" in excess.site]) == excesses, step
    assert freedom.weighed_share == pytest.approx(1.0, rel=1e-4)
    assert freedom.fields()["weighed_share"] == freedom.weighed_share


def test_what_early_steps_left_cannot_all_be_taken_late() -> None:
    trained, quiet = 1024.0, 3000
    for steps, excesses in (
        (1.0 / WEIGHED_FADE + WEIGHED_AT_ONCE, 0),
        (1.001 / WEIGHED_FADE + WEIGHED_AT_ONCE, 1),
    ):
        freedom = Freedom()
        for _ in range(quiet):
            assert not freedom.add(StepFreedom(trained=trained))
        found = freedom.add(StepFreedom(weighed=WEIGHED * trained * steps * 0.99999, trained=trained))
        assert len([excess for _, excess in found if "weighs" in excess.site]) == excesses, steps


def test_moves_where_nothing_trained_are_beyond_any_share() -> None:
    freedom = Freedom()
    found = freedom.add(StepFreedom(weighed=1e-9))
    assert [excess.own for _, excess in found if "weighs" in excess.site] == ["0 at most"]
    assert freedom.weighed_share == math.inf
    assert freedom.fields()["weighed_share"] is None
    assert Freedom().weighed_share == 0.0


def test_only_optimizers_that_divide_are_weighed() -> None:
    p = [nn.Parameter(torch.zeros(3))]
    assert is_linear(torch.optim.SGD(p, lr=0.1, momentum=0.9))
    assert is_linear(torch.optim.ASGD(p))
    assert not is_linear(torch.optim.Adam(p))

    class Own(torch.optim.SGD):
        """It may do anything."""

    assert not is_linear(Own(p, lr=0.1))


@pytest.mark.parametrize("steps", [0, 50])
def test_what_honest_moves_are_expected_to_weigh_is_what_they_weigh(steps: int) -> None:
    """Rounded with boundaries of every place, two near gradients differ in moves; their weight on average is the one expected."""
    p, optimizer = stepped(KNOWN["Adam"], steps)
    g, quantum = gradients(steps), 0.03
    d = 0.3 * quantum * torch.sin(torch.arange(N, dtype=torch.float64))
    d[::7] *= 10.0  # some are farther apart than a quantum
    expected = Weighing(optimizer).expected(p, g, g + d, torch.tensor([quantum], dtype=torch.float64))
    drawn, total, rounds = torch.Generator().manual_seed(3), 0.0, 400
    for _ in range(rounds):
        offset = torch.rand(N, generator=drawn, dtype=torch.float64)
        moves = quantum * (torch.floor((g + d) / quantum + offset) - torch.floor(g / quantum + offset))
        at = moves.nonzero().reshape(-1)
        total += Weighing(optimizer).weigh(0, p, g, at, moves[at].float()).moved
    assert expected.moved == pytest.approx(total / rounds, rel=0.1)
    assert expected.whole == pytest.approx(
        Weighing(optimizer).weigh(0, p, g, at[:0], moves[at][:0].float()).whole, rel=1e-6
    )


def test_of_rows_each_has_its_quantum_and_without_a_step_nothing_is_kept() -> None:
    p = nn.Parameter(torch.zeros(2, 3))
    g = torch.ones(2, 3)
    optimizer = torch.optim.Adam([p])
    found = Weighing(optimizer).expected(p, g, g + 0.125, torch.tensor([0.25, 0.5], dtype=torch.float64))
    once = [0.5 * 0.0625 / 1.0625, 0.25 * 0.25 / 1.25]  # chance of a move, its square, over the size with it
    assert found.moved == pytest.approx(3.0 * sum(once), rel=1e-6)
    assert found.whole == pytest.approx(6.0, rel=1e-6)
