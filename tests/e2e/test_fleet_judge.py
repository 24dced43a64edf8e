"""One case of a fleet: which claim holds at which level, and what is lost with each piece of evidence."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tallystick.cli.fleet.judging import latest_of
from tallystick.cli.main import main
from tallystick.execution.job import find_source
from tallystick.fleet.agent.agent import boot_log
from tallystick.fleet.agent.memory import Region
from tallystick.fleet.agent.probes import ProcessMemory
from tallystick.fleet.attestation.assurance import CheckedEvidence, attest_head, parse_attestation
from tallystick.fleet.attestation.tpm import PcrReference, TpmEvidence
from tallystick.fleet.inspection import inspection
from tallystick.fleet.inspection.inspection import InspectionFinding, Seal
from tallystick.fleet.inspection.package import InspectionPackage
from tallystick.fleet.provenance.observation import ObservationPlan
from tallystick.fleet.provenance.owner_findings import status_of
from tallystick.fleet.provenance.submission import OwnerFolder
from tallystick.fleet.provenance.transcripts import Lineage
from tallystick.fleet.provenance.verification import OwnerVerdict
from tallystick.fleet.registry.facts import REGISTRY
from tallystick.fleet.registry.industry import START, Industry, chip_name, key_of
from tallystick.fleet.registry.ledger import RegistryLedger
from tallystick.fleet.registry.reconcile import INVENTORY, MAKER, Stream
from tallystick.integrations.observed import Registration, observe
from tallystick.integrations.watching import Inquiry, KnownChip, descends, read_at, verify_owner
from tallystick.signing.dsse import sign_payload
from tallystick.signing.keys import SigningKey, parse_signing_key
from tallystick.store.chips import ChipDirectory
from tallystick.testing import devices
from tallystick.testing.watched import FIRST_DAY, Course, Fleet, Trained, chip_key, report_run, train

JOB = "tallystick.testing.noise_job"
COURSE, SMALL = Course(JOB, 24, 4), {"width": "32"}
CHIP, OTHER = sorted(chip_name(at) for at in range(2))
NONCE, BEACON = "5a" * 32, "07" * 32
Judge = Callable[..., tuple[int, dict[str, Any]]]


def device_key(ueid: bytes) -> SigningKey:
    """The key of a chip's firmware, for which its maker vouches."""
    pem = devices.key_of(f"log {ueid.hex()}").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return parse_signing_key(pem)


def watched(place: Path, agent: str) -> Fleet:
    """An owner whose one chip watched one declared run; everything of it is handed over."""
    fleet = Fleet(place, [bytes.fromhex(CHIP)], agent=agent, keys=device_key)
    directory = fleet.out / "runs" / "model"
    trained = train(fleet, fleet.chips, directory, SMALL, course=COURSE)
    assert isinstance(trained, Trained)
    report_run(fleet, fleet.chips, directory, trained, SMALL, COURSE)
    fleet.close()
    return fleet


def attested(fleet: Fleet, nonce: str) -> bytes:
    """What the chip attests for a nonce, its agent alive until now."""
    key, (chip,) = device_key(bytes.fromhex(CHIP)), fleet.chips
    log = boot_log(ChipDirectory(fleet.out / "chips" / CHIP), key.public_key)
    return attest_head(log[-1], bytes.fromhex(nonce), bytes(16), chip.agent.settings.genesis.agent, key)


def inspected(
    place: Path, fleet: Fleet, *, seal: Seal = "intact", days: int = 1, name: str = "visit"
) -> None:
    """An inspector stood before the chip, days after its log ends, and took its log away."""
    issued = (FIRST_DAY + fleet.time.now) // 1000 + days * 86400
    journal = (fleet.out / "chips" / CHIP / "log.journal").read_bytes()
    with RegistryLedger(place / "registry") as ledger:
        chips = [each for each in ledger.each_chip() if each.chip == CHIP]
    order = inspection.make_order(
        chips, registry="ab" * 32, entries=9, draw=b"\1" * 32, period=3, inspector="watch", custodian="north",
        issued=issued, due=issued + 1000, nonce=b"\7" * 32, seals=("case",), photos=1,
    )  # fmt: skip
    industry = Industry()
    package = InspectionPackage(place / name)
    signed = sign_payload(inspection.ORDER_TYPE, order.encode(), [industry.keys[REGISTRY]]).encode()
    package.begin(signed, order, industry.keys["watch"], now=issued + 1)
    key = device_key(bytes.fromhex(CHIP)).public_key.spki
    finding = InspectionFinding(
        CHIP, "seen", issued + 10, f"SN-{CHIP[:12]}", key=key, seals=(("case", seal),)
    )
    evidence = attested(fleet, order.chip_nonce(CHIP).hex())
    package.record(
        finding,
        industry.keys["watch"],
        now=issued + 20,
        log=journal,
        evidence=evidence,
        photos=[b"a picture"],
    )
    package.seal(industry.keys["watch"], now=issued + 90)


