"""One case of a fleet: which claim holds at which level, and what is lost with each piece of evidence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tallystick.cli.main import main
from tallystick.fleet.agent.agent import boot_log
from tallystick.fleet.attestation.assurance import attest_head
from tallystick.fleet.attestation.tpm import PcrReference, TpmEvidence
from tallystick.fleet.inspection import inspection
from tallystick.fleet.inspection.inspection import InspectionFinding, Seal
from tallystick.fleet.inspection.package import InspectionPackage
from tallystick.fleet.registry.facts import REGISTRY
from tallystick.fleet.registry.industry import START, Industry, chip_name, key_of
from tallystick.fleet.registry.ledger import RegistryLedger
from tallystick.fleet.registry.reconcile import INVENTORY, MAKER, Stream
from tallystick.signing.dsse import sign_payload
from tallystick.signing.keys import SigningKey, parse_signing_key
from tallystick.store.chips import ChipDirectory
from tallystick.testing import devices
from tallystick.testing.watched import FIRST_DAY, Course, Fleet, Trained, report_run, train

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


def inspected(place: Path, fleet: Fleet, *, seal: Seal = "intact") -> None:
    """An inspector stood before the chip and took its log away."""
    journal = (fleet.out / "chips" / CHIP / "log.journal").read_bytes()
    with RegistryLedger(place / "registry") as ledger:
        chips = [each for each in ledger.each_chip() if each.chip == CHIP]
    order = inspection.make_order(
        chips, registry="ab" * 32, entries=9, draw=b"\1" * 32, period=3, inspector="watch", custodian="north",
        issued=START, due=START + 1000, nonce=b"\7" * 32, seals=("case",), photos=1,
    )  # fmt: skip
    industry = Industry()
    package = InspectionPackage(place / "visit")
    signed = sign_payload(inspection.ORDER_TYPE, order.encode(), [industry.keys[REGISTRY]]).encode()
    package.begin(signed, order, industry.keys["watch"], now=START + 1)
    key = device_key(bytes.fromhex(CHIP)).public_key.spki
    finding = InspectionFinding(CHIP, "seen", START + 10, f"SN-{CHIP[:12]}", key=key, seals=(("case", seal),))
    evidence = attested(fleet, order.chip_nonce(CHIP).hex())
    package.record(
        finding, industry.keys["watch"], now=START + 20, log=journal, evidence=evidence, photos=[b"a picture"]
    )
    package.seal(industry.keys["watch"], now=START + 90)


def registered(
    place: Path, *, owner: str = "north", more: list[str] | None = None, key: str | None = None
) -> None:
    """A registry that lists the chip, and what its maker and the hall say of it."""
    industry, chips = Industry(), [CHIP, *(more or [])]
    own = device_key(bytes.fromhex(CHIP)).public_key.key_id if key is None else key_of(key).public_key.key_id
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
        ({"key": "another"}, 122, "violation", "registered is"),
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
    assert told(judge(place, case(fleet), "--claim", "runs", "--claim", "complete")[1])[:2] == (
        "pass",
        "pass",
    )


def test_an_owners_own_list_reconciles_nothing(copied: tuple[Path, Fleet], judge: Judge) -> None:
    place, fleet = copied
    own = Stream(INVENTORY, "north", "north", "", START, True, (CHIP,), {})
    for name in ("maker", "hall"):
        (place / f"{name}.json").write_bytes(own.encode())
    answer = judge(place, case(fleet))[1]
    assert told(answer)[3] == 3
    assert answer["owners"][0]["chips"][0]["assurance"]["next_level_lacks"] == ["a reconciled registry"]


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
        ("flop_per_chip_second = 1e15\nleast_utilisation = 0.5\n", 109),
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


def test_a_chip_that_came_later_is_asked_for_its_own_time(firmware: tuple[Path, Fleet], judge: Judge) -> None:
    place, fleet = firmware
    earlier = case(fleet).replace(f'since = "{day(fleet)}"', f'since = "{day(fleet, -30 * 86_400_000)}"')
    code, answer = judge(place, earlier)
    assert (code, told(answer)[1], answer["owners"][0]["chips"][0]["observed"]) == (3, "unknown", False)
    code, answer = judge(place, earlier + f'since = "{day(fleet)}"\n')
    assert (code, told(answer)[1], answer["owners"][0]["chips"][0]["observed"]) == (0, "pass", True)


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
