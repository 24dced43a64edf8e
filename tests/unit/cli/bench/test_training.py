"""tally bench: what is measured is judged rightly, and a part that fails stays in the table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tallystick.cli.profiles import run_child
from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, TallyError
from tallystick.execution.determinism import Profile
from tallystick.numerics.policy import find_policy
from tallystick.roles.plain_loop import PlainLoop
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick_bench import measure
from tallystick_bench.kernel import kernel
from tallystick_bench.machine import machine
from tallystick_bench.rows import Row, kernel_rows, overhead_rows
from tallystick_bench.training import PARTS, Bench, differing_bytes

TINY = """
import torch
from torch import nn
from tallystick.execution.job import Job

def build(settings):
    generator = torch.Generator().manual_seed(int(settings.get("init_seed", 0)))
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-64, 64, p.shape, generator=generator) / 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = (torch.arange(96) * 37 % 64 / 32 - 1).reshape(16, 6)
    return Job(
        model=model, optimizer=optimizer, batch=lambda step: data * (step % 3 + 1), accumulation=2, clip_norm=1.0,
        loss=lambda net, x: (net(x) - x.sum(1, keepdim=True)).square().mean(), steps=4,
        evaluate=lambda net: {"held_out_loss": sum(float(p.detach().double().sum()) for p in net.parameters())},
    )
