"""A collector that signs for two histories of one chip, and one that keeps quiet."""

import functools

from scene import KEY, Scene, agent_at, caught, live, main

from tallystick.errors import StoreError
from tallystick.fleet.agent.chip_log import verify_log
from tallystick.fleet.agent.collector import Collector, Receipt, find_equivocation, parse_receipt
from tallystick.signing.keys import ed25519_key
from tallystick.testing.attacks import must
from tallystick.testing.watched import SimulatedTime

LIAR = ed25519_key(b"\7" * 32)


class Silent:
    """Never answers."""

    def submit(self, frames: list[bytes]) -> list[bytes]:
        del frames
        raise StoreError("collector: out of reach")


def attack(scene: Scene) -> str:
    time, identity = SimulatedTime(), bytes.fromhex(LIAR.public_key.key_id)
    make = functools.partial(agent_at, time=time, collector_id=identity)
    receipts: list[list[Receipt]] = []
    for name in (
        "a",
        "b",
    ):  # one device key on two disks; each history has a collector's receipts, signed with one key
        collector = Collector(scene.folder / f"collector-{name}", LIAR, {bytes(17): KEY.public_key})
        agent = make(scene.folder / name, collector=collector)
        agent.start()
        live(agent, time, 5)
        agent.stop()
        collector.close()
        held = [data for _, data in sorted(agent.directory.receipts().items())]
        receipts.append([parse_receipt(data, LIAR.public_key) for data in held])
        must(not [f for f in verify_log(agent.log) if f.severity == "violation"], "the chip is accused")
    must(not find_equivocation(receipts[0]), "an honest collector is accused")
    found = find_equivocation([*receipts[0], *receipts[1]])
    must(bool(found), "two histories under one collector's signature are not noticed")
    quiet = make(scene.folder / "quiet", collector=Silent())
    quiet.start()
    live(quiet, time, 60)  # a snapshot in two days: in five there may be none to be quiet about
    quiet.stop()
    said = {(f.rule, f.severity) for f in verify_log(quiet.log)}
    must((21, "unknown") in said and "violation" not in {s for _, s in said}, f"silence: {said}")
    return caught(
        f"its own receipts ({found[0].text}). Limit: a collector that keeps quiet leaves 'unknown' (rule 21): the chip is not "
        "accused and the run goes on after the stated wait"
    )


if __name__ == "__main__":
    main(attack, __doc__)
