from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.commit import directory
from tallystick.commit.encoding import canonical_json
from tallystick.commit.merkle import root as merkle_root
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation, StoreError
from tallystick.fleet.registry import claims
from tallystick.fleet.registry.corim import export_corim
from tallystick.fleet.registry.events import parse_entry, sign_event
from tallystick.fleet.registry.facts import REGISTRY, Chip, RegistryEntry
from tallystick.fleet.registry.heads import parse_signed_head, verify_extension, verify_head
from tallystick.fleet.registry.industry import START, Industry, chip_name, key_of
from tallystick.fleet.registry.ledger import RegistryLedger
from tallystick.fleet.registry.reconcile import Stream, reconcile

CHIPS = [chip_name(at) for at in range(6)]


class World:
    """A registry with six chips: four of north's, two still with their maker."""

    def __init__(self, path: Path) -> None:
        self.industry = Industry()
        self.path = path
        self.ledger = RegistryLedger(path)
        self.now = START
        first = [
            *self.industry.beginning(),
            *self.industry.make(CHIPS),
            self.industry.sell(CHIPS[:4], "fab", "north"),
        ]
        if not path.exists():
            self.add(*first)

    def add(self, *entries: RegistryEntry):
        self.now += 1
        return self.ledger.append(entries, self.industry.keys[REGISTRY], now=self.now)

    def do(self, kind: str, signers: list[str], **body: object):
        return self.add(self.industry.event(kind, body, *signers))

    def chip(self, at: int) -> Chip:
        found = self.ledger.find_chip(CHIPS[at])
        assert found is not None
        return found

    def proof(self, key: str) -> claims.RegistryProof:
        return claims.RegistryProof(self.ledger.load_head(), key, self.ledger.prove_key(key.encode()))

    @property
    def key(self):
        return self.industry.keys[REGISTRY].public_key


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("template") / "registry"
    World(place).ledger.close()
    return place


@pytest.fixture
def world(template: Path, tmp_path: Path) -> World:
    shutil.copytree(template, tmp_path / "registry")
    return World(tmp_path / "registry")


# ------------------------------------------------------------------------------------------------ rules


def test_a_chip_is_made_packaged_sold_lost_found_repaired_and_scrapped(world: World) -> None:
    lot = CHIPS[:1]
    assert (world.chip(0).owner, world.chip(0).status) == ("north", "active")
    world.do("board", ["north"], holder="north", board="B1", chips=lot)
    world.do("damage", ["north"], owner="north", chips=lot, reason="fan")
    world.do("rma", ["fab", "north"], **{"from": "north", "to": "fab", "chips": lot})
    assert (world.chip(0).owner, world.chip(0).custodian, world.chip(0).status) == (
        "north",
        "fab",
        "in repair",
    )
    world.do("return", ["fab", "north"], **{"from": "fab", "to": "north", "chips": lot, "replaced": []})
    world.do("loss", ["north"], owner="north", chips=lot, reason="a pallet is gone")
    assert world.chip(0).status == "lost"
    world.do("found", ["north"], owner="north", chips=lot, reason="it was in the other hall")
    world.do("inspected", ["watch"], inspector="watch", result="ab" * 32, chips=[[CHIPS[0], "passed"]])
    assert world.chip(0).inspected > START
    world.do("retire", ["north", "watch"], owner="north", witness="watch", chips=lot, evidence="cd" * 32)
    assert world.chip(0).status == "retired"
    kinds = [event.kind for _, event in world.ledger.history(CHIPS[0])]
    assert kinds == "fab package transfer board damage rma return loss found inspected retire".split()


def test_a_replaced_chip_is_retired_and_its_successor_changes_owner(world: World) -> None:
    world.do("rma", ["fab", "north"], **{"from": "north", "to": "fab", "chips": CHIPS[:1]})
    pair = [[CHIPS[0], CHIPS[5]]]
    world.do("return", ["fab", "north"], **{"from": "fab", "to": "north", "chips": [], "replaced": pair})
    assert (world.chip(0).status, world.chip(5).owner) == ("retired", "north")


