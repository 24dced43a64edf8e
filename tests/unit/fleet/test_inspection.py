from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.cli.main import main
from tallystick.commit.encoding import canonical_json
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation, StoreError
from tallystick.fleet.inspection import custody, inspection, judging
from tallystick.fleet.inspection.inspection import InspectionFinding, InspectionResult, WorkOrder
from tallystick.fleet.inspection.judging import InspectionVerdict, LogReader
from tallystick.fleet.inspection.package import InspectionPackage
from tallystick.fleet.provenance.submission import report_leaf
from tallystick.fleet.provenance.transcripts import Lineage, Precommit, RunReport, Totals
from tallystick.fleet.registry.facts import Chip
from tallystick.fleet.registry.industry import START, chip_name, key_of
from tallystick.signing.dsse import sign_payload
from tallystick.store.keys import write_key

CHIPS = sorted(chip_name(at) for at in range(4))
WATCH, LAB = key_of("watch"), key_of("lab")
KEYS = {"watch": WATCH.public_key, "lab": LAB.public_key, "registry": key_of("registry").public_key}
LOG = b"what the chip kept"


def order() -> WorkOrder:
    chips = [
        Chip(
            chip,
            "gx1",
            "fab",
            f"SN-{chip[:12]}",
            key_of(chip).public_key.key_id,
            "B1",
            "north",
            "north",
            "active",
            0,
            0,
            8,
        )
        for chip in CHIPS
    ]
    return inspection.make_order(
        chips, registry="ab" * 32, entries=9, draw=b"\1" * 32, period=3, inspector="watch", custodian="north",
        issued=START, due=START + 1000, nonce=b"\7" * 32, seals=("case", "screw"), photos=1,
    )  # fmt: skip


def good(made: WorkOrder, chip: str) -> tuple[InspectionFinding, dict[str, object]]:
    evidence = inspection.extract_log(LOG, chip=chip, nonce=made.chip_nonce(chip), signer=key_of(chip))
    finding = InspectionFinding(
        chip, "seen", START + 10, f"SN-{chip[:12]}", key=key_of(chip).public_key.spki,
        seals=(("case", "intact"), ("screw", "intact")),
    )  # fmt: skip
    return finding, {"log": LOG, "evidence": evidence, "photos": [b"picture of " + chip.encode()]}


class Visit:
    """A package of four chips, begun by the inspector."""

    def __init__(self, path: Path) -> None:
        self.order = order()
        self.package = InspectionPackage(path)
        signed = sign_payload(inspection.ORDER_TYPE, self.order.encode(), [key_of("registry")]).encode()
        self.package.begin(signed, self.order, WATCH, now=START + 1)

    def record(
        self,
        chip: str,
        change: Callable[[InspectionFinding], InspectionFinding] | None = None,
        **files: object,
    ) -> None:
        finding, given = good(self.order, chip)
        self.package.record(
            change(finding) if change else finding, WATCH, now=START + 20, **{**given, **files}
        )  # pyright: ignore[reportArgumentType]

    def verdict(self, reader: LogReader = inspection.read_extraction) -> InspectionVerdict:
        result = self.package.seal(WATCH, now=START + 90)
        return judging.judge(self.order, result, KEYS, self.package.load_files(), reader)


@pytest.fixture
def visit(tmp_path: Path) -> Visit:
    return Visit(tmp_path / "visit")


def reasons(verdict: InspectionVerdict, chip: str) -> str:
    return "; ".join(next(each.reasons for each in verdict.chips if each.target.chip == chip))


PRECOMMIT = Precommit("22" * 32, None, (), "33" * 32, Lineage("initialised"))
REPORT = RunReport("11" * 32, 2, PRECOMMIT, "44" * 32, (), Totals(1, 1, 1))


