"""What an auditor accepts: limits just kept and just passed, noise measured when it is due, and what steps that differ leave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import cycle
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from tallystick.errors import InvalidInput
from tallystick.execution.noise.freedom import Freedom, StepFreedom
from tallystick.execution.noise.measured import Calibration, SiteNoise
from tallystick.execution.noise.own_path import MOST_CHOICES, OwnPath
from tallystick.execution.noise.yardstick import Yardstick
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import NOISE_BAND, site_grid
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Frame, Kind, SiteAddress, decode_frame, encode_frame
from tallystick.numerics.policy import FP32, POLICIES, find_policy
from tallystick.roles import acceptance, bending
from tallystick.roles.acceptance import DOUBT, Acceptance, Limits
from tallystick.roles.bending import Carried, StepBend, TensorBend, _OwnBranches


def session(
    step: int = 1, numbers: Mapping[str, float] | None = None, overdue: list[int] | None = None
) -> Any:
    """As much of a session as is asked for: one parameter of four elements; in ``overdue`` go steps held so."""
    held: list[int] = [] if overdue is None else overdue
    context = SimpleNamespace(
        yardstick=None, hold_overdue=lambda: held.append(step), changes_hearing=lambda place: False,
        table=GridTable(), excesses=[],
    )  # fmt: skip
    context.hold_against = lambda yardstick: setattr(context, "yardstick", yardstick)
    return SimpleNamespace(
        policy=POLICIES["fp32"],
        table=GridTable(),
        step=step,
        seed=1,
        parameters=[("w", torch.nn.Parameter(torch.ones(4)))],
        optimizer=SimpleNamespace(param_groups=[dict(numbers or {})]),
        open_step=SimpleNamespace(schedule=[]),
        is_calibrated=lambda frame: False,
        chooses_grids=lambda step: True,
        is_calibration_step=lambda step: False,
        following_context=lambda frame: context,
        site_name=str,
    )


@pytest.mark.parametrize(("name", "most"), [("steer", math.inf), ("moves", math.inf), ("silenced", 1.0)])
def test_a_limit_is_a_number_from_nothing_on_and_a_share_at_most_all(name: str, most: float) -> None:
    limits: Any = Limits
    for good in (0, 1):
        assert getattr(limits(**{name: good}), name) == good
    for bad in (-0.001, math.nan, *([1.001] if most == 1.0 else [])):
        with pytest.raises(InvalidInput, match=f"--max-{name} must be a number from 0 to {most:g}"):
            limits(**{name: bad})


@pytest.mark.parametrize(
    ("limits", "found", "inside", "outside"),
    [
        (Limits(steer=0.5), "largest_steer", 0.5, 0.501),
        (Limits(steer=0.5), "largest_move", 0.5, 0.501),
        (Limits(moves=7), "moved", 7, 8),
        (Limits(moves=7), "decisions_moved", 7, 8),
        (Limits(silenced=0.5), "silenced_parameters", 2, 3),
    ],
)
def test_a_limit_may_be_reached_and_not_passed(
    limits: Limits, found: str, inside: float, outside: float
) -> None:
    for value, excesses in ((inside, 0), (outside, 1)):
        freedom = Freedom()
        setattr(freedom, found, value)
        measured = Acceptance(limits, freedom)
        measured.begin(session(step=0))
        after = session()
        with torch.no_grad():
            after.parameters[0][1].add_(0.5)  # four elements by a half: a distance of one
        found_now = measured.end(after)
        assert freedom.distance == 1.0
        assert len(found_now) == excesses, value


@pytest.mark.parametrize(("path", "excesses"), [(3.0, 0), (3.001, 1)])
def test_residues_carry_all_weights_so_far_at_most(path: float, excesses: int) -> None:
    measured, now = Acceptance(Limits(), Freedom(path=path)), session(step=0)
    now.policy = POLICIES["bf16"]
    measured.begin(now)
    with torch.no_grad():
        now.parameters[0][1].add_(0.5)
    assert len(measured.end(now)) == excesses


@pytest.mark.parametrize(("policy", "most"), [("fp32", 2.0**-4), ("fp64", 2.0**-6), ("leaf", 2.0**-6)])
def test_a_log_leads_a_tensor_so_far_at_most(
    monkeypatch: pytest.MonkeyPatch, policy: str, most: float
) -> None:
    """Of the way that the auditor's own rounding would have led it."""
    measured, now = Acceptance(Limits(), Freedom()), session(step=4)
    now.policy = POLICIES[policy]
    measured.begin(now)
    for way, excesses in (
        (most, []),
        (1.001 * most, ["w: way that the log's choices led it, over the way trained"]),
    ):
        monkeypatch.setattr(measured._own, "shares", lambda *given, way=way: {"w": way})
        assert [excess.site for _, excess in measured.end(now)] == excesses
        assert measured.freedom.path_steer == way


def led_session(step: int) -> Any:
    now = session(step=step)
    now.optimizer = torch.optim.SGD([now.parameters[0][1]], lr=0.5)
    return now


def take_step(auditor: Acceptance, now: Any, own: float) -> None:
    """Take a step of which the log chose the gradient of one element, four, where the auditor's is ``own``."""
    context: Any = SimpleNamespace(freedom=StepFreedom(), excesses=[], table=GridTable())
    gradient = torch.tensor([4.0, 0.0, 0.0, 0.0])
    context.is_calibrated = False
    auditor._note_own(now, context, 0, gradient, torch.tensor([0]), torch.tensor([own]), False, False)
    now.parameters[0][1].grad = gradient
    now.optimizer.step()
    now.step += 1
    auditor.count(now, context)


def test_where_steps_that_differ_led_is_taken_back() -> None:
    auditor, now = Acceptance(Limits(), Freedom()), led_session(4)
    for own, way in ((3.0, 0.5), (0.0, 2.0)):
        auditor.begin(now)
        take_step(auditor, now, own)
        assert auditor._own.tensors[0].farthest.tolist() == [way]
        auditor.discard()
        assert auditor._own.tensors == {}


@pytest.mark.parametrize(("calibrated", "latest"), [(True, -1), (False, 4), (False, 3)])
def test_whether_the_noise_was_measured_in_a_step_is_said_of_what_is_chosen_in_it(
    monkeypatch: pytest.MonkeyPatch, calibrated: bool, latest: int
) -> None:
    auditor, now = Acceptance(Limits(), Freedom()), led_session(4)
    auditor.begin(now)
    auditor._latest = latest
    told: list[bool] = []
    monkeypatch.setattr(auditor._own, "note", lambda *given, is_measured, **more: told.append(is_measured))
    context: Any = SimpleNamespace(is_calibrated=calibrated)
    auditor._note_own(now, context, 0, torch.ones(4), torch.tensor([0]), torch.ones(1), False, True)
    assert told == [calibrated or latest == 4]


