"""Dates the log back: a cosignature with an earlier time, and an audit dated before anybody saw the run."""

from dataclasses import replace

from court import DAY, LOG, PUBLISHED, WITNESSES, Court, log_policy, must_fail
from stage import Stage, main

from tallystick.roles.statements import log_proof_of
from tallystick.testing.attacks import must_refuse
from tallystick.tlog.policy import parse_log_policy
from tallystick.tlog.publication import entry_of
from tallystick.tlog.tree import LogProof, parse_checkpoint


def attack(stage: Stage) -> str:
    court = Court(stage)
    honest = court.members()
    statement = court.run.load_statement()
    policy = parse_log_policy(("\n".join(log_policy()) + "\n").encode())
    proof = court.log.prove(entry_of(statement))
    assert proof.verify(entry_of(statement), policy).seen_at == PUBLISHED
    # An audit from before the publication: whoever audits before it is published can be told what to find.
    early = [m for m in honest if m != court.audited()] + [court.audited(at=PUBLISHED - DAY)]
    dated = must_fail(early, check=7, naming="the run was published at")
    # A cosignature whose time is turned back: the time is what was signed.
    note = proof.checkpoint.note
    witness = next(signature for signature in note.signatures if signature.name == WITNESSES[0].key.name)
    earlier = (PUBLISHED - 2 * DAY).to_bytes(8, "big") + witness.signature[8:]
    signatures = [replace(s, signature=earlier) if s == witness else s for s in note.signatures]
    turned = parse_checkpoint(replace(note, signatures=tuple(signatures)).encode())
    forged = LogProof(proof.index, proof.path, turned)
    said = must_refuse(lambda: forged.verify(entry_of(statement), policy), naming=WITNESSES[0].key.name)
    held = [m for m in honest if m.kind != "log-proof"] + [log_proof_of(statement, forged.encode())]
    must_fail(held, check=7, naming=WITNESSES[0].key.name)
    # A log cannot stand in for its witnesses: its own signature has no time.
    alone = replace(note, signatures=tuple(s for s in note.signatures if s.name == LOG.key.name))
    bare = LogProof(proof.index, proof.path, parse_checkpoint(alone.encode()))
    must_refuse(lambda: bare.verify(entry_of(statement), policy), naming="is not met")
    return f"the reader ({dated}); {said}"


if __name__ == "__main__":
    main(attack, __doc__)