"""
BOTH = pytest.mark.parametrize("policy", ["fp64", "fp32"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return str(path)


def recorded(job: str, policy: str, place: Path, steps: int = 2) -> RunDirectory:
    from tallystick.execution.job import find_source

    directory = RunDirectory(place)
    record(Order(find_source(job), {}, find_policy(policy), steps=steps), directory)
    return directory


def row(value: float | None, must: float | None, **more: Any) -> Row:
    return Row("log", "text", "fp32", "log bits", value, "bits", must, **more)


# -- what a row says ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "verdict", "passes"),
    [
        (row(0.03, 0.03), "met", True),
        (row(0.031, 0.03), "not met", False),
        (row(0.0, 0.0, sound=False), "not met", False),
        (row(7.0, None), "printed only", True),
        (row(1, 1, at_least=True), "met", True),
        (row(0, 1, at_least=True), "inconclusive", False),
        (row(0.59, 0.6, at_least=True, is_goal=True), "not met", False),
        (row(0.6, 0.6, at_least=True, is_goal=True), "met", True),
        (row(None, None, error="no memory"), "failed", False),
    ],
)
def test_a_row_passes_only_if_it_is_met_or_merely_printed(made: Row, verdict: str, passes: bool) -> None:
    assert (made.verdict, made.passes) == (verdict, passes)


def test_json_rows_have_the_fields_that_scripts_rely_on() -> None:
    fields = row(0.02, 0.03, detail={"steps": 9}).fields()
    assert {"job", "policy", "measure", "value", "must"} <= fields.keys()
    assert (fields["value"], fields["must"], fields["rule"], fields["steps"]) == (0.02, 0.03, "at most", 9)
    json.dumps(fields)


# -- the measurements themselves, in this process ----------------------------------------------


@BOTH
def test_overhead_times_plain_recorded_and_audited_steps_in_turn(job: str, policy: str) -> None:
    said: list[str] = []
    found = measure.overhead(job, policy, rounds=2, warm_up=1, say=said.append)
    assert len(found["rounds"]) == 2
    assert len(said) == 4
    assert found["calibrations_due"] == 0  # of a job of four steps
    for one in found["rounds"]:
        assert one.keys() == {"plain", "best", "record", "audit"}
        assert (
            sum(value for name, value in one["record"].items() if name != "total") <= one["record"]["total"]
        )
    rows = overhead_rows("tiny", policy, found)
    shares = [r.value or 0.0 for r in rows if r.measure.startswith("record: ")]
    assert len(shares) == 6
    assert all(r.passes for r in rows)


def test_overhead_without_a_round_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no round was measured"):
        overhead_rows("tiny", "fp32", {"rounds": []})


def test_ratios_are_those_of_the_medians_and_shares_add_up() -> None:
    def times(factor: float) -> dict[str, float]:
        return {"forward_backward": factor, "optimizer": factor, "total": 4 * factor}

    rounds = [
        {"plain": times(1), "best": times(0.5), "record": times(k), "audit": times(3)} for k in (2, 5, 100)
    ]
    facts = {
        "first_calibration": 8.0,
        "calibration": 4.0,
        "calibrations_due": 2,
        "job_steps": 8,
        "state_root": 2.0,
        "copy": 0.5,
        "log_bytes": 70,
    }
    rows = {
        r.measure: r.value for r in overhead_rows("tiny", "fp32", {"rounds": rounds, "threads": 1, **facts})
    }
    assert rows["record / plain"] == 5.0
    assert rows["audit / plain"] == 3.0
    assert rows["record / best plain loop"] == 10.0
    assert rows["audit / best plain loop"] == 6.0
    assert rows["record: forward and backward"] == 0.25
    assert rows["record: data and log"] == 0.5
    assert rows["one calibration / plain step"] == 1.0
    assert rows["all calibrations / plain run"] == 0.5
    assert rows["one state root / plain step"] == 0.5
    assert rows["copying one gradient / plain step"] == 0.125
    assert rows["plain: optimizer"] == 0.25


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_the_best_plain_loop_takes_the_optimizers_fused_step_where_there_is_one(optimizer: str) -> None:
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    fused, own = (getattr(torch.optim, optimizer)([weight], lr=0.5) for weight in weights)
    measure.fuse(fused)
    assert fused.param_groups[0].get("fused", "none") == (True if optimizer != "RMSprop" else "none")
    for made, weight in zip((fused, own), weights, strict=True):
        weight.grad = torch.full((3,), 0.25)
        made.step()
    torch.testing.assert_close(weights[0], weights[1])


@BOTH
def test_a_plain_loop_on_master_copies_trains_the_model(job: str, policy: str) -> None:
    from tallystick.execution.job import find_source

    built = find_source(job).build({})
    before = [p.detach().clone() for p in built.model.parameters()]
    loop = PlainLoop(built, measure.COMPUTE[policy], masters=True)
    loop.step(0)
    for was, parameter, (_, master) in zip(before, built.model.parameters(), loop.masters, strict=True):
        assert master.dtype == torch.float64
        assert torch.equal(parameter, master.to(parameter.dtype))
        assert not torch.equal(parameter, was.to(parameter.dtype))


@BOTH
def test_every_role_of_the_memory_measurement_reports_its_peak(job: str, policy: str, tmp_path: Path) -> None:
    for role in ("plain", "record", "audit"):
        found = measure.memory(job, policy, role, 3, str(tmp_path / "run"))
        assert found["peak"] >= found["before"] > 1 << 20


@BOTH
def test_the_control_repeats_itself_and_differs_under_jitter(job: str, policy: str, tmp_path: Path) -> None:
    run = recorded(job, policy, tmp_path / "run")
    results: list[bytes] = []
    for number, jitter in enumerate((False, False, True)):
        out = tmp_path / f"weights-{number}"
        found = measure.control(str(run.path), str(out), jitter, job)
        results.append(out.read_bytes())
        assert len(results[-1]) == found["weights"] * found["bytes_each"]
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_the_control_draws_the_dropout_of_the_recorded_run(job: str, tmp_path: Path) -> None:
    run = recorded(job, "fp64", tmp_path / "run", steps=1)
    measure.control(str(run.path), str(tmp_path / "weights"), False, job)
    plain = torch.frombuffer(bytearray((tmp_path / "weights").read_bytes()), dtype=torch.float64)
    entries = run.load_checkpoint(1)
    names = ["0.weight", "1.weight", "1.bias", "4.weight", "4.bias"]
    own = [torch.frombuffer(bytearray(entries[f"model/{name}"].data), dtype=torch.float32) for name in names]
    assert torch.allclose(plain, torch.cat(own).double(), atol=1e-6, rtol=0.0)


def test_recording_hardly_moves_the_held_out_loss(job: str) -> None:
    found = {
        arithmetic: measure.curve(job, arithmetic, steps=4, seed=1, points=2, say=print)
        for arithmetic in ("plain fp32", "plain bf16", "fp32", "leaf 26")
    }
    for one in found.values():
        assert [step for step, _ in one["points"]] == [2, 4]
        assert one["points"][-1][1] == pytest.approx(found["plain fp32"]["points"][-1][1], abs=0.05)
    assert found["plain bf16"]["log_bits_per_parameter_step"] is None
    assert found["leaf 26"]["log_bits_per_parameter_step"] > 0.0


def test_an_unknown_arithmetic_is_refused(job: str) -> None:
    with pytest.raises(InvalidInput, match="arithmetic plain fp8: unknown; known are fp64, fp32, bf16, leaf"):
        measure.curve(job, "plain fp8", steps=1, seed=0, points=1, say=print)


def test_a_job_without_a_held_out_loss_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.py"
    path.write_text(TINY.replace("held_out_loss", "other"))
    with pytest.raises(InvalidInput, match=r"gives no held_out_loss, it gives \['other'\]"):
        measure.curve(str(path), "fp32", steps=1, seed=0, points=1, say=print)


def test_differing_bytes_counts_changed_and_missing_ones(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "a"), RunDirectory(tmp_path / "b")
    first.write_checkpoint(1, [Entry("w", "U8", (4,), b"abcd"), Entry("x", "U8", (2,), b"pq")])
    second.write_checkpoint(1, [Entry("w", "U8", (4,), b"aXcY"), Entry("y", "U8", (3,), b"rst")])
    assert differing_bytes(first, first, 1) == 0
    assert differing_bytes(first, second, 1) == 2 + 2 + 3


# -- the parts, with a child that answers at once ------------------------------------------------


class Played:
    """Answers as the commands would; ``verdict`` is the audit's, ``broken`` the word of a command that fails."""

    def __init__(self, verdict: str = "match", broken: str = "nothing") -> None:
        self.verdict, self.broken = verdict, broken
        self.asked: list[tuple[list[str], str]] = []

    def __call__(self, arguments: Sequence[str], profile: Profile) -> dict[str, Any]:
        self.asked.append((list(arguments), str(profile)))
        if self.broken in arguments:
            raise TallyError(f"tally {self.broken}: no memory")
        if arguments[0] == "record":
            return self._record(RunDirectory(Path(arguments[arguments.index("--run") + 1])), arguments)
        if arguments[0] == "audit":
            if "--claim" in arguments:
                RunDirectory(Path(arguments[-1])).write_checkpoint(3, [Entry("w", "U8", (2,), b"aY")])
            return {"verdict": self.verdict, "first": None, "freedom": {}}
        return self._measured(arguments[2], json.loads(arguments[3]), profile)

    def _record(self, run: RunDirectory, arguments: Sequence[str]) -> dict[str, Any]:
        assert "--checkpoint-every" in arguments or "--set" in arguments
        run.write_checkpoint(0, [Entry("document/grids", "U8", (2,), b"gg")])
        run.write_checkpoint(3, [Entry("w", "U8", (2,), b"ab")])
        return {"parameters": 10, "log_bits_per_parameter_step": 0.5, "log_bytes_per_step": 5.0}

    def _measured(self, kind: str, given: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
        if kind == "control":
            Path(given["out"]).write_bytes(
                bytes(8) if profile.instructions == "native" and not profile.jitter else b"12345678"
            )
            return {}
        if kind == "overhead":
            batch = int(given["settings"]["batch"])
            times = {"forward_backward": float(batch), "optimizer": 1.0, "total": 1.0 + batch}
            round_ = {
                "plain": times,
                "best": times,
                "record": {**times, "total": 2.0 + batch},
                "audit": times,
            }
            facts = dict.fromkeys(
                ("first_calibration", "calibration", "calibrations_due", "state_root", "copy", "log_bytes"),
                1.0,
            )
            return {"rounds": [round_], "threads": 1, "job_steps": 8, "parameters": 10_000_000, **facts}
        if kind == "curve":
            loss = 2.0 + 0.1 * given["seed"] + {"bf16": 0.05, "leaf 26": 0.21}.get(given["arithmetic"], 0.0)
            bits = None if given["arithmetic"].startswith("plain") else 1.0
            return {"points": [[1, 3.0], [2, loss]], "log_bits_per_parameter_step": bits}
        peak = {"plain": 100, "record": 120, "audit": 130}[given["role"]]
        return {"peak": peak, "before": 20}


def bench(place: Path, child: Played, **more: Any) -> Bench:
    (place / "bench").mkdir()
    return Bench(place / "bench", lambda _: None, child=child, quick=True, **more)


def test_exactness_meets_zero_where_the_audit_matches_and_the_control_differs(tmp_path: Path) -> None:
    child = Played()
    rows = bench(tmp_path, child, policies=["fp32"], jobs=["digits"]).run(["exactness"])
    assert {r.verdict for r in rows} == {"met"}
    assert all(r.must == 0 for r in rows if r.measure.startswith("differing"))
    audits = [a for a, _ in child.asked if a[0] == "audit"]
    assert len(audits) >= 2
    assert sum(a[0] == "record" for a, _ in child.asked) == 2  # one each way round, whoever asks


def test_exactness_of_the_large_network_is_shown_at_the_batch_that_the_table_names(tmp_path: Path) -> None:
    child = Played()
    bench(tmp_path, child, policies=["fp32"], jobs=["resnet50", "digits"]).run(["exactness"])
    settings = {
        a[1]: a[a.index("--set") + 1] if "--set" in a else None for a, _ in child.asked if a[0] == "record"
    }
    assert settings == {"resnet50": "batch=8", "digits": None}


def test_a_mismatch_is_counted_in_bytes_and_not_met(tmp_path: Path) -> None:
    rows = bench(tmp_path, Played("mismatch"), policies=["fp32"], jobs=["digits"]).run(["exactness"])
    bad = [r for r in rows if r.measure.startswith("differing")]
    assert {(r.value, r.verdict) for r in bad} == {(1, "not met")}


@pytest.mark.parametrize("broken", ["record", "audit", "control"])
def test_a_command_that_fails_leaves_a_failed_row(tmp_path: Path, broken: str) -> None:
    rows = bench(tmp_path, Played(broken=broken), policies=["fp32"], jobs=["digits"]).run(["exactness"])
    whole = bench_size(tmp_path)
    assert len(rows) == whole
    failed = [r for r in rows if r.verdict == "failed"]
    assert failed
    assert all(r.error == f"tally {broken}: no memory" for r in failed)


def bench_size(tmp_path: Path) -> int:
    place = tmp_path / "whole"
    place.mkdir()
    return len(bench(place, Played(), policies=["fp32"], jobs=["digits"]).run(["exactness"]))


def test_a_part_that_fails_does_not_vanish(tmp_path: Path) -> None:
    rows = bench(tmp_path, Played(broken="bench")).run(["loss", "memory", "overhead"])
    assert {(r.part, r.verdict) for r in rows} == {
        (part, "failed") for part in ("overhead", "memory", "loss")
    }
    assert {r.job for r in rows} == {"text", "digits", "gpt2", "resnet50"}


def test_log_rows_of_text_have_a_limit_and_others_none(tmp_path: Path) -> None:
    rows = bench(tmp_path, Played()).run(["log"])
    limits = {(r.job, r.policy): r.must for r in rows if r.unit == "bits"}
    assert limits == {
        ("digits", "fp64"): None,
        ("digits", "fp32"): None,
        ("digits", "bf16"): None,
        ("text", "fp64"): 0.001,
        ("text", "fp32"): 0.03,
        ("text", "bf16"): 1.1,
    }
    assert all(r.detail["first_grids_bytes"] == 2 for r in rows)


def test_scaling_goes_over_sizes_and_batches(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    child = Played()
    rows = Bench(tmp_path / "bench", lambda _: None, child=child).run(["scaling"])
    ratios = {r.measure: r.value for r in rows if r.job == "gpt2"}
    assert ratios["record / plain, 10 M parameters, batch 1"] == 1.5
    assert ratios["record / plain, 10 M parameters, batch 4"] == pytest.approx(1.2)
    assert ratios["audit / plain, 10 M parameters, batch 16"] == 1.0
    assert ratios["record share, 10 M parameters, batch 4"] == pytest.approx(1 / 6)
    given = [json.loads(asked[3])["settings"] for asked, _ in child.asked]
    assert [one["batch"] for one in given] == ["1", "4", "16"] * 3
    assert {r.policy for r in rows} == {"fp32"}


def test_memory_is_judged_against_the_plain_loop(tmp_path: Path) -> None:
    rows = bench(tmp_path, Played(), jobs=["text"], policies=["fp64"]).run(["memory"])
    assert [(r.value, r.verdict) for r in rows if r.must is not None] == [(1.2, "met"), (1.3, "not met")]


def test_loss_is_judged_against_the_spread_over_seeds(tmp_path: Path) -> None:
    made = bench(tmp_path, Played(), jobs=["text"], workers=2)
    rows = {(row.policy, row.measure): row for row in made.run(["loss"])}
    judged = {key: row for key, row in rows.items() if row.must is not None}
    far = "mean from plain"
    assert {key: (row.value, row.verdict) for key, row in judged.items()} == {
        ("fp64", f"held-out loss, recorded: {far} fp64"): (0.0, "met"),
        ("fp32", f"held-out loss, recorded: {far} fp32"): (0.0, "met"),
        ("bf16", f"held-out loss, recorded: {far} bf16"): (pytest.approx(0.05), "met"),
        ("leaf", f"held-out loss, b_r 32: {far} fp64"): (0.0, "met"),
        ("leaf", f"held-out loss, b_r 26: {far} fp64"): (pytest.approx(0.21), "not met"),
    }
    assert all(row.must == pytest.approx(0.2) for row in judged.values())
    assert rows["bf16", "held-out loss, recorded: furthest seed from plain bf16"].value == pytest.approx(0.05)
    assert rows["fp64", "held-out loss, plain loop: mean of 3 seeds"].value == pytest.approx(2.1)
    (curves,) = made.curves
    assert curves.arithmetics == [
        "plain fp64", "plain fp32", "plain bf16", "fp64", "fp32", "bf16", "leaf 32", "leaf 26"
    ]  # fmt: skip


def test_a_policy_of_ones_own_is_trained_beside_what_it_is_judged_by(tmp_path: Path) -> None:
    child = Played()
    bench(tmp_path, child, jobs=["text"], policies=["bf16"], seeds=(0, 1)).run(["loss"])
    asked = sorted(
        (given["arithmetic"], given["seed"]) for given in (json.loads(a[3]) for a, _ in child.asked)
    )
    assert asked == [(name, seed) for name in ("bf16", "plain bf16", "plain fp32") for seed in (0, 1)]
    assert {profile for _, profile in child.asked} == {"native,threads=1"}


def test_what_was_trained_is_not_trained_again_unless_something_differs(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def trained(name: str, **more: Any) -> int:
        (tmp_path / name).mkdir()
        child = Played()
        bench(tmp_path / name, child, jobs=["text"], policies=["fp32"], out=out, **more).run(["loss"])
        return len(child.asked)

    assert trained("first") == 6
    assert trained("again") == 0
    assert trained("other length", steps=7) == 6
    kept = sorted((out / "trainings").iterdir())
    kept[0].write_text(kept[0].read_text()[:-20])
    kept[1].write_text("[" * 100_000)
    kept[2].write_text(kept[2].read_text().replace('"seed": ', '"seed": 7'))
    assert trained("damaged") + trained("damaged, other length", steps=7) == 3


def test_a_training_that_fails_leaves_the_others_kept(tmp_path: Path) -> None:
    class Fails(Played):
        def _measured(self, kind: str, given: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
            if given["arithmetic"] == "plain fp32" and given["seed"] == 0:
                raise TallyError("no memory")
            return super()._measured(kind, given, profile)

    out = tmp_path / "out"
    rows = bench(tmp_path, Fails(), jobs=["text"], policies=["fp32"], out=out, workers=1).run(["loss"])
    assert [(row.verdict, row.error) for row in rows] == [("failed", "plain fp32, seed 0: no memory")]
    assert len(list((out / "trainings").iterdir())) == 5


def test_parts_run_in_their_own_order_and_only_if_asked_for(tmp_path: Path) -> None:
    rows = bench(tmp_path, Played(), jobs=["text"], policies=["fp32"]).run(["loss", "log"])
    assert list(dict.fromkeys(r.part for r in rows)) == ["log", "loss"]
    assert set(PARTS) > {"log", "loss"}


# -- the real child ------------------------------------------------------------------------------


def test_a_real_child_records_and_its_log_is_measured(job: str, tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    rows = Bench(tmp_path / "bench", lambda _: None, jobs=[job], policies=["fp32"], quick=True).run(["log"])
    assert [r.verdict for r in rows] == ["printed only", "printed only"]
    assert rows[0].detail["parameters"] == 6 * 8 + 8 + 8 + 8 + 1


def test_a_child_that_refuses_says_why() -> None:
    with pytest.raises(TallyError, match="job nothing: neither a shipped job"):
        run_child(["record", "nothing", "--run", "nowhere", "--policy", "fp32"], Profile())


def test_the_machine_is_named() -> None:
    assert machine()["processor"]
    assert machine()["torch"]


# -- kernels -----------------------------------------------------------------------------------


@BOTH
def test_kernels_are_timed_beside_copying_and_torchs_optimizers(policy: str) -> None:
    found = kernel(policy, elements=4096, rounds=2)
    assert found["bytes"]["copy"] == found["bytes"]["round"] == 4096 * (16 if policy == "fp64" else 8)
    assert all(seconds > 0.0 for seconds in found["seconds"].values())
    rows = {each.measure: each for each in kernel_rows("cpu", policy, found)}
    rounding = rows["rounding, with log: bandwidth / copy"]
    assert (rounding.must, rounding.at_least, rounding.is_goal) == (0.6, True, True)
    assert [each.must for each in rows.values()].count(None) == len(rows) - 1
    assert rows["portable AdamW / torch's foreach"].value is not None


def test_a_kernels_share_is_its_bandwidth_over_that_of_copying() -> None:
    names = ("copy", "round", "scale", "fingerprint", "adamw", "sgd", "torch adamw", "torch sgd")
    found = {
        "seconds": {**dict.fromkeys(names, 1.0), "copy": 0.5, "torch adamw": 4.0},
        "copies": {**dict.fromkeys(names, 0.5), "copy": 1.0},
        "bytes": dict.fromkeys(names, 100) | {"adamw": 350},
        "elements": 10, "threads": 1, "rounds": 1,
    }  # fmt: skip
    rows = {each.measure: each for each in kernel_rows("cpu", "fp32", found)}
    assert rows["rounding, with log: bandwidth / copy"].value == 0.5
    assert rows["rounding, with log: bandwidth / copy"].verdict == "not met"
    assert rows["portable AdamW: bandwidth / copy"].value == 1.75
    assert rows["portable AdamW / torch's foreach"].value == 0.25
