"""tally calibrate on a tiny job: what it measures, proposes, writes, refuses; and recording with what it wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tallystick.numerics.policy import CHOICES, FP32
from tallystick.run.calibration import LIMIT, parse_calibration

KINDS = {"gradient", "loss", "state", "decision"}


def calibrate(tally, job: Path, *more: str | Path):
    return tally("calibrate", job, "--policy", "fp32", "--set", "width=256", *more)


def test_every_kind_of_site_is_measured_at_every_step_asked_for(tally, job: Path) -> None:
    answer = calibrate(
        tally, job, "--at", "0,3", "--repeats", "3", "--optimizer-arithmetic", "general", "--json"
    )

    fields = json.loads(answer.out)
    assert (answer.code, fields["steps"], fields["repeats"], fields["reached"]) == (0, [0, 3], 3, True)
    assert {site["kind"] for site in fields["sites"]} == KINDS
    assert {site["step"] for site in fields["sites"]} == {0, 3}
    for site in fields["sites"]:
        for unit in ("in_rms", "in_ulp"):
            for noise in (site[unit] or {}).values():
                assert 0 <= noise["median"] <= noise["p99"] <= noise["p99.99"] <= noise["max"]
    gradients = [site for site in fields["sites"] if site["kind"] == "gradient"]
    assert all(0 < site["in_rms"]["jitter"]["max"] < 1e-4 for site in gradients), "last-bit noise of binary32"
    assert all(2.0 ** site["band"] > site["largest_in_scale"]["jitter"] for site in gradients)
    assert fields["parameters"] == {
        "gradient_floor": -4, "gradient_spacing": 4, "safety": 3, "gradient_steer": -20, "recalibrate_every": 100,
    }  # fmt: skip
    assert fields["expected"] == fields["expected_of_policy"]


def test_the_same_command_gives_the_same_numbers(tally, job: Path) -> None:
    first, again = (json.loads(calibrate(tally, job, "--json").out) for _ in range(2))
    for fields in (first, again):
        del fields["seconds"]
    assert first == again


@pytest.mark.parametrize(("log_bits", "freedom"), [("0.3", None), ("0.03", None), (None, "0.002")])
def test_the_finest_grid_within_what_is_wanted_is_proposed(
    tally, job: Path, log_bits: str | None, freedom: str | None
) -> None:
    wanted = [*(["--log-bits", log_bits] if log_bits else []), *(["--freedom", freedom] if freedom else [])]
    fields = json.loads(calibrate(tally, job, *wanted, "--json").out)
    name, limit = ("log_bits", float(log_bits)) if log_bits else ("freedom", float(freedom or 0))
    assert fields["expected"][name] <= limit
    floor = fields["parameters"]["gradient_floor"]
    assert CHOICES["fp32"]["gradient_floor"][0] <= floor <= CHOICES["fp32"]["gradient_floor"][1]
    if floor > CHOICES["fp32"]["gradient_floor"][0]:
        # One octave finer about doubles both.
        assert fields["expected"][name] * 2.2 > limit


@pytest.mark.parametrize(("log_bits", "floor"), [(None, -3), ("4", -3), ("2.5", -2)])
def test_residues_cost_their_bits(tally, job: Path, tmp_path: Path, log_bits: str | None, floor: int) -> None:
    """What is expected is what a run of the proposed grid then writes."""
    wanted = [] if log_bits is None else ["--log-bits", log_bits]
    settings = ("--set", "width=256")
    fields = json.loads(
        tally(
            "calibrate", job, "--policy", "bf16", *settings, *wanted, "--out", tmp_path / "b.json", "--json"
        ).out
    )
    assert fields["parameters"]["gradient_floor"] == floor
    answer = tally(
        "record",
        job,
        "--bands",
        tmp_path / "b.json",
        *settings,
        "--steps",
        "2",
        "--run",
        tmp_path / "run",
        "--json",
    )
    assert answer.code == 0, answer
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_bytes().splitlines()]
    parameters = sum(site["elements"] for site in fields["sites"] if site["kind"] == "gradient")
    assert steps[1]["log_bytes"] * 8 / parameters == pytest.approx(fields["expected"]["log_bits"], rel=0.1)


def test_what_cannot_be_had_is_said_and_nothing_is_written(tally, job: Path, tmp_path: Path) -> None:
    out = tmp_path / "bands.json"
    answer = calibrate(tally, job, "--log-bits", "0.000001", "--out", out, "--json")

    assert answer.code == 2
    assert "--log-bits 1e-06: within the policy's limits no less than" in answer.err
    assert "no choice is written" in answer.err
    assert json.loads(answer.out)["reached"] is False
    assert not out.exists()


def test_another_profile_is_measured_in_a_process_of_its_own(tally, job: Path) -> None:
    answer = calibrate(
        tally, job, "--profile", "threads=1,jitter", "--profile", "native", "--at", "2", "--json"
    )

    fields = json.loads(answer.out)
    assert answer.code == 0, answer.err
    assert fields["profiles"] == ["native,threads=1,jitter", "native"]
    assert fields["needed_safety"] is not None
    for site in fields["sites"]:
        noise = site["largest_in_scale"]
        if site["kind"] in ("gradient", "decision"):
            assert noise["native"] == 0.0, "the same arithmetic from the same state gives the same bits"
            assert noise["native,threads=1,jitter"] > 0.0
            assert noise["native,threads=1,jitter"] < 16 * noise["jitter"]


def test_the_choice_is_recorded_with_and_costs_about_what_was_expected(
    tally, job: Path, tmp_path: Path
) -> None:
    out, drawn = tmp_path / "bands.json", tmp_path / "plot.svg"
    answer = calibrate(tally, job, "--at", "0,3", "--log-bits", "0.4", "--out", out, "--plot", drawn)
    assert answer.code == 0
    assert "proposed for policy fp32: gradient_floor" in answer.out
    assert ElementTree.fromstring(drawn.read_bytes()).tag.endswith("svg")

    choice = parse_calibration(out.read_bytes())
    assert choice.parameters["gradient_floor"] < FP32.gradient_floor
    same = ("--set", "width=256", "--checkpoint-every", "2", "--json")
    wide = json.loads(tally("record", job, "--run", tmp_path / "own", "--policy", "fp32", *same).out)
    chosen = tally("record", job, "--run", tmp_path / "run", "--bands", out, *same)
    fields = json.loads(chosen.out)
    assert (chosen.code, chosen.err) == (0, "")
    assert {name: fields["policy_parameters"][name] for name in choice.parameters} == choice.parameters
    assert wide["log_bits_per_parameter_step"] < fields["log_bits_per_parameter_step"]
    assert fields["log_bits_per_parameter_step"] == pytest.approx(choice.log_bits, rel=0.35)
    assert tally("verify", tmp_path / "run").code == 0
    audit = tally("audit", tmp_path / "run", "--job", job, "--profile", "jitter", "--json")
    assert (audit.code, json.loads(audit.out)["verdict"]) == (0, "match")


def test_a_run_is_resumed_under_its_own_choice_only(tally, job: Path, tmp_path: Path) -> None:
    out, run = tmp_path / "bands.json", tmp_path / "run"
    assert calibrate(tally, job, "--freedom", "0.01", "--out", out).code == 0
    order = ("record", job, "--run", run, "--set", "width=256", "--checkpoint-every", "2")
    assert tally(*order, "--bands", out).code == 0
    again = tally(*order, "--policy", "fp32", "--resume")
    assert again.code == 2
    assert "policy of the run is" in again.err


def test_a_choice_measured_on_another_job_is_used_and_the_difference_said(
    tally, job: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bands.json"
    assert calibrate(tally, job, "--out", out).code == 0
    answer = tally("record", job, "--run", tmp_path / "run", "--bands", out, "--set", "width=8")
    assert answer.code == 0
    assert (
        "was measured on something else: settings measured {'width': '256'}, recorded {'width': '8'}"
        in answer.err
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--at", "0;3"], "--at 0;3: must be steps with commas between"),
        (["--at", "3,0"], "steps must ascend"),
        (["--at", "6"], "--at 6: the job has 6 steps"),
        (["--at", ",".join(map(str, range(65)))], "65 steps, at most 64"),
        (["--repeats", "0"], "--repeats"),
        (["--profile", "sse9"], "unknown word 'sse9'"),
        (["--log-bits", "0"], "--log-bits 0: must be above 0"),
        (["--log-bits", "nan"], "--log-bits nan: must be above 0"),
        (["--freedom", "1.5"], "--freedom 1.5: must be above 0 and at most 1"),
        (["--plot", "plot.png"], "--plot plot.png: only .svg files are drawn"),
        (["--out", "nowhere/bands.json"], "there is no directory nowhere"),
        (["--device", "tpu"], "device tpu: unknown"),
        (["--recalibrate-every", "0"], "--recalibrate-every"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_reason(
    tally, job: Path, arguments: list[str], reason: str
) -> None:
    answer = calibrate(tally, job, *arguments)

    assert (answer.code, answer.out) == (2, "")
    assert answer.err.count("\n") == 1
    assert reason in answer.err


def cancelling(place: Path) -> Path:
    """A job whose gradient is a sum over numbers and the same ones negated, in another order: what rounding leaves of nothing.

    Whole numbers would not do: a machine may add them up without an error, and jitter leaves them alone.
    """
    job = place / "noisy.py"
    job.write_text(
        "import torch\n"
        "from tallystick.execution.job import Job\n"
        "def build(settings):\n"
        "    model = torch.nn.Linear(4, 3, bias=False)\n"
        "    chance = torch.Generator().manual_seed(5)\n"
        "    x = torch.randn(4096, 4, generator=chance)\n"
        "    rows = torch.cat((x, -x))[torch.randperm(8192, generator=chance)]\n"
        "    return Job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), steps=4,\n"
        "               batch=lambda step: rows, loss=lambda model, x: model(x).sum() + 1e6)\n"
    )
    return job


def test_a_site_too_noisy_for_the_policy_is_named_with_exit_3(tally, tmp_path: Path) -> None:
    """The difference of two equal means of about one: here 1e-9 on every machine, and 1e-7 of noise on any."""
    job = tmp_path / "noisy.py"
    job.write_text(
        "import torch\n"
        "from tallystick.execution.job import Job\n"
        "def build(settings):\n"
        "    model = torch.nn.Linear(4, 3, bias=False)\n"
        "    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))\n"
        "    return Job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), steps=4,\n"
        "               batch=lambda step: x,\n"
        "               loss=lambda model, x: model(x).exp().mean() - model(x).exp().mean() + 1e-9)\n"
    )
    answer = tally("calibrate", job, "--policy", "fp32", "--json")
    assert answer.code == 3
    assert json.loads(answer.out)["kind"] == "Nondeterminism"
    assert re.search(
        r"tally: loss: its noise is 2\*\*-?\d+ of its scale, policy fp32 allows 2\*\*-5", answer.err
    )


def test_a_gradient_too_noisy_for_the_policy_is_noise_only_and_stops_nothing(tally, tmp_path: Path) -> None:
    """Also where it is the only one; with 1e6 in it the loss is no noise, its gradient is all that rounding left."""
    answer = tally("calibrate", cancelling(tmp_path), "--policy", "fp32", "--json")
    assert (answer.code, answer.err) == (0, "")
    noisy = {site["name"]: site["noise_only"] for site in json.loads(answer.out)["sites"]}
    assert noisy["weight"] and not noisy["loss"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{}", "is missing"),
        (b"x" * (LIMIT + 9), str(LIMIT)),
        (b'{"policy":"fp32","safety":200}', "calibration"),
    ],
)
def test_a_malformed_choice_is_refused_before_anything_is_recorded(
    tally, job: Path, tmp_path: Path, data: bytes, reason: str
) -> None:
    out = tmp_path / "bands.json"
    out.write_bytes(data)
    answer = tally("record", job, "--run", tmp_path / "run", "--bands", out)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"tally: --bands {out}: ")
    assert reason in answer.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"safety": 200}, "safety is 200, the policy allows 3 to 8"),
        ({"gradient_floor": 3}, "gradient_floor is 3, the policy allows -10 to -2"),
        ({"noise_limit": 0}, "noise_limit is not for the trainer to choose"),
        ({"recalibrate_every": 0}, "recalibrate_every must be from 1 to 100"),
    ],
)
def test_numbers_outside_the_policys_limits_are_refused(
    tally, job: Path, tmp_path: Path, changes: dict[str, int], reason: str
) -> None:
    from tallystick.commit.encoding import canonical_json

    out = tmp_path / "bands.json"
    assert calibrate(tally, job, "--out", out).code == 0
    document = json.loads(out.read_bytes())
    out.write_bytes(canonical_json({**document, "parameters": document["parameters"] | changes}))
    answer = tally("record", job, "--run", tmp_path / "run", "--bands", out)
    assert answer.code == 2
    assert reason in answer.err


def test_a_choice_for_another_policy_and_a_missing_one_are_refused(tally, job: Path, tmp_path: Path) -> None:
    out = tmp_path / "bands.json"
    assert calibrate(tally, job, "--out", out).code == 0
    other = tally("record", job, "--run", tmp_path / "run", "--bands", out, "--policy", "fp64")
    assert (other.code, "is for policy fp32, the order says --policy fp64" in other.err) == (2, True)
    missing = tally("record", job, "--run", tmp_path / "run", "--bands", tmp_path / "no.json")
    assert (missing.code, "there is no such file" in missing.err) == (2, True)
    neither = tally("record", job, "--run", tmp_path / "run")
    assert (neither.code, "--policy: is missing, and no --bands says which" in neither.err) == (2, True)


def test_a_policy_without_numbers_to_choose_is_refused(tally, job: Path) -> None:
    answer = tally("calibrate", job, "--policy", "leaf")
    assert answer.code == 2
    assert "policy leaf: has no number that a calibration could choose" in answer.err
