"""Puts other statements into a bundle: of another run, of too few witnesses, stale, without role, re-signed, left out."""

from court import DAY, JUDGE, NOW, WITNESSES, Court, must_fail
from stage import Stage, main

from tallystick.evidence.bundle import Member
from tallystick.roles.statements import log_proof_of
from tallystick.tlog.publication import entry_of
from tallystick.tlog.tree import LogProof, parse_checkpoint


def without(members: list[Member], *gone: Member) -> list[Member]:
    return [member for member in members if member not in gone]


def attack(stage: Stage) -> str:
    court, other = Court(stage), Court(stage, "other", (("learning_rate", "0.01"),))
    honest, audited, theirs = court.members(), court.audited(), other.audited()
    said = {
        "an audit of another run": must_fail(
            [*without(honest, audited), theirs], check=5, naming="is about run"
        ),
        "another run's provenance": must_fail(
            [*without(honest, court.provenance()), other.provenance()], check=5, naming="is about run"
        ),
        "the audit signed by a judge": must_fail(
            [*without(honest, audited), court.audited(JUDGE)], check=3, naming="is judge in the policy"
        ),
        "no audit": must_fail(without(honest, audited), check=12, naming="0 auditors count"),
        "stale evidence": must_fail(honest, check=12, naming="days old", now=NOW + 31 * DAY),
        "no publication": must_fail(without(honest, court.proof()), check=7, naming="log proof is missing"),
        "another run's publication": must_fail(
            [*without(honest, court.proof()), other.proof()], check=2, naming="about no document"
        ),
    }
    statement = court.run.load_statement()
    proof = court.log.prove(entry_of(statement))
    note = proof.checkpoint.note
    few = tuple(s for s in note.signatures if s.name != WITNESSES[0].key.name)
    one = LogProof(proof.index, proof.path, parse_checkpoint(type(note)(note.text, few).encode()))
    said["too few witnesses"] = must_fail(
        [*without(honest, court.proof()), log_proof_of(statement, one.encode())], check=7, naming="is not met"
    )
    return "the reader: " + "; ".join(f"{what} ({why})" for what, why in said.items())


if __name__ == "__main__":
    main(attack, __doc__)
