"""tally bench: measures what docs/benchmarks.md states, and says what is not reached."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tallystick.cli.options import AsJson, Settings, argument, flag, option, parse_settings
from tallystick.cli.profiles import run_child
from tallystick.cli.terminal import console, print_json, say
from tallystick.errors import InvalidInput
from tallystick.execution.determinism import Profile, parse_profile
from tallystick.numerics.policy import find_policy
from tallystick.reports.layout import BAD, GOOD, QUIET, UNSURE, printable, share
from tallystick.store.files import write_whole
from tallystick_bench import honest as honest_runs
from tallystick_bench.chips import chip
from tallystick_bench.curves import LossPlot
from tallystick_bench.losses import Losses
from tallystick_bench.machine import machine
from tallystick_bench.monitor import monitor
from tallystick_bench.rows import Row
from tallystick_bench.spending import beyond_segment, step_of
from tallystick_bench.training import PARTS, SEEDS, Bench

if TYPE_CHECKING:
    from tallystick_bench.dispute import DisputeCost
    from tallystick_bench.exchange import ExchangeCost

DEFAULT_SEEDS = len(SEEDS)
STYLES = {"met": GOOD, "not met": BAD, "printed only": QUIET, "inconclusive": UNSURE, "failed": BAD}

app = typer.Typer(help="Measure what recording costs and whether it holds: the rows of docs/benchmarks.md.")


app.command()(monitor)
app.command()(chip)


@app.callback(invoke_without_command=True)
def start(context: typer.Context) -> int | None:
    """Measure what recording costs and whether it holds: the rows of docs/benchmarks.md."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
    return None


Parts = Annotated[
    list[str] | None, argument("[PART]...", f"Any of {', '.join(PARTS)}; by default all of them.")
]
Jobs = Annotated[
    list[str] | None, option("--job", "JOB", "Instead of each part's own jobs; may be repeated.")
]
Policies = Annotated[
    list[str] | None, option("--policy", "fp64|fp32|bf16|leaf", "Only this policy; may be repeated.")
]
Steps = Annotated[
    int | None, option("--steps", "N", "Steps, or measured rounds, instead of each part's own.", least=1)
]
Out = Annotated[
    Path | None,
    option(
        "--out",
        "DIR",
        "Part loss: write losses.json and a plot for each job here, and keep what is trained; another call goes on.",
    ),
]
Seeds = Annotated[int, option("--seeds", "N", "Part loss: train with seeds 0 to N - 1.", least=1, most=100)]
Quick = Annotated[bool, flag("--quick", "A few steps of everything: shows that it works, measures nothing.")]


@app.command()
def training(
    part: Parts = None,
    job: Jobs = None,
    policy: Policies = None,
    steps: Steps = None,
    quick: Quick = False,
    out: Out = None,
    seeds: Seeds = DEFAULT_SEEDS,
    as_json: AsJson = False,
) -> int:
    """Measure exactness, log, overhead, memory, loss, kernels and policy leaf of recorded training; 1 if anything is missed."""
    parts = part or list(PARTS)
    for name in parts:
        if name not in PARTS:
            raise InvalidInput(f"part {name}: unknown; known are {', '.join(PARTS)}")
    for name in policy or []:
        find_policy(name)
    if out is not None and "loss" not in parts:
        raise InvalidInput(
            f"--out {out}: only part loss writes files, and it is not among {', '.join(parts)}"
        )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tallystick-bench-") as place:
        bench = Bench(
            Path(place), say, job, policy, steps, quick,
            show=lambda row: say(line_of(row)), seeds=range(seeds), out=out,
        )  # fmt: skip
        rows = bench.run(parts)
    if out is not None and bench.curves:
        for path in write_losses(out, bench.curves, machine()):
            say(f"wrote {path}")
    facts = {**machine(), "seconds": round(time.perf_counter() - started, 1), "quick": quick}
    if as_json:
        print_json({"rows": [row.fields() for row in rows], "machine": facts})
    else:
        console().print(table_of(rows, facts))
    return 0 if all(row.passes for row in rows) else 1


