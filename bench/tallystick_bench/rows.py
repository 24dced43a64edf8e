"""The rows of the benchmark: what was measured, what it must reach, and whether it does."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tallystick.errors import InvalidInput
from tallystick_bench import losses

MOST_OVERHEAD: Mapping[tuple[str, str], float] = {
    **{(who, policy): 1.10 for who in ("record", "audit") for policy in ("fp64", "fp32")},
    ("record", "leaf"): 1.6,
}
MOST_LOG: Mapping[tuple[str, str], float] = {  # bytes per step
    ("gpt2", "fp64"): 16e3, ("resnet50", "fp64"): 4e3, ("gpt2", "fp32"): 300e3,
}  # fmt: skip
MOST_BITS: Mapping[tuple[str, str], float] = {
    ("text", "fp64"): 0.001, ("text", "fp32"): 0.03, ("text", "bf16"): 1.1,
}  # fmt: skip
MOST_MEMORY = 1.25
LEAST_BANDWIDTH = 0.6  # of rounding, as a share of the bandwidth of copying the same bytes
ENTRIES: Mapping[str, float] = {
    "resnet50": 1.0466e9,
    "gpt2": 2.110e8,
}  # derived from the 2024 paper's code, each step
LARGE = ("gpt2", "resnet50")
CHECKPOINT_EVERY = 20  # the default of tally record
MOST_DEVIATIONS = 4.0  # that a count of corrections may lie from half the one before
Verdict = Literal["met", "not met", "printed only", "inconclusive", "failed"]
Unit = Literal["bytes", "weights", "entries", "bits", "times", "share", "nats"]


@dataclass(frozen=True)
class Row:
    """One measured number.

    Attributes:
        part: which part measured it.
        job, policy, measure: what was measured.
        value: None if that failed.
        unit: of ``value``.
        must: what it must reach: at most this, or with ``at_least`` at least this; None for a number to look at.
        is_goal: with ``at_least``, that less is a miss; it is otherwise a control that showed nothing.
        sound: False if something besides the number is wrong, such as the audit's verdict.
        error: why there is no number.
        detail: what else was learned, for ``--json``.
    """

    part: str
    job: str
    policy: str
    measure: str
    value: float | None
    unit: Unit
    must: float | None = None
    at_least: bool = False
    is_goal: bool = False
    sound: bool = True
    error: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def verdict(self) -> Verdict:
        """Whether the number is what it must be. A control that shows no difference is ``inconclusive``."""
        if self.value is None:
            return "failed"
        if self.must is None:
            return "printed only"
        if self.at_least:
            return "met" if self.value >= self.must else "not met" if self.is_goal else "inconclusive"
        return "met" if self.sound and self.value <= self.must else "not met"

    @property
    def passes(self) -> bool:
        """Whether nothing was missed: only what is met, and what is merely printed, passes."""
        return self.verdict in ("met", "printed only")

    def fields(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {
            "part": self.part,
            "job": self.job,
            "policy": self.policy,
            "measure": self.measure,
            "value": self.value,
            "unit": self.unit,
            "must": self.must,
            "rule": None if self.must is None else "at least" if self.at_least else "at most",
            "verdict": self.verdict,
            "error": self.error,
            **self.detail,
        }


def kernel_rows(place: str, policy: str, found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of one measurement of the kernels: bandwidths as shares of that of copying in the same run."""
    seconds: Mapping[str, float] = found["seconds"]
    speed = {name: found["bytes"][name] / seconds[name] for name in seconds}
    shared = {"threads": found["threads"], "elements": found["elements"], "rounds": found["rounds"]}
    rows: list[Row] = []
    names = {"round": "rounding, with log", "scale": "block scale", "fingerprint": "fingerprint"}
    names |= {"adamw": "portable AdamW", "sgd": "portable SGD"}
    for name, words in names.items():
        detail = {
            **shared,
            "ns_per_element": 1e9 * seconds[name] / found["elements"],
            "bytes_per_second": speed[name],
            "copy_bytes_per_second": speed["copy"],
        }
        must = LEAST_BANDWIDTH if name == "round" else None
        value = found["copies"][name] * found["bytes"][name] / found["bytes"]["copy"]
        measure = f"{words}: bandwidth / copy"
        rows.append(
            Row("kernel", place, policy, measure, value, "share", must, True, is_goal=True, detail=detail)
        )
    for name, words in (("adamw", "AdamW"), ("sgd", "SGD")):
        value = seconds[name] / seconds[f"torch {name}"]
        measure = f"portable {words} / torch's foreach"
        rows.append(Row("kernel", place, policy, measure, value, "times", detail=shared))
    return rows


