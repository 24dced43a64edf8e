"""The calibrator: measures a job's noise at some of its steps and proposes the numbers of its policy.

It trains the job as a recording would, keeping nothing, and stops before each step asked for: there it repeats
the forward and backward pass under last-bit jitter, and in child processes under other arithmetic. What it proposes
are numbers that the policy leaves to the trainer (``CHOICES``); bands themselves are measured again in every run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from tallystick.commit.codec import Document
from tallystick.errors import InvalidInput, Nondeterminism, StoreError
from tallystick.execution.determinism import Profile
from tallystick.execution.job import Job, JobSource
from tallystick.execution.noise.bands import grid_for
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.noise.measured import exponent_above
from tallystick.execution.noise.probes import ProbingContext
from tallystick.execution.noise.survey import (
    JITTER,
    Measured,
    Pass,
    Reference,
    Survey,
    elsewhere,
    read_pass,
    read_reference,
    survey_step,
    write_pass,
    write_reference,
)
from tallystick.execution.rounding.grids import bits_for, is_noise_only
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.execution.step import backward_of, run_step, verify_batches_are_pure
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.noise import DEEPEST, ambiguous_share, entry_bits, relative_share
from tallystick.numerics.policy import CHOICES, SPARSEST, Policy, policy_of
from tallystick.roles.trainer import open_session
from tallystick.run.calibration import CalibrationChoice, MeasuredKind, SiteChoice
from tallystick.store.files import RunDirectory

MARGIN = 2  # octaves that a band keeps over the largest deviation between profiles
PAYLOAD_BITS = 48  # of a site that has something to say: address, length and count, about six bytes
SCALE_SLACK = 1.44  # a scale is the rms rounded up to a power of two: so much larger on average
REQUEST, REFERENCE, ANSWER = "request.json", "reference.safetensors", "answer.safetensors"
REQUEST_LIMIT = 1 << 20

Child = Callable[[Sequence[str], Profile], dict[str, Any]]
Progress = Callable[[int, int, str], None]  # done, of how many, what comes next


@dataclass(frozen=True)
class CalibrationOrder:
    """What to measure.

    Attributes:
        source, settings, policy, seed, device: as a recording would be given them.
        at: the steps before which noise is measured, ascending.
        repeats: jittered repetitions at each.
        profiles: other arithmetic to compare with, each in a child process.
    """

    source: JobSource
    settings: Mapping[str, str]
    policy: Policy
    seed: int = 0
    at: tuple[int, ...] = (0,)
    repeats: int = 2
    profiles: tuple[Profile, ...] = ()
    device: str = "cpu"


def measure(order: CalibrationOrder, child: Child, progress: Progress) -> list[Survey]:
    """Return a survey of each step asked for.

    Raises:
        Nondeterminism: the job cannot be repeated elsewhere, or a site is too noisy for the policy; by name.
        InvalidInput: the job is malformed, or has fewer steps.
        TallyError: a child process failed; the message has its own words.
    """
    job = order.source.build(order.settings, order.seed)
    if not order.at or list(order.at) != sorted(set(order.at)) or order.at[0] < 0:
        raise InvalidInput(f"--at {','.join(map(str, order.at))}: must be ascending steps, each once")
    if order.at[-1] >= job.steps:
        raise InvalidInput(f"--at {order.at[-1]}: the job has {job.steps} steps, the first is 0")
    verify_batches_are_pure(job)
    session = open_session(job, order.policy, order.seed, device=order.device)
    passes = 1 + order.repeats + len(order.profiles)
    count = _Count(order.at[-1] + passes * len(order.at), progress)
    surveys: list[Survey] = []
    try:
        count.show("plain pass")
        while True:
            if session.step in order.at:
                surveys.append(_survey(order, job, session, child, count))
            if session.step >= order.at[-1]:
                return surveys
            count.show(f"step {session.step}")
            _train(session, job, order.seed)
            count.advance()
    finally:
        session.close()


@dataclass
class _Count:
    total: int
    progress: Progress
    done: int = 0

    def show(self, what: str) -> None:
        self.progress(self.done, self.total, what)

    def advance(self) -> None:
        self.done += 1


def _train(session: Session, job: Job, seed: int) -> None:
    """Do one step as a recording would."""
    before = session.table
    if session.is_calibration_step(session.step):
        measured = calibrate(session, backward_of(session, job), repeats=1, seed=seed)
        session.table = session.grids_for(before, measured)
    context = session.recording_context(before)
    run_step(session, job, context)
    context.finish()
    session.settle(context)


def _survey(order: CalibrationOrder, job: Job, session: Session, child: Child, count: _Count) -> Survey:
    backward = backward_of(session, job)
    where = f"step {session.step}"

    def advance(what: str) -> None:
        count.advance()
        count.show(f"{where}, after {what}")

    def others(reference: Reference) -> Iterator[tuple[str, Pass]]:
        for profile in order.profiles:
            count.show(f"{where}, {profile}")
            yield str(profile), _pass_under(order, session, reference, profile, child)

    return survey_step(
        session, backward, repeats=order.repeats, seed=order.seed, others=others, advance=advance
    )


# -- the pass of another profile -------------------------------------------------------------------


@dataclass(frozen=True)
class PassRequest(Document, what="request", limit=REQUEST_LIMIT):
    """What a child process is asked to do: which job, under which policy, on which device, from which step."""

    device: str
    job: str
    jitter: bool
    parameters: Mapping[str, int | str]
    policy: str
    seed: int
    settings: Mapping[str, str]
    source_digest: str
    step: int


def _pass_under(
    order: CalibrationOrder, session: Session, reference: Reference, profile: Profile, child: Child
) -> Pass:
    """Return the pass that a child process makes under ``profile`` from this session's state."""
    try:
        with tempfile.TemporaryDirectory(prefix="tallystick-calibrate-") as name:
            place = Path(name)
            directory = RunDirectory(place / "state")
            directory.write_checkpoint(session.step, state_entries(session))
            write_reference(place / REFERENCE, reference)
            request = PassRequest(
                order.device, order.source.path, profile.jitter, session.policy.parameters(), session.policy.name,
                session.seed, dict(order.settings), order.source.digest, session.step,
            )  # fmt: skip
            (place / REQUEST).write_bytes(request.encode())
            child(["noise-pass", str(place), "--json"], profile)
            return read_pass(place / ANSWER, _buffer_numbers(session))
    except OSError as problem:
        raise StoreError(f"temporary directory of {profile}: {problem.strerror or problem}") from problem