def registered(
    place: Path, *, owner: str = "north", more: list[str] | None = None, key: str | None = None
) -> None:
    """A registry that lists the chip, and what its maker and the hall say of it."""
    industry, chips = Industry(), [CHIP, *(more or [])]
    own = (
        device_key(bytes.fromhex(CHIP)).public_key.key_id
        if key is None
        else key and key_of(key).public_key.key_id
    )
    rows = [
        [chip, f"SN-{chip[:12]}", own if chip == CHIP else key_of(chip).public_key.key_id] for chip in chips
    ]
    made = [
        industry.event("fab", {"maker": "fab", "model": "gx1", "chips": chips}, "fab"),
        industry.event("package", {"maker": "fab", "chips": rows}, "fab"),
    ]
    with RegistryLedger(place / "registry") as ledger:
        sale = industry.sell(chips, "fab", owner)
        entries = [*industry.beginning(), *made, sale]
        ledger.append(entries, industry.keys[REGISTRY], now=START)
    for name, kind, party, source in (
        ("maker", MAKER, "fab", "fab"),
        ("hall", INVENTORY, owner, "an auditor"),
    ):
        stream = Stream(kind, source, party, "", START, True, tuple(chips), {})
        (place / f"{name}.json").write_bytes(stream.encode())


def endorsed(place: Path) -> None:
    chain = (devices.issue(f"log {CHIP}", "line", is_ca=False), devices.issue("line", "maker root"))
    (place / "chain.pem").write_bytes(b"".join(each.public_bytes(Encoding.PEM) for each in chain))
    (place / "root.pem").write_bytes(devices.issue("maker root", "maker root").public_bytes(Encoding.PEM))


def day(fleet: Fleet, after: int = 0) -> str:
    return datetime.fromtimestamp((FIRST_DAY + after) / 1000, UTC).isoformat()


def case(fleet: Fleet, *, left_out: str = "") -> str:
    """The case with everything there is, but for one thing."""
    parts = {
        "plan": f'since = "{day(fleet)}"\nuntil = "{day(fleet, fleet.time.now)}"\nsnapshots_per_day = 1.0\n'
        f'beacon = "{BEACON}"\njob = "{JOB}"\nnonce = "{NONCE}"\n',
        "registry": '[registry]\ndirectory = "registry"\n',
        "streams": 'streams = ["maker.json", "hall.json"]\n',
        "inspection": '[inspection]\npackages = ["visit"]\ntrust = ["registry=registry.pub", "watch=watch.pub"]\n',
        "owner": '[[owner]]\nname = "north"\nfolder = "owner"\n',
        "chip": f'[[owner.chip]]\nueid = "{CHIP}"\nkey = "device.pub"\n',
        "attestation": 'attestation = "token"\n',
        "endorsement": 'endorsement = "chain.pem"\ndevice_root = "root.pem"\n',
    }
    return 'format = "tallystick/fleet-case/1"\n[plan]\n' + "".join(
        part for name, part in parts.items() if name != left_out
    )


@pytest.fixture(scope="module")
def firmware(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Fleet]:
    return prepared(tmp_path_factory.mktemp("firmware"), "firmware")


def prepared(place: Path, agent: str) -> tuple[Path, Fleet]:
    fleet = watched(place / "owner", agent)
    registered(place)
    endorsed(place)
    inspected(place, fleet)
    (place / "token").write_bytes(attested(fleet, NONCE))
    (place / "device.pub").write_bytes(device_key(bytes.fromhex(CHIP)).public_key.pem())
    industry = Industry()
    for party in ("registry", "watch"):
        (place / f"{party}.pub").write_bytes(industry.keys[party].public_key.pem())
    return place, fleet