def scaling_rows(job: str, policy: str, batch: int, found: Mapping[str, Any]) -> list[Row]:
    """Return one cell of the scaling table: both ratios, and the share of a recorded step that is recording's own."""
    where = f"{found['parameters'] / 1e6:.3g} M parameters, batch {batch}"
    rows: list[Row] = []
    for row in overhead_rows(job, policy, found)[:2]:
        rows.append(replace(row, part="scaling", measure=f"{row.measure}, {where}", must=None))
    ratio = rows[0].value
    assert ratio is not None
    name = f"record share, {where}"
    rows.append(
        Row("scaling", job, policy, name, 1.0 - 1.0 / ratio, "share", detail={"of": "a recorded step"})
    )
    return rows


def loss_rows(found: losses.Losses, policies: Sequence[str]) -> list[Row]:
    """Return each arithmetic's mean final loss, and for policies the distance from the plain loops of the same seed.

    What a policy must keep is its mean's distance from the plain loop of its own precision: within what another seed does to
    plain float32. Autocast has a price of its own, which the distance from plain float32 shows. Seed by seed the rule would
    say nothing where training is chaotic: of two triples of runs that differ by chance alone the furthest pair is farther
    apart than the first triple's range in 58 cases of 100, their means in 15.
    """
    rows: list[Row] = []
    spread = found.spread()
    for arithmetic in found.arithmetics:
        trainings = found.of(arithmetic)
        finals = {one.seed: one.final for one in trainings}
        name, _, more = arithmetic.partition(" ")
        policy, beside = (
            (more, "plain loop") if name == "plain" else (name, f"b_r {more}" if more else "recorded")
        )
        detail: dict[str, Any] = {
            "finals": finals, "spread": found.spread(arithmetic), "steps": trainings[0].points[-1][0],
            "log_bits_per_parameter_step": [one.log_bits for one in trainings],
        }  # fmt: skip
        mean = sum(finals.values()) / len(finals)
        what = f"held-out loss, {beside}"
        rows.append(
            Row(
                "loss", found.job, policy, f"{what}: mean of {len(finals)} seeds", mean, "nats", detail=detail
            )
        )
        rows.append(Row("loss", found.job, policy, f"{what}: seed to seed", detail["spread"], "nats"))
        if name == "plain":
            continue
        for plain in dict.fromkeys((losses.REFERENCE, losses.PLAIN[policy])):
            must = spread if plain == losses.PLAIN[policy] and len(finals) > 1 else None
            shift, furthest = found.shift(arithmetic, plain), found.furthest(arithmetic, plain)
            rows.append(Row("loss", found.job, policy, f"{what}: mean from {plain}", shift, "nats", must))
            rows.append(
                Row("loss", found.job, policy, f"{what}: furthest seed from {plain}", furthest, "nats")
            )
    return rows


def leaf_entry_rows(found: Mapping[str, Mapping[str, int]]) -> list[Row]:
    """Return how many entries each of the paper's jobs logs in a step, beside the number derived from the paper's code."""
    rows: list[Row] = []
    for job, counts in found.items():
        total, wanted = float(sum(counts.values())), ENTRIES[job]
        for name, count in counts.items():
            rows.append(
                Row("leaf", job, "leaf", f"entries a step, {name.replace('_', ' ')}", count, "entries")
            )
        near = abs(total - wanted) <= 1e-3 * wanted
        rows.append(
            Row("leaf", job, "leaf", "entries a step", total, "entries", 1.001 * wanted, sound=near,
                detail={"derived": wanted})
        )  # fmt: skip
    return rows


