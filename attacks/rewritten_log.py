"""Rewrites the transparency log: shortens it, forks it, hides an entry from some, changes an entry under its tree."""

import shutil

from court import LOG, NOW, PUBLISHED, WITNESSES, Court, must_fail, publish
from stage import Stage, main

from tallystick.evidence.bundle import named
from tallystick.store.tlog import LogDirectory, Witness
from tallystick.testing.attacks import must, must_refuse
from tallystick.tlog.policy import parse_log_policy
from tallystick.tlog.publication import entry_of
from tallystick.tlog.tree import encode_entries, is_split_view


def attack(stage: Stage) -> str:
    court = Court(stage)
    honest = court.members()
    log, memory = court.log, court.log.path.with_name(f"{court.log.path.name}-witness")
    short = LogDirectory(stage.folder / "short")
    shutil.copytree(log.path, short.path)
    second = court.provenance().data
    publish(log, [second], PUBLISHED + 60)
    must(log.checkpoint().size == 2, "the control: the log does not grow")

    def cosign(which: LogDirectory) -> None:
        Witness(memory / "0").cosign(which, LOG.key, WITNESSES[0], NOW)

    # Rewound: the witness has seen two entries.
    rewound = must_refuse(lambda: cosign(short), naming="it was shortened")
    # Forked: another second entry under the same key.
    fork = LogDirectory(stage.folder / "fork")
    shutil.copytree(short.path, fork.path)
    fork.add([entry_of(court.audited().data).encode()])
    fork.sign(LOG)
    must_refuse(lambda: cosign(fork), naming="root")
    must(
        is_split_view(log.checkpoint(), fork.checkpoint(), [LOG.key]),
        "two trees of one size are not told apart",
    )
    both = [*honest, *(named("checkpoint", each.checkpoint().note.encode()) for each in (log, fork))]
    forked = must_fail(both, check=4, naming="signed two trees of 2 entries")
    # Hidden: the entry that a reader asks for is not in the tree that it is shown.
    policy = parse_log_policy("\n".join(["log " + str(LOG.key), "quorum none", ""]).encode())
    must_refuse(lambda: fork.prove(entry_of(second)), naming="")
    real = log.prove(entry_of(second))
    real.verify(entry_of(second), policy)
    moved = type(real)(real.index, real.path, fork.checkpoint())
    must_refuse(lambda: moved.verify(entry_of(second), policy), naming="root")
    # Changed in place, under the tree that was signed.
    tile = next((log.path / "tile" / "entries").rglob("2"))
    tile.write_bytes(encode_entries([entry_of(court.audited().data).encode(), entry_of(second).encode()]))
    must_refuse(log.verify, naming="")
    return f"witness ({rewound}); reader ({forked}); an entry left out has no proof, a changed one does not lead to the root"


if __name__ == "__main__":
    main(attack, __doc__)