@pytest.fixture
def judge(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Judge:
    def call(place: Path, text: str, *more: str) -> tuple[int, dict[str, Any]]:
        (place / "case.toml").write_text(text)
        capfd.readouterr()
        code = main(["fleet", "judge", str(place / "case.toml"), "--json", *more])
        caught = capfd.readouterr()
        return code, json.loads(caught.out) if caught.out.startswith("{") else {"error": caught.err}

    return call


def told(answer: dict[str, Any]) -> tuple[Any, ...]:
    """The three claims, and the level of the one chip."""
    (owner,) = answer["owners"]
    claims = ("declared_run_correctness", "declared_run_completeness", "fleet_completeness")
    return (*(owner[claim] for claim in claims), owner["chips"][0]["assurance"]["level"])


def test_everything_there_is_reaches_the_highest_level(firmware: tuple[Path, Fleet], judge: Judge) -> None:
    place, fleet = firmware
    html = place / "page.html"
    code, answer = judge(place, case(fleet), "--html", str(html), "--findings", str(place / "findings"))
    assert (code, *told(answer)) == (0, "pass", "pass", "pass", 4)
    (chip,) = answer["owners"][0]["chips"]
    assert (chip["observed"], chip["assurance"]["next_level_lacks"]) == (True, [])
    assert (
        "L4, endorsed firmware, inspected, in a reconciled registry; observed from 2026-02-02"
        in html.read_text()
    )
    assert (place / "findings" / "001.json").exists()


@pytest.mark.parametrize(
    ("left_out", "said", "lacks"),
    [
        ("streams", ("pass", "pass", "unknown", 3), "a reconciled registry"),
        ("inspection", ("pass", "pass", "unknown", 3), "an inspection"),
        ("endorsement", ("pass", "pass", "pass", 1), "a TPM's quote over the attested head"),
    ],
)
def test_without_one_piece_of_evidence_the_level_is_lost(
    left_out: str, said: tuple[Any, ...], lacks: str, firmware: tuple[Path, Fleet], judge: Judge
) -> None:
    place, fleet = firmware
    code, answer = judge(place, case(fleet, left_out=left_out))
    assert told(answer) == said
    assert lacks in answer["owners"][0]["chips"][0]["assurance"]["next_level_lacks"]
    assert code == (3 if "unknown" in said else 0)


def test_without_an_attestation_for_the_nonce_that_of_the_inspection_counts(
    firmware: tuple[Path, Fleet], judge: Judge
) -> None:
    place, fleet = firmware
    code, answer = judge(place, case(fleet, left_out="attestation"))
    assert (code, told(answer)[3]) == (0, 4)
    text = case(fleet, left_out="attestation").replace('packages = ["visit"]', "packages = []")
    code, answer = judge(place, text)
    assert (code, told(answer)) == (3, ("pass", "unknown", "unknown", 0))
    lacks = answer["owners"][0]["chips"][0]["assurance"]["next_level_lacks"]
    assert lacks == ["an attestation of the log's last record for a fresh nonce"]


@pytest.fixture
def copied(firmware: tuple[Path, Fleet], tmp_path: Path) -> tuple[Path, Fleet]:
    """The same, to be changed."""
    return Path(shutil.copytree(firmware[0], tmp_path / "copy")), firmware[1]


def findings(answer: dict[str, Any], rule: int) -> list[tuple[str, str]]:
    (owner,) = answer["owners"]
    every = [*owner["findings"], *(each for run in owner["runs"] for each in run["findings"])]
    return [(each["severity"], each["text"]) for each in every if each["rule"] == rule]


def again(place: Path, what: str) -> None:
    """Remove something that is made anew."""
    shutil.rmtree(place / what)


def test_a_chip_that_fails_its_inspection_is_a_finding(
    copied: tuple[Path, Fleet], judge: Judge, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before, `tally monitor verify` passed over a package in which it failed."""
    place, fleet = copied
    again(place, "visit")
    inspected(place, fleet, seal="broken")
    code, answer = judge(place, case(fleet))
    assert (code, *told(answer)) == (1, "pass", "fail", "fail", 0)
    ((severity, text),) = findings(answer, 120)
    assert (severity, "failed its inspection" in text, "seal" in text) == ("violation", True, True)
    again(place, "owner/runs")
    (place / "owner" / "runs").mkdir()
    verify = [
        "monitor",
        "verify",
        str(place / "owner"),
        "--chip",
        f"{CHIP}={place / 'device.pub'}",
        "--beacon",
        BEACON,
    ]
    verify += ["--inspection", str(place / "visit"), "--json"]
    for party in ("registry", "watch"):
        verify += ["--trust", f"{party}={place / party}.pub"]
    capfd.readouterr()
    assert main(verify) == 1
    assert findings({"owners": [json.loads(capfd.readouterr().out)]}, 120)[0][0] == "violation"


@pytest.mark.parametrize(
    ("change", "rule", "severity", "said"),
    [
        ({"owner": "south"}, 122, "violation", f"chip {CHIP} was shown by north and is registered to south"),
        ({"more": [OTHER]}, 122, "violation", f"chip {OTHER} is registered to north and was not shown"),
        ({"key": "another"}, 122, "violation", "registered is"),  # and the level falls
    ],
)
def test_what_the_registry_says_otherwise_fails_the_fleet(
    change: dict[str, Any], rule: int, severity: str, said: str, copied: tuple[Path, Fleet], judge: Judge
) -> None:
    place, fleet = copied
    again(place, "registry")
    registered(place, **change)
    code, answer = judge(place, case(fleet))
    assert (code, told(answer)[2]) == (1, "fail")
    assert any(each[0] == severity and said in each[1] for each in findings(answer, rule)), answer
    assert told(answer)[3] == (0 if "key" in change else 3 if "owner" in change else 4)
    assert told(judge(place, case(fleet), "--claim", "runs", "--claim", "complete")[1])[:2] == (
        "pass",
        "pass",
    )


@pytest.mark.parametrize(
    "stream",
    [
        Stream(INVENTORY, "north", "north", "", START, True, (CHIP,), {}),
        Stream(INVENTORY, "an auditor", "south", "", START, False, (), {}),
    ],
)
def test_an_owners_own_list_or_an_empty_one_shows_nothing(
    stream: Stream, copied: tuple[Path, Fleet], judge: Judge
) -> None:
    """Before, fleet completeness passed by them."""
    place, fleet = copied
    for name in ("maker", "hall"):
        (place / f"{name}.json").write_bytes(stream.encode())
    code, answer = judge(place, case(fleet))
    assert (code, *told(answer)) == (3, "pass", "pass", "unknown", 3)
    assert f"no list of somebody else names chip {CHIP}" in findings(answer, 122)[0][1]
    assert answer["owners"][0]["chips"][0]["assurance"]["next_level_lacks"] == ["a reconciled registry"]


def test_what_a_competitor_lists_accuses_nobody_else(copied: tuple[Path, Fleet], judge: Judge) -> None:
    """South says that north's chip stands in its hall: one of the two is wrong, and nobody knows which."""
    place, fleet = copied
    claimed = Stream(INVENTORY, "south", "south", "", START, False, (CHIP,), {})
    (place / "south.json").write_bytes(claimed.encode())
    code, answer = judge(place, case(fleet).replace('"hall.json"]', '"hall.json", "south.json"]'))
    assert (code, *told(answer)) == (3, "pass", "pass", "unknown", 3)
    assert {severity for severity, _ in findings(answer, 122)} == {"unknown"}


def test_evidence_that_does_not_hold_is_no_evidence(copied: tuple[Path, Fleet], judge: Judge) -> None:
    place, fleet = copied
    (place / "root.pem").write_bytes(devices.issue("my root", "my root").public_bytes(Encoding.PEM))
    code, answer = judge(place, case(fleet))
    assert (code, *told(answer)) == (3, "pass", "unknown", "pass", 1)
    assert [severity for severity, _ in findings(answer, 121)] == ["unknown"]
    (place / "token").write_bytes(attested(fleet, "00" * 32))
    code, answer = judge(place, case(fleet, left_out="endorsement"))
    assert (code, len(findings(answer, 121)), "answers nonce" in findings(answer, 121)[0][1]) == (3, 1, True)


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ("flop_per_chip_second = 1e-3\n", 109),
        ("least_rate = 2.0\n", 15),
    ],
)
def test_limits_of_the_plan_are_held(
    more: str, rule: int, firmware: tuple[Path, Fleet], judge: Judge
) -> None:
    """Rules 15 and 109 had no command."""
    place, fleet = firmware
    plain = case(fleet)
    assert not findings(judge(place, plain)[1], rule)
    code, answer = judge(place, plain.replace("[registry]", f"{more}[registry]"))
    assert (code, findings(answer, rule)[0][0]) == (1, "violation")