def write_losses(directory: Path, curves: Sequence[Losses], facts: dict[str, Any]) -> list[Path]:
    """Write what was trained as losses.json, and a plot for each job, into an existing directory; return their paths.

    Raises:
        StoreError: they cannot be written.
    """
    document = {"jobs": [one.fields() for one in curves], "machine": facts}
    texts = {"losses.json": json.dumps(document, indent=1) + "\n"}
    texts |= {f"losses-{Path(one.job).stem}.svg": LossPlot(one).svg() for one in curves}
    for name, text in texts.items():
        write_whole(directory / name, text.encode())
    return [directory / name for name in texts]


@app.command()
def evidence(
    part: Annotated[str, argument("[PART]", "bundle, dispute, or exchange.")] = "bundle",
    runs: Annotated[int, option("--runs", "N", "bundle: fresh processes.", least=1)] = 7,
    job: Annotated[str, option("--job", "JOB", "dispute, exchange: text, gpt2, or another.")] = "text",
    policy: Annotated[str, option("--policy", "NAME", "dispute, exchange: fp32 or fp64.")] = "fp32",
    segment: Annotated[
        int, option("--segment", "N", "dispute, exchange: steps between checkpoints.", least=2, most=64)
    ] = 8,
    settings: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Measure what verifying a bundle takes a stranger, or what a dispute takes all parties; 1 if it is too much."""
    if part not in ("bundle", "dispute", "exchange"):
        raise InvalidInput(f"part {part}: unknown; known are bundle, dispute, exchange")
    if part == "exchange":
        return _bench_exchange(job, policy, segment, parse_settings(settings or []), as_json=as_json)
    if settings:
        raise InvalidInput(f"--set {settings[0]}: belongs to exchange")
    if part == "dispute":
        return _bench_dispute(job, policy, segment, as_json=as_json)
    return _bench_bundle(runs, as_json=as_json)


def _bench_bundle(runs: int, *, as_json: bool) -> int:
    from tallystick_bench.evidence import MOST_MEMORY, MOST_SECONDS, measure_evidence

    with tempfile.TemporaryDirectory(prefix="tallystick-bench-") as place:
        cost = measure_evidence(Path(place), runs)
    fields = {**vars(cost), "must_seconds": MOST_SECONDS, "must_bytes": MOST_MEMORY, "met": cost.is_met}
    if as_json:
        print_json({**fields, "machine": machine()})
        return 0 if cost.is_met else 1
    table = Table(title="tally bench evidence", title_justify="left")
    for heading in ("tally verify BUNDLE, bare install", "value", "must"):
        table.add_column(heading, justify="left" if heading.startswith("tally") else "right")
    table.add_row(
        f"seconds, median of {cost.runs} processes (slowest {cost.slowest:.2f}; start alone {cost.start_seconds:.2f})",
        f"{cost.seconds:.2f}",
        f"<= {MOST_SECONDS:g}",
    )
    table.add_row("of its own work (CPU), seconds", f"{cost.cpu_seconds:.2f}", "")
    table.add_row("peak memory, MB", f"{cost.peak_bytes / 1e6:.0f}", f"<= {MOST_MEMORY / 1e6:.0f}")
    table.add_row("bundle", f"{cost.members} members, {cost.bundle_bytes:,} bytes", "")
    console().print(table)
    return 0 if cost.is_met else 1


@app.command()
def honest(
    job: Annotated[
        list[str] | None,
        option("--job", "JOB", "Instead of digits, text and a small resnet50; may be repeated."),
    ] = None,
    policy: Policies = None,
    profile: Annotated[
        list[str] | None, option("--profile", "NAME", "Only audits under this arithmetic; may be repeated.")
    ] = None,
    steps: Annotated[int, option("--steps", "N", "Steps of each run.", least=1)] = honest_runs.STEPS,
    settings: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Record honest runs, audit them on other arithmetic, count false accusations; 1 if any, or one run is not accepted."""
    for name in policy or []:
        find_policy(name)
    for name in profile or []:
        parse_profile(name)
    with tempfile.TemporaryDirectory(prefix="tallystick-bench-") as place:
        matrix = honest_runs.measure_honest(
            Path(place), jobs=job, policies=policy or honest_runs.POLICIES, steps=steps,
            profiles=profile or honest_runs.PROFILES, settings=parse_settings(settings or []), say=say,
        )  # fmt: skip
    if as_json:
        print_json({**matrix.fields(), "machine": machine()})
        return 0 if matrix.is_met else 1
    table = Table(title=f"tally bench honest: {steps} steps, recorded under native", title_justify="left")
    for heading in ("job", "policy", "audited under", "verdict", "moved / budget", "dispute"):
        table.add_column(heading, justify="right" if heading.startswith("moved") else "left")
    for audit in matrix.audits:
        verdict = audit.error or f"{audit.verdict}" + ("" if audit.first is None else f": {audit.first}")
        style = (
            BAD
            if audit.is_false_accusation or audit.verdict is None
            else GOOD
            if audit.verdict == "match"
            else UNSURE
        )
        ruling = "" if audit.outcome is None else f"{audit.outcome}, loser {audit.loser}"
        table.add_row(
            audit.job,
            audit.policy,
            audit.profile,
            Text(printable(verdict), style=style),
            "" if audit.verdict is None else f"{audit.moved:,} / {audit.budget:,}",
            ruling,
        )
    console().print(table)
    say(
        f"{matrix.false_accusations} false accusations and {matrix.not_accepted} not accepted "
        f"in {len(matrix.audits)} audits, must be 0"
    )
    return 0 if matrix.is_met else 1


def _bench_dispute(job: str, policy: str, segment: int, *, as_json: bool) -> int:
    from tallystick_bench.dispute import KEEP_FREED_MEMORY, DisputeCost

    find_policy(policy)
    given = json.dumps({"job": job, "policy": policy, "segment": segment})
    answer = run_child(["bench", "measure", "dispute", given], Profile(), KEEP_FREED_MEMORY)
    cost = DisputeCost.parse(answer)
    if as_json:
        print_json({**cost.fields(), "machine": machine()})
    else:
        for table in dispute_tables(cost, machine()):
            console().print(table)
    return 0 if cost.is_met else 1


def _bench_exchange(job: str, policy: str, segment: int, settings: dict[str, str], *, as_json: bool) -> int:
    from tallystick_bench.exchange import measure_exchange

    find_policy(policy)
    with tempfile.TemporaryDirectory(prefix="tallystick-bench-") as place:
        cost = measure_exchange(Path(place), job, policy, segment, say, settings)
    if as_json:
        print_json({**cost.fields(), "machine": machine()})
    else:
        console().print(exchange_table(cost, machine()))
    return 0


def exchange_table(cost: ExchangeCost, facts: dict[str, Any]) -> Table:
    """Return what a dispute by files took as people read it."""
    levels = ", ".join(f"{count} of {level}" for level, count in cost.rounds_per_level.items())
    title = f"tally bench evidence exchange: {cost.job}, {cost.policy}, step {cost.segment // 2} of {cost.segment}"
    facts = {**facts, "state": f"{cost.state_bytes:,} B"}
    caption = (
        f"{cost.rounds} rounds of questions and answers, {cost.seconds:.1f} s in all; bisection: {levels}; "
        f"the {cost.loser} lost at {cost.operator}\n"
        + ", ".join(f"{name} {value}" for name, value in facts.items() if value not in (None, False))
    )
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for heading in ("who", "questions", "bytes sent", "bytes received", "seconds", "CPU seconds"):
        table.add_column(heading, justify="left" if heading == "who" else "right")
    for who, each in cost.parties.items():
        table.add_row(
            who, str(each.questions), f"{each.sent_bytes:,}", f"{each.received_bytes:,}", f"{each.seconds:.1f}",
            f"{each.cpu_seconds:.1f}",
        )  # fmt: skip
    return table


def dispute_tables(cost: DisputeCost, facts: dict[str, Any]) -> Iterator[Table]:
    """Return what a dispute cost as people read it: the parties' time, then the judge's work."""
    from tallystick_bench.dispute import MOST_SHARE, MOST_STEPS

    step, spent = step_of(cost.ledger), cost.ledger.spent
    title = (
        f"tally bench evidence dispute: {cost.job}, {cost.policy}, step {cost.segment // 2} of {cost.segment}"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("party", "what it did", "seconds", "CPU seconds", "steps", "must"):
        table.add_column(heading, justify="left" if heading in ("party", "what it did") else "right")
    for who, deed in sorted(spent):
        one = spent[(who, deed)]
        table.add_row(who, deed, f"{one.wall:.3f}", f"{one.cpu:.3f}", f"{one.wall / step.wall:.3f}", "")
    table.add_section()
    table.add_row("", "a plain step, repeated", f"{step.wall:.3f}", f"{step.cpu:.3f}", "1", "")
    total, steps = beyond_segment(cost.ledger), cost.beyond
    label = "dispute beyond repeating one segment"
    table.add_row(
        "all", label, f"{total.wall:.3f}", f"{total.cpu:.3f}", f"{steps.wall:.2f}", f"<= {MOST_STEPS:g}"
    )
    yield table
    facts = {**facts, "memory touched before": f"{cost.touched / 1e9:.1f} GB"}
    caption = ", ".join(f"{name} {value}" for name, value in facts.items() if value not in (None, False))
    title = f"the judge's work; {cost.operators} operators, {cost.rounds} rounds; the {cost.loser} lost at {cost.operator}"
    judged = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for heading in ("operator", "leaves", "ms", "of a step", "bytes", "of the state"):
        judged.add_column(heading, justify="left" if heading == "operator" else "right")
    for kind in sorted(cost.kinds, key=lambda kind: -kind.seconds):
        time_share, byte_share = kind.seconds / step.wall, kind.nbytes / cost.state_bytes
        judged.add_row(
            kind.name, str(kind.leaves), f"{1e3 * kind.seconds:.2f}", _judged_share(time_share, MOST_SHARE),
            f"{kind.nbytes:,}", _judged_share(byte_share, MOST_SHARE),
        )  # fmt: skip
    judged.add_section()
    most = f"<= {share(MOST_SHARE)}"
    judged.add_row("must", "", "", most, "", most)
    yield judged


def _judged_share(value: float, most: float) -> Text:
    return Text(share(value), style=GOOD if value <= most else BAD)


@app.command(hidden=True)
def measure(kind: str, arguments: str, as_json: AsJson = False) -> int:
    """Take one measurement in this process; what the other commands start."""
    from tallystick_bench import leaf as leaf_logs
    from tallystick_bench import measure as taken
    from tallystick_bench.kernel import kernel

    known: dict[str, Callable[..., dict[str, Any]]] = {
        f.__name__: f for f in (taken.control, taken.curve, kernel, taken.memory, taken.overhead)
    }
    known |= {
        "dispute": _measure_dispute,
        "entries": leaf_logs.entries,
        "forms": leaf_logs.log_forms,
        "corrections": leaf_logs.halving,
    }
    if kind not in known:
        raise InvalidInput(f"measurement {kind}: unknown; known are {', '.join(known)}")
    given: dict[str, Any] = json.loads(arguments)
    if kind in ("overhead", "curve"):
        given["say"] = lambda line: say(f"  {line}")
    print_json(known[kind](**given))
    return 0


def _measure_dispute(job: str, policy: str, segment: int) -> dict[str, Any]:
    from tallystick_bench.dispute import measure_dispute

    with tempfile.TemporaryDirectory(prefix="tallystick-bench-") as place:
        return measure_dispute(Path(place), job, policy, segment, say).fields()


def table_of(rows: Sequence[Row], facts: dict[str, Any]) -> Table:
    """Return the rows as people read them; the caption says on which machine."""
    caption = ", ".join(f"{name} {value}" for name, value in facts.items() if value not in (None, False))
    table = Table(title="tally bench training", title_justify="left", caption=caption, caption_justify="left")
    for heading in ("job", "policy", "measure", "value", "must", "verdict"):
        table.add_column(heading, justify="right" if heading in ("value", "must") else "left")
    last = None
    for row in rows:
        if last is not None and (row.part, row.job, row.policy) != last:
            table.add_section()
        last = (row.part, row.job, row.policy)
        must = "" if row.must is None else f"{'>=' if row.at_least else '<='} {_number(row.must, row)}"
        value = "" if row.value is None else _number(row.value, row)
        verdict = Text(row.verdict, style=STYLES[row.verdict])
        for note in (row.error, row.detail.get("audit") if not row.sound else None):
            verdict.append(f": {printable(str(note))}" if note else "")
        table.add_row(row.job, row.policy, row.measure, value, must, verdict)
    return table


def line_of(row: Row) -> str:
    """Return a row as a line for those who wait."""
    value = "no number" if row.value is None else _number(row.value, row)
    return f"    {row.measure}: {value} ({row.verdict})"


def _number(value: float, row: Row) -> str:
    if row.unit == "share":
        return share(value)
    if row.unit in ("bytes", "weights", "entries"):
        return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"
    return f"{value:.3g}" if row.unit == "bits" or value < 0.01 else f"{value:.3f}"
