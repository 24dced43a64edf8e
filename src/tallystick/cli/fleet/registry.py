"""tally registry: keep a registry of chips, prove what it says, and hold it against independent streams."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from tallystick.cli.options import (
    AsJson,
    Now,
    Out,
    argument,
    flag,
    option,
    parse_counts,
    parse_named,
    second_of,
)
from tallystick.cli.terminal import TaskDisplay, answer, done
from tallystick.errors import InvalidInput
from tallystick.fleet.registry.claims import (
    RegistryProof,
    fleet_fields,
    make_frame,
    parse_chip,
    verify_owner,
    verify_registry_proof,
)
from tallystick.fleet.registry.corim import export_corim
from tallystick.fleet.registry.events import event_message, parse_entry, sign_event
from tallystick.fleet.registry.facts import LARGEST_ENTRY, REGISTRY, RegistryEntry, RegistryEvent
from tallystick.fleet.registry.heads import LARGEST_HEAD, SignedHead, parse_signed_head
from tallystick.fleet.registry.ledger import RegistryLedger
from tallystick.fleet.registry.reconcile import LARGEST_STREAM, Stream, reconcile
from tallystick.reports.registry import chip_page, head_page, reconciliation_page
from tallystick.store.documents import read_document
from tallystick.store.files import read_whole, write_whole
from tallystick.store.keys import load_key, load_public_key

app = typer.Typer(
    help="Keep a registry of chips: who made, moved, lost and scrapped which.", no_args_is_help=True
)

Directory = Annotated[Path, argument("DIR", "The registry's directory.")]
OwnKey = Annotated[str, option("--key", "FILE", "The registry's private key, or env:NAME.")]
Signers = Annotated[
    list[str] | None, option("--sign", "PARTY=KEYFILE", "Sign for this party; may be repeated.")
]
Chip = Annotated[str, argument("CHIP", "A chip's UEID in hexadecimal.")]


def register(parent: typer.Typer) -> None:
    """Add ``tally registry`` to ``parent``."""
    parent.add_typer(app, name="registry")


@app.command("open")
def open_registry(
    directory: Directory,
    key: OwnKey,
    name: Annotated[str, option("--name", "NAME", "What the registry is called.")],
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Begin a registry; its first event names its key."""
    signer, second = load_key(key), second_of(now)
    body: dict[str, object] = {"name": name, "key": signer.public_key.spki.hex()}
    event = RegistryEvent("open", second, secrets.token_hex(16), "", body)
    with RegistryLedger(directory) as ledger:
        if ledger.log_path.exists():
            raise InvalidInput(f"{directory}: holds a registry already")
        entry = sign_event(event, {REGISTRY: signer})
        parse_entry(entry.encode())
        signed = ledger.append([entry], signer, now=second)
    answer(head_page("registry opened", signed), as_json=as_json)
    return 0