def test_time_that_no_declared_run_needs_is_asked_about(firmware: tuple[Path, Fleet], judge: Judge) -> None:
    place, fleet = firmware
    text = case(fleet).replace(
        "[registry]", "flop_per_chip_second = 1e15\nleast_utilisation = 0.5\n[registry]"
    )
    code, answer = judge(place, text)
    assert (code, findings(answer, 109)[0][0]) == (3, "unknown")
    code, answer = judge(place, text + "hours = 144.0\n")
    assert (code, findings(answer, 109)[0][0]) == (1, "violation")


def test_a_chip_that_came_later_is_asked_for_its_own_time(firmware: tuple[Path, Fleet], judge: Judge) -> None:
    place, fleet = firmware
    earlier = case(fleet).replace(f'since = "{day(fleet)}"', f'since = "{day(fleet, -30 * 86_400_000)}"')
    code, answer = judge(place, earlier)
    assert (code, told(answer)[1], answer["owners"][0]["chips"][0]["observed"]) == (3, "unknown", False)
    code, answer = judge(place, earlier + f'since = "{day(fleet)}"\n')
    assert (code, told(answer)[1], answer["owners"][0]["chips"][0]["observed"]) == (0, "pass", True)


def test_what_a_chip_held_before_it_came_is_another_owners_to_explain(
    copied: tuple[Path, Fleet], judge: Judge
) -> None:
    place, fleet = copied
    again(place, "owner/runs")
    (place / "owner" / "runs").mkdir()
    whole = case(fleet, left_out="endorsement")
    _, answer = judge(place, whole)
    assert (told(answer)[1], len(findings(answer, 110))) == ("fail", 1)
    until = f'until = "{day(fleet, fleet.time.now)}"'
    later = whole.replace(until, f'until = "{day(fleet, fleet.time.now + 60_000)}"')
    _, answer = judge(place, later + f'since = "{day(fleet, fleet.time.now + 1)}"\n')
    assert (told(answer)[1] == "fail", findings(answer, 110)) == (False, [])
    _, answer = judge(place, whole + f'until = "{day(fleet, 1)}"\n')  # and after it left
    assert (told(answer)[1] == "fail", findings(answer, 110)) == (False, [])


