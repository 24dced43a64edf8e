"""Single records of a real run's data: opened by its owner, found or proven absent by a reader without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tallystick.cli.main import main
from tallystick.errors import InvalidInput, Mismatch
from tallystick.execution.job import Batch, find_source
from tallystick.execution.step import batch_bytes, batch_digest, split_batch
from tallystick.fleet.provenance.batch_opening import OpenedBatch, open_batch, parse_batch_opening, take_apart
from tallystick.fleet.provenance.owner_findings import OwnerFindings
from tallystick.fleet.provenance.transcripts import (
    Lineage,
    ReportOpening,
    RunReport,
    Totals,
    make_precommit,
    make_report,
)
from tallystick.fleet.provenance.verification import OwnerVerdict, RunVerdict
from tallystick.numerics.policy import find_policy
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

STEPS = 4
SETTINGS = {"width": "4", "batch": "16", "steps": "20"}


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An owner's folder with one honest run of digits, declared and reported."""
    place = tmp_path_factory.mktemp("records") / "owner"
    run = place / "runs" / "a"
    (place / "chips").mkdir(parents=True)
    record(
        Order(find_source("digits"), SETTINGS, find_policy("fp32"), steps=STEPS, checkpoint_every=2),
        RunDirectory(run),
    )
    transcript, opening = RunDirectory(run).load_transcript(), ReportOpening(bytes(range(32)), ((),))
    batches = [each.batch for each in transcript.records]
    precommit = make_precommit(
        transcript.specification, opening, ranks=["01" * 17], lineage=Lineage("initialised"), batches=batches
    )
    report = make_report(transcript, opening, precommit, Totals(1000, 64, 10))
    run.with_name("a.opening.json").write_bytes(opening.encode())
    run.with_name("a.report.json").write_bytes(report.encode())
    assert main(["rules", "open", str(run), "--json"]) == 0
    return place


def batch(step: int) -> Batch:
    return find_source("digits").build(SETTINGS).batch(step)


def report_of(owner: Path) -> RunReport:
    return RunReport.parse((owner / "runs" / "a.report.json").read_bytes())


def opened(owner: Path, step: int) -> OpenedBatch:
    data = (owner / "runs" / "a.batches" / f"{step}.batch").read_bytes()
    return open_batch(parse_batch_opening(data), report_of(owner))


def test_a_record_has_the_digest_that_the_same_tensors_have_alone_and_in_any_other_batch(owner: Path) -> None:
    for step in range(STEPS):
        alone = [batch_digest(each) for each in split_batch(batch(step), 16)]
        assert list(opened(owner, step).records) == alone
        images, labels = batch(step)
        turned = take_apart(batch_bytes((images.flip(0), labels.flip(0))))
        assert list(turned.records) == alone[::-1] and turned.form == opened(owner, step).form


@pytest.mark.parametrize(
    "made",
    [
        {
            "x": torch.arange(6).reshape(3, 2),
            "y": [torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bool)],
        },
        (torch.rand(2, 1, 4, dtype=torch.float64), "words", 3, 0.5, None, True),
        torch.arange(5, dtype=torch.uint8),
        {"é": torch.rand(4, 3).t().contiguous().t()},
    ],
)
def test_whatever_a_batch_holds_is_taken_apart_as_a_step_takes_it_apart(made: Batch) -> None:
    found = take_apart(batch_bytes(made))
    assert found.digest == batch_digest(made)
    assert list(found.records) == [batch_digest(each) for each in split_batch(made, len(found.records))]
    assert len(found.records) >= 2


def test_one_bit_makes_another_record_and_another_layout_another_form(owner: Path) -> None:
    images, labels = batch(0)
    flipped = images.clone()
    flipped.view(torch.int32)[3, ..., 0] ^= 1  # the lowest bit of a pixel
    true, changed = opened(owner, 0), take_apart(batch_bytes((flipped, labels)))
    differ = [a != b for a, b in zip(true.records, changed.records, strict=True)]
    assert differ == [at == 3 for at in range(16)] and true.form == changed.form
    for other in ((images.double(), labels), (images.unsqueeze(1), labels), (images, labels, 1)):
        assert take_apart(batch_bytes(other)).form != true.form


