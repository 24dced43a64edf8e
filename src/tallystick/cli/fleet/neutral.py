"""tally neutral: run an agreed program on committed data where neither party can see or say more than agreed."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Annotated

import typer

from tallystick.cli.options import AsJson, Now, Out, argument, flag, option, parse_named, second_of
from tallystick.cli.terminal import TaskDisplay, answer, done
from tallystick.commit.encoding import parse_hex
from tallystick.errors import InvalidInput, StoreError
from tallystick.fleet.enclave.neutral import (
    ASSURANCE,
    NeutralInput,
    NeutralOrder,
    NeutralOutput,
    integer_output,
    open_order,
    read_order,
    scalar_output,
    sign_order,
    verdict_output,
)
from tallystick.fleet.enclave.neutral_result import verify_result
from tallystick.fleet.enclave.sandbox import check_isolation, find_problem, versions
from tallystick.fleet.enclave.sealed_job import PROGRAM_LIMIT, carry_out, salts_for, write_job
from tallystick.fleet.provenance.transcripts import ReportOpening, RunReport
from tallystick.reports.neutral import order_page, result_page
from tallystick.signing.dsse import ENVELOPE_LIMIT, parse_envelope
from tallystick.store.documents import read_document
from tallystick.store.files import open_file, read_whole, write_whole
from tallystick.store.keys import load_key, load_public_key

app = typer.Typer(
    help="Run an agreed program on committed data, and let out no more than agreed.", no_args_is_help=True
)
EXIT_CODES = {"pass": 0, "fail": 1, "unknown": 3}

OrderFile = Annotated[Path, argument("ORDER", "What `tally neutral order` or `sign` wrote.")]
VerifierKey = Annotated[Path, option("--verifier", "FILE", "The verifier's public key, known beforehand.")]
OwnerKey = Annotated[Path, option("--owner", "FILE", "The owner's public key, known beforehand.")]
Program = Annotated[Path, option("--program", "FILE", "Python source, or a zip of modules with __main__.py.")]
ConstantTime = Annotated[bool, flag("--constant-time", "Hold the result back until the time limit is over.")]


def register(parent: typer.Typer) -> None:
    """Add ``tally neutral`` to ``parent``."""
    parent.add_typer(app, name="neutral")


@app.command("order")
def make_order(
    program: Program,
    inputs: Annotated[
        list[str],
        option(
            "--input",
            "NAME=WHAT",
            "file:PATH, sha256:HEX, or from --report: meta, shards, state:STEPS. May be repeated.",
        ),
    ],
    outputs: Annotated[
        list[str],
        option(
            "--output", "NAME=FORM", "verdict, integer:LOW:HIGH or scalar:LOW:HIGH:LEVELS. May be repeated."
        ),
    ],
    budget: Annotated[int, option("--budget", "BITS", "The most bits that may come out.")],
    verifier: VerifierKey,
    owner: OwnerKey,
    key: Annotated[str, option("--key", "FILE", "The private key of one of the two, or env:NAME.")],
    out: Out,
    report: Annotated[
        Path | None, option("--report", "FILE", "The report whose commitments are meant.")
    ] = None,
    seconds: Annotated[int, option("--seconds", "N", "Time limit of each run.")] = 600,
    memory_mb: Annotated[int, option("--memory-mb", "N", "Address space of a run, MiB.")] = 4096,
    scratch_mb: Annotated[int, option("--scratch-mb", "N", "Files of a run, MiB.")] = 64,
    repeats: Annotated[int, option("--repeats", "N", "Runs that must agree.")] = 2,
    constant_time: ConstantTime = False,
    as_json: AsJson = False,
) -> int:
    """Draw up an order and sign it as one of the two parties; the other uses `tally neutral sign`."""
    stated = None if report is None else read_document(RunReport, report)
    source = read_whole(program, limit=PROGRAM_LIMIT, what="a program")
    order = NeutralOrder(
        secrets.token_hex(16),
        load_public_key(verifier).key_id,
        load_public_key(owner).key_id,
        hashlib.sha256(source).hexdigest(),
        tuple(sorted((_input(text, stated) for text in inputs), key=lambda item: item.name)),
        tuple(sorted((_output(text) for text in outputs), key=lambda output: output.name)),
        budget,
        repeats,
        seconds,
        memory_mb << 20,
        scratch_mb << 20,
        constant_time,
    )
    signer = load_key(key)
    signed = sign_order(order, signer)
    write_whole(out, signed)
    answer(order_page(order, (signer.public_key.key_id,)), as_json=as_json)
    return 0


@app.command("sign")
def sign(
    order: OrderFile,
    key: Annotated[str, option("--key", "FILE", "Your private key, or env:NAME.")],
    out: Out,
    program: Annotated[
        Path | None, option("--program", "FILE", "The program that you read and agree to.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Sign what the other party drew up; read `tally neutral show` and the program first."""
    data = read_whole(order, limit=ENVELOPE_LIMIT, what="an order")
    found = read_order(data)
    if program is not None:
        own = hashlib.sha256(read_whole(program, limit=PROGRAM_LIMIT, what="a program")).hexdigest()
        if own != found.program:
            raise InvalidInput(f"{program}: SHA-256 is {own}, the order is for {found.program}")
    signed = sign_order(found, load_key(key), data)
    write_whole(out, signed)
    answer(order_page(found, _signed_by(signed)), as_json=as_json)
    return 0