@pytest.mark.parametrize("chosen", [MOST_CHOICES, MOST_CHOICES + 1])
def test_a_log_chooses_whole_gradients_so_often_at_most(monkeypatch: pytest.MonkeyPatch, chosen: int) -> None:
    auditor, now = Acceptance(Limits(), Freedom()), session(step=4)
    auditor.begin(now)
    monkeypatch.setattr(OwnPath, "choices", chosen)
    what = "times that the log chose whether a gradient is nothing but noise"
    assert [excess.site for _, excess in auditor.end(now)] == [what] * (chosen > MOST_CHOICES)
    assert auditor.freedom.choices == chosen


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(("calibrated", "scheduled"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("steps", [MOST_CHOICES, MOST_CHOICES + 1])
def test_a_trainer_chooses_so_often_at_most_when_to_measure(
    monkeypatch: pytest.MonkeyPatch, policy: str, asks: bool, calibrated: bool, scheduled: bool, steps: int
) -> None:
    """Who measures when it suits chooses which of a gradient's batches is asked whether it is noise."""
    monkeypatch.setattr(acceptance, "bend_of", lambda *given, **more: StepBend(0.0, {}))
    monkeypatch.setattr(acceptance, "count_exact", lambda *given: 0)
    own = Yardstick(POLICIES[policy], Calibration())
    auditor, now = Acceptance(Limits(), Freedom()), session(step=4)
    auditor.begin(now)
    auditor._yardstick = own
    now.policy, now.listeners = POLICIES[policy], SimpleNamespace(gradients=None)
    doubts: list[int] = []
    now.has_outgrown = lambda doubt: (doubts.append(doubt), asks)[1]
    now.is_calibration_step = lambda step: scheduled
    context: Any = SimpleNamespace(is_calibrated=calibrated, newly_heard=lambda place: False)
    context.freedom, context.excesses = StepFreedom(), []
    for _ in range(steps):
        with auditor.watching(now, context, lambda context: None):
            now.listeners.gradients()
    is_free = policy == "fp32" and not scheduled
    assert doubts == [DOUBT if calibrated else -DOUBT] * (steps if is_free else 0)
    what = "steps in which the noise was measured unasked, or was not and asked for it"
    is_over = is_free and asks != calibrated and steps > MOST_CHOICES
    assert [excess.site for _, excess in auditor.end(now)] == [what] * is_over
    now.step += 1
    auditor.begin(now)
    assert auditor._unasked == 0, "the next segments are other ones"


def test_an_optimizer_that_cannot_be_copied_is_not_accepted() -> None:
    auditor, now = Acceptance(Limits(), Freedom()), led_session(4)
    auditor.begin(now)
    now.step += 1
    auditor._own.problem = "optimizer Odd: ValueError"
    assert [excess.site for _, excess in auditor.end(now)] == ["optimizer Odd: ValueError"]


def test_segments_that_follow_each_other_are_one_path() -> None:
    auditor, now = Acceptance(Limits(), Freedom()), led_session(4)
    for way in (0.5, 1.0):
        auditor.begin(now)
        take_step(auditor, now, 3.0)
        auditor.end(now)
        assert auditor._own.tensors[0].farthest.tolist() == [way]
    now.step += 1
    auditor.begin(now)
    assert auditor._own.tensors == {}


def test_steps_that_differ_are_not_counted() -> None:
    measured = Acceptance(Limits(moves=0), Freedom(moved=3))
    measured.begin(session(step=4))
    measured.freedom.add(StepFreedom(energy=1.0, decisions_moved=9, decisions_far=9))
    measured.discard()
    assert (measured.freedom.moved, measured.freedom.decisions_moved, measured.freedom.sites) == (3, 0, {})


def test_noise_is_measured_at_the_beginning_and_as_often_as_the_policy_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the trainer's own interval is, which is the trainer's to choose."""
    asked: list[tuple[int, int]] = []

    own = Calibration()
    earlier: list[object] = []

    def calibrate(
        at: Any, backward: object, *, repeats: int, seed: int, for_audit: bool, **more: object
    ) -> Calibration:
        assert for_audit
        asked.append((at.step, repeats))
        earlier.append(more["earlier"])
        return own

    monkeypatch.setattr(acceptance, "calibrate", calibrate)
    measured, frame = Acceptance(Limits(), Freedom()), encode_frame(Frame())
    every = POLICIES["fp32"].recalibrate_every
    overdue: list[int] = []
    for step in (3, 4, 3 + every - 1, 3 + every, 3 + every + 1):
        measured.follow(session(step=step, overdue=overdue), frame, lambda context: None)
    assert overdue == [3 + every]
    assert asked == [(3, 4), (3 + every, 3)]
    assert earlier == [
        None,
        own.table,
    ]  # the session's own where the audit begins in the middle, then what was measured
    Acceptance(Limits(), Freedom()).follow(session(step=0), frame, lambda context: None)
    assert earlier[2:] == [
        GridTable()
    ]  # at the beginning nothing: what a first state says is the trainer's word


@pytest.mark.parametrize(
    ("numbers", "factor"),
    [
        ({}, 1.0),
        ({"momentum": 0.6}, 2.0),  # sqrt(1.6 / 0.4)
        ({"betas.0": 0.6, "momentum": 0.0}, 2.0),
        ({"momentum": 1.0}, 1.0),  # no decay of an average
    ],
)
def test_momentum_carries_a_push_farther_than_the_update_it_is_part_of(
    numbers: dict[str, float], factor: float
) -> None:
    measured, before = Acceptance(Limits(), Freedom()), session(0, numbers)
    measured.begin(before)
    after = session(1, numbers)
    after.policy = POLICIES["bf16"]
    with torch.no_grad():
        after.parameters[0][1].add_(1.0)  # four elements by one: a distance of two
    context: Any = SimpleNamespace(
        freedom=StepFreedom(energy=4.0, shifted=1.0), excesses=[], table=GridTable()
    )
    measured.count(after, context)
    assert measured.freedom.path == pytest.approx(0.5 * 2.0 * factor)


def bent_step(followed: list[float], own: list[float], moved: int = 1) -> Any:
    """A step whose gradient is ``followed``, and ``own`` under the follower's own decisions: as much as is asked for."""
    p = torch.nn.Parameter(torch.ones(4))
    p.grad = torch.tensor(followed)
    slow = SimpleNamespace(before=dict)
    made: Any = SimpleNamespace(parameters=[("w", p)], table=None, interlude=nullcontext, sites=[])
    made.open_step = SimpleNamespace(slow=slow, schedule=[])
    made.arithmetic, made.seed, made.step = SimpleNamespace(jitter=None), 1, 4
    made.optimizer = SimpleNamespace(param_groups=[])
    made.tensors = SimpleNamespace(all_buffers=list)
    made.policy = POLICIES["bf16"]
    made.following_context = lambda frame, form: SimpleNamespace(widths={(0, 0): 4}, read=[])
    frame = Frame.of({SiteAddress(0, 0, Kind.DECISION, 0): b"0"})
    context: Any = SimpleNamespace(frame=frame, excesses=[], table=GridTable(), widths={(0, 0): 4})
    context.freedom = StepFreedom(decisions_moved=moved)
    return made, context, (torch.tensor(own), torch.tensor(followed))


def repeating(monkeypatch: pytest.MonkeyPatch, *gradients: Tensor) -> None:
    """Have a step's repetitions give these gradients in turn: of the follower's own decisions, then of the log's."""
    turns = cycle(gradients)
    monkeypatch.setattr(bending, "gradients_under", lambda *given: ([next(turns)], {}, 0.0))
    monkeypatch.setattr(bending, "jittered", lambda session, jitter: nullcontext())


@pytest.mark.parametrize(
    ("followed", "own", "size"),
    [
        ([3.0, 0, 0, 4.0], [0.0] * 4, math.inf),
        ([0.0] * 4, [0.0] * 4, 0.0),
        ([3.0, 0, 0, 0], [0.0, 0, 0, 4.0], 1.25),
    ],
)
def test_decisions_that_make_a_gradient_out_of_none_bend_it_without_bound(
    monkeypatch: pytest.MonkeyPatch, followed: list[float], own: list[float], size: float
) -> None:
    made, context, repeated = bent_step(followed, own)
    monkeypatch.setattr(bending, "_OwnBranches", lambda *given, **more: None)
    repeating(monkeypatch, *repeated)
    found = bending.bend_of(made, context, lambda context: None)
    assert found.whole == found.tensors["w"].share == size


@pytest.mark.parametrize(
    ("own", "given"), [([3.0, 0.0, 0.0, 4.0], []), ([0.0, 0.0, 0.0, 4.0], [[0.0, 0.0, 0.0, 4.0]])]
)
def test_what_decisions_make_of_a_gradient_is_where_the_auditors_own_would_have_led(
    monkeypatch: pytest.MonkeyPatch, own: list[float], given: list[list[float]]
) -> None:
    """The step's context is told of the gradient of the auditor's own decisions, where that is another."""
    made, context, repeated = bent_step([3.0, 0.0, 0.0, 4.0], own)
    monkeypatch.setattr(bending, "_OwnBranches", lambda *given, **more: None)
    repeating(monkeypatch, *repeated)
    monkeypatch.setattr(acceptance, "count_exact", lambda *given: 0)
    auditor = Acceptance(Limits(), Freedom(), _yardstick=Yardstick(POLICIES["bf16"], Calibration()))
    made.listeners, made.is_calibration_step, made.policy = (
        SimpleNamespace(),
        lambda step: True,
        POLICIES["bf16"],
    )
    context.is_calibrated, context.newly_heard = False, lambda place: False
    context.hold_against = lambda yardstick: None
    monkeypatch.setattr(auditor, "_measure", lambda *given, **more: None)
    monkeypatch.setattr(auditor, "_note_bend", lambda *given: None)
    for bent in (1, 2):
        with auditor.watching(made, context, lambda context: None):
            made.listeners.gradients()
        assert [each.tolist() for each in context.own_gradients.values()] == given
        assert list(context.own_gradients) == [(int(Kind.GRADIENT), 0)] * len(given)
        assert auditor._bent == bent * len(given)
    context.freedom.decisions_moved = 0  # what a loop carries, or leaves over, turns nothing
    monkeypatch.setattr(
        acceptance, "bend_of", lambda *rest, **more: StepBend(0.0, {}, {(int(Kind.GRADIENT), 0): own})
    )
    with auditor.watching(made, context, lambda context: None):
        made.listeners.gradients()
    assert auditor._bent == 2 * len(given)


@pytest.mark.parametrize(
    ("steps", "bent", "limit"),
    [
        (200, 0, 0.0625),
        (200, 1, 0.15625),
        (200, 8, 0.15625),
        (200, 9, 0.0625),
        (3200, 100, 0.15625),
        (3200, 101, 0.0625),
    ],
)
def test_a_log_that_turns_decisions_in_few_steps_may_lead_farther(
    steps: int, bent: int, limit: float
) -> None:
    """Eight, or one in 32: honest machines turn some, and one may lead an element of 64, or a row of 64, all its way."""
    auditor = Acceptance(Limits(), Freedom(), _steps=steps, _bent=bent)
    made: Any = SimpleNamespace(parameters=[], policy=FP32)
    for share in (limit, math.nextafter(limit, 1.0), math.nan):
        found = auditor._of_limits(made, {"w": share})
        assert [each.site for each in found] == [
            "w: way that the log's choices led it, over the way trained"
        ] * (share != limit)


@pytest.mark.parametrize(
    ("there", "carried", "again", "factor", "problem"),
    [
        ([3.0, 0.0, 0.0, 4.0], None, [3.0, 0.0, 0.0, 4.0], 1.0, None),
        ([1.5, 0.0, 0.0, 2.0], None, [3.0, 0.0, 0.0, 4.0], 0.5, None),  # half a batch, or clipped
        ([4.0, 1.0, 0.0, 4.0], [1.0, 1.0, 0.0, 0.0], [3.0, 0.0, 0.0, 4.0], 1.0, None),
        ([16.0, 0.999, 0.0, 0.0], None, [16.0, 0.0, 0.0, 0.0], 1.0, None),  # a sixteenth
        ([16.0, 1.01, 0.0, 0.0], None, [16.0, 0.0, 0.0, 0.0], 1.0, "0.063 of the gradient another one"),
        ([0.0] * 4, None, [16.0, 0.0, 0.0, 0.0], 0.0, None),  # let go of
        ([-16.0, 0.0, 0.0, 0.0], None, [16.0, 0.0, 0.0, 0.0], 0.0, "1 of the gradient another one"),
        ([3.0, 0.0, 0.0, 4.0], None, [0.0, 1.0, 0.0, 0.0], 0.0, "1 of the gradient another one"),
        ([3.0, 0.0, 0.0, 4.0], None, [0.0] * 4, 0.0, "1 of the gradient another one"),
        ([0.0] * 4, None, [0.0] * 4, 0.0, None),
    ],
)
def test_a_loops_gradient_follows_from_its_loss_but_for_a_factor(
    there: list[float], carried: list[float] | None, again: list[float], factor: float, problem: str | None
) -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    now: Any = SimpleNamespace(parameters=[("w", p)], policy=POLICIES["fp32"])
    kept = Carried()
    p.grad = None if carried is None else torch.tensor(carried)
    kept.begin(now)
    p.grad = torch.tensor(there)
    found, place = kept.follows_from(now, {"w": torch.tensor(again)}), (int(Kind.GRADIENT), 0)
    assert (found.factors, found.problem) == ({place: pytest.approx(factor)}, problem)
    left = torch.tensor(there) - torch.tensor(carried or [0.0] * 4) - factor * torch.tensor(again)
    assert [each.tolist() for each in found.left.values()] == [left.tolist()] * bool(left.any())


def test_a_loop_may_clip_each_gradient_by_itself() -> None:
    """A factor for each, and what one has besides is held to the size of all."""
    v, w = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    now: Any = SimpleNamespace(parameters=[("v", v), ("w", w)], policy=POLICIES["fp32"])
    again = {"v": torch.tensor([3.0, 4.0]), "w": torch.tensor([1.0, 0.0])}
    v.grad, w.grad = again["v"] / 4.0, again["w"] * 2.0
    found = Carried().follows_from(now, again)
    assert (list(found.factors.values()), found.left, found.problem) == ([0.25, 2.0], {}, None)
    w.grad[1] = 0.125
    found = Carried().follows_from(now, again)
    assert (found.left[(int(Kind.GRADIENT), 1)].tolist(), found.problem) == ([0.0, 0.125], None)
    w.grad[1] = 0.25
    assert Carried().follows_from(now, again).problem is not None


@pytest.mark.parametrize(
    ("weights", "again", "gradient", "factor", "left"),
    [
        ([1.0, 2.0], [4.0, 0.0], [2.5, 1.0], 0.5, [0.0, 0.0]),  # half, and half of the weights
        ([1.0, 2.0], [4.0, 0.0], [2.0, -1.0], 0.5, [0.0, -1.0]),  # weights grow by themselves
        ([1.0, 2.0], [4.0, 0.0], [-2.0, 1.0], 0.0, [-2.0, 1.0]),
        ([2.0, 0.0], [4.0, 0.0], [2.0, 1.0], 0.5, [0.0, 1.0]),  # nobody knows which
        ([0.0, 0.0], [4.0, 0.0], [2.0, 1.0], 0.5, [0.0, 1.0]),
        ([1.0, 2.0], [0.0, 0.0], [2.0, 1.0], 0.0, [2.0, 1.0]),
        ([1.0, 2.0], [4.0, 0.0], [2.0, 0.0], 0.5, [0.0, 0.0]),
    ],
)
def test_a_loop_may_add_its_own_decay(
    weights: list[float], again: list[float], gradient: list[float], factor: float, left: list[float]
) -> None:
    """A share of the weights that is not negative, beside a factor that is not either."""
    given = (torch.tensor(each, dtype=torch.float64) for each in (gradient, again, weights))
    found, besides = bending._follow(*given)  # pyright: ignore[reportPrivateUsage]
    assert (found, besides.tolist()) == (pytest.approx(factor), pytest.approx(left))


def test_what_decisions_make_of_a_gradient_is_carried_until_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also into a step in which no decision moved; and the share of a batch that a step is."""
    place, kept = (Kind.GRADIENT, 0), Carried()
    made, context, _ = bent_step([0.0] * 4, [0.0] * 4)
    ((_, p),) = made.parameters
    p.grad = None
    logs, own = torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 0.0, 0.5])
    for moved, repeated, there, given in (
        (1, (own, logs), [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.25]),
        (0, (logs,), [3.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.25]),
        (1, (own, logs), [4.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.5]),
    ):
        repeating(monkeypatch, *repeated)
        kept.begin(made)
        p.grad, context.freedom.decisions_moved = torch.tensor(there), moved
        found = bending.bend_of(made, context, lambda context: None, kept)
        assert (found.gradients[place].tolist(), found.problem) == (given, None)
    for gone in (torch.zeros(4), None):
        kept.apart[place] = torch.ones(4).double()
        p.grad = gone
        kept.begin(made)
        assert (kept.before, kept.apart) == ({}, {})


def test_once_a_decision_turned_a_loop_is_held_to_its_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a step has beside its loss leads where a decision turned; in later steps more than a sixteenth is a problem."""
    place, kept = (Kind.GRADIENT, 0), Carried()
    made, context, _ = bent_step([0.0] * 4, [0.0] * 4)
    made.policy = FP32
    ((_, p),) = made.parameters
    p.detach().zero_()
    logs = torch.tensor([16.0, 0.0, 0.0, 0.0])
    repeating(monkeypatch, logs)
    for moved, there, given, problem in (
        (0, [16.0, 2.0, 0.0, 0.0], None, None),  # nothing was turned before
        (1, [16.0, 0.5, 0.0, 0.0], [16.0, 0.0, 0.0, 0.0], None),
        (0, [16.0, 0.5, 0.0, 0.0], None, None),  # noise that a loop adds, say
        (0, [16.0, 2.0, 0.0, 0.0], None, "0.124 of the gradient another one"),
    ):
        p.grad = None
        kept.begin(made)
        p.grad, context.freedom.decisions_moved = torch.tensor(there), moved
        found = bending.bend_of(made, context, lambda context: None, kept)
        led = None if place not in found.gradients else found.gradients[place].tolist()
        assert (led, found.problem) == (given, problem)


def step_with_buffer(before: Tensor, after: Tensor) -> Any:
    """A job's step that leaves a buffer ``after`` what was ``before``, and a gradient of one element."""
    made, context, _ = bent_step([1.0, 0.0, 0.0, 0.0], [0.0] * 4, moved=0)
    made.open_step = SimpleNamespace(slow=SimpleNamespace(before=lambda: {"b": before}), schedule=[])
    made.tensors = SimpleNamespace(all_buffers=lambda: [("b", after)])
    return made, context


def test_what_decisions_wrote_into_a_buffer_leads_the_steps_that_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are repeated from the buffer of the follower's own decisions, until both leave the same."""
    kept, place, now = Carried(is_loop=False), (Kind.GRADIENT, 0), torch.tensor
    one, other = now([1.0, 0.0, 0.0, 0.0]), now([0.5, 0.0, 0.0, 0.0])
    asked: list[Any] = []
    gives: list[Any] = []

    def repeat(session: Any, form: Any, context: Any, backward: Any, led: Any = None) -> Any:
        asked.append((form, {name: by.tolist() for name, by in (led or {}).items()}))
        return gives.pop(0)

    def repeated(gradient: Tensor, buffer: int) -> Any:
        return bending._Repeated({"w": gradient}, {"b": now([buffer])}, {})

    monkeypatch.setattr(bending, "_repeat", repeat)
    own, log = _OwnBranches, FollowingContext
    for moved, gives[:], forms, led, given in (
        (0, [], [], {}, None),  # nothing is repeated
        (1, [repeated(one, 3), repeated(one, 2)], [(own, {}), (log, {})], {"b": [1]}, None),
        (0, [repeated(other, 5), repeated(one, 3)], [(own, {"b": [1]}), (log, {})], {"b": [2]}, other),
        (1, [repeated(one, 4), repeated(other, 9), repeated(one, 4)],
         [(own, {}), (own, {"b": [2]}), (log, {})], {"b": [5]}, other),
        (0, [repeated(one, 4), repeated(one, 4)], [(own, {"b": [5]}), (log, {})], {}, None),
        (0, [], [], {}, None),
    ):  # fmt: skip
        made, context = step_with_buffer(now([1]), now([2]))
        context.freedom.decisions_moved, asked[:] = moved, []
        found = bending.bend_of(made, context, lambda context: None, kept)
        assert asked == forms
        assert {name: by.tolist() for name, by in kept.led.items()} == led
        assert (found.problem, found.gradients.get(place) is None) == (None, given is None)
        assert given is None or found.gradients[place].tolist() == given.tolist()
        # What a buffer of before made is no bend of this step.
        assert found.whole == 0.0


@pytest.mark.parametrize("moved", [0, 1])
def test_a_step_that_cannot_be_repeated_from_the_auditors_own_buffers_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    made, context = step_with_buffer(torch.tensor([1]), torch.tensor([2]))
    context.freedom.decisions_moved = moved
    again = bending._Repeated({"w": torch.tensor([1.0, 0.0, 0.0, 0.0])}, {"b": torch.tensor([2])}, {})
    monkeypatch.setattr(bending, "_repeat", lambda *given: None if given[4:] else again)
    kept = Carried(is_loop=False, led={"b": torch.tensor([1])})
    found = bending.bend_of(made, context, lambda context: None, kept)
    assert found.problem == "none of them, from the buffers that the auditor's own left"


@pytest.mark.parametrize("moved", [0, 1])
def test_a_loop_that_cannot_be_repeated_in_parts_may_have_led_no_buffer(
    monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    made, context = step_with_buffer(torch.tensor([1]), torch.tensor([2]))
    context.freedom.decisions_moved = moved
    again = bending._Repeated(
        {"w": torch.tensor([1.0, 0.0, 0.0, 0.0])}, {"b": torch.tensor([2])}, {(0, 0): 4}
    )
    monkeypatch.setattr(bending, "_repeat", lambda *given: None if given[3] == "in parts" else again)
    kept = Carried(led={"b": torch.tensor([1])})
    found = bending.bend_of(made, context, cast("Any", "whole"), kept, cast("Any", "in parts"))
    assert found.problem == "other ones"


@pytest.mark.parametrize(
    ("own", "logs", "by"),
    [
        (torch.tensor([3, 1]), torch.tensor([1, 4]), torch.tensor([2, -3])),
        (torch.tensor([True, False]), torch.tensor([False, False]), torch.tensor([1, 0])),
        (torch.tensor([2.5, math.inf]), torch.tensor([0.5, math.inf]), torch.tensor([2.0, 0.0]).double()),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 0j]), torch.tensor([2j]).to(torch.complex128)),
        (torch.tensor([1.0]), torch.tensor([1.0]), None),
        (None, torch.tensor([1.0]), None),
        (torch.tensor([1.0]), None, None),
    ],
)
def test_a_buffer_of_any_dtype_is_led_by_a_difference_that_gives_it_again(
    own: Tensor | None, logs: Tensor | None, by: Tensor | None
) -> None:
    found = bending._apart(own, logs)
    assert (found is None) == (by is None)
    if found is not None and by is not None and own is not None and logs is not None:
        assert (found.dtype, found.tolist()) == (by.dtype, by.tolist())
        put = dict[str, Tensor]()
        made: Any = SimpleNamespace(
            tensors=SimpleNamespace(all_buffers=lambda: [("b", logs)], put_back=put.update),
            following_context=lambda frame, form: SimpleNamespace(widths={}, read=[]), arithmetic=SimpleNamespace(jitter=None),
            interlude=nullcontext, parameters=[], seed=1, step=2, computing=lambda arithmetic: nullcontext(),
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(bending, "gradients_under", lambda *given: ([], {}, 0.0))
            patched.setattr(bending, "jittered", lambda session, jitter: nullcontext())
            context: Any = SimpleNamespace(frame=None)
            bending._repeat(made, _OwnBranches, context, lambda context: None, {"b": found})
        assert (put["b"].dtype, put["b"].tolist()) == (own.dtype, own.tolist())


@pytest.mark.parametrize(("in_parts", "met"), [(None, True), ("in parts", True), ("in parts", False)])
def test_a_later_step_that_its_loss_cannot_repeat_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, in_parts: Any, met: bool
) -> None:
    """By its micro-batches, by the whole batch where these are others, or not at all."""
    made, context, _ = bent_step([2.0, 0.0, 0.0, 0.0], [0.0] * 4, moved=0)
    made.policy, widths = FP32, {(0, 0): 4 if met else 5}
    made.following_context = lambda frame, form: SimpleNamespace(widths=widths, read=[])
    repeating(monkeypatch, torch.tensor([4.0, 0.0, 0.0, 0.0]))
    found = bending.bend_of(made, context, cast("Any", "whole"), Carried(is_turned=True), in_parts)
    assert (found.problem, found.gradients) == (None, {})

    def refuse(*given: Any) -> None:
        raise InvalidInput("a tensor cannot be cut")

    monkeypatch.setattr(bending, "gradients_under", refuse)
    found = bending.bend_of(made, context, cast("Any", "whole"), Carried(is_turned=True), in_parts)
    assert found.problem == "none of them"


