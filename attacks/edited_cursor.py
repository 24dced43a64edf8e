"""Commits to a checkpoint whose data cursor stands elsewhere, so that whoever resumes it trains on other data."""

from stage import EVERY, Stage, edit_checkpoint, main

from tallystick.commit.encoding import canonical_json
from tallystick.commit.state import Entry


def edit(entries: dict[str, Entry]) -> None:
    data = canonical_json({"step": EVERY + 3})
    entries["document/cursor"] = Entry("document/cursor", "U8", (len(data),), data)


def attack(stage: Stage) -> str:
    run = stage.honest_run()
    edit_checkpoint(run, EVERY, edit)
    return stage.caught_by_audit_and_dispute(run, step=EVERY - 1, verdicts={"mismatch"})


if __name__ == "__main__":
    main(attack, __doc__)
