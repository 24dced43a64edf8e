"""tally bench monitor fleets: how often an honest owner whose chips watch real training is accused of anything."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tallystick.cli.fleet.monitoring import PLAN, inspect_chip
from tallystick.cli.profiles import PARENT, end_with_parent
from tallystick.cli.terminal import say
from tallystick.fleet.sampling.coverage import at_most, binomial_interval
from tallystick_bench.table import PartRow

CHIPS = 4  # of each fleet; its run is cut over all of them
CHECKS = 3  # of a chip's number of snapshots: by its log, by the plan, by the run; each has the stated rate of false alarms
SURPRISE = 1e-6  # the probability with which so many false findings as are allowed come at the stated rate


def fleet_rows(fleets: int, seed: int) -> Iterator[PartRow]:
    """Yield what honest fleets of ``CHIPS`` simulated chips, one for each seed from ``seed`` on, are accused of."""
    found = list[str]()
    passed = 0
    workers = min(os.cpu_count() or 1, fleets)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawned, initializer=_begin, initargs=(os.getpid(),)) as pool:
        for number, (verdict, findings) in enumerate(pool.map(honest_fleet, range(seed, seed + fleets))):
            passed += verdict == "pass"
            found += [f"seed {seed + number}: {text}" for text in findings]
            for text in findings:
                say(f"    seed {seed + number}: {text}")
            if (number + 1) % max(1, fleets // 20) == 0:
                say(f"    {number + 1:,} of {fleets:,} fleets, {passed:,} pass, {len(found)} findings")
    rate = PLAN.limits.false_alarm
    tests = CHECKS * CHIPS * fleets
    most = next(count for count in range(tests + 1) if 1.0 - at_most(count, tests, rate) < SURPRISE)
    accused = fleets - passed
    yield PartRow("fleets", f"of {fleets:,} honest fleets of {CHIPS} chips do not pass", accused, "", most)
    yield PartRow(
        "fleets", f"findings against them; {rate:g} a chip and check are stated", len(found), "", most
    )
    low, high = binomial_interval(accused, fleets, 0.95)
    yield PartRow("fleets", "share of fleets that do not pass, 95 % interval from", 100 * low, "%")
    yield PartRow("fleets", "to", 100 * high, "%")


def _begin(parent: int) -> None:
    """Have this process end with the one that waits for it."""
    os.environ[PARENT] = str(parent)
    end_with_parent()


def honest_fleet(seed: int) -> tuple[str, list[str]]:
    """Return the verdict on one such owner, and every finding; all that is drawn follows from ``seed``."""
    import torch

    from tallystick.execution.job import find_shipped
    from tallystick.integrations.watching import Inquiry, OwnerFolder, Plausibility, verify_owner
    from tallystick.testing.watched import Fleet, honest

    torch.set_num_threads(1)
    drawn = random.Random(seed)
    ueids = [b"\x01" + drawn.randbytes(16) for _ in range(CHIPS)]
    with tempfile.TemporaryDirectory(prefix="tallystick-fleet-") as place:
        folder = Path(place) / "honest"
        fleet = Fleet(folder, ueids, seed=seed)
        try:
            honest(fleet)
        finally:
            fleet.close()
        known = {ueid.hex(): inspect_chip(folder / "chips" / ueid.hex()) for ueid in ueids}
        inquiry = Inquiry(drawn.randbytes(32), plausibility=Plausibility(1e6), plan=PLAN)
        verdict, _, _ = verify_owner("honest", OwnerFolder(folder), known, find_shipped, inquiry)
    return verdict.verdict, [f"{each.rule} {each.name}: {each.text}" for each in verdict.findings]