def test_a_simulated_chip_has_no_level_and_a_software_agent_the_first(tmp_path: Path, judge: Judge) -> None:
    for agent, level in (("simulated", 0), ("software", 1)):
        place, fleet = prepared(tmp_path / agent, agent)
        code, answer = judge(place, case(fleet))
        assert (code, *told(answer)) == (0, "pass", "pass", "pass", level)


def test_a_quote_of_a_tpm_is_worth_the_second_level(tcti: str, tmp_path: Path, judge: Judge) -> None:
    def run(*arguments: object) -> None:
        assert main([str(each) for each in arguments]) == 0

    place, chip = tmp_path / "case", tmp_path / "chip"
    (place / "owner" / "runs").mkdir(parents=True)
    run("key", "generate", tmp_path / "owner.key")
    run("chip", "init", chip, "--owner", tmp_path / "owner.key.pub", "--tpm", tcti)
    run("chip", "agent", chip, "--for", "0")
    run("chip", "attest", chip, "--nonce", NONCE, "--out", place / "token", "--tpm", place / "tpm.json")
    evidence = TpmEvidence.parse((place / "tpm.json").read_bytes())
    (place / "pcrs.json").write_bytes(PcrReference("sha256", evidence.registers).encode())
    for name, file in (("device.pub", "chip.key.pub"), ("tpm.pub", "tpm.pub")):
        shutil.copy(chip / file, place / name)
    ueid = json.loads((chip / "chip.json").read_bytes())["ueid"]
    shutil.copytree(chip, place / "owner" / "chips" / ueid)
    text = (
        f'format = "tallystick/fleet-case/1"\n[plan]\nsince = "2026-01-01"\nuntil = "2026-01-02"\nnonce = "{NONCE}"\n'
        f'snapshots_per_day = 1.0\nbeacon = "{BEACON}"\n[[owner]]\nname = "north"\nfolder = "owner"\n'
        f'[[owner.chip]]\nueid = "{ueid}"\nkey = "device.pub"\nattestation = "token"\n'
    )
    quote = 'tpm = "tpm.json"\ntpm_key = "tpm.pub"\npcrs = "pcrs.json"\n'
    assert told(judge(place, text)[1])[3] == 1
    assert told(judge(place, text + quote)[1])[3] == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("snapshots_per_day = 1.0", "snapshots_per_day = 0.0", "snapshots_per_day must be from 0.001"),
        ("snapshots_per_day = 1.0", "snapshots = 1.0", "'snapshots_per_day' is missing"),
        ('folder = "owner"', 'folder = "nobody"', "there is no such folder, of owner north"),
        ('nonce = "5a', 'nonce = "zz', "nonce"),
        ('key = "device.pub"', 'key = "device.pub"\nkeys = 1', "'keys' is unknown"),
        ('since = "', 'since = "the ', "must be a date"),
        ("[[owner]]", "[[owner]]\nname = 1", "is no TOML"),
    ],
)
def test_a_case_that_is_none_is_refused_in_words(
    old: str, new: str, said: str, firmware: tuple[Path, Fleet], judge: Judge
) -> None:
    place, fleet = firmware
    text = case(fleet)
    assert old in text
    code, answer = judge(place, text.replace(old, new))
    assert (code, said in answer["error"]) == (2, True), answer


