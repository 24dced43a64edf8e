"""Trainings of one job under every arithmetic and several seeds, side by side; finished ones are kept and not repeated.

Needs no torch: each training is a child process of its own. What came back is judged in ``training`` and drawn by
``curves``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tallystick.errors import InvalidInput, TallyError
from tallystick.numerics.policy import find_policy
from tallystick.store.files import storing

POINTS = 20  # of a curve
PLAIN: Mapping[str, str] = {
    "fp64": "plain fp64",
    "fp32": "plain fp32",
    "bf16": "plain bf16",
    "leaf": "plain fp64",
}
"""The torch loop that a policy's forward and backward pass has the precision of."""

REFERENCE = "plain fp32"
LEAF_BITS = (32, 26)
LARGEST_FILE = 1 << 20  # bytes of a kept training; a real one has some 3,000

Measure = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Training:
    """One training's held-out losses.

    Attributes:
        job, arithmetic, seed: what was trained, how (see ``measure.curve``) and from which seed.
        points: (steps done, held-out loss), at least one.
        log_bits: per parameter and step; None of a plain loop.
    """

    job: str
    arithmetic: str
    seed: int
    points: tuple[tuple[int, float], ...]
    log_bits: float | None = None

    @property
    def final(self) -> float:
        """The held-out loss after the last step."""
        return self.points[-1][1]


@dataclass(frozen=True)
class Losses:
    """All trainings of one job, by arithmetic and seed."""

    job: str
    trainings: Mapping[tuple[str, int], Training]

    @property
    def arithmetics(self) -> list[str]:
        """Those there are, in the order of ``wanted_arithmetics``."""
        return list(dict.fromkeys(arithmetic for arithmetic, _ in self.trainings))

    def of(self, arithmetic: str) -> list[Training]:
        """Return the trainings of one arithmetic, in ascending order of their seeds."""
        return [self.trainings[key] for key in sorted(self.trainings) if key[0] == arithmetic]

    def spread(self, arithmetic: str = REFERENCE) -> float:
        """Return how far apart two seeds end at most: what chance alone does to the loss."""
        finals = [one.final for one in self.of(arithmetic)]
        return max(finals) - min(finals)

    def shift(self, arithmetic: str, beside: str) -> float:
        """Return how far the mean final loss lies from that under ``beside``."""
        pairs = list(zip(self.of(arithmetic), self.of(beside), strict=True))
        return abs(sum(a.final - b.final for a, b in pairs)) / len(pairs)

    def furthest(self, arithmetic: str, beside: str) -> float:
        """Return the largest distance of the final loss from that of the same seed under ``beside``."""
        pairs = zip(self.of(arithmetic), self.of(beside), strict=True)
        return max(abs(a.final - b.final) for a, b in pairs)

    def fields(self) -> dict[str, object]:
        """Return everything as plain data."""
        return {"job": self.job, "trainings": [asdict(one) for one in self.trainings.values()]}


def wanted_arithmetics(policies: Iterable[str]) -> list[str]:
    """Return what to train so that ``policies`` can be judged: each policy, its plain loop, and plain float32."""
    chosen = list(policies)
    plain = [
        name
        for name in ("plain fp64", REFERENCE, "plain bf16")
        if name in {PLAIN[p] for p in chosen} | {REFERENCE}
    ]
    return plain + [
        each
        for policy in chosen
        for each in ([f"leaf {bits}" for bits in LEAF_BITS] if policy == "leaf" else [policy])
    ]


