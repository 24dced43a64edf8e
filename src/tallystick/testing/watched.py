"""Owners with simulated chips that watch real training: one honest, and those who cheat.

    python -m tallystick.testing.watched OWNER --out DIR --chips UEID,UEID

trains the job ``digits`` with the chips observing every step, and leaves what that owner would hand over: chips, run,
report and opening. Chip ``UEID`` has the key derived from it (``chip_key``), as a maker would have registered it.

    honest        one run, cut over all its chips
    unreported    declares the run of its first chip and is silent about that of its second
    glued         goes on with another model's weights half-way and glues the two runs into one transcript
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tallystick.commit.state import Entry
from tallystick.execution.job import JobSource, find_source
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import state_entries
from tallystick.fleet.agent.agent import ChipAgent, ChipSettings
from tallystick.fleet.agent.chip_log import snapshots_of
from tallystick.fleet.agent.chip_record import DAY_MS, Firmware, Genesis
from tallystick.fleet.agent.memory import Region
from tallystick.fleet.provenance.transcripts import (
    Lineage,
    Precommit,
    ReportOpening,
    RunReport,
    Slice,
    Totals,
    even_shards,
    make_precommit,
    make_report,
)
from tallystick.integrations.committing import beside, elements_of
from tallystick.integrations.run_replayer import batch_digests, flop_per_step, tokens_per_step
from tallystick.numerics.policy import find_policy
from tallystick.roles.run_writer import Progress
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import Specification
from tallystick.run.transcript import Transcript
from tallystick.signing.keys import SigningKey, ed25519_key
from tallystick.store.chips import ChipDirectory
from tallystick.store.files import RunDirectory, write_whole
from tallystick.store.keys import write_key
from tallystick.testing.held_memory import HeldMemory

OWNERS = ("honest", "unreported", "glued")
JOB, STEPS, EVERY = "digits", 60, 10
SETTINGS = {"width": "8", "batch": "16", "steps": str(STEPS)}
RATE = 1000  # thousandths of a snapshot a day
STEP_MS = DAY_MS // 4  # simulated time that a step takes
POLLS = (
    24  # of each agent in it: one that looks four times a day takes an eighth fewer snapshots than it draws
)
FLEET_FIRMWARE = Firmware(hashlib.sha256(b"simulated firmware").digest(), 1)
FIRST_DAY = 1_770_000_000_000  # milliseconds since 1970
PAGE = 4096
TORN_SHARE = 0.2


@dataclass(frozen=True)
class Course:
    """What is trained: a job, its steps, and how many lie between two committed states."""

    job: str = JOB
    steps: int = STEPS
    every: int = EVERY


DIGITS = Course()


def chip_key(ueid: bytes) -> SigningKey:
    """Return the device key of a simulated chip."""
    return ed25519_key(hashlib.sha256(b"tallystick simulated chip" + ueid).digest())


class SimulatedTime:
    """A clock that training moves."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> int:
        """Return the simulated milliseconds."""
        return self.now

    def wall(self) -> int:
        """Return the same, since some day in 2026."""
        return FIRST_DAY + self.now


@dataclass
class Memory:
    """What one simulated chip holds: its slices of the session's state, as of this step and the one before."""

    pieces: Sequence[Slice]
    now: list[tuple[Region, bytes]] = field(default_factory=list[tuple[Region, bytes]])
    before: list[tuple[Region, bytes]] = field(default_factory=list[tuple[Region, bytes]])
    tear: float | None = None

    def load(self, entries: Mapping[str, Entry]) -> None:
        """Take the chip's part of a state."""
        self.before, self.now = self.now, []
        for piece in self.pieces:
            entry = entries.get(piece.entry)
            if entry is None:
                continue
            width = memoryview(entry.data).nbytes // max(int(np.prod(entry.shape)), 1)
            data = memoryview(entry.data).cast("B")[piece.start * width : (piece.start + piece.count) * width]
            self.now.append((Region(piece.region, entry.dtype, _kind(piece.entry), len(data)), bytes(data)))

    def clear(self) -> None:
        """Hold nothing: no program runs."""
        self.before, self.now = [], []

    def read(self) -> list[tuple[Region, bytes]]:
        """Return the memory; torn, it is new up to a place and old behind it."""
        same = [region for region, _ in self.now] == [region for region, _ in self.before]
        if self.tear is None or not same:
            return self.now
        left = 4 * int(self.tear * sum(len(data) for _, data in self.now) / 4)
        mixed: list[tuple[Region, bytes]] = []
        for (region, new), (_, old) in zip(self.now, self.before, strict=True):
            cut = min(left, len(new))
            mixed.append((region, new[:cut] + old[cut:]))
            left -= cut
        return mixed