def test_chips_that_show_everything_pass(visit: Visit) -> None:
    for chip in CHIPS:
        visit.record(chip)
    verdict = visit.verdict()
    assert all(chip.passed and not chip.reasons for chip in verdict.chips)
    assert verdict.failures == []
    (round_,) = verdict.rounds({"gx1": 100})
    assert (round_.drawn, round_.inspected, round_.refused, round_.unreached) == (4, 4, 0, 0)
    assert verdict.event_rows() == [[chip, "passed"] for chip in CHIPS]


BAD: list[tuple[str, Callable[[InspectionFinding], InspectionFinding], dict[str, object], str]] = [
    ("another serial number", lambda f: replace(f, serial="SN-other"), {}, "serial number on the part is SN-other"),
    ("no serial number", lambda f: replace(f, serial=""), {}, "is not read, registered is SN-"),
    ("a broken seal", lambda f: replace(f, seals=(("case", "broken"), ("screw", "intact"))), {}, "seal case is broken"),
    ("a seal left out", lambda f: replace(f, seals=(("case", "intact"),)), {}, "seal screw is not reported"),
    ("no photo", lambda f: f, {"photos": []}, "0 photos, 1 are asked for"),
    ("no log", lambda f: f, {"log": b""}, "no log was extracted"),
    ("another log", lambda f: f, {"log": b"an emptier log"}, "did not sign this log with this nonce"),
    ("too late", lambda f: replace(f, time=START + 2000), {}, "seen at 1800002000, the order runs from"),
    ("another device key", lambda f: replace(f, key=key_of("x").public_key.spki), {}, "is not the registered one"),
]  # fmt: skip


@pytest.mark.parametrize(("why", "change", "files", "reason"), BAD, ids=[row[0] for row in BAD])
def test_a_chip_with_one_fault_fails_with_its_reason(
    visit: Visit,
    why: str,
    change: Callable[[InspectionFinding], InspectionFinding],
    files: dict[str, object],
    reason: str,
) -> None:
    for chip in CHIPS[1:]:
        visit.record(chip)
    visit.record(CHIPS[0], change, **files)
    verdict = visit.verdict()
    assert [chip.target.chip for chip in verdict.failures] == [CHIPS[0]]
    assert reason in reasons(verdict, CHIPS[0])
    assert verdict.event_rows()[0] == [CHIPS[0], "failed"]


def test_evidence_of_an_earlier_visit_or_another_chip_is_not_fresh(visit: Visit) -> None:
    old = inspection.extract_log(LOG, chip=CHIPS[0], nonce=b"\0" * 32, signer=key_of(CHIPS[0]))
    visit.record(CHIPS[0], evidence=old)
    other = inspection.extract_log(
        LOG, chip=CHIPS[2], nonce=visit.order.chip_nonce(CHIPS[2]), signer=key_of(CHIPS[1])
    )
    visit.record(CHIPS[1], evidence=other)
    verdict = visit.verdict()
    assert all("did not sign this log with this nonce" in reasons(verdict, chip) for chip in CHIPS[:2])


def test_one_picture_shown_for_two_chips_fails_both(visit: Visit) -> None:
    for chip in CHIPS[:2]:
        visit.record(chip, photos=[b"the same picture"])
    verdict = visit.verdict()
    assert all("is shown for another chip too" in reasons(verdict, chip) for chip in CHIPS[:2])


def test_refusal_absence_and_silence_are_failures_and_only_the_unreached_are_not(visit: Visit) -> None:
    none = {"log": b"", "evidence": b"", "photos": []}
    for chip, outcome in zip(CHIPS[:3], ("refused", "absent", "unreached"), strict=True):
        visit.package.record(InspectionFinding(chip, outcome, START + 5), WATCH, now=START + 20, **none)  # pyright: ignore[reportArgumentType]
    verdict = visit.verdict()
    assert [chip.target.chip for chip in verdict.failures] == [CHIPS[0], CHIPS[1], CHIPS[3]]
    assert reasons(verdict, CHIPS[3]) == "nothing was reported: counted as a failure"
    (round_,) = verdict.rounds({"gx1": 100}, {"gx1": 2})
    assert (round_.inspected, round_.refused, round_.unreached, round_.lost) == (0, 3, 1, 2)
    assert verdict.event_rows() == [[CHIPS[0], "refused"], [CHIPS[1], "absent"], [CHIPS[3], "absent"]]