def _buffer_numbers(session: Session) -> dict[str, int]:
    return {site.name: site.ordinal for site in session.sites if site.kind == Kind.BUFFER}


def answer_request(place: Path, find: Callable[[str], JobSource]) -> None:
    """Do, in the child, what the request in ``place`` asks for, and write the answer there.

    Raises:
        InvalidInput: the request is malformed, or the job is not the same here.
    """
    try:
        data = (place / REQUEST).read_bytes()
    except OSError as problem:
        raise InvalidInput(f"{place / REQUEST}: cannot be read ({problem.strerror})") from None
    asked = PassRequest.parse(data)
    source = find(asked.job)
    if source.digest != asked.source_digest:
        raise InvalidInput(
            f"request: job source is {source.digest[:16]}.., asked for {asked.source_digest[:16]}.."
        )
    policy = policy_of(asked.policy, asked.parameters)
    job = source.build(asked.settings, asked.seed)
    session = open_session(job, policy, asked.seed, device=asked.device, jitter=asked.jitter)
    try:
        load_state(session, RunDirectory(place / "state").load_checkpoint(asked.step))
        branches, slices = read_reference(place / REFERENCE, len(session.parameters))
        made = elsewhere(session, backward_of(session, job), branches, slices)
        write_pass(place / ANSWER, made, _buffer_numbers(session))
    finally:
        session.close()


# -- what a choice of numbers costs ----------------------------------------------------------------


@dataclass(frozen=True)
class Expectation:
    """What a policy is expected to cost, the mean over the steps measured.

    Attributes:
        log_bits: of log per parameter and step.
        freedom: share of roundings within twice the band of a boundary.
        ambiguous: share of gradient elements that are logged.
        band: mean of the gradients' bands over their scales, weighted by elements, as a power of two; None
            where all of them are noise only.
    """

    log_bits: float
    freedom: float
    ambiguous: float
    band: float | None


@dataclass
class _Sum:
    bits: float = 0.0
    parameters: int = 0
    roundings: int = 0
    free: float = 0.0
    ambiguous: float = 0.0
    bands: float = 0.0
    banded: int = 0

    def log(self, numel: int, share: float, width: int = 1) -> None:
        self.bits += numel * entry_bits(share, width) + PAYLOAD_BITS * min(1.0, numel * share)


