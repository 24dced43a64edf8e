"""What the attacks on compute monitoring share: small runs, simulated chips, and how the outcome is told.

Every script makes one cheat for real, with an honest control beside it, and ends in one line: "caught by: .." or, where the
design lets it pass, "limit: .." with the measured limit (exit status 0); or "NOT CAUGHT: .." (1) where something differs
from that. `--keep DIR` keeps what was written there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

from tallystick.commit.state import Entry, summarise
from tallystick.execution.job import Job, JobSource, find_source
from tallystick.fleet.agent.agent import ChipAgent, ChipSettings, CollectorPort
from tallystick.fleet.agent.chip_log import ChipHead, NumberedFinding, verify_log
from tallystick.fleet.agent.chip_record import DAY_MS, Firmware, Genesis, LoggedRecord
from tallystick.fleet.agent.memory import Region
from tallystick.fleet.attestation.assurance import CheckedEvidence, parse_attestation
from tallystick.fleet.provenance.observation import ObservationPlan
from tallystick.fleet.provenance.transcripts import Lineage
from tallystick.fleet.provenance.verification import OwnerVerdict
from tallystick.integrations.watching import Inquiry, KnownChip, OwnerFolder, RunReplayer, verify_owner
from tallystick.numerics.policy import find_policy
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript
from tallystick.store.chips import ChipDirectory
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must, play_attack
from tallystick.testing.cheats import TamperedSource, forge
from tallystick.testing.held_memory import HeldMemory
from tallystick.testing.watched import (
    FIRST_DAY,
    RATE,
    Course,
    Fleet,
    SimulatedChip,
    SimulatedTime,
    Trained,
    chip_key,
    report_run,
    train,
)

JOB, STEPS, EVERY = "tallystick.testing.noise_job", 24, 4
COURSE = Course(JOB, STEPS, EVERY)
SMALL = {"width": "32"}
BEACON = bytes(range(32))
UEIDS = [b"\x01" + bytes([n]) * 16 for n in range(1, 5)]


def caught(text: str) -> str:
    return f"caught by: {text}"


def limit(text: str) -> str:
    return f"limit: {text}"


@dataclass
class Scene:
    """Where one attack happens."""

    folder: Path
    fleets: list[Fleet] = field(default_factory=list)

    @property
    def source(self) -> JobSource:
        return find_source(JOB)

    def order(self, source: JobSource | None = None, **settings: str) -> Order:
        return Order(
            source or self.source,
            {**SMALL, **settings},
            find_policy("fp32"),
            steps=STEPS,
            checkpoint_every=EVERY,
        )

    def run(self, name: str = "run") -> RunDirectory:
        return RunDirectory(self.folder / name)

    def trained(self, name: str = "honest", source: JobSource | None = None, **settings: str) -> RunDirectory:
        """Return a finished run; ``source`` builds what is trained where that is not what is declared."""
        directory = self.run(name)
        record(self.order(source, **settings), directory)
        return directory

    def tampered(self, tamper: Callable[[Job], None]) -> JobSource:
        return TamperedSource(self.source.path, self.source.source, tamper)

    def replayer(self, run: RunDirectory) -> RunReplayer:
        return RunReplayer(run, self.source)

    # -- chips and owners ------------------------------------------------------------------------

    def fleet(self, chips: int = 1, owner: str = "owner", rate: int = RATE) -> Fleet:
        made = Fleet(self.folder / owner, UEIDS[:chips], rate=rate)
        self.fleets.append(made)
        return made

    def declare(
        self,
        fleet: Fleet,
        chips: Sequence[SimulatedChip],
        name: str = "model",
        *,
        source: JobSource | None = None,
        lineage: Lineage | None = None,
        watched: Callable[[int], bool] = lambda _: True,
        edit: Callable[[RunDirectory], None] = lambda _: None,
        **settings: str,
    ) -> RunDirectory:
        """Train under the chips' eyes, let ``edit`` falsify the run, and report it."""
        directory, chosen = fleet.out / "runs" / name, {**SMALL, **settings}
        trained = train(
            fleet, chips, directory, chosen, source=source, course=COURSE, lineage=lineage, watched=watched
        )
        assert isinstance(trained, Trained)
        edit(RunDirectory(directory))
        report_run(fleet, chips, directory, trained, chosen, COURSE)
        return RunDirectory(directory)

    def verdict(
        self,
        fleet: Fleet,
        *,
        random_segments: int = 2,
        memory: int = 0,
        use: Mapping[str, float] | None = None,
        attest: bool = True,
    ) -> OwnerVerdict:
        """Return what an inspector says who reads the chips, all watched since the first day, and verifies what was declared."""
        known = {chip.ueid.hex(): inspect(chip, attest=attest) for chip in fleet.chips}
        plan = ObservationPlan(RATE, FIRST_DAY, FIRST_DAY + max(fleet.time.now, 1), use or {})
        inquiry = Inquiry(BEACON, random_segments, 1, memory_records=memory, plan=plan)
        return verify_owner("owner", OwnerFolder(fleet.out), known, find_source, inquiry)[0]

    def close(self) -> None:
        for fleet in self.fleets:
            fleet.close()


def inspect(chip: SimulatedChip, *, attest: bool = True) -> KnownChip:
    """Return what an inspector knows who stood before the chip: its registered key, and its head for a fresh nonce."""
    key, nonce = chip_key(chip.ueid).public_key, os.urandom(32)
    if not attest:
        return KnownChip(key, (), CheckedEvidence(known_key=True))
    attested = parse_attestation(chip.agent.attest(nonce), key, nonce)
    return KnownChip(key, (attested.head,), CheckedEvidence(known_key=True, attestation=attested))


