"""tally log: publishes roots and statements in a transparency log, witnesses it, and checks it; without torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tallystick.cli.options import AsJson, argument, flag, option
from tallystick.cli.terminal import done
from tallystick.errors import InvalidInput
from tallystick.reports.layout import Row
from tallystick.signing.note import COSIGNATURE, NOTE, NoteKey, NoteSigner, parse_vkey
from tallystick.store.files import RunDirectory, read_whole, write_whole
from tallystick.store.keys import load_key
from tallystick.store.tlog import LogDirectory, Witness
from tallystick.tlog.policy import POLICY_LIMIT, LogPolicy, parse_log_policy
from tallystick.tlog.publication import DOCUMENT_LIMIT, entry_of
from tallystick.tlog.tree import LOG_PROOF_LIMIT, WitnessedCheckpoint, parse_log_proof

app = typer.Typer(
    help="Publish roots and statements in a transparency log, and check one.", no_args_is_help=True
)

Log = Annotated[Path, argument("LOG", "The log's directory.")]
Key = Annotated[str, option("--key", "KEY", "An Ed25519 private key's file, or env:NAME.")]
Document = Annotated[
    Path, argument("DOCUMENT", "A finished run's directory, its run.json, a statement, or a draw.")
]
PolicyFile = Annotated[
    Path | None, option("--policy", "FILE", "Known logs and witnesses and their quorum (C2SP tlog-policy).")
]
LogKey = Annotated[
    str | None, option("--log-key", "VKEY", "The log's key; instead of a policy, no witness asked.")
]


def register(parent: typer.Typer) -> None:
    """Add ``tally log`` to ``parent``."""
    parent.add_typer(app, name="log")


@app.command()
def init(
    log: Log,
    origin: Annotated[
        str, option("--origin", "NAME", "The log's name: where it is served, without https://.")
    ],
    key: Key,
    as_json: AsJson = False,
) -> int:
    """Make an empty log and sign it."""
    signer = _signer(origin, NOTE, key)
    made = LogDirectory(log).create(origin, signer)
    values: dict[str, object] = {
        "log": str(log),
        "origin": origin,
        "size": made.size,
        "vkey": str(signer.key),
    }
    return done(f"new log {origin}", values, [("vkey", str(signer.key))], as_json=as_json)


@app.command()
def vkey(
    name: Annotated[str, option("--name", "NAME", "The name that stands before the signature.")],
    key: Key,
    witness: Annotated[bool, flag("--witness", "The key cosigns as a witness.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print a key as logs and policies write it."""
    found = _signer(name, COSIGNATURE if witness else NOTE, key).key
    values: dict[str, object] = {"vkey": str(found), "name": name, "witness": witness}
    return done(str(found), values, [], as_json=as_json)


@app.command()
def add(
    log: Log,
    documents: Annotated[
        list[Path], argument("DOCUMENT...", "Run directories, run.json files, statements, draws.")
    ],
    as_json: AsJson = False,
) -> int:
    """Add documents by their digest; they wait for the next checkpoint."""
    entries = [entry_of(_load(document)) for document in documents]
    places = LogDirectory(log).add([entry.encode() for entry in entries])
    added: list[dict[str, object]] = []
    rows: list[Row] = []
    for document, entry, (index, is_new) in zip(documents, entries, places, strict=True):
        added.append(
            {
                "document": str(document),
                "kind": entry.kind,
                "digest": entry.digest,
                "index": index,
                "new": is_new,
            }
        )
        rows.append(
            (f"{index}", f"{entry.kind} {entry.digest} ({document}{'' if is_new else ', was there'})")
        )
    return done(f"{len(added):,} added to {log}", {"entries": added}, rows, as_json=as_json)


@app.command()
def checkpoint(log: Log, key: Key, as_json: AsJson = False) -> int:
    """Put what waits under a new signed checkpoint."""
    directory = LogDirectory(log)
    private = load_key(key)
    origin = directory.checkpoint().origin
    signed = directory.sign(NoteSigner(NoteKey(origin, NOTE, private.public_key), private))
    values: dict[str, object] = {"origin": origin, "size": signed.size, "root": signed.root.hex()}
    rows: list[Row] = [("entries", f"{signed.size:,}"), ("root", signed.root.hex())]
    return done(f"checkpoint of {origin}", values, rows, as_json=as_json)