@pytest.mark.parametrize(
    ("met", "by_whole", "carries", "problem"),
    [
        ({(0, 0): 4, (1, 0): 4}, {}, True, None),
        ({(0, 0): 4, (1, 0): 3}, {(0, 0): 4}, False, None),  # each micro-batch takes the whole
        ({(0, 0): 4, (1, 0): 3}, {(0, 0): 4}, True, "other ones"),
        ({(0, 0): 4, (1, 0): 3}, {(0, 0): 8}, False, "other ones"),
        ({(0, 0): 4}, {}, False, "other ones"),
        (None, {(0, 0): 4}, False, None),  # no parts that are equal
        (None, None, False, "none of them"),
    ],
)
def test_decisions_of_a_loop_are_judged_where_its_loss_comes_to_them(
    monkeypatch: pytest.MonkeyPatch,
    met: dict[tuple[int, int], int] | None,
    by_whole: dict[tuple[int, int], int] | None,
    carries: bool,
    problem: str | None,
) -> None:
    """In the same micro-batches, or in each of them as in a pass over the whole; a job's step is repeated as a whole."""
    made, context, (repeated, _) = bent_step([3.0, 0.0, 0.0, 4.0], [1.5, 0.0, 0.0, 2.0])
    context.frame = Frame.of({SiteAddress(0, part, Kind.DECISION, 0): b"0" for part in (0, 1)})
    context.widths = {(0, 0): 4, (0, 1): 9, (1, 0): 4}
    asked: list[Any] = []
    made.following_context = lambda frame, form: (asked.append(form), SimpleNamespace())[1]

    def repeat(session: Any, backward: Any, again: Any, started: Any) -> Any:
        again.widths, again.read = met if backward == "in parts" else by_whole, []
        if again.widths is None:
            raise InvalidInput("decision: needs 5 more bytes, 4 left")
        return [repeated], {}, 0.0

    monkeypatch.setattr(bending, "gradients_under", repeat)
    monkeypatch.setattr(bending, "jittered", lambda session, jitter: nullcontext())
    kept, backward, in_parts = Carried(), cast("Any", "whole"), cast("Any", "in parts")
    made.parameters[0][1].grad = torch.ones(4) if carries else None
    kept.begin(made)
    made.parameters[0][1].grad = torch.tensor([3.0, 0.0, 0.0, 4.0]) + (1.0 if carries else 0.0)
    found = bending.bend_of(made, context, backward, kept, in_parts)
    assert found.problem == problem
    if problem is None:
        # by the same parts both repetitions are one; by the whole it is the loop's own beside the repetition, half as large
        assert found.whole == pytest.approx(0.0 if carries else 1.0)
    assert asked[:2] == [_OwnBranches, FollowingContext]
    job = bending.bend_of(made, context, backward)
    assert job.problem == (None if by_whole is not None else "none of them")