def test_an_unreached_chip_of_which_something_was_found_is_a_failure(visit: Visit) -> None:
    visit.record(CHIPS[0], lambda f: replace(f, outcome="unreached"))
    verdict = visit.verdict()
    assert CHIPS[0] in [chip.target.chip for chip in verdict.failures]
    assert "unreached, and yet something was found" in reasons(verdict, CHIPS[0])


def test_a_reader_of_real_logs_can_stand_in_for_the_plain_one(visit: Visit) -> None:
    seen: list[str] = []

    def reader(*, log: bytes, evidence: bytes, key: object, chip: str, nonce: bytes) -> list[str]:
        seen.append(chip)
        return ["the log is shortened"] if chip == CHIPS[0] else []

    for chip in CHIPS:
        visit.record(chip)
    verdict = visit.verdict(reader)
    assert seen == CHIPS
    assert reasons(verdict, CHIPS[0]) == "the log is shortened"
    assert len(verdict.failures) == 1


# ------------------------------------------------------------------------------------------------ custody


def test_custody_goes_from_hand_to_hand_and_must_come_back(visit: Visit) -> None:
    visit.record(CHIPS[0])
    visit.package.hand_over("watch", "lab", {"watch": WATCH, "lab": LAB}, now=START + 30)
    with pytest.raises(ProtocolViolation, match="watch acts, lab has custody"):
        visit.record(CHIPS[1])
    chain = visit.package.load_chain()
    forced = custody.add_link(chain, "seal", {"watch": WATCH}, items=[], time=START + 50)
    with pytest.raises(Mismatch, match="watch acts, lab has custody"):
        custody.verify_chain([*chain, forced], KEYS)


def test_a_seal_over_many_findings_can_be_read_and_none_is_made_that_cannot() -> None:
    begin = custody.add_link([], "begin", {"watch": WATCH}, items=[b"\1" * 32], time=1)
    seal = custody.add_link([begin], "seal", {"watch": WATCH}, items=[b"\2" * 32] * 2000, time=2)
    chain = custody.parse_chain(custody.encode_chain([begin, seal]))
    assert (chain, custody.verify_chain(chain, KEYS)) == ((begin, seal), "watch")
    with pytest.raises(InvalidInput, match="exceeds the limit of 16777216"):
        custody.add_link([begin], "seal", {"watch": WATCH}, items=[b"\2" * 32] * 251_000, time=2)


def test_a_link_in_another_spelling_is_refused() -> None:
    link = custody.add_link([], "begin", {"watch": WATCH}, items=[b"\1" * 32], time=1)
    value = json.loads(link.encode())
    value["signatures"][0]["note"] = "more"
    with pytest.raises(InvalidInput, match="is not written as its one encoding"):
        custody.Link.parse(canonical_json(value))
    with pytest.raises(InvalidInput, match="payloadType must be"):
        custody.Link.parse(replace(link.envelope(), payload_type="text/plain").encode())


def test_custody_with_a_detour_is_unbroken(visit: Visit) -> None:
    visit.record(CHIPS[0])
    visit.package.hand_over("watch", "lab", {"watch": WATCH, "lab": LAB}, now=START + 30)
    visit.package.hand_over("lab", "watch", {"watch": WATCH, "lab": LAB}, now=START + 40)
    assert len(visit.verdict().failures) == 3