def test_a_batch_of_another_step_run_or_content_is_not_bound(owner: Path) -> None:
    place, report = owner / "runs" / "a.batches", report_of(owner)
    first = parse_batch_opening((place / "0.batch").read_bytes())
    second = parse_batch_opening((place / "1.batch").read_bytes())
    for other in (
        type(first)(first.run, 0, STEPS, first.salt, first.proof, second.batch),
        type(first)(first.run, 1, STEPS, first.salt, first.proof, first.batch),
        type(first)(first.run, 0, STEPS, second.salt, first.proof, first.batch),
    ):
        with pytest.raises(Mismatch):
            open_batch(other, report)


def test_a_reader_without_torch_finds_a_forbidden_record_or_its_absence(
    owner: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = report_of(owner)
    findings, rules = tmp_path / "findings.json", tmp_path / "rules.toml"
    verdicts = (RunVerdict(report.run, "pass", ()),)
    found = OwnerFindings(OwnerVerdict("owner", "pass", "pass", "unknown", 1, verdicts, (), ()), {})
    findings.write_bytes(found.encode())
    capfd.readouterr()
    files = [str(owner / "runs" / "a.batches" / f"{step}.batch") for step in range(STEPS)]
    assert (
        main(["rules", "records", *files, "--report", str(owner / "runs" / "a.report.json"), "--json"]) == 0
    )
    shown = json.loads(capfd.readouterr().out)
    assert shown["bound"] and [each["step"] for each in shown["batches"]] == list(range(STEPS))
    form, used = shown["batches"][0]["form"], shown["batches"][2]["records"][5]

    def judged(forbidden: str, folder: Path, *, apart: bool = False) -> tuple[int, str]:
        rules.write_text(
            'format = "tallystick/rules/1"\nname = "Records"\n[[rule]]\nid = "r"\nkind = "data"\nunit = "record"\n'
            f'forms = ["{form}"]\nforbidden = ["{forbidden}"]\n'
        )
        command = ["rules", "judge", str(rules), str(findings), str(folder), "--claim", "runs", "--json"]
        if not apart:
            return main(command), capfd.readouterr().out
        without_torch = (
            "import sys; sys.modules['torch'] = None\n"
            "from tallystick.cli.main import main; sys.exit(main(sys.argv[1:]))"
        )
        child = subprocess.run(
            [sys.executable, "-c", without_torch, *command], capture_output=True, text=True, check=False
        )
        return child.returncode, child.stdout

    assert judged(used, owner, apart=True)[0] == 1
    assert judged("0" * 64, owner)[0] == 0
    import shutil

    partly = shutil.copytree(owner, tmp_path / "partly")
    (partly / "runs" / "a.batches" / "3.batch").unlink()
    code, text = judged("0" * 64, partly)
    assert code == 3 and "the batches of 3 of 4 steps were opened" in text
    assert judged(used, partly)[0] == 1
    (partly / "runs" / "a.batches" / "3.batch").write_bytes(
        Path(files[2]).read_bytes()
    )  # step 2 twice: 3 stays closed
    assert judged("0" * 64, partly)[0] == 3


def test_an_owner_can_open_one_batch_alone_and_not_one_of_other_data(
    owner: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = owner / "runs" / "a"
    assert main(["rules", "open", str(run), "--step", "2", "--out", str(tmp_path / "one"), "--json"]) == 0
    (only,) = (tmp_path / "one").iterdir()
    assert only.name == "2.batch" and only.stat().st_mode & 0o777 == 0o600
    assert only.read_bytes() == (owner / "runs" / "a.batches" / "2.batch").read_bytes()
    assert main(["rules", "open", str(run), "--step", "4"]) == 2
    assert "the run has steps 0 to 3" in capfd.readouterr().err
    assert main(["rules", "records", str(run.with_name("a.report.json"))]) == 2
    with pytest.raises(InvalidInput, match="does not begin"):
        take_apart(b"\0")