REFUSED = [
    ("a chip that another one owns", "transfer", ["north", "south"],
     {"from": "north", "to": "south", "chips": CHIPS[4:5]}, "is held by fab, not by north"),
    ("an unknown chip", "transfer", ["north", "south"],
     {"from": "north", "to": "south", "chips": [chip_name(99)]}, "is not registered"),
    ("to nobody known", "transfer", ["north", "fab"],
     {"from": "north", "to": "nobody", "chips": CHIPS[:1]}, "must be signed by nobody, north"),
    ("signed by the giver alone", "transfer", ["north"],
     {"from": "north", "to": "south", "chips": CHIPS[:1]}, "must be signed by north, south; is signed by north"),
    ("to an inspector", "transfer", ["north", "watch"],
     {"from": "north", "to": "watch", "chips": CHIPS[:1]}, "watch: is no owner"),
    ("a chip that is made twice", "fab", ["fab"],
     {"maker": "fab", "model": "gx1", "chips": CHIPS[:1]}, "is registered already"),
    ("made by an owner", "fab", ["north"],
     {"maker": "north", "model": "gx1", "chips": [chip_name(99)]}, "north: is no maker"),
    ("of an unknown model", "fab", ["fab"],
     {"maker": "fab", "model": "gx2", "chips": [chip_name(99)]}, "model gx2 is not declared"),
    ("packaged twice", "package", ["fab"],
     {"maker": "fab", "chips": [[CHIPS[4], "SN-new", ""]]}, "was packaged as SN-"),
    ("lost by another", "loss", ["south"],
     {"owner": "south", "chips": CHIPS[:1], "reason": "theft"}, "is owned by north, not by south"),
    ("found without being lost", "found", ["north"],
     {"owner": "north", "chips": CHIPS[:1], "reason": "here"}, "is active; found is for chips that are lost"),
    ("scrapped without an inspector", "retire", ["north", "south"],
     {"owner": "north", "witness": "south", "chips": CHIPS[:1], "evidence": "ab" * 32}, "south: is no inspector"),
    ("exempted by its owner", "exempt", ["north"],
     {"chips": CHIPS[:1], "until": START * 2, "reason": "school"}, "must be signed by registry"),
    ("inspected by its owner", "inspected", ["north"],
     {"inspector": "north", "result": "ab" * 32, "chips": [[CHIPS[0], "passed"]]}, "north: is no inspector"),
    ("repaired by an owner", "rma", ["north", "south"],
     {"from": "north", "to": "south", "chips": CHIPS[:1]}, "south: is no maker"),
    ("returned without repair", "return", ["fab", "north"],
     {"from": "fab", "to": "north", "chips": CHIPS[:1], "replaced": []}, "is active with north for north"),
    ("a slower model", "model", [REGISTRY],
     {"name": "gx1", "vendor": "fab", "flop_per_chip_day": "1"}, "its rate may rise"),
    ("opened twice", "open", [REGISTRY], {"name": "again", "key": ""}, "opened once"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("why", "kind", "signers", "body", "reason"), REFUSED, ids=[row[0] for row in REFUSED]
)
def test_refused(
    world: World, why: str, kind: str, signers: list[str], body: dict[str, object], reason: str
) -> None:
    if kind == "open":
        body = {**body, "key": world.industry.spki(REGISTRY)}
        entry = world.industry.event(kind, body, *signers)
        entry = sign_event(replace(entry.event, registry=""), {REGISTRY: world.industry.keys[REGISTRY]})
    else:
        entry = world.industry.event(kind, body, *signers)
    before = world.ledger.load_head()
    with pytest.raises((ProtocolViolation, Mismatch), match=reason):
        world.add(entry)
    assert world.ledger.load_head() == before
    assert world.ledger.rebuild() == before.head


def test_a_lost_chip_cannot_be_sold_and_a_scrapped_one_does_nothing(world: World) -> None:
    world.do("loss", ["north"], owner="north", chips=CHIPS[:1], reason="theft")
    with pytest.raises(ProtocolViolation, match="is lost; transfer is for chips that are active or damaged"):
        world.add(world.industry.sell(CHIPS[:1], "north", "south"))
    world.do(
        "retire", ["north", "watch"], owner="north", witness="watch", chips=CHIPS[1:2], evidence="ab" * 32
    )
    with pytest.raises(ProtocolViolation, match="is retired"):
        world.do("found", ["north"], owner="north", chips=CHIPS[1:2], reason="no")


def test_one_serial_or_device_key_on_two_chips_is_refused(world: World) -> None:
    fresh = [chip_name(50), chip_name(51)]
    world.do("fab", ["fab"], maker="fab", model="gx1", chips=fresh)
    old = world.chip(0)
    for serial, key, reason in ((old.serial, "", "serial"), ("SN-50", old.key, "key")):
        with pytest.raises(ProtocolViolation, match=f"{reason} .* is that of chip {old.chip} already"):
            world.do("package", ["fab"], maker="fab", chips=[[fresh[0], serial, key]])
    with pytest.raises(ProtocolViolation, match="one serial on two chips"):
        world.do("package", ["fab"], maker="fab", chips=[[fresh[0], "SN-50", ""], [fresh[1], "SN-50", ""]])


def test_a_deed_counts_once_and_in_its_own_registry_only(world: World) -> None:
    there = world.industry.sell(CHIPS[:1], "north", "south")
    world.add(there, world.industry.sell(CHIPS[:1], "south", "north"))
    with pytest.raises(ProtocolViolation, match="stands in the log already"):
        world.add(there)
    elsewhere = Industry("elsewhere")
    with pytest.raises(ProtocolViolation, match="is meant for registry"):
        world.add(elsewhere.sell(CHIPS[:1], "north", "south"))


def test_another_hand_or_a_changed_word_breaks_a_signature(world: World) -> None:
    entry = world.industry.sell(CHIPS[:1], "north", "south")
    forged = replace(entry, signatures=(("north", key_of("thief").sign(b"")), entry.signatures[1]))
    with pytest.raises(Mismatch, match="transfer: north: the signature is not of key"):
        world.add(forged)
    with pytest.raises(Mismatch, match="the signature is not of key"):
        world.add(replace(entry, event=replace(entry.event, time=1)))


def test_a_party_changes_its_key_with_the_old_one_and_the_authority_revokes_a_stolen_one(
    world: World,
) -> None:
    fresh = key_of("north's second")
    body = {"name": "north", "roles": ["owner"], "key": fresh.public_key.spki.hex()}
    with pytest.raises(ProtocolViolation, match="must be signed by north, registry"):
        world.do("party", [REGISTRY], **body)
    world.do("party", [REGISTRY, "north"], **body)
    with pytest.raises(Mismatch):
        world.add(world.industry.sell(CHIPS[:1], "north", "south"))
    stolen = {"name": "north", "key": world.industry.spki("north"), "reason": "stolen"}
    world.do("revoke", [REGISTRY], **stolen)
    world.add(world.industry.sell(CHIPS[:1], "north", "south"))
    assert world.chip(0).owner == "south"


def test_all_entries_of_a_batch_are_taken_up_or_none(world: World) -> None:
    before = world.ledger.log_path.read_bytes()
    good, bad = (
        world.industry.sell(CHIPS[:1], "north", "south"),
        world.industry.sell(CHIPS[:1], "north", "south"),
    )
    with pytest.raises(ProtocolViolation, match=r"entry 10: chip .* is held by south, not by north"):
        world.add(good, bad)
    assert world.ledger.log_path.read_bytes() == before
    assert world.chip(0).owner == "north"
    with pytest.raises(InvalidInput, match="nothing to append"):
        world.add()


# ------------------------------------------------------------------------------------------------ parsing


def test_an_entry_has_one_encoding(world: World) -> None:
    for line in world.ledger.log_path.read_bytes().splitlines():
        assert parse_entry(line).encode() == line
        for other in (line + b"\n", b" " + line, line.replace(b'"kind"', b'"kinds"')):
            with pytest.raises(InvalidInput):
                parse_entry(other)


def test_the_record_of_a_chip_is_canonical_json(world: World) -> None:
    for chip in world.ledger.each_chip():
        assert chip.encode() == canonical_json(chip._asdict())
        assert claims.parse_chip(chip.encode()) == chip


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"from": "north", "to": "north", "chips": CHIPS[:1]}, "from and to are both north"),
        ({"from": "north", "to": "south", "chips": []}, "0 chips; must be 1 to 10000"),
        ({"from": "north", "to": "south", "chips": [CHIPS[0], CHIPS[0]]}, "named twice"),
        ({"from": "north", "to": "south", "chips": ["AB" * 8]}, "lower-case hexadecimal"),
        ({"from": "north", "to": "south", "chips": ["ab" * 6]}, "7 to 33 bytes of UEID"),
        ({"from": "nor th", "to": "south", "chips": CHIPS[:1]}, "letters, digits"),
        ({"from": "north", "to": "south", "chips": [1]}, "must be a string, is 1"),
        ({"from": "north", "to": "south"}, "field 'chips' is missing"),
        ({"from": "north", "to": "south", "chips": CHIPS[:1], "price": 1}, "field 'price' is unknown"),
    ],
)
def test_malformed_deeds_are_refused_before_any_rule(body: dict[str, object], reason: str) -> None:
    entry = Industry().event("transfer", body)
    with pytest.raises(InvalidInput, match=reason):
        parse_entry(entry.encode())