@pytest.mark.parametrize(
    ("why", "change", "reason"),
    [
        ("a link taken out", lambda c: [c[0], *c[2:]], "does not follow the one before"),
        ("the begin taken out", lambda c: c[1:], "must begin with a begin"),
        ("links exchanged", lambda c: [c[0], c[2], c[1], *c[3:]], "does not follow the one before"),
        ("the seal taken off", lambda c: c[:-1], "must end with a seal"),
        (
            "a file exchanged",
            lambda c: [c[0], replace(c[1], items=(b"\2" * 32,)), *c[2:]],
            "the signature is not of key",
        ),
        (
            "a time changed",
            lambda c: [c[0], replace(c[1], time=1), *c[2:]],
            "is of second 1, the one before of",
        ),
    ],
)
def test_a_broken_chain_is_refused(
    visit: Visit, why: str, change: Callable[[list[custody.Link]], list[custody.Link]], reason: str
) -> None:
    for chip in CHIPS:
        visit.record(chip)
    result = visit.package.seal(WATCH, now=START + 90)
    broken = replace(result, custody=tuple(change(list(result.custody))))
    with pytest.raises(Mismatch, match=reason):
        judging.judge(visit.order, broken, KEYS, visit.package.load_files(), inspection.read_extraction)


def test_results_of_other_orders_and_files_outside_the_chain_are_refused(visit: Visit) -> None:
    visit.record(CHIPS[0])
    result, files = visit.package.seal(WATCH, now=START + 90), visit.package.load_files()
    judge = judging.judge
    with pytest.raises(Mismatch, match="the result is of order"):
        judge(replace(visit.order, period=4), result, KEYS, files, inspection.read_extraction)
    swapped = replace(result.findings[0], photos=(b"\3" * 32,))
    with pytest.raises(Mismatch, match="is not in the chain of custody"):
        judge(visit.order, replace(result, findings=(swapped,)), KEYS, files, inspection.read_extraction)
    stray = replace(result.findings[0], chip=chip_name(77))
    with pytest.raises(Mismatch, match="was not in the order"):
        judge(visit.order, replace(result, findings=(stray,)), KEYS, files, inspection.read_extraction)


# ------------------------------------------------------------------------------------------------ package


def test_a_finding_is_not_changed_and_nothing_follows_the_seal(visit: Visit) -> None:
    visit.record(CHIPS[0])
    with pytest.raises(ProtocolViolation, match="was recorded already"):
        visit.record(CHIPS[0])
    with pytest.raises(ProtocolViolation, match="is not in the order"):
        visit.package.record(InspectionFinding(chip_name(9), "refused", START), WATCH, now=START)
    visit.package.seal(WATCH, now=START + 90)
    with pytest.raises(ProtocolViolation, match="is sealed"):
        visit.record(CHIPS[1])
    with pytest.raises(StoreError, match="exists and is not empty"):
        Visit(visit.package.path)


def test_a_file_that_was_changed_in_the_package_is_not_there(visit: Visit) -> None:
    visit.record(CHIPS[0])
    picture = next(
        p for p in (visit.package.path / "files").iterdir() if p.read_bytes().startswith(b"picture")
    )
    picture.write_bytes(b"another picture")
    assert "photo" in reasons(visit.verdict(), CHIPS[0])


def test_the_checklist_names_every_chip_with_its_own_nonce(visit: Visit) -> None:
    text = (visit.package.path / "checklist.txt").read_text()
    assert all(chip in text and visit.order.chip_nonce(chip).hex() in text for chip in CHIPS)
    assert len({visit.order.chip_nonce(chip) for chip in CHIPS}) == 4


