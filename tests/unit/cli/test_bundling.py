"""The way of a run through key, log, audit, sign, export and bundle to a stranger's verification."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tallystick.commit.state import summarise
from tallystick.evidence.policy import FORMAT, LIMITS, PINS

WITHOUT_EXTRAS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "sklearn", "transformers"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
from tallystick.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

OPEN = {
    "format": FORMAT, "judges_word": False, **dict.fromkeys((*PINS, *(f"most_{limit}" for limit in LIMITS))),
}  # fmt: skip


@pytest.fixture
def evidence(tally, recorded: Path, tmp_path: Path) -> dict[str, Path]:
    """A bundle about the honest run, the policy that accepts it, and the weights."""
    for name, algorithm in (
        ("trainer", "ed25519"),
        ("auditor", "ed25519"),
        ("log", "ed25519"),
        ("w", "ed25519"),
        ("model", "ecdsa-p256"),
    ):
        assert tally("key", "generate", tmp_path / name, "--algorithm", algorithm).code == 0
    log, proof, model = tmp_path / "L", tmp_path / "run.tlog-proof", tmp_path / "M"
    vkey = json.loads(
        tally("log", "init", log, "--origin", "log.example/a", "--key", tmp_path / "log", "--json").out
    )["vkey"]
    tally("log", "add", log, recorded)
    tally("log", "checkpoint", log, "--key", tmp_path / "log")
    cosign = (
        "--name",
        "w.example",
        "--key",
        tmp_path / "w",
        "--log-key",
        vkey,
        "--memory",
        tmp_path / "memory",
    )
    witness = json.loads(tally("log", "cosign", log, *cosign, "--json").out)["vkey"]
    assert tally("log", "prove", log, recorded, "--out", proof).code == 0
    provenance, audited = tmp_path / "provenance.json", tmp_path / "audit.json"
    assert tally("sign", recorded, "--key", tmp_path / "trainer", "--out", provenance).code == 0
    assert tally("export", recorded, "--out", model).code == 0
    assert tally("sign", model, "--key", tmp_path / "model").code == 0
    assert tally("audit", recorded, "--key", tmp_path / "auditor", "--statement", audited).code == 0

    def key_id(name: str) -> str:
        return json.loads(tally("key", "show", tmp_path / f"{name}.pub", "--json").out)["key_id"]

    policy = {
        **OPEN, "trainers": [key_id("trainer"), key_id("model")],
        "auditors": [key_id("auditor")], "judges": [], "auditor_quorum": 1, "coverage": "whole",
        "rounding_policies": ["fp32"], "most_freedom": "1", "most_steer": "1", "most_age_days": 30,
        "log_policy": [f"log {vkey}", f"witness W {witness}", "quorum W"], "model_signature": True,
    }  # fmt: skip
    (tmp_path / "policy.json").write_text(json.dumps(policy, indent=1))
    specification, root = recorded / "specification.json", tmp_path / "specification-proof.json"
    from tallystick.store.files import RunDirectory

    root.write_bytes(RunDirectory(recorded).load_transcript().prove_specification().encode())
    keys = [tmp_path / f"{name}.pub" for name in ("trainer", "auditor", "model")]
    paths = [
        recorded,
        specification,
        root,
        provenance,
        audited,
        model / "model.sig",
        *keys,
        f"{recorded}@{proof}",
    ]
    bundle = tmp_path / "run.bundle"
    assert tally("bundle", *paths, "-o", bundle).code == 0
    return {"bundle": bundle, "policy": tmp_path / "policy.json", "model": model, "audit": audited}


def test_a_stranger_accepts_the_bundle_without_torch(evidence: dict[str, Path]) -> None:
    arguments = [
        "verify",
        evidence["bundle"],
        "--policy",
        evidence["policy"],
        "--model",
        evidence["model"],
        "--json",
    ]
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *map(str, arguments)],
        check=False, capture_output=True, text=True, env={**os.environ}, timeout=300,
    )  # fmt: skip
    fields = json.loads(child.stdout)
    assert (child.returncode, fields["verdict"], fields["finding"]) == (0, "match", "trained as stated")
    assert [check["outcome"] for check in fields["checks"]] == ["passed"] * 13


def test_no_policy_other_weights_and_a_changed_byte_are_not_accepted(
    tally, evidence: dict[str, Path]
) -> None:
    answer = tally("verify", evidence["bundle"])
    assert answer.code == 3
    assert "not judged (no --policy)" in answer.out
    given = ("verify", evidence["bundle"], "--policy", evidence["policy"], "--model", evidence["model"])
    (evidence["model"] / ".github").mkdir()
    answer = tally(*given)
    assert (answer.code, "not looked at: .github, model.sig" in " ".join(answer.out.split())) == (0, True)
    weights = evidence["model"] / "model.safetensors"
    weights.rename(evidence["model"] / "__init__.py")
    answer = tally(*given)
    assert answer.code == 1
    assert "model: has '__init__.py', the result is one file" in " ".join(answer.out.split())
    (evidence["model"] / "__init__.py").rename(weights)
    (evidence["model"] / "more.bin").write_bytes(b"x")
    answer = tally("verify", evidence["bundle"], "--policy", evidence["policy"], "--model", evidence["model"])
    assert answer.code == 1
    assert "check 6 failed" in answer.out
    data = bytearray(evidence["bundle"].read_bytes())
    data[-1] ^= 1
    evidence["bundle"].write_bytes(data)
    assert tally("verify", evidence["bundle"], "--policy", evidence["policy"]).code == 1


def test_the_downloader_asks_whether_a_file_is_the_result(tally, evidence: dict[str, Path]) -> None:
    weights, bundle, rules = evidence["model"] / "model.safetensors", evidence["bundle"], evidence["policy"]
    answer = tally("verify", weights, "--bundle", bundle, "--policy", rules, "--json")
    fields = json.loads(answer.out)
    assert (answer.code, fields["verdict"], fields["file"]["is_result"]) == (0, "match", True)
    stated = fields["stated"]
    assert ("tiny" in stated["job"], stated["policy"], stated["steps"]) == (True, "fp32", 6)
    measured = fields["audits"][0]["measured"]
    assert (measured["uncompared"], measured["silenced"] <= 1.0) == (0, True)
    answer = tally("verify", weights, "--bundle", bundle)
    assert (answer.code, "yes, this is the result" in answer.out) == (3, True)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    answer = tally("verify", weights, "--bundle", bundle, "--policy", rules)
    assert (answer.code, "NO, this is not the result" in answer.out) == (1, True)
    for given in (weights, evidence["audit"], evidence["model"] / "model.sig", rules):
        answer = tally("verify", given)
        assert answer.code == 2
        assert "malformed" not in answer.err
        assert "`tally verify" in answer.err


def test_a_policy_is_begun_from_a_bundle_and_pins_what_it_states(
    tally, evidence: dict[str, Path], tmp_path: Path
) -> None:
    written, bundle = tmp_path / "begun.json", evidence["bundle"]
    keys = [
        ("--trainer", tmp_path / "trainer.pub"),
        ("--trainer", tmp_path / "model.pub"),
        ("--auditor", tmp_path / "auditor.pub"),
    ]
    arguments = [text for pair in keys for text in pair]
    assert tally("policy", "init", *arguments, "--bundle", bundle, "--out", written).code == 0
    assert tally("verify", bundle, "--policy", written).code == 0
    assert "is not overwritten" in tally("policy", "init", "--out", written).err
    text = written.read_text()
    for field, stated, other in (("steps", "6", "7"), ("seed", "0", "1")):
        assert f'"{field}": {stated},' in text
        written.write_text(text.replace(f'"{field}": {stated},', f'"{field}": {other},'))
        answer = tally("verify", bundle, "--policy", written)
        assert answer.code == 1
        assert f"{field}: the run states {stated}, the policy asks for {other}" in " ".join(
            answer.out.split()
        )
    answer = tally(
        "policy", "init", "--trainer", tmp_path / "trainer.pub", "--judge", tmp_path / "trainer.pub"
    )
    assert (answer.code, "one party, one role" in answer.err) == (2, True)
    assert tally("policy", "init", "--bundle", evidence["audit"]).code == 2


def test_a_model_card_says_what_a_bundle_states_and_its_commands_check_that(
    tally, evidence: dict[str, Path], recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, bundle = tmp_path / "card.md", tmp_path / "small.bundle"
    keys = [tmp_path / f"{name}.pub" for name in ("trainer", "auditor")]
    about = [
        recorded / "specification.json",
        tmp_path / "specification-proof.json",
        tmp_path / "provenance.json",
    ]
    assert tally("bundle", recorded, *about, evidence["audit"], *keys, "-o", bundle).code == 0
    answer = tally("verify", bundle, "--card", card, "--json")
    assert answer.code == 3, answer.err + answer.out
    text, stated = card.read_text(), json.loads(answer.out)
    assert (answer.code, text.startswith("## Verification\n")) == (3, True)
    for said in (
        stated["root"], stated["stated"]["program"], stated["stated"]["weights"], stated["stated"]["trainer"],
        stated["audits"][0]["auditor"], hashlib.sha256(bundle.read_bytes()).hexdigest(),
        "**match**: 6 of 6 steps", f"This does not show {stated['shows_not']}.",
    ):  # fmt: skip
        assert said in text
    monkeypatch.chdir(evidence["model"])
    for path in (*keys, bundle):
        shutil.copy(path, ".")
    (block,) = re.findall("```sh\n(.*?)```", text, re.DOTALL)
    assert [tally(*shlex.split(line)[1:]).code for line in block.splitlines()[1:]] == [0, 0]
    card.unlink()
    data = bytearray(bundle.read_bytes())
    data[-1] ^= 1
    bundle.write_bytes(data)
    answer = tally("verify", bundle, "--card", card)
    assert (answer.code, card.exists(), "not written" in answer.err) == (1, False, True)


def test_wrong_arguments_are_refused(
    tally, evidence: dict[str, Path], recorded: Path, tmp_path: Path
) -> None:
    for arguments, reason in (
        (("verify", evidence["bundle"], "--root", "00" * 32), "a bundle has --policy"),
        (("verify", recorded, "--policy", evidence["policy"]), "is a run directory"),
        (("verify", recorded, "--card", tmp_path / "card"), "--card: for a bundle of evidence"),
        (("verify", evidence["bundle"], "--policy", evidence["audit"]), "field 'auditor_quorum' is missing"),
        (
            ("bundle", evidence["model"] / "model.safetensors", "-o", tmp_path / "x"),
            "no document that belongs in a bundle",
        ),
        (("bundle", tmp_path / "trainer", "-o", tmp_path / "x"), "is no public key"),
        (("sign", evidence["model"], "--key", tmp_path / "trainer"), "knows no ed25519"),
        (("export", recorded, "--out", evidence["model"]), "is there already"),
        (("audit", recorded, "--key", tmp_path / "trainer"), "--key: needs --statement"),
        (("dispute", recorded, recorded, "--key", tmp_path / "trainer"), "--key: needs --statement"),
        (
            ("dispute", recorded, recorded, "--level", "steps", "--trainer-key", tmp_path / "trainer"),
            "leave out --trainer-key",
        ),
        (("dispute", recorded, recorded, "--trainer-signs", tmp_path / "trainer"), "is no public key"),
    ):
        answer = tally(*arguments)
        assert answer.code == 2, arguments
        assert reason in answer.err


def accusing(tally, edited: Path, tmp_path: Path, *, signed: bool = True, **more: bool) -> dict[str, Any]:
    """What a stranger's verification answers, from an auditor's accusation through the dispute to a bundle.

    ``signed``: whether both parties sign their moves over operators; ``more`` is added to the stranger's policy.
    """
    for name in ("trainer", "auditor", "judge"):
        tally("key", "generate", tmp_path / name)
    accusation, verdict, record = (
        tmp_path / "accusation.json",
        tmp_path / "verdict.intoto.json",
        tmp_path / "verdict.json",
    )
    claim, provenance = tmp_path / "claim", tmp_path / "provenance.json"
    assert tally("sign", edited, "--key", tmp_path / "trainer", "--out", provenance).code == 0
    assert tally("audit", edited, "--key", tmp_path / "auditor", "--statement", accusation).code == 1
    assert tally("audit", edited, "--claim", claim).code == 1
    hands = ("--trainer-key", tmp_path / "trainer", "--auditor-key", tmp_path / "auditor") if signed else ()
    if signed:  # a claim that somebody else hands in answers nothing
        other = (*hands[:3], tmp_path / "judge")
        refused = tally("dispute", edited, claim, "--accusation", accusation, *other)
        assert "accusation: is not signed by any of the 1 keys given" in refused.err, refused.err
    answer = tally(
        "dispute", edited, claim, "--out", record, "--key", tmp_path / "judge", "--statement", verdict,
        "--accusation", accusation, *hands,
    )  # fmt: skip
    assert answer.code == 1
    from tallystick.store.files import RunDirectory

    transcript = RunDirectory(edited).load_transcript()
    (tmp_path / "proof.json").write_bytes(transcript.prove_specification().encode())
    keys = [tmp_path / f"{name}.pub" for name in ("trainer", "auditor", "judge")]
    paths = [
        edited, claim, edited / "specification.json", tmp_path / "proof.json", provenance, accusation, verdict, record, *keys,
    ]  # fmt: skip
    assert tally("bundle", *paths, "-o", tmp_path / "accusing.bundle").code == 0
    ids = [json.loads(tally("key", "show", key, "--json").out)["key_id"] for key in keys]
    policy = {
        **OPEN, "trainers": [ids[0]], "auditors": [ids[1]], "judges": [ids[2]],
        "auditor_quorum": 1, "coverage": "whole", "rounding_policies": ["fp32"], "most_freedom": "1", "most_steer": "1",
        "most_age_days": 30, "log_policy": None, "model_signature": False, **more,
    }  # fmt: skip
    (tmp_path / "policy.json").write_text(json.dumps(policy))
    found = tally("verify", tmp_path / "accusing.bundle", "--policy", tmp_path / "policy.json", "--json")
    fields = json.loads(found.out)
    assert (found.code, fields["verdict"]) == (1, "mismatch")
    outcomes = [check["outcome"] for check in fields["checks"]][8:]
    if signed or more.get("judges_word", False):
        assert outcomes == ["passed", "passed", "failed", "not reached", "not reached"]
    else:
        assert outcomes == ["passed", "failed", "not reached", "not reached", "not reached"]
    return fields


def test_a_claim_that_somebody_else_hands_in_silences_no_accusation(
    tally, edited: Path, tmp_path: Path
) -> None:
    """A copy of the trainer's own run agrees with it: an agreement, unless the accuser takes part, answers nothing."""
    for name in ("auditor", "judge"):
        tally("key", "generate", tmp_path / name)
    accusation, verdict, copy = (tmp_path / name for name in ("accusation.json", "verdict.json", "copy"))
    assert tally("audit", edited, "--key", tmp_path / "auditor", "--statement", accusation).code == 1
    shutil.copytree(edited, copy)
    arguments = (
        "dispute", edited, copy, "--accusation", accusation, "--key", tmp_path / "judge", "--statement", verdict,
    )  # fmt: skip
    for signs in ((), ("--auditor-signs", tmp_path / "auditor.pub")):
        refused = tally(*arguments, *signs)
        assert refused.code == 2
        assert "the outcome is agreement, loser none, and nothing shows that" in refused.err
        assert not verdict.exists()
    assert tally(*arguments, "--auditor-key", tmp_path / "auditor").code == 0
    assert verdict.exists()


