"""Commits to a log and then loses it: one frame is damaged, or the file is gone, and nobody can follow the step."""

from stage import AT, EVERY, Stage, audit, main

from tallystick.testing.attacks import must, must_refuse


def attack(stage: Stage) -> str:
    first = AT - AT % EVERY
    damaged = stage.honest_run("damaged")
    frames = damaged.load_frames(damaged.load_transcript(), first, first + EVERY)
    wrong = {**frames, AT: frames[AT][:-1] + bytes([frames[AT][-1] ^ 1])}
    damaged.log_path(first).write_bytes(b"".join(wrong[step] for step in sorted(wrong)))
    by = stage.caught_by_audit_and_dispute(damaged, step=first, verdicts={"mismatch"}, at_most=AT)
    lost = stage.honest_run("lost")
    lost.log_path(first).unlink()
    must_refuse(lambda: audit(lost, stage.source), naming="not found")
    ruling = stage.dispute(lost)
    must((ruling.loser, ruling.step) == ("trainer", first), f"the judge says {ruling.loser}: {ruling.reason}")
    return f"{by}; where the whole file is gone the audit gives no verdict, and the trainer loses the dispute"


if __name__ == "__main__":
    main(attack, __doc__)