def _kind(entry: str) -> str:
    return "optimizer" if entry.startswith("optimizer/") else "buffer" if "/buffer/" in entry else "weights"


@dataclass
class SimulatedChip:
    """A simulated chip with its agent."""

    ueid: bytes
    agent: ChipAgent
    probe: HeldMemory
    memory: Memory
    steps: dict[int, int] = field(default_factory=dict[int, int])


class Fleet:
    """An owner's chips, and the time they share."""

    def __init__(
        self,
        out: Path,
        ueids: Sequence[bytes],
        *,
        seed: int = 0,
        rate: int = RATE,
        agent: str = "simulated",
        keys: Callable[[bytes], SigningKey] = chip_key,
    ) -> None:
        self.out, self.time, self.chips = out, SimulatedTime(), list[SimulatedChip]()
        self._chance = random.Random(seed)
        for ueid in ueids:
            directory = ChipDirectory(out / "chips" / ueid.hex())
            key = keys(ueid)
            directory.path.mkdir(parents=True)
            write_key(directory.key_path, key)
            genesis = Genesis(
                "tallystick", f"{agent} chip", agent, hashlib.sha256(b"owner").digest(), "local"
            )
            settings = ChipSettings(ueid, FLEET_FIRMWARE, genesis, rate, PAGE)
            memory = Memory(())
            probe = HeldMemory(memory.read)
            draw = random.Random(f"{seed} {ueid.hex()}").expovariate  # a real chip's nobody can foresee
            made = ChipAgent(directory, key, probe, settings, clock=self.time, draw=draw)
            made.start()
            made.self_test()
            self.chips.append(SimulatedChip(ueid, made, probe, memory))

    def pass_time(self, session: Session, steps_done: int, chips: Sequence[SimulatedChip]) -> None:
        """Let the time of one step pass on all chips; ``chips`` hold the session's state."""
        entries = {entry.name: entry for entry in state_entries(session)}
        for chip in chips:
            chip.memory.load(entries)
        for chip in self.chips:
            torn = bool(chip.memory.before) and self._chance.random() < TORN_SHARE and chip in chips
            chip.memory.tear = self._chance.random() if torn else None
            chip.probe.torn = torn
            if chip not in chips:
                chip.memory.clear()
        for _ in range(POLLS):
            self.time.now += STEP_MS // POLLS
            for chip in self.chips:
                if chip.agent.poll() is not None and chip in chips:
                    taken, _ = snapshots_of(chip.agent.log)[-1]
                    chip.steps[taken.record.seq] = steps_done - chip.probe.torn

    def close(self) -> None:
        """End the agents; what each logs last says until when it was alive."""
        for chip in self.chips:
            chip.agent.self_test()
            chip.agent.stop()


@dataclass
class Trained:
    """A run that chips watched: its transcript's opening and pre-commitment."""

    opening: ReportOpening
    precommit: Precommit


def train(
    fleet: Fleet,
    chips: Sequence[SimulatedChip],
    directory: Path,
    settings: Mapping[str, str],
    *,
    watched: Callable[[int], bool] = lambda _: True,
    commits: bool = True,
    lineage: Lineage | None = None,
    course: Course = DIGITS,
    source: JobSource | None = None,
) -> Trained | None:
    """Record a run of ``course`` into ``directory`` while ``chips`` hold its state in the steps that are ``watched``.

    ``source`` builds what is trained, where that is not what is declared.
    """
    made: list[Trained] = []
    current: list[Session] = []
    declared = find_source(course.job)

    def began(session: Session, specification: Specification) -> None:
        current.append(session)
        shards = even_shards(elements_of(session), len(chips))
        for chip, pieces in zip(chips, shards, strict=True):
            chip.memory.pieces = pieces
        opening = ReportOpening(secrets.token_bytes(32), shards)
        precommit = make_precommit(
            specification, opening, ranks=[chip.ueid.hex() for chip in chips],
            lineage=lineage or Lineage("initialised"),
            batches=batch_digests(declared, settings, course.steps, specification.seed),
        )  # fmt: skip
        if commits:
            for chip in chips:
                chip.agent.precommit(precommit.digest())
        made.append(Trained(opening, precommit))

    def progress(step: Progress) -> None:
        if watched(step.step):
            fleet.pass_time(current[0], step.step + 1, chips)

    order = Order(
        source or declared,
        settings,
        find_policy("fp32"),
        seed=1,
        steps=course.steps,
        checkpoint_every=course.every,
    )
    record(order, RunDirectory(directory), progress=progress, began=began)
    return made[0] if made else None


