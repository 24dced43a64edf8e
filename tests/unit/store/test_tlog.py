from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tallystick.commit import merkle
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.signing.keys import ed25519_key
from tallystick.signing.note import COSIGNATURE, NOTE, Note, NoteKey, NoteSigner
from tallystick.store.tlog import LogDirectory, Witness
from tallystick.tlog.policy import LogPolicy
from tallystick.tlog.tree import LogEntry, checkpoint_text, encode_entries, parse_checkpoint

ORIGIN = "log.example/runs"


def signer(number: int, name: str = ORIGIN, kind: int = NOTE) -> NoteSigner:
    key = ed25519_key(bytes([number]) * 32)
    return NoteSigner(NoteKey(name, kind, key.public_key), key)


LOG, WITNESS = signer(1), signer(2, "w.example", COSIGNATURE)
POLICY = LogPolicy((LOG.key,), {"W": WITNESS.key}, {}, "W")


def entry(number: int) -> LogEntry:
    return LogEntry("run", f"{number:064x}")


def grown(path: Path, *sizes: int) -> LogDirectory:
    log = LogDirectory(path)
    log.create(ORIGIN, LOG)
    for size in sizes:
        new = range(log.checkpoint().size, size)
        assert log.add([entry(number).encode() for number in new]) == [(number, True) for number in new]
        log.sign(LOG)
    return log


def test_a_log_grows_and_everything_in_it_can_be_proved(tmp_path: Path) -> None:
    log = grown(tmp_path / "log", 1, 2, 5, 255, 256, 257, 520)
    leaves = [merkle.leaf_hash(entry(i).encode()) for i in range(520)]
    assert log.checkpoint().root == merkle.root(leaves)
    assert log.verify() == 3 + 3 + 1
    rules = LogPolicy((LOG.key,), {}, {}, "none")
    for number in (0, 254, 255, 256, 511, 519):
        assert log.prove(entry(number)).verify(entry(number), rules).size == 520
    with pytest.raises(InvalidInput, match="is not in the log"):
        log.prove(entry(520))
    log.add([entry(520).encode()])
    with pytest.raises(InvalidInput, match="waits for the next checkpoint"):
        log.prove(entry(520))


def test_an_entry_is_added_once(tmp_path: Path) -> None:
    log = grown(tmp_path / "log", 3)
    assert log.add([entry(1).encode()]) == [(1, False)]
    assert log.add([entry(9).encode()]) == [(3, True)]
    assert log.add([entry(9).encode()]) == [(3, False)]
    assert log.sign(LOG).size == 4


def test_with_nothing_pending_the_checkpoint_and_its_cosignatures_stay(tmp_path: Path) -> None:
    log = grown(tmp_path / "log", 3)
    log.attach(Witness(tmp_path / "w").cosign(log, LOG.key, WITNESS, 7))
    before = log.checkpoint_path.read_bytes()
    log.sign(LOG)
    assert log.checkpoint_path.read_bytes() == before
    assert log.checkpoint().verify(POLICY).seen_at == 7


def test_a_log_is_never_made_twice_nor_signed_with_another_key(tmp_path: Path) -> None:
    log = grown(tmp_path / "log", 3)
    with pytest.raises(StoreError, match="not empty"):
        log.create(ORIGIN, LOG)
    log.add([entry(3).encode()])
    with pytest.raises(Mismatch, match="not signed by the key"):
        log.sign(signer(9))
    with pytest.raises(InvalidInput, match="the key signs as other"):
        log.sign(signer(1, "other"))
    assert log.checkpoint().size == 3


def test_a_changed_tile_is_noticed_before_anything_is_signed(tmp_path: Path) -> None:
    log = grown(tmp_path / "log", 300)
    log.add([entry(300).encode()])
    tile = log.path / "tile/0/000"
    data = bytearray(tile.read_bytes())
    data[40] ^= 1
    tile.write_bytes(data)
    with pytest.raises(Mismatch, match="is not what the tiles below it lead to"):
        log.verify()
    partial = log.path / "tile/0/001.p/44"
    data = bytearray(partial.read_bytes())
    data[40] ^= 1
    partial.write_bytes(data)
    with pytest.raises(Mismatch, match="has root"):
        log.sign(LOG)


@pytest.mark.parametrize("sizes", [(3, 7), (250, 258), (256, 300)])
def test_a_log_whose_checkpoint_was_set_back_refuses_to_fork(tmp_path: Path, sizes: tuple[int, int]) -> None:
    log = grown(tmp_path / "log", sizes[0])
    old = log.checkpoint_path.read_bytes()
    log.add([entry(number).encode() for number in range(*sizes)])
    newest = log.sign(LOG)
    log.checkpoint_path.write_bytes(old)
    log.add([entry(999).encode()])
    with pytest.raises(StoreError, match="never shortened"):
        log.sign(LOG)
    log.checkpoint_path.write_bytes(newest.note.encode())
    shutil.rmtree(log.path / "pending")
    assert log.sign(LOG).size == sizes[1]


