"""Commits to a tensor of the same bytes and another shape, then another dtype."""

from dataclasses import replace

from stage import EVERY, Stage, edit_checkpoint, main

from tallystick.commit.state import Entry, summarise
from tallystick.testing.attacks import must


def find(entries: dict[str, Entry]) -> str:
    return next(n for n in sorted(entries) if n.startswith("model/") and len(entries[n].shape) == 2)


def attack(stage: Stage) -> str:
    caught = []
    for what in ("shape", "dtype"):
        run = stage.honest_run(what)
        honest = run.load_checkpoint(EVERY)

        def edit(entries: dict[str, Entry], what: str = what, honest: dict[str, Entry] = honest) -> None:
            name = find(entries)
            rows, columns = entries[name].shape
            form = {"shape": (columns, rows)} if what == "shape" else {"dtype": "I32"}
            entries[name] = replace(entries[name], **form)
            must(
                summarise(entries.values()).root() != summarise(honest.values()).root(),
                f"the root does not say which {what} a tensor has",
            )

        edit_checkpoint(run, EVERY, edit)
        caught.append(stage.caught_by_audit_and_dispute(run, step=EVERY - 1, verdicts={"mismatch"}))
    return f"{caught[0]}; the same for another dtype"


if __name__ == "__main__":
    main(attack, __doc__)