def report_run(
    fleet: Fleet,
    chips: Sequence[SimulatedChip],
    directory: Path,
    trained: Trained,
    settings: Mapping[str, str],
    course: Course = DIGITS,
) -> RunReport:
    """Write report and opening beside the run directory."""
    transcript = RunDirectory(directory).load_transcript()
    source = find_source(course.job)
    active = sum(chip.agent.log[-1].record.clocks.active for chip in chips)
    totals = Totals(
        flop_per_step(source, settings) * transcript.num_steps,
        tokens_per_step(source, settings) * transcript.num_steps,
        active,
    )
    snapshots = [(chip.ueid.hex(), seq, step) for chip in chips for seq, step in sorted(chip.steps.items())]
    report = make_report(transcript, trained.opening, trained.precommit, totals, snapshots)
    write_documents(directory, report, trained.opening)
    return report


def write_documents(directory: Path, report: RunReport, opening: ReportOpening) -> None:
    """Write a report and what opens it beside a run directory, the latter for its owner alone."""
    write_whole(beside(directory, "report"), report.encode())
    write_whole(beside(directory, "opening"), opening.encode(), mode=0o600)


def honest(fleet: Fleet) -> None:
    """One run, cut over all chips."""
    settings = SETTINGS | {"init_seed": "1"}
    directory = fleet.out / "runs" / "classifier"
    trained = train(fleet, fleet.chips, directory, settings)
    assert trained is not None
    report_run(fleet, fleet.chips, directory, trained, settings)


def unreported(fleet: Fleet) -> None:
    """Declare the run of the first chip; train something else on the second and say nothing."""
    settings = SETTINGS | {"init_seed": "2"}
    first, second = fleet.chips
    directory = fleet.out / "runs" / "declared"
    trained = train(fleet, [first], directory, settings)
    assert trained is not None
    hidden = fleet.out / "hidden"
    train(fleet, [second], hidden, SETTINGS | {"init_seed": "9", "learning_rate": "0.02"}, commits=False)
    shutil.rmtree(hidden)
    report_run(fleet, [first], directory, trained, settings)


def glued(fleet: Fleet) -> None:
    """Train one run up to the middle, put another model's weights in, and report the two as one."""
    settings = SETTINGS | {"init_seed": "3"}
    middle = STEPS // 2
    start, other = fleet.out / "start", fleet.out / "other"
    trained = train(fleet, fleet.chips, start, settings, watched=lambda step: step < middle)
    assert trained is not None
    train(
        fleet,
        fleet.chips,
        other,
        SETTINGS | {"init_seed": "8"},
        watched=lambda step: step >= middle,
        commits=False,
    )
    directory = fleet.out / "runs" / "fine-tuned"
    glue(start, other, directory, middle)
    report_run(fleet, fleet.chips, directory, trained, settings)
    shutil.rmtree(start)
    shutil.rmtree(other)


def glue(first: Path, second: Path, out: Path, middle: int) -> None:
    """Write the run that begins as ``first`` and from step ``middle`` on is ``second``: every document fits the others."""
    one, two = RunDirectory(first).load_transcript(), RunDirectory(second).load_transcript()
    shutil.copytree(first, out)
    for folder, suffix in (("logs", ".tlog"), ("checkpoints", ".safetensors")):
        for path in (second / folder).iterdir():
            number = int(path.name.removesuffix(suffix))
            if number >= middle and not (folder == "checkpoints" and number == middle):
                shutil.copy(path, out / folder / path.name)
    glued_run = Transcript(one.specification, one.records[:middle] + two.records[middle:])
    run = RunDirectory(out)
    run.write_document(run.records_path, glued_run.encode_records())
    run.write_document(run.statement_path, glued_run.statement().encode())


PARTS: Mapping[str, Callable[[Fleet], None]] = {"honest": honest, "unreported": unreported, "glued": glued}


def main() -> None:
    """Play one owner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("owner", choices=OWNERS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chips", required=True)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    ueids = [bytes.fromhex(text) for text in chosen.chips.split(",")]
    fleet = Fleet(chosen.out, ueids, seed=chosen.seed)
    try:
        PARTS[chosen.owner](fleet)
    finally:
        fleet.close()
    print(
        json.dumps(
            {"owner": chosen.owner, "snapshots": sum(len(snapshots_of(c.agent.log)) for c in fleet.chips)}
        )
    )


if __name__ == "__main__":
    main()