def test_what_a_loop_lets_go_of_before_its_first_backward_pass_is_not_carried() -> None:
    """Most loops zero their gradients at the beginning of a step, not at the end of the one before."""
    made, context, _ = bent_step([1.0, 2.0, 3.0, 4.0], [0.0] * 4)
    auditor = Acceptance(Limits(), Freedom(), is_loop=True, _yardstick=Yardstick(FP32, Calibration()))
    kept = auditor._carried = Carried()
    made.listeners = SimpleNamespace()
    ((_, p),) = made.parameters
    for lets_go in (False, True):
        p.grad = torch.ones(4)
        with auditor.watching(made, context, lambda context: None):
            if lets_go:
                p.grad = None
            for _ in range(2):  # only the first pass finds what was there before it
                with made.listeners.around_backward():
                    p.grad = torch.ones(4)
        assert len(kept.before) == (not lets_go)
        assert made.listeners.around_backward is None


@pytest.mark.parametrize("in_parts", [None, "in parts"])
def test_a_step_whose_log_cannot_be_followed_again_is_judged_for_no_job(
    monkeypatch: pytest.MonkeyPatch, in_parts: Any
) -> None:
    """A loop under ``bf16`` may take unequal parts, which its loss of the whole is then held against."""
    made, context, (own, _) = bent_step([3.0, 0.0, 0.0, 4.0], [1.5, 0.0, 0.0, 2.0])
    made.following_context = lambda frame, form: SimpleNamespace(form=form, widths={(0, 0): 4}, read=[])

    def repeat(session: Any, backward: Any, again: Any, started: Any) -> Any:
        if backward == "in parts" or again.form is FollowingContext:
            raise InvalidInput("a tensor cannot be cut")
        return [own], {}, 0.0

    monkeypatch.setattr(bending, "gradients_under", repeat)
    monkeypatch.setattr(bending, "jittered", lambda session, jitter: nullcontext())
    found = bending.bend_of(made, context, cast("Any", "whole"), None, in_parts)
    assert found.problem == ("none of them" if in_parts is None else None)
    assert in_parts is None or found.whole == pytest.approx(1.0)