# ------------------------------------------------------------------------------------------------- proofs


def test_an_owners_claim_is_proved_offline_and_nobody_elses(world: World) -> None:
    data = world.proof(f"chip/{CHIPS[0]}").encode()
    proof = claims.RegistryProof.parse(data)
    assert claims.verify_owner(proof, world.key, chip=CHIPS[0], owner="north") == world.chip(0)
    with pytest.raises(Mismatch, match="is owned by north, south is claimed"):
        claims.verify_owner(proof, world.key, chip=CHIPS[0], owner="south")
    with pytest.raises(InvalidInput, match="is about chip/"):
        claims.verify_owner(proof, world.key, chip=CHIPS[1], owner="north")
    with pytest.raises(Mismatch, match="registry head"):
        claims.verify_owner(proof, key_of("other").public_key, chip=CHIPS[0], owner="north")


def test_a_chip_that_is_not_registered_is_proved_absent(world: World) -> None:
    proof = world.proof(f"chip/{chip_name(99)}")
    assert claims.verify_registry_proof(proof, world.key) is None
    with pytest.raises(Mismatch, match="is not registered under this head"):
        claims.verify_owner(proof, world.key, chip=chip_name(99), owner="north")
    serial = claims.verify_registry_proof(world.proof(f"serial/{world.chip(0).serial}"), world.key)
    assert serial == CHIPS[0].encode()