def leaf_form_rows(job: str, b_r: int, tau: str, found: Mapping[str, Any]) -> list[Row]:
    """Return bits of log for each entry in every form, forward and backward apart."""
    rows: list[Row] = []
    for way, sizes in found["sizes"].items():
        detail = {"thresholds": found["thresholds"], **sizes}
        for form in ("dense", "dense_zlib", "sparse", "sparse_zlib"):
            name = f"b_r {b_r}, tau {tau}, {way}: {form.replace('_', ', ')}"
            bits = 8.0 * sizes[form] / max(sizes["elements"], 1)
            rows.append(Row("leaf", job, "leaf", name, bits, "bits", detail=detail))
    return rows


def leaf_correction_rows(found: Sequence[Mapping[str, int]], score: float) -> list[Row]:
    """Return how often a follower took the log's side, by b_r, and how far that is from halving."""
    rows = [
        Row("leaf", "small network", "leaf", f"corrections, b_r {one['b_r']}", one["corrections"], "entries")
        for one in found
    ]
    name = "corrections halve with each bit: furthest from it, in standard deviations"
    return [*rows, Row("leaf", "small network", "leaf", name, score, "times", MOST_DEVIATIONS)]


def overhead_rows(job: str, policy: str, found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of one overhead measurement: ratios of medians, phases as shares of their step.

    Raises:
        InvalidInput: nothing was measured.
    """
    rounds: list[Mapping[str, Mapping[str, float]]] = found["rounds"]
    if not rounds:
        raise InvalidInput(f"overhead of {job}: no round was measured")
    seconds = {
        who: {phase: statistics.median(one[who][phase] for one in rounds) for phase in rounds[0][who]}
        for who in ("plain", "best", "record", "audit")
    }
    plain, best = seconds["plain"]["total"], seconds["best"]["total"]

    def row(measure: str, value: float, unit: Unit, **detail: Any) -> Row:
        return Row("overhead", job, policy, measure, value, unit, detail=detail)

    rows: list[Row] = []
    for who in ("record", "audit"):
        each = sorted(one[who]["total"] / one["plain"]["total"] for one in rounds)
        detail = {"lowest": each[0], "highest": each[-1], "rounds": len(rounds), "threads": found["threads"]}
        detail |= {"seconds": seconds[who], "plain_seconds": seconds["plain"]}
        ratio = row(f"{who} / plain", seconds[who]["total"] / plain, "times", **detail)
        most = MOST_OVERHEAD.get((who, policy)) if job in LARGE else None
        rows.append(replace(ratio, must=most))
    for who in ("record", "audit"):
        each = sorted(one[who]["total"] / one["best"]["total"] for one in rounds)
        detail = {"lowest": each[0], "highest": each[-1], "best_seconds": seconds["best"]}
        rows.append(row(f"{who} / best plain loop", seconds[who]["total"] / best, "times", **detail))
    for who in ("record", "audit"):
        total = seconds[who]["total"]
        phases = {phase: value for phase, value in seconds[who].items() if phase != "total"}
        rest = [2 * one[who]["total"] - sum(one[who].values()) for one in rounds]
        phases["data and log"] = statistics.median(rest)
        for phase, value in phases.items():
            name = phase.replace("forward_backward", "forward and backward").replace("_", " ")
            rows.append(row(f"{who}: {name}", value / total, "share", plain_steps=value / plain))
    rows.append(row("plain: optimizer", seconds["plain"]["optimizer"] / plain, "share"))
    rows.append(row("copying one gradient / plain step", found["copy"] / plain, "share"))
    size = row("log bytes per step, median", found["log_bytes"], "bytes")
    rows.append(replace(size, must=MOST_LOG.get((job, policy))))
    one, first, due = found["calibration"], found["first_calibration"], found["calibrations_due"]
    amortised = (first + due * one) / (found["job_steps"] * plain)
    rows.append(row("one calibration / plain step", one / plain, "times", first_plain_steps=first / plain))
    rows.append(
        row(
            "all calibrations / plain run", amortised, "share", calibrations=1 + due, steps=found["job_steps"]
        )
    )
    root = found["state_root"] / plain
    rows.append(row("one state root / plain step", root, "times", amortised=root / CHECKPOINT_EVERY))
    return rows