def test_documents_have_one_encoding_and_one_signer(visit: Visit) -> None:
    assert WorkOrder.parse(visit.order.encode()) == visit.order
    visit.record(CHIPS[0])
    result = visit.package.seal(WATCH, now=START + 90)
    assert InspectionResult.parse(result.encode()) == result
    with pytest.raises(InvalidInput):
        WorkOrder.parse(visit.order.encode() + b"\n")
    signed = visit.package.load("result.json")
    assert inspection.open_document(inspection.RESULT_TYPE, signed, KEYS) == (result.encode(), "watch")
    with pytest.raises(Mismatch, match="whose key is known here, is by none"):
        inspection.open_document(inspection.RESULT_TYPE, signed, {"watch": LAB.public_key})
    with pytest.raises(Mismatch, match="is by lab and watch"):
        inspection.open_document(
            inspection.RESULT_TYPE, signed, {"lab": KEYS["watch"], "watch": KEYS["watch"]}
        )
    with pytest.raises(InvalidInput, match="payloadType must be"):
        inspection.open_document(inspection.ORDER_TYPE, signed, KEYS)
    both = sign_payload(inspection.RESULT_TYPE, result.encode(), [WATCH, key_of("stranger")]).encode()
    with pytest.raises(Mismatch, match="2 signatures"):
        inspection.open_document(inspection.RESULT_TYPE, both, KEYS)


# --------------------------------------------------------------------------- from the registry to the event