def test_one_chip_belongs_to_one_owner(firmware: tuple[Path, Fleet], judge: Judge) -> None:
    place, fleet = firmware
    chip = f'[[owner.chip]]\nueid = "{CHIP}"\nkey = "device.pub"\n'
    code, answer = judge(place, case(fleet) + f'[[owner]]\nname = "south"\nfolder = "owner"\n{chip}')
    assert (code, f"chip {CHIP} is there twice" in answer["error"]) == (2, True)
    assert judge(place, case(fleet), "--claim", "all")[0] == 2


def test_two_programs_on_one_chip_are_each_found_to_be_their_runs(tmp_path: Path) -> None:
    """Their regions have numbers in front then, and nothing matched; a program that nobody declared is still nobody's."""
    fleet = Fleet(tmp_path / "owner", [bytes.fromhex(CHIP)])
    (chip,), memory = fleet.chips, fleet.chips[0].memory
    plain, held = memory.read, list[tuple[Region, bytes]]()

    def numbered(number: int, regions: list[tuple[Region, bytes]]) -> list[tuple[Region, bytes]]:
        return [(replace(region, name=f"{number}/{region.name}"), data) for region, data in regions]

    for name, settings in (("first", SMALL), ("second", {**SMALL, "init_seed": "5"})):
        directory = fleet.out / "runs" / name
        trained = train(fleet, fleet.chips, directory, settings, course=COURSE)
        assert isinstance(trained, Trained)
        report_run(fleet, fleet.chips, directory, trained, settings, COURSE)
        held[:] = memory.now
        chip.probe.take = lambda: [*numbered(0, plain()), *numbered(1, held)] if plain() else []
    fleet.close()
    key = chip_key(chip.ueid).public_key
    plan = ObservationPlan(1000, FIRST_DAY, FIRST_DAY + fleet.time.now)
    nonce = bytes.fromhex(NONCE)
    stated = parse_attestation(chip.agent.attest(nonce), key, nonce)
    known = {CHIP: KnownChip(key, (stated.head,), CheckedEvidence(True, stated))}
    inquiry = Inquiry(bytes.fromhex(BEACON), plan=plan)

    def verdict() -> tuple[OwnerVerdict, set[str]]:
        found, (view,), _ = verify_owner("north", OwnerFolder(fleet.out), known, find_source, inquiry)
        return found, {status_of(view, seq) for seq in view.matches}

    found, statuses = verdict()
    assert (found.verdict, found.findings) == ("pass", ()), found.fields()
    assert statuses <= {"exact", "torn"}
    again(fleet.out, "runs/first")
    found, _ = verdict()
    assert found.verdict == "fail"
    assert {each.rule for each in found.findings if each.severity == "violation"} >= {110, 111}


def test_a_process_may_be_observed_twice(tmp_path: Path) -> None:
    """A second model's registration took the place of the first one's, whose memory nobody saw from then on."""
    chip = ChipDirectory(tmp_path)
    chip.settings_path.write_text("{}")
    made: list[Registration] = []
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        made.append(observe(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)))
    programs = ProcessMemory(chip.observed_path).programs()
    assert len(programs) == 2 and {each.pid for each in programs} == {os.getpid()}
    made[0].close()
    assert len(ProcessMemory(chip.observed_path).programs()) == 1
    made[1].close()
    assert not list(chip.observed_path.glob("*.json")) and not list(chip.observed_path.glob("*.control"))