@app.command()
def show(order: OrderFile, as_json: AsJson = False) -> int:
    """Show what an order says, and which keys stand under it; their signatures are checked when it is run."""
    data = read_whole(order, limit=ENVELOPE_LIMIT, what="an order")
    answer(order_page(read_order(data), _signed_by(data)), as_json=as_json)
    return 0


@app.command()
def pack(
    order: OrderFile,
    program: Program,
    inputs: Annotated[list[str], option("--input", "NAME=FILE", "An input's file; may be repeated.")],
    out: Out,
    opening: Annotated[
        Path | None, option("--opening", "FILE", "What opens the report's commitments; only salts leave it.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Seal order, program and inputs into one file for the neutral place; 1 if something is not what was agreed."""
    signed = read_whole(order, limit=ENVELOPE_LIMIT, what="an order")
    found = read_order(signed)
    salts: dict[str, bytes] = {}
    if opening is not None:
        salts = salts_for(found, read_document(ReportOpening, opening))
    files = {
        name: Path(file)
        for name, file in (parse_named(t, option="--input", form="NAME=FILE") for t in inputs)
    }
    source = read_whole(program, limit=PROGRAM_LIMIT, what="a program")
    write_job(out, signed, source, files, salts)
    size = out.stat().st_size
    values = {"job": str(out), "order": found.digest(), "bytes": size, "inputs": sorted(files)}
    return done(f"sealed: {out}", values, as_json=as_json)


@app.command()
def run(
    job: Annotated[Path, argument("JOB", "What `tally neutral pack` wrote.")],
    verifier: VerifierKey,
    owner: OwnerKey,
    key: Annotated[str, option("--key", "FILE", "The neutral place's private key, or env:NAME.")],
    out: Out,
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Carry out a sealed job, isolated; 0 if all its verdicts pass, 1 if one fails, 3 if there is no answer."""
    signer, keys = load_key(key), (load_public_key(verifier), load_public_key(owner))
    with TaskDisplay("neutral run") as shown:
        order, outcome, statement = carry_out(job, *keys, signer, now=second_of(now), progress=shown)
    write_whole(out, statement)
    answer(result_page(order, outcome, ASSURANCE, str(out)), as_json=as_json)
    return EXIT_CODES[outcome.verdict]


@app.command()
def verify(
    result: Annotated[Path, argument("RESULT", "What `tally neutral run` wrote.")],
    order: Annotated[Path, option("--order", "FILE", "The order, signed by both.")],
    verifier: VerifierKey,
    owner: OwnerKey,
    neutral: Annotated[Path, option("--neutral", "FILE", "The neutral place's public key.")],
    as_json: AsJson = False,
) -> int:
    """Check a result offline: signatures, order, program, inputs, schema; codes as `tally neutral run`."""
    signed = read_whole(order, limit=ENVELOPE_LIMIT, what="an order")
    agreed = open_order(signed, load_public_key(verifier), load_public_key(owner))
    data = read_whole(result, limit=ENVELOPE_LIMIT, what="a result")
    found = verify_result(data, agreed, load_public_key(neutral))
    answer(result_page(agreed, found.outcome, found.assurance), as_json=as_json)
    return EXIT_CODES[found.outcome.verdict]


@app.command()
def check(as_json: AsJson = False) -> int:
    """Try in the enclosure what a hostile program would; 2 if this machine cannot isolate programs."""
    if (problem := find_problem()) is not None:
        raise StoreError(problem)
    refused = {"refused": list(check_isolation())}
    return done("this machine can isolate programs", {**refused, **versions()}, as_json=as_json)


def _input(text: str, report: RunReport | None) -> NeutralInput:
    name, what = parse_named(text, option="--input", form="NAME=WHAT")
    kind, _, rest = what.partition(":")
    if kind == "file" and rest:
        with open_file(Path(rest), what="an input") as file:
            return NeutralInput(name, "file", hashlib.file_digest(file, "sha256").hexdigest())
    if kind == "sha256":
        return NeutralInput(name, "file", parse_hex(rest, n_bytes=32, what=f"--input {name}").hex())
    if report is None:
        raise InvalidInput(
            f"--input {text}: must be NAME=file:PATH or sha256:HEX; meta, shards and state need --report"
        )
    if what in ("meta", "shards"):
        return NeutralInput(name, "committed", getattr(report.precommit, what), what)
    states = {str(steps): made for steps, made in report.checkpoints}
    if kind == "state" and rest in states:
        return NeutralInput(name, "state", states[rest], f"checkpoint/{rest}")
    raise InvalidInput(
        f"--input {text}: must be meta, shards or state:STEPS; states are committed after {', '.join(states)[:200]} steps"
    )


def _output(text: str) -> NeutralOutput:
    name, form = parse_named(text, option="--output", form="NAME=FORM")
    kind, *parts = form.split(":")
    try:
        if kind == "verdict" and not parts:
            return verdict_output(name)
        if kind == "integer" and len(parts) == 2:
            return integer_output(name, int(parts[0]), int(parts[1]))
        if kind == "scalar" and len(parts) == 3:
            return scalar_output(name, float(parts[0]), float(parts[1]), int(parts[2]))
    except (ValueError, OverflowError):
        pass
    raise InvalidInput(f"--output {text}: must be NAME=verdict, integer:LOW:HIGH or scalar:LOW:HIGH:LEVELS")


def _signed_by(signed: bytes) -> tuple[str, ...]:
    return tuple(key_id for key_id, _ in parse_envelope(signed, what="order").signatures)