def test_ties_of_a_loop_that_cannot_be_repeated_in_parts_are_not_excused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = decode_frame(encode_frame(Frame.of({})))
    session: Any = SimpleNamespace(
        policy=FP32, seed=3, step=5, interlude=nullcontext, arithmetic=None,
        tensors=SimpleNamespace(all_buffers=list), following_context=lambda frame, form: form(FP32, GridTable(), empty),
    )  # fmt: skip
    context: Any = SimpleNamespace(ties={(0, 0): torch.tensor([1, 9])}, frame=empty)

    def refuse(*given: Any) -> None:
        raise InvalidInput("a tensor cannot be cut")

    monkeypatch.setattr(bending, "gradients_under", refuse)
    monkeypatch.setattr(bending, "jittered", lambda session, jitter: nullcontext())
    assert bending.count_exact(session, context, lambda given: None) == 2


@pytest.mark.parametrize("problem", [None, "other ones"])
def test_decisions_that_nobody_can_judge_are_not_accepted(
    monkeypatch: pytest.MonkeyPatch, problem: str | None
) -> None:
    """Also in a step that the optimizer does not take."""
    made, context, _ = bent_step([0.0] * 4, [0.0] * 4)
    monkeypatch.setattr(acceptance, "bend_of", lambda *given, **more: StepBend(0.0, {}, problem=problem))
    monkeypatch.setattr(acceptance, "count_exact", lambda *given: 0)
    for listener in ("carried", "gradients"):
        auditor = Acceptance(Limits(), Freedom(), _yardstick=Yardstick(POLICIES["bf16"], Calibration()))
        made.listeners, context.excesses, context.is_calibrated = SimpleNamespace(), [], True
        made.step, made.is_calibration_step, made.chooses_grids = 4, lambda step: True, lambda step: True
        context.newly_heard = lambda place: False
        with auditor.watching(made, context, lambda context: None):
            getattr(made.listeners, listener)()
        assert (made.listeners.carried, made.listeners.gradients) == (None, None)
        assert [excess.stated for _, excess in context.excesses] == ([] if problem is None else [problem])