def train(
    job: str,
    policies: Sequence[str],
    seeds: Sequence[int],
    steps: int | None,
    measure: Measure,
    *,
    keep: Path,
    facts: Mapping[str, Any],
    workers: int,
    say: Callable[[str], None],
    points: int = POINTS,
) -> Losses:
    """Return every wanted training of ``job``, ``workers`` at a time; those kept in ``keep`` are not repeated.

    Args:
        job: a shipped job, or a file.
        policies: to compare with their plain loops.
        seeds: of initial weights, data and dropout masks.
        steps: instead of the job's own number.
        measure: runs one training in a process of its own, from the arguments of ``measure.curve``.
        keep: an existing directory; each training is written there as soon as it ends.
        facts: what else a result depends on, the versions and the processor: a kept training is used only where they agree.
        workers: processes at a time, one thread each.
        say: takes one line of progress.
        points: of each curve.

    Raises:
        TallyError: a training failed; the others are done, and kept.
    """
    wanted = [(arithmetic, seed) for arithmetic in wanted_arithmetics(policies) for seed in seeds]
    asked = {key: _Kept(keep, job, *key, steps, points, facts) for key in wanted}
    found = {key: kept for key, one in asked.items() if (kept := one.load()) is not None}
    missing = [key for key in wanted if key not in found]
    say(f"  {job}: {len(missing)} of {len(wanted)} trainings to do, {workers} at a time")
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        running = {pool.submit(measure, asked[key].arguments): key for key in missing}
        failed: TallyError | None = None
        try:
            for number, done in enumerate(as_completed(running), 1):
                key, problem = running[done], done.exception()
                if isinstance(problem, TallyError):  # the others are worth keeping
                    say(
                        f"  {job}: {key[0]}, seed {key[1]}: failed: {problem} ({number} of {len(missing)} done)"
                    )
                    failed = failed or TallyError(f"{key[0]}, seed {key[1]}: {problem}")
                    continue
                found[key] = asked[key].keep(done.result())
                say(
                    f"  {job}: {key[0]}, seed {key[1]}: {found[key].final:.4f} ({number} of {len(missing)} done)"
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if failed is not None:
        raise failed
    return Losses(job, {key: found[key] for key in wanted})


@dataclass(frozen=True)
class _Kept:
    """One training as it is asked for, and the file that holds it once it is done."""

    directory: Path
    job: str
    arithmetic: str
    seed: int
    steps: int | None
    points: int
    facts: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``measure.curve``."""
        return {
            "job": self.job, "arithmetic": self.arithmetic, "steps": self.steps, "seed": self.seed, "points": self.points
        }  # fmt: skip

    def _stated(self) -> dict[str, Any]:
        policy, _, bits = self.arithmetic.partition(" ")
        source = Path(self.job)
        numbers = None
        if policy != "plain":
            numbers = find_policy(policy, b_r=int(bits) if bits else None).parameters()
        digest = None
        if source.is_file():
            with storing(str(source)):
                digest = hashlib.sha256(source.read_bytes()).hexdigest()
        stated = {**self.arguments, "policy": numbers, "source": digest, **self.facts}
        return json.loads(json.dumps(stated))

    @property
    def path(self) -> Path:
        """Named by what was asked, so that another question does not overwrite the answer."""
        name = Path(self.job).stem
        asked = hashlib.sha256(json.dumps(self._stated(), sort_keys=True).encode()).hexdigest()[:12]
        return self.directory / f"{name}-{self.arithmetic.replace(' ', '-')}-{self.seed}-{asked}.json"

    def load(self) -> Training | None:
        """Return the kept training; None where there is none for these facts, or none that can be read."""
        path = self.path
        with storing(str(path)):
            if not path.is_file() or path.stat().st_size > LARGEST_FILE:
                return None
            data = path.read_bytes()
        try:
            document = json.loads(data)
            return self._training(document) if document["asked"] == self._stated() else None
        except (ValueError, TypeError, KeyError, RecursionError, InvalidInput):
            return None

    def keep(self, answer: Mapping[str, Any]) -> Training:
        """Return what the child answered, and write it to the file, whole or not at all.

        Raises:
            InvalidInput: the answer holds no curve.
        """
        training, path = self._training(answer), self.path
        new = path.with_suffix(".new")
        with storing(str(path)):
            new.write_text(json.dumps({"asked": self._stated(), **answer}, indent=1) + "\n")
            new.replace(path)
        return training

    def _training(self, answer: Mapping[str, Any]) -> Training:
        points = tuple((int(step), float(loss)) for step, loss in answer["points"])
        if not points:
            raise InvalidInput(f"{self.job}, {self.arithmetic}: no point was measured")
        bits = answer["log_bits_per_parameter_step"]
        return Training(self.job, self.arithmetic, self.seed, points, None if bits is None else float(bits))


def keeping(directory: Path) -> Path:
    """Return the place in ``directory`` for finished trainings, made if need be.

    Raises:
        TallyError: it cannot be made.
    """
    place = directory / "trainings"
    with storing(str(place)):
        place.mkdir(parents=True, exist_ok=True)
    if not place.is_dir():
        raise TallyError(f"{place}: is not a directory")
    return place