def test_no_record_can_be_shown_in_another_place_or_beside_another(world: World) -> None:
    """A registry that keeps two records of one chip cannot prove both: the chip has one place."""
    key = f"chip/{CHIPS[0]}".encode()
    proof = world.ledger.prove_key(key)
    root = world.ledger.load_head().head.state_root
    second = world.chip(0)._replace(owner="south").encode()
    others = tuple(item for item in proof.items if item[0] != key)
    for items in ((*others, (key, second)), (*proof.items, (key, second)), others):
        with pytest.raises((Mismatch, InvalidInput)):
            directory.verify_lookup(replace(proof, items=tuple(items)), key, root)
    with pytest.raises((Mismatch, InvalidInput)):
        directory.verify_lookup(replace(proof, size=proof.size + 1), key, root)


def test_the_log_goes_on_from_every_older_head_and_from_no_other_past(world: World) -> None:
    old = world.ledger.load_head()
    world.add(world.industry.sell(CHIPS[:1], "north", "south"))
    new = world.ledger.load_head()
    proof = world.ledger.prove_extension(old.head)
    verify_extension(old.head, new.head, proof)
    with pytest.raises(Mismatch):
        verify_extension(replace(old.head, log_root=b"\1" * 32), new.head, proof)
    made = claims.RegistryProof(
        new, f"chip/{CHIPS[0]}", world.ledger.prove_key(f"chip/{CHIPS[0]}".encode()), old, tuple(proof)
    )
    assert claims.verify_registry_proof(claims.RegistryProof.parse(made.encode()), world.key) is not None


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.binary(min_size=1, max_size=12), st.binary(max_size=20), max_size=60), st.data())
def test_a_map_proves_what_each_key_has(entries: dict[bytes, bytes], data: st.DataObject) -> None:
    depth = directory.depth_for(len(entries))
    buckets: list[list[directory.Item]] = [[] for _ in range(1 << depth)]
    for item in sorted(entries.items()):
        buckets[directory.prefix_of(item[0]) >> (32 - depth)].append(item)
    leaves = [directory.bucket_leaf(bucket) for bucket in buckets]
    from tallystick.commit.merkle import inclusion_proof

    top = merkle_root(leaves)
    root = directory.map_root(depth, len(entries), top)
    key = data.draw(st.sampled_from(sorted(entries)) if entries else st.binary(min_size=1, max_size=4))
    at = directory.prefix_of(key) >> (32 - depth)
    proof = directory.MapProof(
        depth, len(entries), top, at, tuple(buckets[at]), tuple(inclusion_proof(leaves, at))
    )
    assert directory.verify_lookup(proof, key, root) == entries.get(key)
    assert directory.parse_map_proof(json.loads(directory.encode_map_proof(proof)), what="proof") == proof


