"""Bands that a later step exceeds, numbers outside a policy's limits: what an audit says of them, and of whom."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tallystick.errors import InvalidInput
from tallystick.execution.job import JobSource, find_source
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.noise.measured import exponent_above
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.snapshot import state_entries
from tallystick.execution.step import backward_of
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Frame, Kind, SiteAddress, encode_frame
from tallystick.numerics.policy import find_policy
from tallystick.roles import judge
from tallystick.roles.audit_report import AuditReport
from tallystick.roles.auditor import audit
from tallystick.roles.claim import write_claim
from tallystick.roles.comparison import TO_EXCUSE, find_noisy_sites
from tallystick.roles.operator_dispute import OperatorDispute, OperatorResult
from tallystick.roles.replay import Replay, open_replay
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

# From step LOUD on, large terms cancel in the gradient of the first matrix: a thousand times the noise, the same size.
JOB = """
import torch
from tallystick.execution.job import Job

LOUD = 5


def build(settings):
    drawn = torch.Generator().manual_seed(0)
    small = lambda *shape: torch.randint(-64, 65, shape, generator=drawn) / 64
    model = torch.nn.ModuleDict({"loud": torch.nn.Linear(64, 64, bias=False), "quiet": torch.nn.Linear(64, 8)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(small(*parameter.shape))
    weight = small(64)

    def batch(step):
        x = torch.randint(-64, 65, (8, 64), generator=torch.Generator().manual_seed(step)) / 64
        far = 1024.0 * x.roll(1, 0) if step >= LOUD else torch.zeros_like(x)
        return torch.cat((far, -far, x)), x

    def loss(model, batch):
        far, x = batch
        return 4096.0 + (model["loud"](far) @ weight).sum() / 8 + model["quiet"](x).square().mean()

    return Job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5), batch=batch,
               loss=loss, steps=8)
