"""Snapshots of ranks that hold a run's states between them are traced to run, step, rank and slices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tallystick.cli.main import main
from tallystick.execution.job import find_source
from tallystick.fleet.agent.agent import ChipAgent, ChipSettings
from tallystick.fleet.agent.chip_record import Firmware, Genesis
from tallystick.fleet.agent.probes import ProcessMemory
from tallystick.fleet.provenance.transcripts import (
    Lineage,
    ReportOpening,
    Slice,
    Totals,
    make_precommit,
    make_report,
)
from tallystick.numerics.policy import find_policy
from tallystick.roles.trainer import Order, record
from tallystick.signing.keys import ed25519_key
from tallystick.store.chips import ChipDirectory
from tallystick.store.files import RunDirectory
from tallystick.store.keys import write_key
from tallystick.testing.watched import write_documents

RANK = Path(__file__).parent / "programs" / "rank.py"
STEPS = 6
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="agents read other processes' memory on Linux"
)


def recorded(place: Path, seed: int) -> RunDirectory:
    settings = {"width": "8", "batch": "16", "steps": str(STEPS), "init_seed": str(seed)}
    order = Order(
        find_source("digits"), settings, find_policy("fp32"), seed=1, steps=STEPS, checkpoint_every=3
    )
    record(order, RunDirectory(place))
    return RunDirectory(place)


@contextmanager
def chip_at(place: Path, number: int) -> Iterator[tuple[str, ChipAgent]]:
    ueid = b"\1" + bytes([number]) * 16
    directory, key = ChipDirectory(place / "chips" / ueid.hex()), ed25519_key(bytes([number]) * 32)
    directory.path.mkdir(parents=True)
    directory.settings_path.write_bytes(b"{}")
    write_key(directory.key_path, key)
    genesis = Genesis("tallystick", "rank", "software", bytes(32), "local")
    settings = ChipSettings(ueid, Firmware(bytes(32), 1), genesis, 1000, 4096)
    probe = ProcessMemory(directory.observed_path)
    agent = ChipAgent(directory, key, probe, settings)
    agent.start()
    try:
        yield ueid.hex(), agent
    finally:
        agent.stop()
        probe.close()


@contextmanager
def ranks_of(
    place: Path, run: RunDirectory, kind: str, chips: list[str]
) -> Iterator[list[subprocess.Popen[str]]]:
    shared = [str(len(chips)), kind, str(place / "store"), str(run.path)]
    children = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), *shared, str(place / "chips" / ueid), str(place / "shards.json")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, ueid in enumerate(chips)
    ]  # fmt: skip
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            with child:
                pass


def go_to(children: list[subprocess.Popen[str]], steps: int) -> None:
    for child in children:
        assert child.stdin is not None
        child.stdin.write(f"{steps}\n")
        child.stdin.flush()
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"


def declare(
    place: Path, run: RunDirectory, name: str, chips: list[str], shards: Any, claims: Any = ()
) -> bytes:
    """Write what a developer hands in of a run; return what its chips would have logged before."""
    transcript = run.load_transcript()
    opening = ReportOpening(name.encode().ljust(32, b"."), shards)
    batches = [each.batch for each in transcript.records]
    precommit = make_precommit(
        transcript.specification, opening, ranks=chips, lineage=Lineage("initialised"), batches=batches
    )
    report = make_report(transcript, opening, precommit, Totals(1, 1, 1), claims)
    write_documents(run.path, report, opening)
    return precommit.digest()


@pytest.mark.parametrize(
    ("kind", "ranks", "others", "is_logged"),
    [
        ("both", 4, 2, False),
        *(
            pytest.param(kind, ranks, 49, is_logged, marks=pytest.mark.slow)
            for kind in ("fsdp2", "tp", "both", "ddp", "pipeline")
            for ranks, is_logged in ((2, False), (4, False), (4, True))
        ),
    ],
)
def test_a_ranks_memory_is_traced_to_run_step_rank_and_slices(
    kind: str, ranks: int, others: int, is_logged: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = [recorded(tmp_path / "runs" / f"run{seed:02d}", seed) for seed in range(others + 1)]
    own = runs[others // 2]
    taken: dict[int, list[int]] = {}
    with ExitStack() as stack:
        made = [stack.enter_context(chip_at(tmp_path, number + 1)) for number in range(ranks)]
        chips, agents = [ueid for ueid, _ in made], [agent for _, agent in made]
        children = stack.enter_context(ranks_of(tmp_path, own, kind, chips))
        for steps in (2, STEPS):
            go_to(children, steps)
            rows = json.loads((tmp_path / "shards.json").read_text())
            shards = tuple(tuple(Slice.read_row(row) for row in rank) for rank in rows)
            for run in runs:
                digest = declare(tmp_path, run, run.path.name, chips, shards)
                if run is own and is_logged and steps == 2:
                    for agent in agents:
                        agent.precommit(digest)
            taken[steps] = [agent.snapshot().record.seq for agent in agents]

    sizes = {piece.entry: 0 for rank in shards for piece in rank}
    for rank in shards:
        for piece in rank:
            sizes[piece.entry] += piece.count
    assert all(name in sizes for name in ("model/hidden.weight", "optimizer/head.weight/momentum_buffer"))
    whole = 4096 * (ranks if kind == "ddp" else 1)
    assert sizes["model/hidden.weight"] == sizes["optimizer/hidden.weight/momentum_buffer"] == whole
    assert any(piece.run for rank in shards for piece in rank) == (kind in ("tp", "both"))
    for steps, records in taken.items():
        for rank, (ueid, seq) in enumerate(zip(chips, records, strict=True)):
            if rank in (0, ranks - 1):
                key = tmp_path / "chips" / ueid / "chip.key.pub"
                arguments = ["--chip", f"{ueid}={key}", "--snapshot", str(seq), "--json"]
                capfd.readouterr()
                assert main(["monitor", "trace", str(tmp_path), *arguments]) == 0
                found = json.loads(capfd.readouterr().out)
                (part,) = found["parts"]
                assert (part["run"], part["match"]["steps_done"]) == (own.path.name, steps)
                # Under data parallelism all hold the same: whose it is says the chip.
                assert (part["rank"], part["ranks"], part["match"]["status"]) == (rank, ranks, "exact")
                assert (found["named"], found["declared"]) == (others + 1, others + 1)
                assert (found["unexplained"], found["unread"]) == (0, [])
                assert {piece["entry"] for piece in part["slices"]} == {piece.entry for piece in shards[rank]}
