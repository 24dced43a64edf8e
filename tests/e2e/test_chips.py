"""Chips and declared runs as a user meets them: a real process that is stopped, and the small fleet."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tallystick.fleet.agent.agent import boot_log
from tallystick.fleet.attestation.assurance import Attestation, parse_attestation
from tallystick.store.chips import ChipDirectory
from tallystick.store.keys import load_public_key

TALLY = (sys.executable, "-m", "tallystick")


def tally(*arguments: object, codes: tuple[int, ...] = (0,)) -> str:
    child = subprocess.run([*TALLY, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert child.returncode in codes, child.stderr
    return child.stdout


def tally_says(*arguments: object) -> str:
    """Return what the command says of what it does not take."""
    child = subprocess.run([*TALLY, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert child.returncode == 2, child.stdout
    return child.stderr


@pytest.mark.slow
def test_snapshots_of_a_recording_process_are_matched_with_its_steps(tmp_path: Path) -> None:
    """A process records a run while another stops it at random and reads its memory: every snapshot has its step."""
    tally("key", "generate", tmp_path / "owner.key")
    chip, owner = tmp_path / "chip", tmp_path / "owner"
    made = json.loads(
        tally("chip", "init", chip, "--owner", tmp_path / "owner.key.pub", "--snapshots-per-day", 60000,
              "--page-bytes", 4096, "--json")
    )  # fmt: skip
    agent = subprocess.Popen([*TALLY, "chip", "agent", str(chip)], stderr=subprocess.PIPE, text=True)
    try:
        while not (chip / "log.journal").exists():
            time.sleep(0.05)
        tally("record", "digits", "--run", owner / "runs" / "a", "--policy", "fp32", "--steps", 60,
              "--checkpoint-every", 10, "--set", "width=8", "--chip", chip)  # fmt: skip
    finally:
        agent.terminate()
        agent.communicate()
    assert agent.returncode == 0
    tally("monitor", "report", owner / "runs" / "a", "--chip", chip)
    (owner / "chips").mkdir()
    (chip).rename(owner / "chips" / made["ueid"])
    key = owner / "chips" / made["ueid"] / "chip.key.pub"
    found = json.loads(
        tally(
            "monitor",
            "verify",
            owner,
            "--chip",
            f"{made['ueid']}={key}",
            "--beacon",
            "5" * 64,
            "--json",
            codes=(0, 3),
        )
    )
    statuses = {s["status"] for c in found["chips"] for s in c["snapshots"]}
    assert statuses <= {"exact", "torn", "empty"}
    assert statuses & {"exact", "torn"}
    assert found["declared_run_correctness"] == "pass"
    assert all(f["severity"] != "violation" for f in found["findings"])


def test_a_running_agent_attests_for_how_long_it_has_been_and_a_stopped_one_nothing(tmp_path: Path) -> None:
    """The uptime attested was that of the last record: an agent that took no snapshot for 200 days attested none of them."""
    tally("key", "generate", tmp_path / "owner.key")
    chip, token, nonce = tmp_path / "chip", tmp_path / "token", "00" * 16
    tally(
        "chip", "init", chip, "--owner", tmp_path / "owner.key.pub", "--snapshots-per-day", "0.001", "--json"
    )
    key = load_public_key(chip / "chip.key.pub")

    def attested() -> Attestation:
        tally("chip", "attest", chip, "--nonce", nonce, "--out", token)
        return parse_attestation(token.read_bytes(), key, bytes(16))

    agent = subprocess.Popen([*TALLY, "chip", "agent", str(chip)], stderr=subprocess.PIPE, text=True)
    try:
        while not (chip / "log.journal").exists():
            time.sleep(0.05)
        time.sleep(2.0)
        assert "a nonce has 8 to 64" in tally_says("chip", "attest", chip, "--nonce", "aa", "--out", token)
        ChipDirectory(chip).ask("attest-zz")  # no nonce, and no reason to end
        live = attested()
    finally:
        agent.terminate()
        agent.communicate()
    booted, last = boot_log(ChipDirectory(chip), key)[-2:]
    assert live.head.digest == booted.digest
    assert live.uptime >= 1 + booted.record.clocks.uptime // 1000
    assert last.record.clocks.uptime // 1000 >= live.uptime, (
        "an agent that ends logs for how long it was there"
    )
    gone = attested()
    assert (gone.head.digest, gone.uptime) == (last.digest, last.record.clocks.uptime // 1000)


@pytest.mark.slow
def test_the_small_fleet_convicts_the_cheats_and_nobody_else(tmp_path: Path) -> None:
    found = json.loads(tally("monitor", "demo", "--keep", tmp_path / "fleet", "--json"))
    verdicts = {owner["owner"]: owner["verdict"] for owner in found["owners"]}
    assert verdicts == {"honest": "pass", "unreported": "fail", "glued": "fail"}
    assert (tmp_path / "fleet" / "report.html").read_bytes().startswith(b"<!doctype html>")
    rules = tmp_path / "rules.toml"
    rules.write_text(
        'format = "tallystick/rules/1"\nname = "Small fleet"\n'
        '[[rule]]\nid = "flop"\nkind = "compute"\nscope = "lineage"\nmost_flop = 1e9\n'
        '[[rule]]\nid = "reported"\nkind = "reporting"\ndata_precommitted = true\nleast_snapshots = 1\n'
    )
    kept = {"honest": "pass", "unreported": "pass", "glued": "unknown"}  # of what each declared
    for owner in found["owners"]:
        (tmp_path / "findings.json").write_text(json.dumps(owner))
        codes = {"honest": 0, "unreported": 1, "glued": 1}
        judged = json.loads(
            tally(
                "rules", "judge", rules, tmp_path / "findings.json", tmp_path / "fleet" / owner["owner"], "--claim", "runs",
                "--claim", "complete", "--json", codes=(codes[owner["owner"]],),
            )
        )  # fmt: skip
        assert judged["rules_kept"] == kept[owner["owner"]]
        assert judged["fleet_completeness"] == "unknown"