@pytest.mark.parametrize("moved", [0, 3])
@pytest.mark.parametrize("is_loop", [False, True])
@pytest.mark.parametrize("rate", [0.5, 0.25])
def test_a_job_whose_step_changes_its_own_rate_takes_no_decision_from_the_log(
    monkeypatch: pytest.MonkeyPatch, moved: int, is_loop: bool, rate: float
) -> None:
    """Gradients say nothing of decisions that choose a rate; a scheduler changes it between two steps."""
    made, context, _ = bent_step([0.0] * 4, [0.0] * 4, moved)
    monkeypatch.setattr(acceptance, "bend_of", lambda *given, **more: StepBend(0.0, {}))
    monkeypatch.setattr(acceptance, "count_exact", lambda *given: 0)
    auditor = Acceptance(
        Limits(), Freedom(), is_loop=is_loop, _yardstick=Yardstick(POLICIES["bf16"], Calibration())
    )
    made.listeners, made.is_calibration_step = SimpleNamespace(), lambda step: True
    made.optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
    made.open_step.schedule = [(0, "lr", rate)]
    context.is_calibrated, context.newly_heard = False, lambda place: False
    with auditor.watching(made, context, lambda context: None):
        made.listeners.gradients()
    what = "decisions moved in a step that changes its own hyper-parameters"
    is_noted = moved and rate == 0.25 and not is_loop
    assert [(each.site, each.stated) for _, each in context.excesses] == (
        [(what, str(moved))] if is_noted else []
    )


def noted_of(
    whole: float, moved: float, own: float, noise: float = 2.0**-20, name: str = "w"
) -> tuple[Acceptance, Any]:
    """What an auditor notes whose own noise of a gradient of 512 elements, scale one, is ``noise``."""
    place = (int(Kind.GRADIENT), 0)
    measured = SiteNoise(noise, np.zeros(1, dtype=np.int64), 1.0, noise, 512)
    band = -5 if noise < 0.25 else NOISE_BAND
    grid = site_grid(POLICIES["bf16"], Kind.GRADIENT, band, np.zeros(1, dtype=np.int64))
    auditor = Acceptance(Limits(), Freedom())
    auditor._yardstick = Yardstick(POLICIES["bf16"], Calibration({place: measured}, GridTable({place: grid})))
    made: Any = SimpleNamespace(policy=POLICIES["bf16"], parameters=[("w", torch.zeros(512))], sites=[])
    context: Any = SimpleNamespace(freedom=StepFreedom(), excesses=[], table=GridTable())
    auditor._note_bend(made, context, StepBend(whole, {name: TensorBend(moved, own)}))
    return auditor, context


@pytest.mark.parametrize(("bent", "noted"), [(0.0, 0), (0.25, 0), (0.2501, 1), (math.inf, 1), (math.nan, 1)])
def test_decisions_bend_a_steps_gradient_by_so_much_at_most(bent: float, noted: int) -> None:
    """A few labels that a model gives itself, turned in its first steps, are a backdoor: the rest it then chooses alone."""
    _, context = noted_of(bent, 0.0, 1.0)
    assert len(context.excesses) == noted
    assert context.freedom.bent == bent or math.isnan(bent)