@app.command()
def deed(
    kind: Annotated[str, argument("KIND", "party, model, fab, package, transfer, loss, ..")],
    registry: Annotated[str, option("--registry", "ID", "The registry's id, or its directory.")],
    body: Annotated[Path, option("--body", "FILE", "The event's fields, as a JSON object.")],
    out: Out,
    sign: Signers = None,
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Draw up an event and sign it; others who must sign use `tally registry sign`."""
    try:
        fields: object = json.loads(read_whole(body, limit=LARGEST_ENTRY, what="an event's body"))
    except (ValueError, RecursionError) as problem:
        raise InvalidInput(f"{body}: is no JSON ({problem})") from None
    if not isinstance(fields, dict):
        raise InvalidInput(f"{body}: must be an object")
    drawn = RegistryEvent(
        kind, second_of(now), secrets.token_hex(16), _id_of(registry), cast("dict[str, object]", fields)
    )
    entry = parse_entry(RegistryEntry(drawn, ()).encode())
    return _sign(entry, sign or [], out, as_json=as_json)


@app.command("sign")
def sign_entry(
    entry: Annotated[Path, argument("FILE", "What `tally registry deed` wrote.")],
    out: Out,
    sign: Signers = None,
    as_json: AsJson = False,
) -> int:
    """Add signatures to an event that somebody else drew up; read what it says first."""
    return _sign(parse_entry(_line(entry)), sign or [], out, as_json=as_json)


@app.command()
def append(
    directory: Directory,
    entries: Annotated[list[Path], argument("FILE...", "Signed events, one or more lines a file.")],
    key: OwnKey,
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Take up signed events, all or none, and publish a new signed head."""
    lines = [line for file in entries for line in _lines(file)]
    with RegistryLedger(directory) as ledger, TaskDisplay("append") as shown:
        ledger.load_head()
        signed = ledger.append(
            (parse_entry(line) for line in lines), load_key(key), now=second_of(now),
            progress=lambda done, _, what: shown(done, len(lines), what),
        )  # fmt: skip
    answer(head_page(f"{len(lines)} events taken up", signed), as_json=as_json)
    return 0


@app.command()
def show(
    directory: Directory,
    chip: Annotated[str | None, argument("[CHIP]", "A chip's UEID in hexadecimal.")] = None,
    history: Annotated[bool, flag("--history", "With all events about it; reads the whole log.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show the newest head, or one chip."""
    with RegistryLedger(directory) as ledger:
        if chip is not None:
            found = ledger.find_chip(chip)
            if found is None:
                ledger.load_head()
                raise InvalidInput(f"chip {chip[:80]}: is not registered")
            events = tuple(ledger.history(chip)) if history else ()
            answer(chip_page(found, f"chip {chip}", events), as_json=as_json)
            return 0
        signed = ledger.load_head()
        statuses = Counter(each.status for each in ledger.each_chip())
        parties = tuple(f"{party.name} ({', '.join(party.roles)})" for party in ledger.each_party())
        aside = tuple(file.name for file in sorted(directory.glob("unacknowledged-*.jsonl")))
    answer(head_page("newest head", signed, dict(sorted(statuses.items())), parties, aside), as_json=as_json)
    return 0


@app.command()
def rebuild(directory: Directory, as_json: AsJson = False) -> int:
    """Make the index again from the log, checking every event, every signature and the head; 1 if they disagree."""
    with RegistryLedger(directory) as ledger, TaskDisplay("rebuild") as shown:
        head = ledger.rebuild(progress=shown)
        signed = ledger.load_head()
    answer(head_page(f"log and head agree over {head.entries:,} entries", signed), as_json=as_json)
    return 0


@app.command()
def prove(
    directory: Directory,
    what: Annotated[str, argument("KEY", "A chip's UEID, or serial/.., key/.., party/.., model/..")],
    out: Out,
    since: Annotated[
        Path | None, option("--since", "HEAD", "Also prove that the log goes on from this head.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write a proof of what the registry says about one thing: its one value, or that it has none."""
    key = what if "/" in what else f"chip/{what}"
    old = None if since is None else _head_in(since)
    with RegistryLedger(directory) as ledger:
        proof = ledger.prove_key(key.encode("ascii", "replace"))
        extension = () if old is None else tuple(ledger.prove_extension(old.head))
        made = RegistryProof(ledger.load_head(), key, proof, old, extension)
    data = made.encode()
    write_whole(out, data)
    present = any(item == key.encode("ascii") for item, _ in proof.items)
    facts = {"file": str(out), "key": key, "present": present, "bytes": len(data)}
    return done(f"proof of {key}", facts, as_json=as_json)


@app.command()
def verify(
    proof: Annotated[Path, argument("PROOF", "What `tally registry prove` wrote.")],
    key: Annotated[Path, option("--key", "FILE", "The registry's public key.")],
    owner: Annotated[str | None, option("--owner", "NAME", "Who claims to own the chip.")] = None,
    as_json: AsJson = False,
) -> int:
    """Check a proof offline; 1 if it does not hold, or somebody else owns the chip."""
    found, public = read_document(RegistryProof, proof), load_public_key(key)
    if owner is not None:
        chip = verify_owner(found, public, chip=found.key.removeprefix("chip/"), owner=owner)
        answer(chip_page(chip, f"{owner} owns chip {chip.chip}, and nobody else does"), as_json=as_json)
        return 0
    value = verify_registry_proof(found, public)
    if value is not None and found.key.startswith("chip/"):
        answer(chip_page(parse_chip(value), f"the proof of {found.key} holds"), as_json=as_json)
        return 0
    there = value is not None
    shown = None if value is None else value.decode("ascii", "replace")
    facts = {"key": found.key, "present": there, "value": shown, "head": found.head.head.entries}
    headline = "the proof holds" if there else f"{found.key}: is not registered"
    return done(headline, facts, as_json=as_json)


@app.command()
def stream(
    kind: Annotated[str, argument("KIND", "maker, customs, inventory or inspection.")],
    party: Annotated[str, option("--party", "NAME", "The maker, importer, or owner of the place.")],
    source: Annotated[str, option("--source", "TEXT", "Whose list it is.")],
    out: Out,
    chips: Annotated[Path | None, option("--chips", "FILE", "Chips seen, one UEID a line.")] = None,
    units: Annotated[
        list[str] | None, option("--units", "MODEL=N", "Chips counted, not named; may be repeated.")
    ] = None,
    exporter: Annotated[str, option("--from", "NAME", "Who sent them, for customs.")] = "",
    complete: Annotated[bool, flag("--complete", "Everything the party has is listed.")] = False,
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Write somebody's list of chips as a stream for `tally registry reconcile`."""
    listed = b"" if chips is None else read_whole(chips, limit=LARGEST_STREAM, what="a list of chips")
    names = tuple(listed.decode("ascii", "replace").split())
    counts = parse_counts(units or (), option="--units", what="model")
    made = Stream(kind, source, party, exporter, second_of(now), complete, names, counts)
    write_whole(out, made.encode())
    facts = {"file": str(out), "chips": len(names), "units": counts, "complete": complete}
    return done(f"{kind} list of {party}", facts, as_json=as_json)


@app.command("reconcile")
def reconcile_streams(
    directory: Directory,
    streams: Annotated[list[Path], argument("STREAM...", "Lists of others, as JSON.")],
    as_json: AsJson = False,
) -> int:
    """Hold the registry against makers' output, customs, inventories and inspections; 1 if anything disagrees."""
    parsed = [read_document(Stream, file) for file in streams]
    with RegistryLedger(directory) as ledger:
        chips = list(ledger.each_chip())
    page = reconciliation_page(len(chips), len(parsed), reconcile(chips, parsed))
    answer(page, as_json=as_json)
    return 0 if page.values["agrees"] else 1


@app.command()
def export(
    directory: Directory,
    out: Out,
    owner: Annotated[str | None, option("--owner", "NAME", "Only this owner's chips.")] = None,
    as_json: AsJson = False,
) -> int:
    """Write the chips as a CoRIM-shaped CBOR document for attestation verifiers."""
    with RegistryLedger(directory) as ledger:
        head = ledger.load_head().head
        models = {model.name: model for model in ledger.each_model()}
        data = export_corim(
            f"tallystick:{head.registry[:32]}:{head.entries}", ledger.each_chip(owner=owner), models
        )
    write_whole(out, data)
    return done("exported", {"file": str(out), "bytes": len(data)}, as_json=as_json)


@app.command()
def frame(
    directory: Directory,
    out: Out,
    fleet: Annotated[
        Path | None, option("--fleet", "FILE", "Also write a fleet file for `tally plan`.")
    ] = None,
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """List the chips that a draw takes from, in the order of its positions."""
    second = second_of(now)
    with RegistryLedger(directory) as ledger:
        chips = list(ledger.each_chip())
        models = {model.name: model for model in ledger.each_model()}
    made = make_frame(chips, now=second)
    write_whole(out, made.encode())
    if fleet is not None:
        write_whole(fleet, json.dumps(fleet_fields(chips, models, now=second), indent=1).encode())
    strata = {name: len(names) for name, names in made.strata().items()}
    facts = {"file": str(out), "root": made.root().hex(), "strata": strata}
    return done(f"{len(made.lines):,} chips can be drawn", facts, as_json=as_json)


def _sign(entry: RegistryEntry, signers: Sequence[str], out: Path, *, as_json: bool) -> int:
    signatures = dict(entry.signatures)
    message = event_message(entry.event.encode())
    for text in signers:
        name, file = parse_named(text, option="--sign", form="PARTY=KEYFILE")
        if name in signatures:
            raise InvalidInput(f"--sign {text}: {name} signed it already")
        signatures[name] = load_key(file).sign(message)
    signed = RegistryEntry(entry.event, tuple(sorted(signatures.items())))
    parse_entry(signed.encode())
    write_whole(out, signed.encode() + b"\n")
    facts = {"file": str(out), "kind": entry.event.kind, "signed_by": sorted(signatures)}
    return done("event signed" if signers else "event drawn up", facts, as_json=as_json)


def _id_of(text: str) -> str:
    if (Path(text) / "head.json").exists():
        with RegistryLedger(Path(text)) as ledger:
            return ledger.load_head().head.registry
    return text


def _head_in(path: Path) -> SignedHead:
    return parse_signed_head(read_whole(path, limit=LARGEST_HEAD, what="a head"), what=str(path))


def _line(path: Path) -> bytes:
    lines = _lines(path)
    if len(lines) != 1:
        raise InvalidInput(f"{path}: must hold one event, holds {len(lines)}")
    return lines[0]


def _lines(path: Path) -> list[bytes]:
    data = read_whole(path, limit=1 << 30, what="a file of events")
    if not data.endswith(b"\n"):
        raise InvalidInput(f"{path}: its last line has no end")
    return data[:-1].split(b"\n")