@app.command()
def cosign(
    log: Log,
    name: Annotated[str, option("--name", "NAME", "The witness's name.")],
    key: Key,
    log_key: Annotated[str, option("--log-key", "VKEY", "The log's key.")],
    memory: Annotated[
        Path, option("--memory", "DIR", "Where this witness keeps what it saw; never delete it.")
    ],
    out: Annotated[
        Path | None, option("--out", "FILE", "Write the checkpoint there, not into the log.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Cosign a log's checkpoint as a witness, if it only grew since the last one this witness saw."""
    directory = LogDirectory(log)
    signer = _signer(name, COSIGNATURE, key)
    now = int(time.time())
    cosigned = Witness(memory).cosign(directory, _log_key(log_key), signer, now)
    if out is None:
        directory.attach(cosigned)
    else:
        write_whole(out, cosigned.note.encode())
    values: dict[str, object] = {
        "origin": cosigned.origin, "size": cosigned.size, "root": cosigned.root.hex(), "time": now, "vkey": str(signer.key),
    }  # fmt: skip
    rows: list[Row] = [
        ("entries", f"{cosigned.size:,}"),
        ("root", cosigned.root.hex()),
        ("witness", str(signer.key)),
    ]
    return done(f"cosigned {cosigned.origin}", values, rows, as_json=as_json)


@app.command()
def prove(
    log: Log,
    document: Document,
    out: Annotated[Path, option("--out", "FILE", "Where to write the .tlog-proof.")],
    as_json: AsJson = False,
) -> int:
    """Write the offline proof that a document is in the log."""
    proof = LogDirectory(log).prove(entry_of(_load(document)))
    write_whole(out, proof.encode())
    values: dict[str, object] = {"proof": str(out), "index": proof.index, "size": proof.checkpoint.size}
    rows: list[Row] = [("proof", str(out)), ("entry", f"{proof.index} of {proof.checkpoint.size}")]
    return done(f"proof from {proof.checkpoint.origin}", values, rows, as_json=as_json)


@app.command()
def verify(
    path: Annotated[Path, argument("PATH", "A log's directory, or a .tlog-proof file.")],
    document: Annotated[Path | None, argument("DOCUMENT", "For a proof: the document it speaks of.")] = None,
    policy: PolicyFile = None,
    log_key: LogKey = None,
    as_json: AsJson = False,
) -> int:
    """Check every tile and signature of a log, or a proof that a document is in one."""
    rules = _policy(policy, log_key)
    if path.is_dir():
        if document is not None:
            raise InvalidInput("a document is checked with its proof: tally log verify PROOF DOCUMENT")
        directory = LogDirectory(path)
        witnessed = directory.checkpoint().verify(rules)
        tiles = directory.verify()
        first: Row = ("tiles", f"{tiles}, each what the entries lead to")
        values: dict[str, object] = {"tiles": tiles}
    else:
        if document is None:
            raise InvalidInput("a proof is checked with its document: tally log verify PROOF DOCUMENT")
        data = read_whole(path, limit=LOG_PROOF_LIMIT, what="a proof")
        proof, entry = parse_log_proof(data, what=str(path)), entry_of(_load(document))
        witnessed = proof.verify(entry, rules)
        first = ("entry", f"{proof.index}: {entry.kind} {entry.digest}")
        values = {"index": proof.index, "kind": entry.kind, "digest": entry.digest}
    values |= {
        "origin": witnessed.origin, "size": witnessed.size, "root": witnessed.root.hex(),
        "witnesses": witnessed.witnesses, "seen_at": witnessed.seen_at,
    }  # fmt: skip
    return done(f"consistent: {path}", values, [first, *_witnessed_rows(witnessed)], as_json=as_json)


def _witnessed_rows(witnessed: WitnessedCheckpoint) -> list[Row]:
    seen = ", ".join(f"{name} at {_clock(when)}" for name, when in witnessed.witnesses.items())
    return [
        ("log", f"{witnessed.origin}, {witnessed.size:,} entries"),
        ("root", witnessed.root.hex()),
        ("witnesses", seen or "none asked for"),
    ]


def _clock(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(min(seconds, 253402300799)))


def _signer(name: str, kind: int, key: str) -> NoteSigner:
    private = load_key(key)
    return NoteSigner(NoteKey(name, kind, private.public_key), private)


def _log_key(text: str) -> NoteKey:
    path = Path(text)
    if "+" not in text or path.is_file():
        text = read_whole(path, limit=POLICY_LIMIT, what="a vkey").decode("utf-8", errors="replace").strip()
    key = parse_vkey(text)
    if key.kind != NOTE:
        raise InvalidInput(f"--log-key: {key.name} is a witness's key (type {key.kind:#04x}), not a log's")
    return key


def _policy(file: Path | None, log_key: str | None) -> LogPolicy:
    if (file is None) == (log_key is None):
        raise InvalidInput(
            "give either --policy FILE or --log-key VKEY: without a key nothing can be verified"
        )
    if log_key is not None:
        return LogPolicy((_log_key(log_key),), {}, {}, "none")
    assert file is not None
    return parse_log_policy(read_whole(file, limit=POLICY_LIMIT, what="a log policy"), what=str(file))


def _load(path: Path) -> bytes:
    if path.is_dir():
        return RunDirectory(path).load_statement()
    return read_whole(path, limit=DOCUMENT_LIMIT, what="a document for a log")