@pytest.mark.parametrize(("moved", "noted"), [(512.0, 0), (513.0, 1), (math.nan, 1)])
def test_decisions_bend_one_gradient_by_four_times_that_at_most(moved: float, noted: int) -> None:
    """A gradient hundreds of times as large says nothing of the others."""
    _, context = noted_of(0.001, moved, 512.0)
    assert [excess.site for _, excess in context.excesses] == [
        "w: what the log's decisions make of this gradient"
    ] * noted


def test_what_decisions_make_of_noise_is_noise() -> None:
    assert noted_of(0.001, 2048.0, 512.0, noise=0.25)[1].excesses == []


@pytest.mark.parametrize("is_silent", [True, False])
def test_decisions_bend_what_was_zero_where_the_log_hears_it(*, is_silent: bool) -> None:
    """A branch that is off when noise is measured, gates that its trainer opens after: 79 % for 23 % of an honest run."""
    place, zero, policy = (int(Kind.GRADIENT), 0), np.zeros(1, dtype=np.int64), POLICIES["fp32"]
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, zero)
    measured = Calibration({place: SiteNoise(0.0, zero, 0.0, 0.0, 512)}, GridTable({place: silent}))
    auditor = Acceptance(Limits(), Freedom())
    auditor._yardstick = Yardstick(policy, measured)
    made: Any = SimpleNamespace(policy=policy, parameters=[("w", torch.zeros(512))], sites=[])
    grid = silent if is_silent else site_grid(policy, Kind.GRADIENT, -9, zero)
    context: Any = SimpleNamespace(freedom=StepFreedom(), excesses=[], table=GridTable({place: grid}))
    auditor._note_bend(made, context, StepBend(0.001, {"w": TensorBend(128.0, 128.0)}))
    assert len(context.excesses) == (not is_silent)


def of_all_steps(auditor: Acceptance) -> list[str]:
    made: Any = SimpleNamespace(policy=POLICIES["bf16"], parameters=[("w", torch.zeros(512))])
    return [excess.site for excess in auditor._of_limits(made, {})]


@pytest.mark.parametrize(("moved", "noted"), [(32.0, 0), (33.0, 1)])
@pytest.mark.parametrize("name", ["w", "model/buffer/labels"])
def test_decisions_bend_a_gradient_or_a_buffer_over_all_steps_as_far_as_one_steps_gradient(
    name: str, moved: float, noted: int
) -> None:
    """A quarter of its way: labels that later steps read bend no gradient in the step that writes them."""
    auditor, _ = noted_of(0.001, moved, 512.0, name=name)
    assert of_all_steps(auditor) == [f"{name}: what the log's decisions make of it, over all steps"] * noted
    auditor._bends[name].add(0.0, 512.0)
    assert of_all_steps(auditor) == []


def test_bends_of_steps_that_differ_are_taken_back() -> None:
    auditor, _ = noted_of(0.001, 1.0, 512.0)
    auditor._weights, before = [], session(0)
    auditor.begin(before)
    auditor._bends["w"].add(512.0, 0.0)
    auditor.discard()
    assert (auditor._bends["w"].moved, auditor._bends["w"].own) == (pytest.approx(1.0), 512.0)


@pytest.mark.parametrize(
    ("due", "chooses", "gradient", "buffer"), [(True, True, 1, 1), (True, False, 1, 0), (False, False, 1, 1)]
)
def test_where_grids_are_not_chosen_buffers_may_be_as_noisy_as_they_were(
    monkeypatch: pytest.MonkeyPatch, due: bool, chooses: bool, gradient: int, buffer: int
) -> None:
    """Their quanta only become coarser there. The larger noise was measured first."""
    places = (Kind.GRADIENT, 0), (Kind.BUFFER, 0)
    asked: list[float] = []

    def calibrate(*given: object, **more: object) -> Calibration:
        size = math.ldexp(1.0, -len(asked))
        asked.append(size)
        noise = SiteNoise(size, np.zeros(1, dtype=np.int64), 1.0, size, 4096)
        return Calibration(dict.fromkeys(places, noise))

    monkeypatch.setattr(acceptance, "calibrate", calibrate)
    auditor, frame = Acceptance(Limits(), Freedom()), encode_frame(Frame())
    now = session(step=0)
    auditor.follow(now, frame, lambda context: None)
    now.step, now.is_calibrated, now.chooses_grids = 100, lambda frame: due, lambda step: chooses
    yardstick = auditor.follow(now, frame, lambda context: None).yardstick
    assert yardstick is not None
    assert [yardstick.noise[place].relative for place in places] == [asked[gradient], asked[buffer]]