def violations(verdict: OwnerVerdict) -> dict[int, NumberedFinding]:
    """Return the first violation of each rule, of the owner and its runs."""
    every = [*verdict.findings, *(finding for run in verdict.runs for finding in run.findings)]
    return {f.rule: f for f in reversed(every) if f.severity == "violation"}


def must_find(verdict: OwnerVerdict, rule: int) -> str:
    """Return the finding's words; the verdict must be a failure and name the rule."""
    found = violations(verdict)
    must(
        verdict.verdict == "fail" and rule in found,
        f"verdict {verdict.verdict}, rules {sorted(found)}, not {rule}",
    )
    return f"rule {rule} ({found[rule].name}: {found[rule].text})"


def must_pass(verdict: OwnerVerdict) -> None:
    """The control: an honest owner must not be accused of anything."""
    must(not violations(verdict) and verdict.verdict == "pass", f"the honest owner: {verdict.fields()}")


# -- one chip's log ----------------------------------------------------------------------------------

KEY = chip_key(bytes(17))
HOUR = DAY_MS // 24


def agent_at(
    place: Path,
    time: SimulatedTime,
    *,
    take: Callable[[], list[tuple[Region, bytes]]] | None = None,
    draw: Callable[[float], float] | None = None,
    collector: CollectorPort | None = None,
    collector_id: bytes = b"",
) -> ChipAgent:
    """Return a chip's agent on the files of ``place``: a snapshot a day, in simulated time; start and stop are the caller's."""
    memory = take or (lambda: [(Region("w", "U8", "weights", 8), b"declared")])
    mode = "local" if collector is None else "remote"
    genesis = Genesis("maker", "model", "simulated", bytes(32), mode, collector_id)
    settings = ChipSettings(
        bytes(17), Firmware(bytes(32), 1), genesis, rate=1000, retention_days=0, hold_seconds=0.0
    )
    probe = HeldMemory(memory)
    return ChipAgent(ChipDirectory(place), KEY, probe, settings, clock=time, draw=draw, collector=collector)


def live(agent: ChipAgent, time: SimulatedTime, days: float, every: int = 6) -> None:
    """Let days pass; the agent looks at its clock every few hours."""
    for _ in range(int(days * 24 / every)):
        time.now += every * HOUR
        agent.poll()


def rules_of(
    log: Sequence[LoggedRecord],
    *,
    known: Iterable[ChipHead] = (),
    others: Iterable[Sequence[LoggedRecord]] = (),
) -> dict[int, NumberedFinding]:
    """Return the first violation of each rule in a log."""
    found = verify_log(log, known=known, others=others)
    return {f.rule: f for f in reversed(found) if f.severity == "violation"}


def must_have_rule(
    log: Sequence[LoggedRecord],
    rule: int,
    *,
    known: Iterable[ChipHead] = (),
    others: Iterable[Sequence[LoggedRecord]] = (),
) -> str:
    """Return the finding's words; the log must have it, and be without findings when nothing else is known."""
    found = rules_of(log, known=known, others=others)
    must(rule in found, f"rules {sorted(found)}, not {rule}")
    return f"rule {rule} ({found[rule].name}: {found[rule].text})"


def head_of(log: Sequence[LoggedRecord], at: int = -1) -> ChipHead:
    """Return what somebody remembers who saw the log's record ``at``."""
    return ChipHead(log[at].record.seq, log[at].digest, "an inspection")


# -- falsifying a run --------------------------------------------------------------------------------


def weights(entries: Mapping[str, Entry]) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(entry.data, "<f4").astype(np.float64)
        for name, entry in entries.items()
        if name.startswith("model/") and entry.dtype == "F32"
    }


def edit_checkpoint(run: RunDirectory, done: int, values: Mapping[str, np.ndarray]) -> None:
    """Put weights into the state committed after ``done`` steps, and make every digest of the run fit."""
    entries = run.load_checkpoint(done)
    for name, value in values.items():
        old = entries[name]
        entries[name] = Entry(name, old.dtype, old.shape, value.astype("<f4").tobytes())
    root = summarise(entries.values()).root().hex()
    run.write_checkpoint(done, list(entries.values()))
    if done == 0:
        set_initial(run, root)
    else:
        forge(run, lambda r: r if r.step != done - 1 else StepRecord(**{**vars(r), "state_root": root}))


def set_initial(run: RunDirectory, root: str) -> None:
    """State another first state."""
    old = run.load_transcript()
    new = Transcript(replace(old.specification, initial_state=root), old.records)
    run.write_document(run.specification_path, new.specification.encode())
    run.write_document(run.records_path, new.encode_records())
    run.write_document(run.statement_path, new.statement().encode())


def lose_logs(run: RunDirectory) -> None:
    """Delete the rounding logs: only the ratio test is left."""
    shutil.rmtree(run.path / "logs")


def interpolate(
    run: RunDirectory, borders: Sequence[int], end: Mapping[str, np.ndarray] | None = None
) -> None:
    """Put points on a straight line into the states at ``borders`` but the first, up to ``end`` or the last state."""
    first = weights(run.load_checkpoint(borders[0]))
    last = end if end is not None else weights(run.load_checkpoint(borders[-1]))
    for border in borders[1:]:
        part = (border - borders[0]) / (borders[-1] - borders[0])
        edit_checkpoint(
            run, border, {name: first[name] + part * (last[name] - first[name]) for name in first}
        )


def play(attack: Callable[[Scene], str], description: str | None) -> int:
    """Run the attack and say how it ended; the exit status."""

    def act(folder: Path, _: argparse.Namespace) -> str:
        scene = Scene(folder)
        try:
            return attack(scene)
        finally:
            scene.close()

    return play_attack(act, argparse.ArgumentParser(description=description))


def main(attack: Callable[[Scene], str], description: str | None) -> None:
    sys.exit(play(attack, description))