# -------------------------------------------------------------------------------------------- at rest


def test_the_index_is_made_again_from_the_log_to_the_same_state(world: World) -> None:
    head = world.ledger.load_head().head
    chips = list(world.ledger.each_chip())
    world.ledger.close()
    world.ledger.index_path.unlink()
    with RegistryLedger(world.path) as again:
        assert list(again.each_chip()) == chips
        assert again.rebuild() == head


def test_small_changes_and_a_whole_rebuild_reach_the_same_root(world: World) -> None:
    fresh = [chip_name(at) for at in range(100, 260)]
    world.add(*world.industry.make(fresh))
    for chip in fresh[:5]:
        world.add(world.industry.sell([chip], "fab", "south"))
    head = world.ledger.load_head().head
    assert world.ledger.rebuild() == head
    assert world.ledger.prove_key(b"chip/" + fresh[0].encode()).depth > 2


def test_a_log_that_was_shortened_changed_or_reordered_is_refused(world: World, tmp_path: Path) -> None:
    world.ledger.close()
    lines = world.ledger.log_path.read_bytes().splitlines(keepends=True)
    tampered = {
        "shorter": lines[:-1],
        "torn": [*lines[:-1], lines[-1][:-20]],
        "reordered": [*lines[:-2], lines[-1], lines[-2]],
        "other": [*lines[:-1], lines[-1].replace(b"north", b"south")],
    }
    for name, changed in tampered.items():
        place = tmp_path / name
        shutil.copytree(world.path, place)
        (place / "entries.jsonl").write_bytes(b"".join(changed))
        with RegistryLedger(place) as ledger, pytest.raises((Mismatch, ProtocolViolation)):
            ledger.rebuild()
    place = tmp_path / "shorter"
    with RegistryLedger(place) as ledger, pytest.raises(Mismatch, match="its head speaks of 9"):
        ledger.find_chip(CHIPS[0])


def test_what_a_killed_writer_left_behind_its_head_is_set_aside_and_said(world: World) -> None:
    head = world.ledger.load_head()
    left = world.industry.sell(CHIPS[:1], "north", "south").encode() + b"\n" + b'{"deed":{"bo'
    world.ledger.close()
    with world.ledger.log_path.open("ab") as file:
        file.write(left)
    with RegistryLedger(world.path) as ledger:
        chip = ledger.find_chip(CHIPS[0])
        assert chip is not None and chip.owner == "north"
        assert ledger.load_head() == head
    world.add(world.industry.sell(CHIPS[1:2], "north", "south"))
    assert (world.path / "unacknowledged-0.jsonl").read_bytes() == left
    assert world.ledger.rebuild() == world.ledger.load_head().head


def test_two_writers_take_turns_and_see_each_others_deeds(world: World) -> None:
    other = RegistryLedger(world.path)
    assert other.party("north") is not None
    assert other.find_chip(CHIPS[0]) is not None
    fresh = key_of("north's second")
    world.do("revoke", [REGISTRY], name="north", key=fresh.public_key.spki.hex(), reason="stolen")
    sale = world.industry.sell(CHIPS[:1], "north", "south")
    with pytest.raises(Mismatch, match="entry 10: transfer: north"):
        other.append([sale], world.industry.keys[REGISTRY], now=START + 9)
    world.industry.keys["north"] = fresh
    signed = other.append(
        [world.industry.sell(CHIPS[:1], "north", "south")], world.industry.keys[REGISTRY], now=START + 9
    )
    assert (signed.head.entries, world.chip(0).owner) == (11, "south")
    other.close()
    assert world.ledger.rebuild() == signed.head


