"""Logs of a real agent at an inspection: an honest one passes, and no shortened, forked or rolled-back one does."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.cli.fleet.inspection import read_package
from tallystick.cli.main import main
from tallystick.fleet.agent.chip_log import read_log, verify_log
from tallystick.fleet.agent.chip_record import parse_record, sign_record
from tallystick.fleet.attestation.assurance import CheckedEvidence, derive_assurance
from tallystick.fleet.inspection import inspection
from tallystick.fleet.inspection.extraction import attested_chips
from tallystick.fleet.inspection.inspection import WorkOrder
from tallystick.fleet.inspection.package import InspectionPackage
from tallystick.fleet.registry.facts import Chip
from tallystick.fleet.registry.industry import key_of
from tallystick.signing.dsse import sign_payload
from tallystick.store.chips import ChipDirectory
from tallystick.store.journal import MAGIC, Journal, read_journal
from tallystick.store.keys import load_key, load_public_key, write_key

Change = Callable[["Visited", Path, Path], None]


@pytest.fixture(scope="module")
def chips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chip whose agent ran twice, as it was after the first time and after the second, and another chip."""
    place = tmp_path_factory.mktemp("chips")
    write_key(place / "owner", key_of("owner"))
    for name in ("one", "two"):
        arguments = (
            "chip",
            "init",
            place / name,
            "--owner",
            place / "owner.pub",
            "--snapshots-per-day",
            40_000,
        )
        assert main([*map(str, arguments)]) == 0
        assert main(["chip", "agent", str(place / name), "--for", "1"]) == 0
    shutil.copytree(place / "one", place / "before")
    assert main(["chip", "agent", str(place / "one"), "--for", "1"]) == 0
    return place