def test_a_log_without_its_checkpoint_is_no_log(tmp_path: Path) -> None:
    log = grown(tmp_path / "log", 3)
    log.checkpoint_path.unlink()
    for call in (lambda: log.sign(LOG), lambda: log.add([b"x"]), lambda: log.create(ORIGIN, LOG)):
        with pytest.raises(StoreError, match=r"no such file|not empty"):
            call()


WRITER = """
import os, signal, sys
from pathlib import Path
from tallystick.signing.note import NOTE, NoteKey, NoteSigner
from tallystick.signing.keys import ed25519_key
from tallystick.tlog.tree import LogEntry
from tallystick.store.tlog import LogDirectory

key = ed25519_key(bytes([1]) * 32)
signer = NoteSigner(NoteKey("log.example/runs", NOTE, key.public_key), key)
renames, die_at = 0, int(sys.argv[2])

def count(event, arguments):
    global renames
    if event == "os.rename":
        renames += 1
        if renames == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

log = LogDirectory(Path(sys.argv[1]))
log.add([LogEntry("run", f"{number:064x}").encode() for number in range(254, 259)])
sys.addaudithook(count)
log.sign(signer)
"""


def test_a_writer_that_is_killed_anywhere_leaves_a_log_that_goes_on(tmp_path: Path) -> None:
    whole = grown(tmp_path / "whole", 254, 259)
    base = grown(tmp_path / "base", 254)
    survived = 0
    for die_at in range(1, 20):
        log = LogDirectory(Path(shutil.copytree(base.path, tmp_path / f"killed-{die_at}")))
        child = subprocess.run(
            [sys.executable, "-c", WRITER, str(log.path), str(die_at)],
            check=False,
            env={**os.environ},
            timeout=60,
        )
        survived += child.returncode == 0
        assert child.returncode in (0, -signal.SIGKILL)
        assert log.checkpoint().size in (254, 259)
        log.verify()
        log.add([entry(259).encode()])
        final = log.sign(LOG)
        assert final.size == 260
        proof = log.prove(entry(258))
        assert proof.verify(entry(258), LogPolicy((LOG.key,), {}, {}, "none")).size == 260
        assert not list((log.path / "pending").iterdir())
        if survived:
            break
    assert survived == 1
    assert die_at > 6
    assert whole.checkpoint().size == 259


def test_a_witness_cosigns_what_only_grew_and_remembers(tmp_path: Path) -> None:
    log = grown(tmp_path / "log", 3)
    witness = Witness(tmp_path / "memory")
    witness.cosign(log, LOG.key, WITNESS, 5)
    log.add([entry(number).encode() for number in range(3, 300)])
    log.sign(LOG)
    cosigned = witness.cosign(log, LOG.key, WITNESS, 6)
    assert cosigned.note.verify([WITNESS.key]) == {WITNESS.key: 6}
    shorter = grown(tmp_path / "shorter", 200)
    with pytest.raises(Mismatch, match="it was shortened"):
        witness.cosign(shorter, LOG.key, WITNESS, 7)
    forked = LogDirectory(tmp_path / "forked")
    forked.create(ORIGIN, LOG)
    forked.add([entry(number + 1).encode() for number in range(300)])
    forked.sign(LOG)
    with pytest.raises(Mismatch, match="consistency proof of 300 to 300"):
        witness.cosign(forked, LOG.key, WITNESS, 8)
    forked.add([entry(777).encode()])
    forked.sign(LOG)
    with pytest.raises(Mismatch, match="consistency proof of 300 to 301"):
        witness.cosign(forked, LOG.key, WITNESS, 9)
    with pytest.raises(Mismatch, match="is not signed by"):
        witness.cosign(log, signer(9).key, WITNESS, 9)


def test_cosignatures_of_another_tree_are_not_attached(tmp_path: Path) -> None:
    log = grown(tmp_path / "log", 3)
    cosigned = Witness(tmp_path / "w").cosign(log, LOG.key, WITNESS, 5)
    log.add([entry(3).encode()])
    log.sign(LOG)
    with pytest.raises(Mismatch, match="has 4 entries, the cosigned checkpoint 3"):
        log.attach(cosigned)


def test_a_bundle_that_lies_about_its_entries_is_noticed(tmp_path: Path) -> None:
    log = grown(tmp_path / "log", 3)
    (log.path / "tile/entries/000.p/3").write_bytes(encode_entries([entry(i).encode() for i in (0, 9, 2)]))
    with pytest.raises(Mismatch, match=r"tile/0/000\.p/3"):
        log.verify()


def test_a_proof_is_refused_where_the_tiles_are_not_the_checkpoints(tmp_path: Path) -> None:
    log = grown(tmp_path / "log", 3)
    forged = LOG.sign(Note(checkpoint_text(ORIGIN, 3, bytes(32))))
    log.checkpoint_path.write_bytes(forged.encode())
    with pytest.raises(Mismatch, match="leads to root"):
        log.prove(entry(1))
    assert parse_checkpoint(forged.encode()).size == 3