def test_a_registry_that_somebody_else_is_writing_to_is_said(world: World) -> None:
    writer = sqlite3.connect(world.ledger.index_path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another process may be writing"), world.ledger as ledger:
        assert ledger.find_chip(CHIPS[0]) is not None
        ledger._open().execute("PRAGMA busy_timeout = 10")
        ledger.append(
            [world.industry.sell(CHIPS[:1], "north", "south")], world.industry.keys[REGISTRY], now=1
        )
    writer.close()


def test_an_index_behind_its_head_is_made_again(world: World, tmp_path: Path) -> None:
    world.ledger.close()
    old = tmp_path / "old.sqlite"
    shutil.copy(world.ledger.index_path, old)
    world.add(world.industry.sell(CHIPS[:1], "north", "south"))
    world.ledger.close()
    shutil.copy(old, world.ledger.index_path)
    assert world.chip(0).owner == "south"


def test_a_damaged_index_is_said_and_a_missing_registry_too(world: World, tmp_path: Path) -> None:
    world.ledger.close()
    world.ledger.index_path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="rebuild"), RegistryLedger(world.path) as ledger:
        ledger.find_chip(CHIPS[0])
    with RegistryLedger(world.path) as ledger:
        ledger.rebuild()
    with (
        pytest.raises(StoreError, match="there is no registry"),
        RegistryLedger(tmp_path / "nowhere") as ledger,
    ):
        ledger.find_chip(CHIPS[0])


def test_heads_are_signed_with_the_registrys_key_only(world: World) -> None:
    with pytest.raises(ProtocolViolation, match="heads are signed by key"):
        world.ledger.append([world.industry.sell(CHIPS[:1], "north", "south")], key_of("other"), now=1)
    signed = world.ledger.load_head()
    assert verify_head(parse_signed_head(signed.encode()), world.key) == signed.head
    with pytest.raises(Mismatch):
        verify_head(replace(signed, head=replace(signed.head, time=1)), world.key)


# --------------------------------------------------------------------------------------- reconciliation


def stream(kind: str, party: str, chips: list[str], *, complete: bool = False, **units: int) -> Stream:
    return Stream(
        kind,
        f"{party}'s {kind} list",
        party,
        "abroad" if kind == "customs" else "",
        START,
        complete,
        tuple(chips),
        units,
    )


def found(world: World, *streams: Stream) -> list[tuple[str, str, str]]:
    return [(f.rule, f.chip, f.party) for f in reconcile(world.ledger.each_chip(), streams)]


def test_streams_that_agree_have_no_findings(world: World) -> None:
    assert found(world, stream("maker", "fab", CHIPS, complete=True, gx1=6)) == []
    assert found(world, stream("inventory", "north", CHIPS[:4], complete=True)) == []
    assert found(world, stream("customs", "north", CHIPS[:4]), stream("inspection", "north", CHIPS[:2])) == []


def test_every_disagreement_has_its_rule(world: World) -> None:
    alien = chip_name(99)
    assert found(world, stream("maker", "fab", [*CHIPS, alien])) == [("unregistered", alien, "fab")]
    assert found(world, stream("maker", "fab", CHIPS[:5], complete=True)) == [("missing", CHIPS[5], "fab")]
    assert found(world, stream("maker", "fab", [], gx1=7)) == [("other-count", "", "fab")]
    assert found(world, stream("maker", "south", CHIPS[:1])) == [("other-maker", CHIPS[0], "south")]
    assert found(world, stream("customs", "south", CHIPS[:1])) == [("moved-unregistered", CHIPS[0], "south")]
    assert found(world, stream("inventory", "north", CHIPS[:3], complete=True)) == [
        ("missing", CHIPS[3], "north")
    ]
    assert found(world, stream("inspection", "south", CHIPS[:1])) == [("held-by-another", CHIPS[0], "south")]
    world.do("loss", ["north"], owner="north", chips=CHIPS[:1], reason="theft")
    world.do(
        "retire", ["north", "watch"], owner="north", witness="watch", chips=CHIPS[1:2], evidence="ab" * 32
    )
    assert found(world, stream("inspection", "north", CHIPS[:2])) == [
        ("seen-though-lost", CHIPS[0], "north"), ("seen-though-retired", CHIPS[1], "north"),
    ]  # fmt: skip
    assert found(world, stream("inventory", "north", CHIPS[2:4], complete=True)) == []