def grid_of(policy: Policy, measured: Measured, survey: Survey) -> SiteGrid | None:
    """Return the grid that a calibration under ``policy`` would give a site; None if it is too noisy."""
    kind = Kind(measured.place[0])
    if kind == Kind.STATE:
        return survey.table.sites.get(measured.place)
    if kind == Kind.DECISION:
        lowest, highest = policy.decision_band
        band = max(lowest, exponent_above(measured.relative.get(JITTER, 0.0)) + policy.safety)
        return SiteGrid(0, band, 0) if band <= highest else None
    if kind == Kind.GRADIENT and measured.noise.rms == 0.0 and measured.noise.largest == 0.0:
        return survey.table.sites.get(measured.place)
    return grid_for(policy, kind, measured.noise)


def expect(policy: Policy, surveys: Sequence[Survey]) -> Expectation | None:
    """Return what ``policy`` would cost at the steps measured; None if it refuses a site there."""
    total = _Sum()
    for survey in surveys:
        for measured in survey.sites.values():
            grid = grid_of(policy, measured, survey)
            if grid is None:
                return None
            _charge(total, measured, grid)
    return Expectation(
        total.bits / max(1, total.parameters),
        total.free / max(1, total.roundings),
        total.ambiguous / max(1, total.parameters),
        total.bands / total.banded if total.banded else None,
    )


def _charge(total: _Sum, measured: Measured, grid: SiteGrid) -> None:
    kind, numel = measured.place[0], measured.numel
    if kind == Kind.DECISION:
        inside = measured.near * min(1.0, 2.0 ** (grid.band - ProbingContext.wide) * SCALE_SLACK)
        total.log(numel, inside / max(1, numel), measured.width)
        return
    total.roundings += numel
    if kind == Kind.GRADIENT:
        total.parameters += numel
    if is_noise_only(grid):
        return
    if grid.residue_bits:  # of every element, and any may be chosen
        bits = grid.residue_bits
        if kind == Kind.GRADIENT and measured.exponents is not None and measured.exponents.any():
            bits = bits_for(grid, DEEPEST + 1 + int(measured.exponents.nonzero()[0][-1]), bits)
        total.bits += numel * bits + PAYLOAD_BITS
        share = free = 1.0
    elif kind == Kind.STATE:
        share, free = (relative_share(grid.precision, grid.band, widened=w) for w in (0, 1))
    elif measured.exponents is None:
        return
    else:
        share, free = (ambiguous_share(measured.exponents, grid, widened=w) for w in (0, 1))
    if not grid.residue_bits:
        total.log(numel, share)
    total.free += numel * free
    if kind == Kind.GRADIENT:
        total.ambiguous += numel * share
        total.bands += numel * 2.0**grid.band
        total.banded += numel


# -- the proposal ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CalibrationLimits:
    """What the caller wants: at most so many bits of log per parameter and step, at most so much freedom."""

    log_bits: float | None = None
    freedom: float | None = None

    def problems(self, found: Expectation) -> list[str]:
        """Return what ``found`` misses, in words."""
        missed: list[str] = []
        for name, value, wanted, unit in (
            ("--log-bits", found.log_bits, self.log_bits, " bits per parameter and step"),
            ("--freedom", found.freedom, self.freedom, " of roundings"),
        ):
            if wanted is not None and value > wanted:
                missed.append(f"{name} {wanted:g}: within the policy's limits no less than {value:.3g}{unit}")
        return missed


@dataclass
class Proposal:
    """The numbers proposed, what they are expected to cost, and what people should know about them."""

    policy: Policy
    expected: Expectation
    own: Expectation
    needed: int | None
    decisive: str | None
    problems: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])

    def chosen(self) -> dict[str, int]:
        """Return the numbers that the policy leaves to the trainer."""
        numbers = self.policy.parameters()
        return {
            name: int(numbers[name]) for name in (*CHOICES.get(self.policy.name, {}), "recalibrate_every")
        }


def needed_safety(policy: Policy, surveys: Sequence[Survey]) -> tuple[int, str] | None:
    """Return the least safety whose bands, from jitter alone, keep ``MARGIN`` octaves over all other profiles.

    And the site that decides it; None if no profile was compared. Sites below the policy's smallest band do not count.
    """
    most: tuple[int, str] | None = None
    for survey in surveys:
        for measured in survey.sites.values():
            others = [value for source, value in measured.relative.items() if source != JITTER]
            kind = Kind(measured.place[0])
            if not others or kind == Kind.STATE:
                continue
            lowest = {Kind.GRADIENT: policy.gradient_band, Kind.DECISION: policy.decision_band}.get(
                kind, policy.buffer_band
            )[0]
            wanted = exponent_above(max(others)) + MARGIN
            need = wanted - exponent_above(measured.relative.get(JITTER, 0.0)) if wanted > lowest else -1000
            name = f"{kind.name.lower()} {measured.name} at step {survey.step}"
            if most is None or need > most[0]:
                most = (need, name)
    return most


