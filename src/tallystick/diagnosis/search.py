"""Why two parties part: the first step on which they do, its tensors and operator, and the cause, tried by repetition.

The step is repeated from the last state that both sides agree on, with one thing changed at a time: another batch, another
learning rate, the optimizer left out. What gives the stated fingerprint is confirmed; what merely looks right is said to fit.
Nothing here decides a verdict: the audit and the judge do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch

from tallystick.commit.encoding import parse_hex_float
from tallystick.commit.state import Entry
from tallystick.diagnosis.causes import Divergence, Evidence, Explanation, Parting, fitting
from tallystick.diagnosis.divergence import (
    compare,
    compare_tensors,
    relate_updates,
)
from tallystick.diagnosis.repetition import (
    Bench,
    Change,
    Repeated,
    State,
    batch_of,
    denormals_flushed,
    dropout_off,
    hyperparameters,
    integer_tensors,
    one_number_changed,
    optimizer_skipped,
    random_stream,
    without_clipping,
)
from tallystick.execution.operations import SCATTERS, Watch, first_difference
from tallystick.execution.step import batch_digest
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript

EFFORT = 60.0  # seconds for trying causes out
FACTORS = (
    0.1,
    0.2,
    0.25,
    0.5,
    0.75,
    0.8,
    0.9,
    1.1,
    1.25,
    1.5,
    2.0,
    2.5,
    3.0,
    4.0,
    5.0,
    10.0,
    0.01,
    100.0,
    -1.0,
    0.0,
)
BATCHES = 256  # steps whose batch is tried
DIGESTS = 10_000  # steps whose batch digest is compared with a stated one
LABELS = 1024  # whole numbers of a batch that are tried, element by value
SEEDS = 8
Tell = Callable[[int, str], None]  # repetitions so far, and what is tried next


@dataclass(frozen=True)
class Trial:
    """One thing to change, in words that read after ``repeated with``."""

    cause: str
    words: str
    change: Change


@dataclass(frozen=True)
class OwnStep:
    """Our side of a step where that is a run of its own: the state before, the record and the log."""

    before: State
    record: StepRecord
    frame: bytes


class Diagnosis:
    """Tries causes of one divergent step out, until one gives the stated fingerprint or the time is over."""

    def __init__(
        self, bench: Bench, transcript: Transcript, found: Divergence, *, seconds: float, tell: Tell | None
    ) -> None:
        self.bench, self.transcript, self.found, self._tell = bench, transcript, found, tell
        self._until = time.monotonic() + seconds
        self.watch = Watch()
        self.own: Repeated | None = None
        self.refusal = ""  # why the log cannot be followed in the job's own step
        self.stated: State | None = None
        self.confirmed: tuple[Trial, Repeated] | None = None
        self._tried: dict[str, int] = {}

    def run(self, stated: State | None, own: OwnStep | None = None) -> None:
        """Fill in what there is to be found; ``stated`` is the other side's state after the step, if it is known.

        ``own`` is the same step of a second run; without it we follow the other side's log.
        """
        bench, found = self.bench, self.found
        record = bench.record
        self.stated = stated
        ours = OwnStep(bench.before, bench.record, bench.frame) if own is None else own
        self.own = bench.repeat(before=ours.before, record=ours.record, frame=ours.frame, watch=self.watch)
        if self.own is None:
            self.refusal = bench.problem
            self.watch = Watch()
            self.own = bench.repeat(before=ours.before, record=ours.record, watch=self.watch, manner="record")
        if self.own is None:
            found.notes.append(
                f"step {record.step} cannot be repeated here, so nothing was tried: {bench.problem}"
            )
            return
        found.makers = dict(self.own.makers)
        loss = None if record.loss is None else parse_hex_float(record.loss, what=f"step {record.step}: loss")
        found.loss = None if loss is None else (self.own.outcome.loss, loss)
        self._read_documents()
        if not any(f.status == "confirmed" for f in found.findings):
            self._try_out()
        if self.confirmed is not None:
            reached = self.confirmed[1].entries
            if self.stated is None:
                self.stated, found.how = reached, "reconstructed"
            elif rest := compare(reached, self.stated).tensors:
                names = ", ".join(tensor.name for tensor in rest)
                found.notes.append(f"the committed state is not even the one that this gives: {names}")
        if self.stated is not None:
            found.after = record.step + 1
            found.state = compare(self.own.entries, self.stated)
        if self.confirmed is not None:
            found.operator = self._parting(self.confirmed[0].change)
        found.tries = bench.tries

    # -- what the documents say ----------------------------------------------------------------

    def _read_documents(self) -> None:
        assert self.own is not None
        record, outcome, say = self.bench.record, self.own.outcome, self._say
        if record.batch != outcome.batch:
            step = self._step_of_batch(record.batch)
            where = "" if step is None else f"; it is that of step {step}'s batch"
            say("other_data", f"the record's own digest of the data is not that of the job's batch{where}")
            if step is not None:
                self._try(Trial("other_data", f"the batch of step {step}", batch_of(step)))
        own = {(group, name): value for group, name, value in outcome.schedule}
        for group, name, text in record.schedule:
            if name == "initial_lr":
                continue  # a note of the scheduler's, which the optimizer does not read
            value = parse_hex_float(text, what=name) if isinstance(text, str) else None
            mine = own.get((group, name))
            if value is None or mine is None or math.isclose(value, mine, rel_tol=2.0**-36):
                continue
            cause = "other_rate" if name == "lr" else "other_hyperparameter"
            say(cause, f"the record states {name} {value!r} for group {group}, the job has {mine!r}")
        if any(f.cause in ("other_rate", "other_hyperparameter") for f in self.found.findings):
            values = {
                (group, name): parse_hex_float(text, what=name)
                for group, name, text in record.schedule
                if isinstance(text, str)
            }
            self._try(
                Trial(self.found.findings[-1].cause, "the stated hyper-parameters", hyperparameters(values))
            )
        if record.skipped != outcome.skipped:
            does = "leaves the optimizer's step out" if record.skipped else "takes a step of the optimizer"
            say("skipped_step", f"the record says that it {does}; the job does the opposite")
            if record.skipped:
                self._try(Trial("skipped_step", "the optimizer's step left out", optimizer_skipped()))
        if self.bench.agrees(self.own) and self.stated is not None:
            difference = compare(self.own.entries, self.stated)
            if difference.tensors or difference.odd:
                names = ", ".join([t.name for t in difference.tensors] + list(difference.odd))
                text = (
                    "the fingerprint that the record states for the end of the step is that of the state repeated here; "
                    f"the committed state is another one: {names}"
                )
                say("edited_weights", text)
        twin = next(
            (
                r.step
                for r in self.transcript.records
                if r.log == record.log and r.step != record.step and r.log_bytes > 32
            ),
            None,
        )
        if twin is not None:
            say("altered_log", f"its log is, byte for byte, that of step {twin}")

    def _say(self, cause: str, text: str) -> None:
        self.found.findings.append(Explanation(cause, "confirmed", text))

    def _step_of_batch(self, digest: str) -> int | None:
        job = self.bench.replay.job
        for step in self._near(min(self.transcript.specification.steps, DIGESTS)):
            if time.monotonic() > self._until:
                return None
            if batch_digest(job.batch(step)) == digest:
                return step
        return None

    def _near(self, steps: int) -> Iterator[int]:
        """Steps other than this one, the nearest first."""
        own = self.bench.record.step
        for away in range(1, steps):
            for step in (own + away, own - away):
                if 0 <= step < steps:
                    yield step

    # -- what repetition says ------------------------------------------------------------------

    def _try_out(self) -> None:
        """Try every trial in turn, the likely ones first; then look for signatures."""
        assert self.own is not None
        record = self.bench.record
        if self.bench.agrees(self.own) and not self.own.violations:
            return  # the step is fine; what differs is no matter of computing it
        if not self.bench.agrees(self.own):
            if record.fingerprint == self.bench.fingerprint:
                self._say(
                    "skipped_step",
                    "the state stated for the end of the step is, bit for bit, the one before it",
                )
            elif not self._obedience_explains():
                for trial in self._trials():
                    if time.monotonic() > self._until:
                        self.found.unfinished = True
                        break
                    if self._try(trial):
                        break
        if self.confirmed is None and not any(f.status == "confirmed" for f in self.found.findings):
            self._fall_back()

    def _try(self, trial: Trial) -> bool:
        """Repeat the step with ``trial``'s change; whether it gives the stated state."""
        if self._tell is not None:
            self._tell(self.bench.tries, trial.words)
        self._tried[trial.cause] = self._tried.get(trial.cause, 0) + 1
        found = self.bench.gives(trial.change)
        if found is None:
            return False
        again = self.bench.repeat()
        if again is not None and self.bench.agrees(again):
            note = "repeated with nothing changed, the step gives the stated state too: noise decides, and no change explains it"
            if note not in self.found.notes:
                self.found.notes.append(note)
            return False
        self.confirmed = (trial, found)
        text = f"repeated with {trial.words}, the step gives the stated state to the last bit"
        self.found.findings.insert(0, Explanation(trial.cause, "confirmed", text))
        return True

    def _trials(self) -> Iterator[Trial]:
        assert self.own is not None
        same = self.found.loss is None or self.found.loss[0] == self.found.loss[1]
        groups = (self._update_trials(), self._forward_trials())
        for group in groups if same else reversed(groups):
            yield from group

    def _update_trials(self) -> Iterator[Trial]:
        """Trials that leave the forward pass as it is."""
        job = self.bench.replay.job
        yield Trial("skipped_step", "the optimizer's step left out", optimizer_skipped())
        if self._has_subnormals():
            yield Trial("denormals", "subnormal numbers flushed to zero", denormals_flushed())
        schedule = {
            (group, name): value for group, name, value in (self.own.outcome.schedule if self.own else [])
        }
        rates = {key: value for key, value in schedule.items() if key[1] == "lr"}
        seen: set[float] = set()
        for factor in (*self._estimated_factors(rates), *FACTORS):
            if factor in seen or factor == 1.0:
                continue
            seen.add(factor)
            values = {key: value * factor for key, value in rates.items()}
            shown = ", ".join(sorted({f"{value:.9g}" for value in values.values()}))
            words = f"{factor:.9g} times the learning rate, {shown}"
            yield Trial("other_rate", words, hyperparameters(values))
        for name in sorted({name for _, name in schedule if name != "lr"}):
            for value in _other_values(next(v for (_, n), v in schedule.items() if n == name)):
                values = {key: value for key in schedule if key[1] == name}
                yield Trial("other_hyperparameter", f"{name} {value:.9g}", hyperparameters(values))
        if job.clip_norm is not None:
            yield Trial("other_hyperparameter", "gradients not clipped", without_clipping())

    def _estimated_factors(self, rates: dict[tuple[int, str], float]) -> list[float]:
        """Factors of the learning rate that the stated update suggests: the estimate, rounded in ways people round."""
        if self.stated is None or self.own is None or not rates:
            return []
        update = relate_updates(self.bench.before, self.own.entries, self.stated)
        if update is None or update.residual > 2.0**-6:
            return []
        rate = max(rates.values(), key=abs)
        guesses = [
            float(Fraction(update.factor).limit_denominator(limit)) for limit in (1, 2, 4, 10, 16, 100, 1000)
        ]
        if rate:
            guesses += [float(f"{rate * update.factor:.{digits}g}") / rate for digits in range(1, 8)]
        return list(dict.fromkeys(guesses))

    def _has_subnormals(self) -> bool:
        assert self.own is not None
        tiny = torch.finfo(torch.float32).tiny
        for entry in self.own.entries.values():
            if entry.dtype == "F32" and entry.data:
                values = torch.frombuffer(bytearray(entry.data), dtype=torch.float32).abs()
                if bool(((values > 0) & (values < tiny)).any()):
                    return True
        return False

    def _forward_trials(self) -> Iterator[Trial]:
        """Trials that change what the forward pass sees."""
        replay, specification = self.bench.replay, self.transcript.specification
        if self.watch.random_modules:
            yield Trial("random_stream", "nothing dropped out", dropout_off())
            for shift in (1, -1):
                if replay.session.step + shift >= 0:
                    words = f"the random numbers of step {self.bench.record.step + shift}"
                    yield Trial("random_stream", words, random_stream(specification.seed, shift))
            for seed in dict.fromkeys(
                [specification.seed + 1, max(specification.seed - 1, 0), *range(SEEDS)]
            ):
                if seed != specification.seed:
                    yield Trial("random_stream", f"the random numbers of seed {seed}", random_stream(seed))
        for number, step in enumerate(self._near(specification.steps)):
            if number >= BATCHES:
                break
            yield Trial("other_data", f"the batch of step {step}", batch_of(step))
        yield from self._label_trials()

    def _label_trials(self) -> Iterator[Trial]:
        """Every whole number of the batch changed into every other one that occurs beside it, if these are few."""
        tensors = integer_tensors(self.bench.replay.job.batch(self.bench.record.step))
        for which, tensor in enumerate(tensors):
            values = sorted({int(v) for v in tensor.reshape(-1).tolist()}) if tensor.numel() <= LABELS else []
            values = (
                list(range(min(values), max(values) + 1))
                if values and max(values) - min(values) < LABELS
                else values
            )
            if not values or tensor.numel() * (len(values) - 1) > LABELS:
                continue
            for element, own in enumerate(tensor.reshape(-1).tolist()):
                for value in values:
                    if value != own:
                        words = (
                            f"element {element} of the batch's whole numbers changed from {own} to {value}"
                        )
                        yield Trial("other_data", words, one_number_changed(which, element, value))

    # -- what signatures say -------------------------------------------------------------------

    def _fall_back(self) -> None:
        assert self.own is not None
        seen = self._evidence()
        guesses = fitting(seen)
        breach = self._breach()
        if breach is not None and breach.status == "confirmed":
            guesses = [breach]
        elif (
            breach is not None
            and self._is_confined()
            and all(g.cause in ("unknown", "edited_weights") for g in guesses)
        ):
            guesses = [breach, *(guess for guess in guesses if guess.cause != "unknown")]
        elif breach is not None:
            self.found.notes.append(
                f"its log breaks the rules too, as that of another computation would: {breach.text}"
            )
        named = {guess.cause for guess in guesses}
        for cause, count in self._tried.items():
            if cause not in named:
                text = f"{count} variant{'s' if count > 1 else ''} tried, none gives the stated state"
                guesses.append(Explanation(cause, "not_confirmed", text))
        self.found.findings += guesses

    def _is_confined(self) -> bool:
        """Whether only those parameters differ at whose gradients the log breaks the rules, as far as that is known."""
        assert self.own is not None
        if self.stated is None or self.refusal:
            return True
        sites = {v.site.rpartition("gradient of ")[2] for v in self.own.violations}
        names = {name for name, _ in self.bench.replay.session.parameters}
        differing = {
            t.name.removeprefix("model/") for t in compare(self.own.entries, self.stated).tensors
        } & names
        return differing <= sites

    def _obedience_explains(self) -> bool:
        """Whether the log alone explains the step. Not asked first where residues leave it enough room to explain much else."""
        if self.bench.replay.session.policy.residue_bits:
            return False
        breach = self._breach()
        if breach is None or breach.status != "confirmed":
            return False
        self.found.findings.append(breach)
        return True

    def _breach(self) -> Explanation | None:
        """Return what is wrong with the log; confirmed if the log, obeyed against its rules, gives the stated state."""
        assert self.own is not None
        if self.refusal:
            return Explanation("broken_log", "fits", f"the job's step cannot follow it: {self.refusal}")
        if not self.own.violations:
            return None
        first = self.own.violations[0]
        where = f" element {first.element:,}" if first.element >= 0 else ""
        text = f"{first.site.removeprefix(f'step {self.bench.record.step}: ')}{where}: {first.rule}"
        obeyed = self.bench.repeat(manner="obey")
        if obeyed is None or not self.bench.agrees(obeyed):
            return Explanation("altered_log", "fits", text)
        if self.stated is None:
            self.stated, self.found.how = obeyed.entries, "reconstructed"
        return Explanation(
            "altered_log",
            "confirmed",
            f"{text}; obeyed all the same, the log gives the stated state to the last bit",
        )

    def _evidence(self) -> Evidence:
        assert self.own is not None
        stated, state, update = self.stated, None, None
        if stated is not None:
            state = compare(self.own.entries, stated)
            update = relate_updates(self.bench.before, self.own.entries, stated)
        session = self.bench.replay.session
        return Evidence(
            state=state,
            update=update,
            loss=self.found.loss,
            environment=self.found.environment,
            scattered=scattered(self.own),
            random=self.watch.random_modules,
            upstream=self.watch.modules_before_random(),
            violations=len(self.own.violations),
            keeps_state=bool(session.trained.keys)
            and any(name.startswith("optimizer/") for name in self.own.entries),
        )

    # -- the operator --------------------------------------------------------------------------

    def _parting(self, change: Change) -> Parting | None:
        """Return the first operator whose results differ with ``change``; None if none does, so that the update parts."""
        other = Watch()
        if self.bench.repeat(change, watch=other) is None:
            return None
        first = first_difference(self.watch, other)
        if first is None:
            self.found.update_only = True
            return None
        pair: list[list[torch.Tensor]] = []
        for each in (None, change):
            again = Watch(wanted=first.index)
            if self.bench.repeat(each, watch=again) is None:
                return None
            pair.append(again.results)
        for mine, theirs in zip(*pair, strict=False):
            if mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.dtype in _CODES:
                difference = compare_tensors(_entry(first.name, mine), _entry(first.name, theirs))
                if difference is not None:
                    return Parting(first, difference)
        return Parting(first, None)


_CODES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16"}


def _entry(name: str, tensor: torch.Tensor) -> Entry:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return Entry(name, _CODES[tensor.dtype], tuple(tensor.shape), data)


def _other_values(value: float) -> list[float]:
    """Values that people give a hyper-parameter such as a momentum or a decay, ``value`` itself left out."""
    usual = [0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999] if 0.0 < value < 1.0 else [0.0]
    scaled = [value * factor for factor in (0.1, 0.5, 2.0, 10.0)] + [1.0 - 10.0 * (1.0 - value)]
    return [each for each in dict.fromkeys(usual + scaled) if each != value and each >= 0.0]


def scattered(repeated: Repeated) -> frozenset[str]:
    """Return the entries of parameters whose gradient a scatter made."""
    return frozenset(
        f"model/{name}"
        for name, maker in repeated.makers.items()
        if any(f" {operator}," in maker for operator in SCATTERS)
    )