def test_a_chip_in_two_lists_is_one_identity_on_two_chips_or_one_chip_shown_twice(world: World) -> None:
    two = [stream("inventory", "north", CHIPS[:1]), stream("inventory", "south", CHIPS[:1])]
    assert ("seen-twice", CHIPS[0], "north") in found(world, *two)


def test_streams_have_one_encoding() -> None:
    made = stream("maker", "fab", CHIPS[:2], gx1=2)
    assert Stream.parse(made.encode()) == made
    others: list[tuple[dict[str, object], str]] = [
        ({"kind": "rumour"}, "must be one of"),
        ({"chips": [CHIPS[0], CHIPS[0]]}, "listed twice"),
        ({"units": {"gx1": -1}}, "units: 'gx1' must be 0 to 2"),
    ]
    for other, reason in others:
        with pytest.raises(InvalidInput, match=reason):
            Stream.parse(canonical_json({**made.fields(), **other}))


# ------------------------------------------------------------------------------------ exports and frames


def test_the_corim_names_each_chip_its_key_and_its_board(world: World) -> None:
    world.do("board", ["north"], holder="north", board="B1", chips=CHIPS[:2])
    models = {model.name: model for model in world.ledger.each_model()}
    data = export_corim("world", world.ledger.each_chip(owner="north"), models)
    document = cbor2.loads(data)
    assert document.tag == 501
    (tag,) = document.value[1]
    assert tag.tag == 506
    triples = cbor2.loads(tag.value)[4]
    environment, (thumbprint,) = triples[2][0]
    assert environment[0] == {1: "fab", 2: "gx1"}
    names = {entry[0][1].value.hex(): entry[1][0].value[1].hex() for entry in triples[2]}
    assert names == {chip: key_of(chip).public_key.key_id for chip in CHIPS[:4]}
    assert (environment[1].tag, thumbprint.tag, thumbprint.value[0]) == (550, 557, 1)
    assert triples[3] == triples[2]
    ((domain, members),) = triples[5]
    assert domain[2].value == b"B1"
    assert len(members) == 2
    assert cbor2.dumps(document, canonical=True) == data
    with pytest.raises(InvalidInput, match=r"model gx1 .* is not declared"):
        export_corim("world", world.ledger.each_chip(), {})


def test_the_frame_of_a_draw_leaves_out_what_is_lost_scrapped_or_exempt(world: World) -> None:
    world.do("loss", ["north"], owner="north", chips=CHIPS[:1], reason="theft")
    world.do("damage", ["north"], owner="north", chips=CHIPS[1:2], reason="fan")
    world.do("exempt", [REGISTRY], chips=CHIPS[2:3], until=START + 100, reason="school")
    frame = claims.make_frame(world.ledger.each_chip(), now=START)
    assert frame.strata() == {"gx1": sorted([CHIPS[1], *CHIPS[3:]])}
    later = claims.make_frame(world.ledger.each_chip(), now=START + 100)
    assert CHIPS[2] in later.strata()["gx1"]
    assert claims.parse_frame(frame.encode()) == frame
    assert claims.parse_frame(frame.encode()).root() == frame.root() != later.root()
    fleet = claims.fleet_fields(
        world.ledger.each_chip(), {m.name: m for m in world.ledger.each_model()}, now=START
    )
    strata = fleet["strata"]
    assert isinstance(strata, list)
    assert [(s["name"], s["chips"], s["exempt"]) for s in strata] == [
        ("gx1", 4, False),
        ("gx1/exempt", 1, True),
    ]
    lines = frame.encode().splitlines(keepends=True)
    for other in (b"", b"a b", b"".join(lines[::-1]), lines[0] * 2, b"a  b c\n", "ä b c\n".encode()):
        with pytest.raises(InvalidInput):
            claims.parse_frame(other)