# -- what an owner hands over that cannot be read, and what is later or earlier than the time asked for ---


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no log": lambda owner: (owner / "chips" / CHIP / "log.journal").unlink(),
    "a log that is none": lambda owner: (owner / "chips" / CHIP / "log.journal").write_bytes(b"junk"),
    "a checkpoint missing": lambda owner: (owner / "runs/model/checkpoints/000008.safetensors").unlink(),
    "a bit flipped": lambda owner: flip(owner / "runs/model/checkpoints/000008.safetensors"),
    "a report that is none": lambda owner: (owner / "runs" / "model.report.json").write_text("{}"),
    "logs missing": lambda owner: shutil.rmtree(owner / "runs" / "model" / "logs"),
}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("how", DAMAGE)
def test_what_cannot_be_read_of_one_owner_is_unknown_and_hinders_no_other(
    how: str, copied: tuple[Path, Fleet], judge: Judge
) -> None:
    """Each ended the whole case, with exit code 2 or 1 and no report, or convicted the owner of a damaged copy."""
    place, fleet = copied
    (place / "empty" / "runs").mkdir(parents=True)
    DAMAGE[how](place / "owner")
    text = case(fleet) + '[[owner]]\nname = "south"\nfolder = "empty"\nchip = []\n'
    code, answer = judge(place, text, "--claim", "runs", "--claim", "complete")
    north, south = answer["owners"]
    assert (code, south["owner"]) == (3, "south")
    claims = {north["declared_run_correctness"], north["declared_run_completeness"]}
    assert "unknown" in claims and "fail" not in claims, north["findings"]


def test_a_pipe_in_a_snapshots_place_hangs_nobody(tmp_path: Path) -> None:
    pipe = tmp_path / "memory.bin"
    os.mkfifo(pipe)
    read = list[bytes]()
    reading = threading.Thread(target=lambda: read.append(read_at(pipe, 0, 4)), daemon=True)
    reading.start()
    reading.join(30.0)
    assert read == [b""]


def test_a_job_that_the_reader_does_not_know_accuses_nobody(copied: tuple[Path, Fleet], judge: Judge) -> None:
    place, fleet = copied
    text = case(fleet).replace(f'job = "{JOB}"\n', "")
    code, answer = judge(place, text)
    assert (code, *told(answer)[:2]) == (3, "unknown", "unknown")
    assert "is no shipped job" in findings(answer, 105)[0][1]
    code, answer = judge(place, text.replace('folder = "owner"\n', f'folder = "owner"\njob = "{JOB}"\n'))
    assert (code, *told(answer)[:2]) == (0, "pass", "pass")
    (place / "mine.py").write_text("def build(settings):\n    raise ValueError(settings)\n")
    code, answer = judge(place, text.replace('folder = "owner"\n', 'folder = "owner"\njob = "mine.py"\n'))
    assert (code, *told(answer)[:2]) == (3, "unknown", "unknown")
    assert "there is no" not in findings(answer, 105)[0][1]  # it was found beside the case


def test_what_the_reader_names_and_is_not_there_is_the_readers_mistake(
    copied: tuple[Path, Fleet], judge: Judge
) -> None:
    place, fleet = copied
    for name in ("device.pub", "token", "chain.pem"):
        code, answer = judge(place, case(fleet).replace(f'"{name}"', '"elsewhere"'))
        assert (code, "elsewhere" in answer["error"]) == (2, True)


def test_a_failure_before_a_passed_inspection_is_no_violation_any_more(
    copied: tuple[Path, Fleet], judge: Judge
) -> None:
    place, fleet = copied
    inspected(place, fleet, seal="broken", days=0, name="before")
    both = case(fleet).replace('["visit"]', '["visit", "before"]')
    code, answer = judge(place, both)
    assert (code, *told(answer)) == (3, "pass", "unknown", "pass", 4)
    assert [severity for severity, _ in findings(answer, 120)] == ["unknown"]


def test_an_inspection_of_another_time_shows_nothing(copied: tuple[Path, Fleet], judge: Judge) -> None:
    place, fleet = copied
    for days in (-7, 3650):  # before the time asked for; later than now
        again(place, "visit")
        inspected(place, fleet, days=days)
        assert told(judge(place, case(fleet))[1])[3] == 3
        assert told(judge(place, case(fleet, left_out="attestation"))[1])[3] == 0


def test_a_log_that_went_on_after_the_attestation_is_worth_what_it_was(tmp_path: Path, judge: Judge) -> None:
    """An agent writes while its log is copied: its level stays, and what it wrote is matched like all else."""
    place, fleet = prepared(tmp_path, "firmware")
    (chip,) = fleet.chips
    chip.agent.start()
    chip.agent.self_test()
    chip.agent.stop()
    code, answer = judge(place, case(fleet))
    assert (code, *told(answer)) == (0, "pass", "pass", "pass", 4)
    chip.agent.start()
    chip.memory.now = [(Region("hidden", "U8", "weights", 4), b"1234")]
    chip.agent.snapshot()
    chip.agent.stop()
    code, answer = judge(place, case(fleet))
    assert (code, told(answer)[1], findings(answer, 110)[0][0]) == (1, "fail", "violation")