def test_from_an_empty_registry_to_an_inspection_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("registry", "fab", "north", "watch"):
        write_key(tmp_path / name, key_of(name))
    for chip in CHIPS:
        write_key(tmp_path / f"chip-{chip}", key_of(chip))
    place, number = tmp_path / "reg", iter(range(1, 100))

    def tally(*arguments: object, code: int = 0) -> dict[str, object]:
        assert main([*map(str, arguments), "--json"]) == code
        return json.loads(capfd.readouterr().out)

    def event(kind: str, body: dict[str, object], *signers: str) -> None:
        draft, file = tmp_path / "body.json", tmp_path / f"{next(number)}.jsonl"
        draft.write_text(json.dumps(body))
        tally("registry", "deed", kind, "--registry", place, "--body", draft, "--out", file)
        for name in signers:
            tally("registry", "sign", file, "--sign", f"{name}={tmp_path / name}", "--out", file)
        tally("registry", "append", place, file, "--key", tmp_path / "registry")

    def spki(name: str) -> str:
        return key_of(name).public_key.spki.hex()

    tally("registry", "open", place, "--key", tmp_path / "registry", "--name", "world")
    event("party", {"name": "fab", "roles": ["maker", "owner"], "key": spki("fab")}, "registry")
    event("party", {"name": "north", "roles": ["owner"], "key": spki("north")}, "registry")
    event("party", {"name": "watch", "roles": ["inspector"], "key": spki("watch")}, "registry")
    event("model", {"name": "gx1", "vendor": "fab", "flop_per_chip_day": "86400000000000000000"}, "registry")
    event("fab", {"maker": "fab", "model": "gx1", "chips": CHIPS}, "fab")
    rows = [[chip, f"SN-{chip[:12]}", key_of(chip).public_key.key_id] for chip in CHIPS]
    event("package", {"maker": "fab", "chips": rows}, "fab")
    event("transfer", {"from": "fab", "to": "north", "chips": CHIPS}, "fab", "north")

    proof, public = tmp_path / "proof.json", tmp_path / "registry.pub"
    tally("registry", "prove", place, CHIPS[0], "--out", proof)
    assert tally("registry", "verify", proof, "--key", public, "--owner", "north")["owner"] == "north"
    tally("registry", "verify", proof, "--key", public, "--owner", "fab", code=1)

    frame, fleet, announced = tmp_path / "frame.txt", tmp_path / "fleet.json", tmp_path / "announcement.json"
    tally("registry", "frame", place, "--out", frame, "--fleet", fleet)
    planned = tally(
        "plan", "--threshold-flop", "1e22", "--fleet", fleet, "--snapshots-per-day", "1", "--run-days", "30",
        "--period-days", "30", "--probability", "0.5",
    )  # fmt: skip
    assert planned["strata"] == ["gx1"]
    handed_in = tmp_path / "handed-in" / "north" / "runs"
    handed_in.mkdir(parents=True)
    (handed_in / "a.report.json").write_bytes(REPORT.encode())
    announcing = (
        "draw", "announce", "--frame", frame, "--samples", "gx1=3", "--period", "0", "--reports", tmp_path / "handed-in",
        "--reports-closed", "100", "--beacon-source", "test", "--beacon-round", "1", "--out", announced,
    )  # fmt: skip
    tally(*announcing, "--now", "150", code=2)  # when the beacon speaks is not known
    for now in ("99", "200"):  # before the reports close; when it has spoken
        tally(*announcing, "--beacon-time", "200", "--now", now, code=2)
    told = tally(*announcing, "--beacon-time", "200", "--now", "150")
    assert (told["reports"], told["reports_count"]) == (report_leaf(REPORT).hex(), 1)
    tally("draw", "sample", announced, "--beacon", "33" * 32, "--now", "199", code=2)
    beacon = "33" * 32
    drawn = tally("draw", "sample", announced, "--beacon", beacon, "--frame", frame)
    tally("draw", "sample", announced, "--beacon", beacon, "--digest", drawn["digest"])
    tally("draw", "sample", announced, "--beacon", "34" * 32, "--digest", drawn["digest"], code=1)
    assert isinstance(drawn["chips"], dict)
    chosen = sorted(drawn["chips"]["gx1"])

    orders = tally(
        "inspect", "order", announced, "--beacon", beacon, "--frame", frame, "--registry", place, "--inspector",
        "watch", "--due", START + 10**9, "--key", tmp_path / "registry", "--out", tmp_path / "orders",
    )["files"]  # fmt: skip
    assert isinstance(orders, list)
    assert len(orders) == 1
    assert Path(orders[0]).stat().st_mode & 0o077 == 0
    visit, trust = (
        tmp_path / "visit",
        ["--trust", f"registry={public}", "--trust", f"watch={tmp_path / 'watch.pub'}"],
    )
    tally("inspect", "pack", orders[0], visit, "--key", tmp_path / "watch", *trust)
    made = InspectionPackage(visit).load_order()
    picture, log, evidence = tmp_path / "a.jpg", tmp_path / "log", tmp_path / "evidence"
    picture.write_bytes(b"picture")
    log.write_bytes(LOG)
    for chip in chosen[:2]:
        picture.write_bytes(b"picture of " + chip.encode())
        evidence.write_bytes(
            inspection.extract_log(LOG, chip=chip, nonce=made.chip_nonce(chip), signer=key_of(chip))
        )
        tally(
            "inspect", "record", visit, chip, "--key", tmp_path / "watch", "--serial", f"SN-{chip[:12]}", "--log", log,
            "--evidence", evidence, "--device-key", tmp_path / f"chip-{chip}.pub", "--seal", "case=intact", "--photo",
            picture,
        )  # fmt: skip
    tally("inspect", "record", visit, chosen[2], "--key", tmp_path / "watch", "--outcome", "refused")
    tally("inspect", "seal", visit, "--key", tmp_path / "watch")
    body, rounds = tmp_path / "deed.json", tmp_path / "rounds.json"
    verdict = tally(
        "inspect",
        "check",
        visit,
        *trust,
        "--logs",
        "plain",
        "--frame",
        frame,
        "--rounds",
        rounds,
        "--deed-body",
        body,
        code=1,
    )
    assert verdict["failures"] == 1
    assert json.loads(rounds.read_text())["rounds"][0] == {
        "stratum": "gx1", "chips": 4, "drawn": 3, "inspected": 2, "refused": 1, "unreached": 0, "lost": 0,
    }  # fmt: skip
    event("inspected", json.loads(body.read_text()), "watch")
    assert tally("registry", "show", place, chosen[0])["inspected"] != 0
    assert tally("registry", "show", place, chosen[2])["inspected"] == 0
    assert tally("registry", "rebuild", place)["entries"] == 9