def test_a_verdict_against_the_trainer_convinces_a_stranger(tally, edited: Path, tmp_path: Path) -> None:
    fields = accusing(tally, edited, tmp_path)

    assert fields["finding"].startswith("trainer at fault at step 5")
    assert "(by moves that the trainer signed)" in fields["finding"]
    assert "the game over states leads to step 5" in fields["checks"][8]["detail"]


def test_a_list_that_the_trainer_did_not_sign_convinces_nobody_but_who_trusts_the_judge(
    tally, edited: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    fields = accusing(tally, edited, tmp_path / "a", signed=False)
    assert fields["finding"] == "not proven: that the trainer is to blame for step 5"
    assert "none of the trainer's" in fields["checks"][9]["detail"]

    fields = accusing(tally, edited, tmp_path / "b", signed=False, judges_word=True)
    assert fields["finding"].startswith("trainer at fault at step 5")
    assert "(the judge's word about who made the list)" in fields["finding"]


def test_a_key_signs_one_list_in_one_dispute_and_a_party_that_is_asked_must_sign(
    tally, edited: Path, tmp_path: Path
) -> None:
    from tallystick.dispute.operator_game import Committed
    from tallystick.dispute.record import parse_dispute, signed_claims
    from tallystick.dispute.signed_moves import History, sign_move
    from tallystick.store.keys import load_key

    claim, key, path = tmp_path / "claim", tmp_path / "trainer", tmp_path / "claim" / "dispute.json"
    tally("key", "generate", key)
    assert tally("audit", edited, "--claim", claim).code == 1
    arguments = ("dispute", edited, claim, "--trainer-key", key, "--json")
    answer = tally(*arguments)
    assert answer.code == 1
    signed = json.loads(answer.out)["operator"]["signed"]
    assert (signed["auditor"], signed["trainer"]) == (None, load_key(str(key)).public_key.key_id)
    assert "those of the auditor are unsigned: who made them is the judge's word" in " ".join(
        tally(*arguments[:-1]).out.split()  # the same list once more
    )
    record = parse_dispute(path.read_bytes())
    first = record.moves[0]
    assert isinstance(first, Committed)
    other = replace(first, root=bytes(32))
    terms, signer = signed_claims(record)[0][0].terms, load_key(str(key))
    signature = sign_move(History(terms).claim(other), signer)
    path.write_bytes(replace(record, moves=(other,), signatures=(signature,)).encode())

    answer = tally(*arguments)

    assert (answer.code, json.loads(answer.out)["kind"]) == (2, "ProtocolViolation")
    assert "another committed move of the trainer's key" in answer.err
    assert parse_dispute(path.read_bytes()).moves == (other,)
    # Asked for a signature and without the key, or with another, the trainer does not answer. Its part is played by the
    # job's program here, so the whole step decides.
    path.unlink()
    tally("key", "generate", tmp_path / "stranger")
    for hands in ((), ("--trainer-key", tmp_path / "stranger")):
        answer = tally("dispute", edited, claim, "--trainer-signs", f"{key}.pub", *hands, "--json")
        fields = json.loads(answer.out)
        assert (answer.code, fields["loser"], fields["record_file"]) == (1, "trainer", None)
        assert "the trainer owed a signed move" in fields["reason"]
        assert "that is the judge's word" in fields["reason"]


def test_a_verdict_about_a_state_in_the_middle_convinces_a_stranger(
    tally, copied: Path, tmp_path: Path
) -> None:
    """Both parties end in one state, and differ in one checkpoint before."""
    from tallystick.store.files import RunDirectory
    from tallystick.testing.cheats import forge

    run = RunDirectory(copied)
    before = run.load_transcript()
    first = before.checkpoints()[1].steps_done
    assert first < before.num_steps
    entries = run.load_checkpoint(first)
    name = next(n for n in sorted(entries) if n.startswith("model/") and entries[n].dtype == "F32")
    data = bytearray(entries[name].data)
    data[2] ^= 1
    entries[name] = replace(entries[name], data=bytes(data))
    run.write_checkpoint(first, list(entries.values()))
    root = summarise(entries.values()).root().hex()
    forge(run, lambda r: replace(r, state_root=root) if r.step == first - 1 else r)
    assert run.load_transcript().statement().final_state == before.statement().final_state

    fields = accusing(tally, copied, tmp_path)

    assert fields["finding"].startswith(f"trainer at fault at step {first - 1}")
    assert f"the game over states leads to step {first - 1}" in fields["checks"][8]["detail"]