class Visited:
    """An inspection of chip ``one`` by the inspector "watch"."""

    def __init__(self, place: Path, chips: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.place, self.chips, self.capfd = place, chips, capfd
        self.ueid = str(json.loads((chips / "one" / "chip.json").read_text())["ueid"])
        self.key = load_key(str(chips / "one" / "chip.key"))
        for name in ("registry", "watch"):
            write_key(place / name, key_of(name))
        self.trust = [f"--trust={name}={place / name}.pub" for name in ("registry", "watch")]

    def tally(self, *arguments: object, code: int = 0) -> dict[str, object]:
        found = main([*map(str, arguments), "--json"])
        out, err = self.capfd.readouterr()
        assert found == code, (out, err)
        return json.loads(out)

    def order(self, nonce: bytes) -> WorkOrder:
        chip = Chip(
            self.ueid,
            "gx1",
            "fab",
            "SN-1",
            self.key.public_key.key_id,
            "",
            "north",
            "north",
            "active",
            0,
            0,
            1,
        )
        now = int(time.time())
        return inspection.make_order(
            [chip], registry="ab" * 32, entries=1, draw=bytes(32), period=0, inspector="watch", custodian="north",
            issued=now - 10, due=now + 10_000, nonce=nonce, seals=(), photos=0,
        )  # fmt: skip

    def inspect(
        self, name: str, chip: str, change: Change | None = None, *, nonce: bytes = b"\7" * 32
    ) -> Path:
        """Return the sealed package of a visit to the chip's directory ``chip``."""
        order, package = self.order(nonce), self.place / name
        signed = sign_payload(inspection.ORDER_TYPE, order.encode(), [key_of("registry")]).encode()
        (self.place / f"{name}.order").write_bytes(signed)
        self.tally(
            "inspect",
            "pack",
            self.place / f"{name}.order",
            package,
            "--key",
            self.place / "watch",
            *self.trust,
        )
        log, token = self.place / f"{name}.journal", self.place / f"{name}.token"
        asked = order.chip_nonce(self.ueid).hex()
        assert main(["chip", "attest", str(self.chips / chip), "--nonce", asked, "--out", str(token)]) == 0
        shutil.copy(ChipDirectory(self.chips / chip).log_path, log)
        if change is not None:
            change(self, log, token)
        self.tally(
            "inspect", "record", package, self.ueid, "--key", self.place / "watch", "--serial", "SN-1", "--log", log,
            "--evidence", token, "--device-key", self.chips / "one" / "chip.key.pub",
        )  # fmt: skip
        self.tally("inspect", "seal", package, "--key", self.place / "watch")
        return package

    def check(self, package: Path, *more: object, code: int) -> str:
        found = self.tally("inspect", "check", package, *self.trust, *more, code=code)
        (chip,) = found["chips"]  # pyright: ignore[reportGeneralTypeIssues]
        return "; ".join(chip["reasons"])


@pytest.fixture
def visit(tmp_path: Path, chips: Path, capfd: pytest.CaptureFixture[str]) -> Visited:
    return Visited(tmp_path, chips, capfd)


def write(path: Path, frames: Sequence[bytes]) -> None:
    path.unlink()
    journal = Journal(path)
    for frame in frames:
        journal.append(frame)
    journal.close()


def test_the_log_of_an_honest_agent_passes(visit: Visited) -> None:
    before = visit.inspect("before", "before", nonce=b"\1" * 32)
    assert visit.check(before, code=0) == ""
    after = visit.inspect("after", "one")
    assert visit.check(after, "--earlier", before, code=0) == ""


def test_an_inspection_that_was_passed_gives_the_head_to_hold_later_logs_against(visit: Visited) -> None:
    package = visit.inspect("head", "one")
    keys = {name: key_of(name).public_key for name in ("registry", "watch")}
    verdict = read_package(package, keys, "chip", [])
    (stated,) = attested_chips(verdict, InspectionPackage(package).load_files()).values()
    log, findings = read_log(ChipDirectory(visit.chips / "one").frames(), visit.key.public_key)
    assert findings == []
    assert (stated.head.seq, stated.head.digest) == (log[-1].record.seq, log[-1].digest)
    assert (
        derive_assurance(log, [], CheckedEvidence(True, stated, inspected=True)).level == 1
    )  # a software agent's
    rolled, _ = read_log(ChipDirectory(visit.chips / "before").frames(), visit.key.public_key)
    assert [found.rule for found in verify_log(rolled, known=[stated.head])] == [11]
    failed = visit.inspect("failed", "one", cut_records, nonce=b"\2" * 32)
    verdict = read_package(failed, keys, "chip", [])
    assert attested_chips(verdict, InspectionPackage(failed).load_files()) == {}


def test_records_appended_while_the_file_was_copied_are_no_fault(visit: Visited) -> None:
    def attested_earlier(visit: Visited, log: Path, token: Path) -> None:
        shutil.copy(visit.chips / "one" / "log.journal", log)

    assert visit.check(visit.inspect("grown", "before", attested_earlier), code=0) == ""


def cut_records(visit: Visited, log: Path, token: Path) -> None:
    write(log, read_journal(log)[:-2])


def cut_bytes(visit: Visited, log: Path, token: Path) -> None:
    log.write_bytes(log.read_bytes()[:-5])


def drop_a_record(visit: Visited, log: Path, token: Path) -> None:
    frames = read_journal(log)
    write(log, [frames[0], *frames[2:]])


def turn_a_bit(visit: Visited, log: Path, token: Path) -> None:
    data = bytearray(log.read_bytes())
    (size,) = struct.unpack_from("<I", data, len(MAGIC))
    data[len(MAGIC) + 12 + size - 1] ^= 1
    log.write_bytes(data)


def resign_a_record(visit: Visited, log: Path, token: Path) -> None:
    """The last record but one is another, signed by the chip all the same: a fork."""
    frames = read_journal(log)
    last = parse_record(frames[-2], visit.key.public_key).record
    other = sign_record(replace(last, clocks=replace(last.clocks, active=last.clocks.active + 1)), visit.key)
    write(log, [*frames[:-2], other.signed, frames[-1]])


def take_an_old_token(visit: Visited, log: Path, token: Path) -> None:
    assert main(["chip", "attest", str(visit.chips / "one"), "--nonce", "00" * 32, "--out", str(token)]) == 0


def show_another_chip(visit: Visited, log: Path, token: Path) -> None:
    shutil.copy(visit.chips / "two" / "log.journal", log)


def show_no_log(visit: Visited, log: Path, token: Path) -> None:
    log.write_bytes(b"a file that is no log")


CHANGES: list[tuple[Change, str]] = [
    (cut_records, "rule 11, truncated"),
    (cut_bytes, "ends in the middle of a record"),
    (drop_a_record, "rule 5, counter"),
    (turn_a_bit, "is damaged at byte"),
    (resign_a_record, "rule 6, broken chain"),
    (take_an_old_token, "answers nonce"),
    (show_another_chip, "rule 2, wrong signature"),
    (show_no_log, "does not begin as a journal"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_changed_log_fails_with_its_reason(visit: Visited, change: Change, reason: str) -> None:
    assert reason in visit.check(visit.inspect("changed", "one", change), code=1)


def test_a_chip_that_went_back_to_a_copy_fails_by_its_own_earlier_log(visit: Visited) -> None:
    """The owner puts an old copy of the chip in place and attests it afresh: only an earlier log tells."""
    before = visit.inspect("first", "one", nonce=b"\1" * 32)
    shutil.copytree(visit.chips / "before", visit.chips / "rolled", dirs_exist_ok=True)
    rolled = visit.inspect("rolled", "rolled")
    assert visit.check(rolled, code=0) == ""  # alone it is a consistent log
    assert "rule 11, truncated" in visit.check(rolled, "--earlier", before, code=1)
    longer = len(read_journal(visit.chips / "one" / "log.journal"))
    while len(read_journal(visit.chips / "rolled" / "log.journal")) <= longer:
        assert main(["chip", "agent", str(visit.chips / "rolled"), "--for", "1.5"]) == 0
    forked = visit.inspect("forked", "rolled", nonce=b"\3" * 32)
    assert visit.check(forked, code=0) == ""
    assert "rule 12, fork" in visit.check(forked, "--earlier", before, code=1)


def test_the_reader_is_the_checkers_choice(visit: Visited) -> None:
    """A chip cannot ask for the plain reader by handing over a plainly signed file."""

    def sign_plainly(visit: Visited, log: Path, token: Path) -> None:
        log.write_bytes(b"what I say")
        nonce = visit.order(b"\7" * 32).chip_nonce(visit.ueid)
        token.write_bytes(
            inspection.extract_log(b"what I say", chip=visit.ueid, nonce=nonce, signer=visit.key)
        )

    package = visit.inspect("plain", "one", sign_plainly)
    assert "evidence: " in visit.check(package, code=1)
    assert visit.check(package, "--logs", "plain", code=0) == ""
    assert "must be chip or plain" in str(
        visit.tally("inspect", "check", package, *visit.trust, "--logs", "any", code=2)
    )


def test_an_unacknowledged_log_of_a_remote_chip_does_not_pass_as_unclear(visit: Visited) -> None:
    """What cannot be told is a reason too: here the findings of an empty journal."""

    def empty(visit: Visited, log: Path, token: Path) -> None:
        log.write_bytes(MAGIC)

    assert "(cannot be told)" in visit.check(visit.inspect("empty", "one", empty), code=1)
    assert load_public_key(visit.chips / "one" / "chip.key.pub") == visit.key.public_key