"""
LOUD = 5


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> JobSource:
    path = tmp_path_factory.mktemp("job") / "loud.py"
    path.write_text(JOB)
    return find_source(str(path))


def audited(source: JobSource, run: Path, *, every: int) -> AuditReport:
    policy = find_policy("fp32", recalibrate_every=every)
    record(Order(source, {}, policy, checkpoint_every=8), RunDirectory(run))
    return audit(RunDirectory(run), source, jitter=True)


def test_a_band_that_a_later_step_exceeds_ends_in_cannot_reproduce_with_the_tensor_named(
    source: JobSource, tmp_path: Path
) -> None:
    report = audited(source, tmp_path / "run", every=100)

    assert report.verdict == "cannot_reproduce", [str(d) for d in report.segments[0].deviations]
    assert report.first is not None
    assert (report.first.kind, report.first.step) == ("cannot_reproduce", LOUD)
    named = [d for d in report.segments[0].deviations if d.kind == "cannot_reproduce"]
    assert "gradient loud.weight" in [d.subject for d in named]
    assert not [d for d in named if "quiet" in d.subject]
    # The control: the deviation is real, and without the measurement it would be an accusation.
    assert report.differing_elements > 0
    assert [d for d in report.segments[0].deviations if d.kind == "mismatch"]


def test_the_same_steps_match_when_the_noise_is_measured_before_each(
    source: JobSource, tmp_path: Path
) -> None:
    report = audited(source, tmp_path / "run", every=1)

    assert (report.verdict, report.differing_elements) == ("match", 0)


def test_the_command_says_who_is_not_accused_with_exit_3(
    source: JobSource, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tallystick.cli.main import main

    record(Order(source, {}, find_policy("fp32"), checkpoint_every=8), RunDirectory(tmp_path / "run"))
    capfd.readouterr()
    code = main(["audit", str(tmp_path / "run"), "--job", source.path, "--profile", "jitter", "--json"])
    fields = json.loads(capfd.readouterr().out)
    assert (code, fields["verdict"], fields["first_step"]) == (3, "cannot_reproduce", LOUD)
    assert fields["first"]["subject"] == "gradient loud.weight"


def test_noise_that_the_policys_factor_lifts_above_a_band_excuses_and_less_does_not(
    source: JobSource, tmp_path: Path
) -> None:
    policy = find_policy("fp32")
    record(Order(source, {}, policy, steps=1), RunDirectory(tmp_path / "run"))
    order = Order(source, {}, policy, steps=1)
    job = order.build()
    session = order.session(job)
    transcript = RunDirectory(tmp_path / "run").load_transcript()
    measured = calibrate(session, backward_of(session, job), repeats=TO_EXCUSE, seed=session.seed + 1)
    session.table = measured.table
    entries = {entry.name: entry for entry in state_entries(session)}
    place = next((kind, n) for kind, n in measured.noise if kind == Kind.GRADIENT)
    # 2**(noise - 1) < excuse * relative <= 2**noise
    noise = exponent_above(policy.excuse * measured.noise[place].relative)

    def excused(band: int) -> list[str]:
        grids = {
            at: SiteGrid(g.precision, band if at == place else g.band + 6, g.floor, g.dithered, g.scales)
            for at, g in measured.table.sites.items()
            if at[0] != Kind.GRADIENT or at == place
        }
        changes = measured.table.diff(GridTable(grids))
        frame = encode_frame(Frame.of({SiteAddress(0, 0, Kind.GRID, 0): changes}))
        found = find_noisy_sites(Replay(job, session), transcript, 0, 0, {0: frame}, entries)
        return [deviation.subject for deviation in found]

    try:
        assert excused(noise - 1) == [session.site_name(place)]
        assert excused(noise) == []
    finally:
        session.close()


def test_a_specification_with_numbers_outside_the_limits_is_refused(
    source: JobSource, tmp_path: Path
) -> None:
    wide = replace(find_policy("fp32"), safety=9, gradient_floor=0)
    record(Order(source, {}, wide, steps=2), RunDirectory(tmp_path / "wide"))
    with pytest.raises(InvalidInput, match="gradient_floor is 0, the policy allows -10 to -2"):
        audit(RunDirectory(tmp_path / "wide"), source)
    allowed = find_policy("fp32", chosen={"safety": 8, "gradient_floor": -2})
    record(Order(source, {}, allowed, steps=2), RunDirectory(tmp_path / "allowed"))
    assert audit(RunDirectory(tmp_path / "allowed"), source).verdict == "match"


@pytest.mark.parametrize(
    "numbers", [{"gradient_floor": -9, "gradient_spacing": 4}, {"gradient_floor": -2, "safety": 3}]
)
def test_chosen_numbers_are_followed_bit_for_bit_on_jittered_arithmetic(
    numbers: dict[str, int], tmp_path: Path
) -> None:
    source, policy = find_source("digits"), find_policy("fp32", chosen=numbers)
    record(Order(source, {}, policy, steps=12, checkpoint_every=6), RunDirectory(tmp_path / "run"))
    report = audit(RunDirectory(tmp_path / "run"), source, jitter=True)
    assert (report.verdict, report.differing_elements, report.steps) == ("match", 0, 12)


@pytest.mark.slow
def test_a_network_as_deep_as_resnet50_is_followed_from_its_noisy_first_step_on(tmp_path: Path) -> None:
    """Fifty layers of batch norm over eight images: bands of 2**-7 of a gradient's scale, and wide decisions."""
    source, run = find_source("resnet50"), RunDirectory(tmp_path / "run")
    settings = {"batch": "8", "width": "8"}
    record(Order(source, settings, find_policy("fp32"), checkpoint_every=3, steps=6), run)
    grids = GridTable.decode(bytes(run.load_checkpoint(0)["document/grids"].data)).sites
    gradients = [grid for (kind, _), grid in grids.items() if kind == Kind.GRADIENT]
    assert max(grid.band for grid in gradients if not is_noise_only(grid)) >= -10, "else nothing is tried"
    report = audit(run, source, jitter=True)
    assert (report.verdict, report.differing_elements, report.steps) == ("match", 0, 6)
    assert report.freedom.moved > 0, "control: without the log these elements would be others"
    assert 0.0 < report.freedom.largest_steer < 0.5


@pytest.mark.parametrize("level", ["operators", "steps"])
def test_a_judge_whose_own_noise_exceeds_a_band_blames_nobody(
    level: str, source: JobSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is honest. Its program runs on the judge's machine here, so what it ends at there convicts nobody."""
    run, claim = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "claim")
    record(Order(source, {}, find_policy("fp32"), checkpoint_every=8), run)
    write_claim(run, source, claim, jitter=True)
    seen: list[OperatorResult] = []
    honest_play = OperatorDispute.play

    def noting(case: OperatorDispute) -> OperatorResult:
        seen.append(honest_play(case))
        return seen[-1]

    monkeypatch.setattr(judge, "open_replay", partial(open_replay, jitter=True))
    monkeypatch.setattr(OperatorDispute, "play", noting)
    result = judge.dispute(run, claim, source, level=level)

    assert (result.loser, result.outcome, result.step) == ("none", "cannot_reproduce", LOUD)
    assert "loud.weight" in result.reason
    assert result.record is None
    # The control: level three alone, with the trainer's part played on this machine, would have convicted it.
    assert [found.loser for found in seen] == (["trainer"] if level == "operators" else [])