@pytest.mark.parametrize("step", [0, 3])
def test_an_audit_that_begins_in_mid_run_has_not_measured_what_was_exactly_zero(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The grid of such a gradient is its trainer's word there: its band was taken for the auditor's own, whatever it was."""
    place = (Kind.GRADIENT, 0)
    zero = SiteNoise(0.0, np.zeros(1, dtype=np.int64), 0.0, 0.0, 4)
    wide = GridTable({place: site_grid(POLICIES["fp32"], Kind.GRADIENT, -2, np.array([1]))})
    monkeypatch.setattr(acceptance, "calibrate", lambda *given, **more: Calibration({place: zero}, wide))
    now, auditor = session(step=step), Acceptance(Limits(), Freedom())
    now.is_calibrated = lambda frame: step == 0
    yardstick = auditor.follow(now, encode_frame(Frame()), lambda context: None).yardstick
    assert yardstick is not None
    assert yardstick.lacks(place) == (step > 0)
    assert (place in yardstick.measured.table.sites) == (step == 0)


@pytest.mark.parametrize(
    ("newly", "by_last", "by_now", "size", "measured"),
    [
        (True, False, False, 0.5, True),
        (True, False, True, 0.5, True),
        (True, True, True, 0.5, False),
        (False, False, False, 0.5, False),
        (False, False, True, 0.75, True),
        (False, True, True, 0.75, False),
    ],
)
def test_what_a_log_calls_more_than_noise_or_has_outgrown_it_between_two_measurements_is_measured_in_that_step(
    monkeypatch: pytest.MonkeyPatch, newly: bool, by_last: bool, by_now: bool, size: float, measured: bool
) -> None:
    """Its noise explains any rounding, and an optimizer may make full steps of the smallest gradient; its floor is 2**0."""
    place, policy = (Kind.GRADIENT, 0), POLICIES["fp32"]
    noise = SiteNoise(0.25, np.zeros(1, dtype=np.int64), 1.0, 0.25, 4, exact=2.0**-30)
    loud = site_grid(policy, Kind.GRADIENT, -2, np.array([1]))
    silent = site_grid(policy, Kind.GRADIENT, NOISE_BAND, np.array([1]))
    heard = iter([by_last, by_now])
    asked: list[int] = []

    def calibrate(at: Any, *given: object, **more: object) -> Calibration:
        asked.append(at.step)
        return Calibration({place: noise}, GridTable({place: loud if next(heard) else silent}))

    monkeypatch.setattr(acceptance, "calibrate", calibrate)
    monkeypatch.setattr(acceptance, "bend_of", lambda *given, **more: StepBend(0.0, {}))
    monkeypatch.setattr(acceptance, "count_exact", lambda *given: 0)
    now, auditor = session(step=1), Acceptance(Limits(), Freedom())
    now.listeners, now.interlude = SimpleNamespace(gradients=None), nullcontext
    now.parameters[0][1].grad, now.has_outgrown = torch.full((4,), size), lambda doubt: False
    context: Any = auditor.follow(now, encode_frame(Frame()), lambda context: None)
    context.newly_heard, context.freedom, context.excesses = lambda place: newly, StepFreedom(), []
    context.is_calibrated = False
    context.hold_against = lambda yardstick: setattr(context, "yardstick", yardstick)
    with auditor.watching(now, context, lambda context: None):
        now.listeners.gradients()
    assert len(asked) == 1 + measured
    wrong, _ = context.yardstick.excess_signal(place, loud)
    assert (wrong is None) == (by_now if measured else by_last)


def test_what_begins_after_steps_that_are_left_out_is_held_against_their_noise() -> None:
    own = Yardstick(POLICIES["fp32"], Calibration())
    for keeping in (False, True):
        auditor = Acceptance(Limits(), Freedom(), _yardstick=own)
        auditor._before = {"freedom": {}, "bends": {}}
        auditor._end = 7
        assert (auditor.continues_at(7), auditor.continues_at(8)) == (True, False)
        auditor.discard(keeping=keeping)
        auditor.begin(session(step=7))
        assert (auditor._yardstick is own) == keeping
        auditor._end = 3
        auditor.begin(session(step=7))
        assert auditor._yardstick is None


@pytest.mark.parametrize(("size", "measured"), [(0.5, False), (0.75, True)])
def test_a_gradient_that_was_exactly_zero_is_measured_when_it_has_outgrown_the_noise_of_others(
    monkeypatch: pytest.MonkeyPatch, size: float, measured: bool
) -> None:
    """Else a trainer that measures where it is zero hears it or not, as it likes; what is found holds from then on."""
    place, policy = (Kind.GRADIENT, 0), POLICIES["fp32"]
    zero = SiteNoise(0.0, np.zeros(1, dtype=np.int64), 0.0, 0.0, 4)
    noise = SiteNoise(2.0**-12, np.zeros(1, dtype=np.int64), size, 2.0**-12, 4)
    silent, loud = (site_grid(policy, Kind.GRADIENT, band, np.array([1])) for band in (NOISE_BAND, -9))
    found = iter([(zero, silent), (noise, loud)])

    def calibrate(*given: object, **more: object) -> Calibration:
        seen, grid = next(found)
        return Calibration({place: seen}, GridTable({place: grid}))

    monkeypatch.setattr(acceptance, "calibrate", calibrate)
    monkeypatch.setattr(acceptance, "bend_of", lambda *given, **more: StepBend(0.0, {}))
    monkeypatch.setattr(acceptance, "count_exact", lambda *given: 0)
    now, auditor = session(step=0), Acceptance(Limits(), Freedom())
    now.listeners, now.interlude, now.is_calibrated = (
        SimpleNamespace(gradients=None),
        nullcontext,
        lambda frame: True,
    )
    context: Any = auditor.follow(now, encode_frame(Frame()), lambda context: None)
    now.parameters[0][1].grad, now.has_outgrown = torch.full((4,), size), lambda doubt: False
    context.newly_heard, context.freedom, context.excesses = lambda place: False, StepFreedom(), []
    context.hold_against, context.is_calibrated = lambda yardstick: None, False
    with auditor.watching(now, context, lambda context: None):
        now.listeners.gradients()
    assert auditor._yardstick is not None
    assert (auditor._yardstick.hears(place), auditor._yardstick.would_hear(place)) == (measured, measured)
    assert auditor._yardstick.noise[place] is (noise if measured else zero)


@pytest.mark.parametrize(
    ("policy", "leaves", "exact", "repeated"),
    [("fp32", 3, 2, 16), ("fp64", 3, 2, 16), ("fp32", 0, 0, 1), ("fp32", 16, 2, 16), ("bf16", 3, 0, 0)],
)  # fmt: skip
def test_what_a_log_turned_counts_where_no_repetition_moves_it_off_its_point(
    policy: str, leaves: int, exact: int, repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four turned elements two are zeros for what they are; one leaves in the first repetition, one in that numbered."""
    empty = decode_frame(encode_frame(Frame.of({})))
    session: Any = SimpleNamespace(
        policy=find_policy(policy), seed=3, step=5, interlude=nullcontext, arithmetic=None,
        tensors=SimpleNamespace(all_buffers=list), following_context=lambda frame, form: form(FP32, GridTable(), empty),
    )  # fmt: skip
    context: Any = SimpleNamespace(ties={(1, 2): torch.tensor([0, 2, 5, 7])}, frame=empty)
    asked: list[list[int]] = []

    def repeat(session: Any, backward: Any, branches: Any, started: Any) -> None:
        x = torch.zeros(8)
        x[2], x[7] = 1e-9, (1e-9 if len(asked) >= leaves else 0.0)
        branches.start_micro_batch(1)
        assert [branches.pending(x) for _ in range(3)] == [False, False, True]
        asked.append(branches.asked[(1, 2)].tolist())
        branches.decide(
            8, 2, torch.arange(0), lambda at: (torch.sign(x[at]) + 1).to(torch.int64), lambda pairs: x
        )

    monkeypatch.setattr(bending, "gradients_under", repeat)
    monkeypatch.setattr(bending, "jittered", lambda session, jitter: nullcontext())
    if leaves == 0:
        context.ties = {(1, 2): torch.tensor([2, 7])}
    elif leaves == 16:
        context.ties = {(1, 2): torch.tensor([0, 2, 5])}

    assert bending.count_exact(session, context, lambda given: None) == exact
    assert len(asked) == repeated


def test_a_decision_that_no_repetition_reaches_is_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may go another way under jitter; of two elements one was seen to leave its point."""
    empty = decode_frame(encode_frame(Frame.of({})))
    session: Any = SimpleNamespace(
        policy=FP32, seed=3, step=5, interlude=nullcontext, arithmetic=None,
        tensors=SimpleNamespace(all_buffers=list), following_context=lambda frame, form: form(FP32, GridTable(), empty),
    )  # fmt: skip
    context: Any = SimpleNamespace(
        ties={(0, 0): torch.tensor([1, 9]), (0, 4): torch.tensor([0])}, frame=empty
    )

    def repeat(session: Any, backward: Any, branches: Any, started: Any) -> None:
        branches.start_micro_batch(0)
        assert branches.pending(torch.ones(4))
        branches.decide(4, 2, torch.arange(0), lambda at: torch.full_like(at, 2), lambda pairs: pairs)

    monkeypatch.setattr(bending, "gradients_under", repeat)
    monkeypatch.setattr(bending, "jittered", lambda session, jitter: nullcontext())
    assert bending.count_exact(session, context, lambda given: None) == 2