@pytest.mark.parametrize("days", [-1, 1])
def test_an_inspection_that_saw_more_is_a_violation_if_it_was_before_the_end(
    days: int, tmp_path: Path, judge: Judge
) -> None:
    """What it saw then has to be in the log; what it saw later may have been logged since the hand-over: unknown."""
    place, fleet = prepared(tmp_path, "firmware")
    (chip,), journal = fleet.chips, place / "owner" / "chips" / CHIP / "log.journal"
    handed = journal.read_bytes()
    chip.agent.start()
    chip.agent.self_test()
    chip.agent.stop()
    again(place, "visit")
    inspected(place, fleet, days=days)
    journal.write_bytes(handed)
    code, answer = judge(place, case(fleet))
    if days > 0:
        assert (code, *told(answer)) == (3, "pass", "unknown", "pass", 4)
        assert ["ask for more" in text for _, text in findings(answer, 121)] == [True]
    else:
        assert (code, told(answer)[1], told(answer)[3]) == (1, "fail", 0)
        assert findings(answer, 11)[0][0] == "violation"


def test_only_an_inspection_that_was_passed_makes_up_for_a_failed_one() -> None:
    def at(issued: int, outcome: str, *, passed: bool) -> Any:
        chip = SimpleNamespace(target=SimpleNamespace(chip=CHIP), outcome=outcome, passed=passed)
        return Visited(SimpleNamespace(issued=issued), (chip,))

    failed, unreached, passed = (
        at(1, "seen", passed=False),
        at(2, "unreached", passed=False),
        at(3, "seen", passed=True),
    )
    assert [len(each.chips) for each in latest_of([unreached, failed])] == [1, 1]
    assert [len(each.chips) for each in latest_of([passed, failed])] == [0, 1]


def test_a_chip_bought_or_sold_after_the_time_asked_for_fails_nobody(
    copied: tuple[Path, Fleet], judge: Judge
) -> None:
    place, fleet = copied
    again(place, "registry")
    registered(place, more=[OTHER])
    bought = f'[[owner.chip]]\nueid = "{OTHER}"\nkey = "device.pub"\nsince = "{day(fleet, fleet.time.now + 86_400_000)}"\n'
    _, answer = judge(place, case(fleet) + bought)
    assert (told(answer)[:2], len(answer["owners"][0]["chips"])) == (("pass", "pass"), 1)
    assert not [text for _, text in findings(answer, 122) if "was not shown" in text]


@pytest.mark.parametrize("key", ["", None])
def test_a_chip_without_a_registered_key_is_not_reconciled(
    key: str | None, copied: tuple[Path, Fleet], judge: Judge
) -> None:
    place, fleet = copied
    again(place, "registry")
    registered(place, key=key)
    expected = (3, "unknown", 3) if key == "" else (0, "pass", 4)
    code, answer = judge(place, case(fleet))
    assert (code, told(answer)[2], told(answer)[3]) == expected


def test_a_chip_that_the_case_does_not_list_is_said(copied: tuple[Path, Fleet], judge: Judge) -> None:
    place, fleet = copied
    shutil.copytree(place / "owner" / "chips" / CHIP, place / "owner" / "chips" / OTHER)
    code, answer = judge(place, case(fleet))
    assert (code, told(answer)[2]) == (3, "unknown")
    assert any(OTHER in text for _, text in findings(answer, 122))


@dataclass(frozen=True)
class Visited:
    """As much of an inspection as the order of several is about."""

    order: Any
    chips: tuple[Any, ...]


def test_no_run_is_its_own_ancestor() -> None:
    """A deterministic run's root is known before it is recorded: one that named itself as its parent could begin anywhere."""

    def run(root: str, parent: str | None) -> Any:
        lineage = Lineage("initialised") if parent is None else Lineage("continued", parent, 0)
        return SimpleNamespace(report=SimpleNamespace(run=root, precommit=SimpleNamespace(lineage=lineage)))

    a, b, c, d = "a" * 64, "b" * 64, "c" * 64, "d" * 64
    runs = [run(a, a), run(b, c), run(c, b), run(d, None), run("e" * 64, d), run("f" * 64, "0" * 64)]
    assert [descends(each, runs) for each in runs] == [False, False, False, True, True, True]
