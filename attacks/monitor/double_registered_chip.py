"""Registers one serial number and one device key for two chips, so that one of them answers every inspection."""

from scene import Scene, caught, main

from tallystick.fleet.registry.events import Entry
from tallystick.fleet.registry.facts import REGISTRY
from tallystick.fleet.registry.industry import START, Industry, chip_name
from tallystick.fleet.registry.ledger import Ledger, SignedHead
from tallystick.fleet.registry.reconcile import Stream, reconcile
from tallystick.testing.attacks import must, must_refuse


def attack(scene: Scene) -> str:
    industry, ledger = Industry(), Ledger(scene.folder / "registry")
    chips = [chip_name(at) for at in range(4)]
    now = iter(range(START, START + 1000))

    def add(*entries: Entry) -> SignedHead:
        return ledger.append(entries, industry.keys[REGISTRY], now=next(now))

    add(*industry.beginning(), *industry.make(chips[:2]), industry.sell(chips[:2], "fab", "north"))
    first = ledger.find_chip(chips[0])
    assert first is not None
    add(industry.deed("fab", {"maker": "fab", "model": "gx1", "chips": chips[2:]}, "fab"))
    refusals = []
    for serial, key in ((first.serial, ""), ("SN-other", first.key)):
        body = {"maker": "fab", "chips": [[chips[2], serial, key]]}
        entry = industry.deed("package", body, "fab")
        refusals.append(must_refuse(lambda entry=entry: add(entry), naming="already"))
    must_refuse(
        lambda: add(industry.deed("fab", {"maker": "fab", "model": "gx1", "chips": chips[:1]}, "fab")),
        naming="chip",
    )
    add(industry.deed("package", {"maker": "fab", "chips": [[chips[2], "SN-2", ""]]}, "fab"))  # the control
    listed = [chip for name in chips[:2] if (chip := ledger.find_chip(name)) is not None]
    twice = [
        Stream("inventory", f"{p}'s list", p, "", START, False, (chips[0],), {}) for p in ("north", "south")
    ]
    found = [f for f in reconcile(listed, twice) if f.rule == "seen-twice"]
    must(not reconcile(listed, twice[:1]) and len(found) == 1, f"one chip in two lists: {found}")
    return caught(
        f"the registry ({refusals[0].split(': ', 1)[1]}; the same for the key), and one chip shown by two owners by "
        f"reconciliation ({found[0].rule}: {found[0].words})"
    )


if __name__ == "__main__":
    main(attack, __doc__)