def propose(policy: Policy, surveys: Sequence[Survey], wanted: CalibrationLimits) -> Proposal:
    """Return the numbers that meet ``wanted``, or come as near to it as the policy allows.

    The safety is the policy's own, or larger where other profiles ask for it; of the grids that meet what is wanted the
    finest is taken. Only if none does, and other profiles were compared, the safety falls, to what they need at least.

    Raises:
        Nondeterminism: no safety within the policy's limits covers what was seen between profiles; by name.
    """
    own, evidence = expect(policy, surveys), needed_safety(policy, surveys)
    if own is None:
        raise Nondeterminism(f"policy {policy.name}: a site is too noisy for it")
    limits = CHOICES.get(policy.name, {})
    needed = None if evidence is None else evidence[0]
    least, greatest = limits.get("safety", (policy.safety, policy.safety))
    if needed is not None and evidence is not None and needed > greatest:
        raise Nondeterminism(
            f"{evidence[1]}: between profiles it differs 2**{needed - MARGIN} times as much as under jitter; with a margin "
            f"of 2**{MARGIN} policy {policy.name} would need a safety of 2**{needed}, it allows 2**{greatest}"
        )
    first = max(policy.safety, least, needed if needed is not None else least)
    last = first if needed is None else max(least, min(first, needed))
    floors = (
        range(limits["gradient_floor"][0], limits["gradient_floor"][1] + 1)
        if "gradient_floor" in limits
        else ()
    )
    aimed = wanted.log_bits is not None or wanted.freedom is not None
    tried: list[tuple[Policy, Expectation]] = []
    for safety in range(first, last - 1, -1):
        for floor in floors if aimed else (policy.gradient_floor,):
            made = replace(policy, safety=safety)
            if aimed:  # this very grid, whatever the noise
                spacing = None if policy.gradient_spacing is None else SPARSEST
                made = replace(made, gradient_floor=floor, gradient_spacing=spacing)
            found = expect(made, surveys)
            if found is None:
                continue
            tried.append((made, found))
            if not wanted.problems(found):
                return _proposal(policy, made, found, own, evidence, [])
    if not tried:
        raise Nondeterminism(f"policy {policy.name}: with a safety of 2**{first} a site is too noisy for it")
    made, found = min(tried, key=lambda pair: (pair[1].log_bits, pair[1].freedom))
    return _proposal(policy, made, found, own, evidence, wanted.problems(found))


def _proposal(
    policy: Policy,
    made: Policy,
    found: Expectation,
    own: Expectation,
    evidence: tuple[int, str] | None,
    problems: list[str],
) -> Proposal:
    warnings: list[str] = []
    if evidence is None:
        warnings.append("jitter alone was measured; --profile compares with other arithmetic too")
    if made.safety < policy.safety:
        warnings.append(
            f"safety 2**{made.safety} instead of the policy's 2**{policy.safety}: a later step may exceed a band, "
            "and its audit then ends in cannot_reproduce"
        )
    needed, decisive = (None, None) if evidence is None else evidence
    return Proposal(made, found, own, needed, decisive, problems, warnings)


def choice_of(order: CalibrationOrder, surveys: Sequence[Survey], proposal: Proposal) -> CalibrationChoice:
    """Return the document that ``tally record --bands`` reads."""
    last: dict[tuple[int, int], SiteChoice] = {}
    for survey in surveys:
        for place, measured in survey.sites.items():
            grid = grid_of(proposal.policy, measured, survey)
            known = last[place].largest if place in last else {}
            largest = {
                source: max(value, known.get(source, 0.0))
                for source, value in sorted(measured.relative.items())
            }
            kind = Kind(place[0])
            floor = None if grid is None or kind in (Kind.STATE, Kind.DECISION) else grid.floor
            last[place] = SiteChoice(
                cast("MeasuredKind", kind.name.lower()),
                measured.name,
                None if grid is None else grid.band,
                floor,
                largest,
            )
    return CalibrationChoice(
        policy=proposal.policy.name,
        parameters=proposal.chosen(),
        job=order.source.name,
        source_digest=order.source.digest,
        settings=dict(order.settings),
        seed=order.seed,
        steps=order.at,
        repeats=order.repeats,
        profiles=tuple(map(str, order.profiles)),
        log_bits=proposal.expected.log_bits,
        freedom=proposal.expected.freedom,
        sites=tuple(last[place] for place in sorted(last)),
    )
