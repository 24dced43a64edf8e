"""tally chip: a chip's agent, its log, and the collector of logs."""

from __future__ import annotations

import functools
import secrets
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from tallystick.cli.fleet.chip_evidence import (
    ChainFile,
    DeviceFile,
    EnrollerFile,
    EnrolmentFile,
    HandedFiles,
    ListFiles,
    Lists,
    ListsRequired,
    MeasurementFile,
    Moment,
    PcrFile,
    RootFile,
    TpmEvidenceFile,
    TpmKeyFile,
    check_handed,
    device,
    make_key_in_tpm,
    read_device,
    signer_of,
    write_tpm_evidence,
)
from tallystick.cli.fleet.chip_page import LogPage, said
from tallystick.cli.fleet.chip_settings import ChipConfiguration, collector_of, load_chip
from tallystick.cli.fleet.enrolling import app as enrolling
from tallystick.cli.options import AsJson, argument, flag, load_chip_keys, option
from tallystick.cli.terminal import answer, print_json, say
from tallystick.commit.encoding import parse_hex
from tallystick.errors import InvalidInput, StoreError
from tallystick.fleet.agent.agent import ChipAgent, ChipSettings, boot_log
from tallystick.fleet.agent.chip_log import ChipHead, read_log, verify_log
from tallystick.fleet.agent.chip_record import Boot
from tallystick.fleet.agent.collector import Collector, parse_receipt, verify_receipt
from tallystick.fleet.agent.memory import Probe
from tallystick.fleet.agent.probes import ProcessMemory, SharedMemory
from tallystick.fleet.attestation.assurance import (
    NONCE_BYTES,
    TOKEN_LIMIT,
    CheckedEvidence,
    attest_head,
    derive_assurance,
    parse_attestation,
)
from tallystick.fleet.attestation.spdm import device_nonce
from tallystick.integrations.chip_http import HttpCollector, serve_collector
from tallystick.reports.layout import counted
from tallystick.signing.keys import PublicKey, generate_key
from tallystick.store.chips import ChipDirectory
from tallystick.store.files import read_whole, write_whole
from tallystick.store.journal import is_written, read_journal
from tallystick.store.keys import load_key, load_public_key, write_key

WAIT = 10.0  # seconds that a request waits for a running agent

app = typer.Typer(
    help="Chips that log snapshots of their memory, and who collects the logs.", no_args_is_help=True
)

Directory = Annotated[Path, argument("DIR", "A chip's directory, as tally chip init makes it.")]
KeyFile = Annotated[Path, option("--key", "FILE", "The device's public key, known beforehand.")]


def register(parent: typer.Typer) -> None:
    """Add ``tally chip`` to ``parent``."""
    app.command()(device)
    app.add_typer(enrolling, name="enrol")
    parent.add_typer(app, name="chip")


ChipOwner = Annotated[Path, option("--owner", "FILE", "The owner's public key.")]
SnapshotsPerDay = Annotated[
    float, option("--snapshots-per-day", "F", "On average, per day with a live agent.")
]
CollectorUrl = Annotated[str | None, option("--collector", "URL", "Remote mode: where records go.")]
CollectorKey = Annotated[Path | None, option("--collector-key", "FILE", "The collector's public key.")]
PageBytes = Annotated[int, option("--page-bytes", "N", "Size of a page.")]
Capacity = Annotated[int, option("--capacity", "N", "Records that the log may hold.")]
RetentionDays = Annotated[
    int, option("--retention-days", "N", "How long shards are kept; 0 for none.", least=0)
]
HashFrozen = Annotated[
    bool, flag("--hash-frozen", "Hash while the program stands still instead of copying first.")
]
HoldMs = Annotated[
    int, option("--hold-ms", "N", "Remote mode: how long a program waits for receipts.", least=0)
]
Algorithm = Annotated[
    str | None,
    option(
        "--algorithm",
        "NAME",
        "Of the device key: ed25519, ecdsa-p256 or ecdsa-p384; by default ed25519, in a TPM ecdsa-p256.",
    ),
]
Tpm = Annotated[
    str | None, option("--tpm", "TCTI", "Keep the device key in this TPM 2.0, such as device:/dev/tpmrm0.")
]
Accelerator = Annotated[
    Path | None, option("--device", "FILE", "Take the identity of the accelerator whose evidence this is.")
]


@app.command()
def init(
    directory: Annotated[Path, argument("DIR", "A new directory for the chip.")],
    owner: ChipOwner,
    snapshots_per_day: SnapshotsPerDay = 0.1,
    collector: CollectorUrl = None,
    collector_key: CollectorKey = None,
    page_bytes: PageBytes = 1 << 20,
    capacity: Capacity = 4096,
    retention_days: RetentionDays = 400,
    hash_frozen: HashFrozen = False,
    hold_ms: HoldMs = 10_000,
    algorithm: Algorithm = None,
    tpm: Tpm = None,
    accelerator: Accelerator = None,
    device_root: RootFile = None,
    as_json: AsJson = False,
) -> int:
    """Make a chip: its device key, its identity and its settings. It is a software agent's, whatever the machine."""
    if (collector is None) != (collector_key is None):
        raise InvalidInput("--collector and --collector-key go together")
    if (accelerator is None) != (device_root is None):
        raise InvalidInput("--device and --device-root go together")
    chosen = _key_algorithm(algorithm, tpm)
    ueid = b"\x01" + secrets.token_bytes(16)
    if accelerator is not None and device_root is not None:
        ueid = read_device(accelerator, device_root, None, None, int(time.time()), Lists())[0].ueid
    chip = ChipDirectory(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise StoreError(f"{directory}: exists and is not empty; choose another directory")
    made = ChipConfiguration(
        ueid, bytes.fromhex(load_public_key(owner).key_id), round(1000 * snapshots_per_day), page_bytes, capacity,
        retention_days, hash_frozen, hold_ms, None if collector is None else HttpCollector(collector).url,
    )  # fmt: skip
    known = None if collector_key is None else load_public_key(collector_key)
    made.settings(known)  # refuses what no agent could run with
    chip.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    in_file = tpm is None
    public = write_key(chip.key_path, generate_key(chosen)) if in_file else make_key_in_tpm(chip, tpm, chosen)
    if known is not None:
        write_whole(chip.path / "collector.pub", known.pem())
    write_whole(chip.settings_path, made.encode())
    if as_json:
        print_json({"directory": str(directory), "ueid": ueid.hex(), "public_key": str(public)})
    else:
        say(f"{directory}: chip {ueid.hex()}; its device key is {public}")
        if tpm is not None:
            say(f"the key stays in the TPM; readers must know its attestation key: {chip.path / 'tpm.pub'}")
            say("or have it enrolled under the TPM maker's certificate: tally chip enrol request")
        say(f"tally chip agent {directory}")
    return 0


def _key_algorithm(named: str | None, tpm: str | None) -> str:
    """Return the algorithm of a new device key.

    Raises:
        InvalidInput: it is no such algorithm, or none that a TPM has.
    """
    chosen = named or ("ed25519" if tpm is None else "ecdsa-p256")
    if chosen not in ("ed25519", "ecdsa-p256", "ecdsa-p384") or (tpm is not None and chosen == "ed25519"):
        where = "a device key" if tpm is None else "a key in a TPM"
        raise InvalidInput(
            f"--algorithm {chosen}: {where} is {'' if tpm else 'ed25519, '}ecdsa-p256 or ecdsa-p384"
        )
    return chosen


@app.command()
def agent(
    directory: Directory,
    manifest: Annotated[
        Path | None, option("--manifest", "FILE", "Observe tensors in files instead of registered programs.")
    ] = None,
    seconds: Annotated[
        float | None, option("--for", "SECONDS", "End after so long; by default never.")
    ] = None,
) -> int:
    """Run the agent: snapshots at random times until it is interrupted; programs register with tallystick.observe."""
    chip, settings, known = load_chip(directory)
    signer = signer_of(chip)
    probe: Probe = ProcessMemory(chip.observed_path) if manifest is None else SharedMemory(manifest)
    link = collector_of(chip)
    made = ChipAgent(
        chip, signer, probe, settings, collector=link,
        check_receipt=None if known is None else functools.partial(verify_receipt, key=known),
    )  # fmt: skip
    made.start()
    ended: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    say(
        f"chip {settings.ueid.hex()}: record {made.log[-1].record.seq}, boot {made.log[-1].record.clocks.boots}"
    )
    until = None if seconds is None else time.monotonic() + seconds
    try:
        while not ended and (until is None or time.monotonic() < until):
            _do_requests(chip, made)
            before = len(made.log)
            if made.poll() is not None:
                stall = made.stalls[-1]
                taken = made.log[before]
                say(f"record {taken.record.seq}: {said(taken)}; stood still {1000 * stall.frozen:.1f} ms")
            if made.is_full:
                raise StoreError(
                    f"{chip.log_path}: the chip's store is full; read the log and make another chip"
                )
            time.sleep(made.nap())
    finally:
        signal.signal(signal.SIGTERM, previous)
        with suppress(StoreError):  # the time since the last record is in no log without another
            made.self_test()
        made.stop()
        if isinstance(probe, ProcessMemory):
            probe.close()
    return 0


@app.command()
def show(directory: Directory, as_json: AsJson = False) -> int:
    """Show a chip's own log and what is to be found in it; exit code 1 with a violation."""
    chip, settings, known = load_chip(directory)
    key = signer_of(chip)
    log = boot_log(chip, key.public_key)
    heads = [ChipHead(h.seq, h.digest, "the chip's own counter")] if (h := chip.head()) is not None else []
    if known is not None:
        heads += [parse_receipt(data, known).head for data in chip.receipts().values()]
    findings = verify_log(log, known=heads)
    nonce = secrets.token_bytes(32)
    attested = None
    if log:
        token = attest_head(log[-1], nonce, b"", settings.genesis.agent, key)
        attested = parse_attestation(token, key.public_key, nonce)
    shown = LogPage(
        log, findings, derive_assurance(log, findings, CheckedEvidence(True, attested)), key.public_key
    )
    answer(shown, as_json=as_json)
    return 1 if shown.verdict == "violation" else 0


@app.command()
def verify(
    log: Annotated[Path, argument("LOG", "A chip's log.journal, handed over.")],
    key: KeyFile,
    token: Annotated[
        Path | None, option("--attestation", "FILE", "What tally chip attest wrote for your nonce.")
    ] = None,
    nonce: Annotated[str | None, option("--nonce", "HEX", "The nonce you chose.")] = None,
    earlier: Annotated[
        list[Path] | None, option("--earlier", "LOG", "A copy handed over before; may be repeated.")
    ] = None,
    tpm: TpmEvidenceFile = None,
    tpm_key: TpmKeyFile = None,
    tpm_enrolment: EnrolmentFile = None,
    enroller: EnrollerFile = None,
    pcrs: PcrFile = None,
    accelerator: DeviceFile = None,
    device_root: RootFile = None,
    measurements: MeasurementFile = None,
    endorsement: ChainFile = None,
    lists: ListFiles = None,
    require_lists: ListsRequired = False,
    at: Moment = None,
    as_json: AsJson = False,
) -> int:
    """Check a log that somebody handed over, without trusting it: exit code 1 with a violation, 3 if it cannot be told."""
    handed = HandedFiles(
        tpm, tpm_key, tpm_enrolment, enroller, pcrs, accelerator, device_root, measurements, endorsement, at,
        Lists(tuple(lists or ()), require_lists),
    )  # fmt: skip
    if (token is None) != (nonce is None) or (handed.needs_nonce and nonce is None):
        raise InvalidInput("--attestation and --nonce go together, and --tpm and --device need both")
    public = load_public_key(key)
    records, findings = read_log(read_journal(log), public)
    heads: list[ChipHead] = []
    attested = None
    asked = b"" if nonce is None else parse_hex(nonce, n_bytes=len(nonce) // 2, what="--nonce")
    if token is not None:
        attested = parse_attestation(
            read_whole(token, limit=TOKEN_LIMIT, what="an attestation"), public, asked
        )
        heads.append(attested.head)
    others = [read_log(read_journal(path), public)[0] for path in earlier or []]
    findings += verify_log(records, known=heads, others=others)
    found = check_handed(handed, records, public, asked)
    evidence = CheckedEvidence(True, attested, found.quote, found.endorsed)
    shown = LogPage(records, findings, derive_assurance(records, findings, evidence), public, found)
    answer(shown, as_json=as_json)
    return {"consistent": 0, "violation": 1, "unknown": 3}[shown.verdict]


@app.command()
def attest(
    directory: Directory,
    nonce: Annotated[str, option("--nonce", "HEX", "8 to 64 bytes that the asker chose.")],
    out: Annotated[Path, option("--out", "FILE", "Where to write the attestation.")],
    tpm: Annotated[
        Path | None, option("--tpm", "FILE", "Write there what the chip's TPM says about key, head and boot.")
    ] = None,
) -> int:
    """Sign the log's head for a nonce: shows whom it is handed to that the log ends there. A running agent says since when."""
    chip, settings, _ = load_chip(directory)
    key = signer_of(chip)
    asked = parse_hex(nonce, n_bytes=len(nonce) // 2, what="--nonce")
    if not NONCE_BYTES[0] <= len(asked) <= NONCE_BYTES[1]:
        raise InvalidInput(
            f"--nonce: has {len(asked)} bytes, a nonce has {NONCE_BYTES[0]} to {NONCE_BYTES[1]}"
        )
    token = _attested_now(chip, key.public_key, asked)
    log = boot_log(chip, key.public_key)
    if not log:
        raise InvalidInput(f"{directory}: the log is empty; start the agent once")
    if token is None:
        seed = next((r.record.event.seed for r in reversed(log) if isinstance(r.record.event, Boot)), b"")
        token = attest_head(log[-1], asked, seed, settings.genesis.agent, key)
        say(f"{directory}: no agent runs, so nothing is attested of the time after the last record")
    if tpm is not None:
        write_tpm_evidence(chip, tpm, log[-1], asked)
    write_whole(out, token)
    head = ChipHead(log[-1].record.seq, log[-1].digest)
    say(f"{out}: record {head.seq} {head.digest.hex()}")
    say(
        f"an accelerator is to be asked with nonce {device_nonce(settings.ueid, key.public_key, head, asked).hex()}"
    )
    return 0


@app.command()
def precommit(
    directory: Directory,
    digest: Annotated[str, argument("HEX", "The pre-commitment's digest, 64 hexadecimal digits.")],
) -> int:
    """Log a run's pre-commitment before its first step; asks the running agent, if there is one."""
    log_precommit(directory, parse_hex(digest, n_bytes=32, what="pre-commitment"))
    say(f"pre-commitment {digest} is logged")
    return 0


def _attested_now(chip: ChipDirectory, key: PublicKey, nonce: bytes) -> bytes | None:
    """Return what the chip's running agent attests for a nonce; None if none runs.

    Raises:
        StoreError: one runs and does not answer.
        Mismatch: it answered somebody else.
    """
    if not is_written(chip.log_path):
        return None
    request = chip.ask(f"attest-{nonce.hex()}")
    deadline = time.monotonic() + WAIT
    while request.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if request.exists():
        chip.done(request.name)
        raise StoreError(f"{chip.path}: the agent did not attest within {WAIT:g} s")
    token = read_whole(chip.attestation_path, limit=TOKEN_LIMIT, what="an attestation")
    parse_attestation(token, key, nonce)
    return token


def log_precommit(directory: Path, digest: bytes) -> None:
    """Return when the chip has logged the digest: its running agent, or one started for this alone.

    Raises:
        StoreError: no chip, or an agent that does not answer.
    """
    chip, settings, known = load_chip(directory)
    request = chip.ask(f"precommit-{digest.hex()}")
    deadline = time.monotonic() + WAIT
    while request.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        if time.monotonic() > deadline - WAIT + 1.0:
            with suppress(StoreError):  # another agent has the log open, and will see the request
                _once(chip, settings, known)
    if request.exists():
        chip.done(request.name)
        raise StoreError(f"{directory}: the agent did not log the pre-commitment within {WAIT:g} s")


@app.command()
def collect(
    directory: Annotated[Path, argument("DIR", "Where the collected logs lie.")],
    key: Annotated[str, option("--key", "FILE", "The collector's private key, or env:NAME.")],
    chips: Annotated[
        list[str], option("--chip", "UEID=FILE", "A chip's UEID and public key; may be repeated.")
    ],
    listen: Annotated[str, option("--listen", "HOST:PORT", "Where to listen.")] = "127.0.0.1:8765",
) -> int:
    """Receive the logs of chips in remote mode and sign receipts, until interrupted."""
    keys = {bytes.fromhex(ueid): key for ueid, key in load_chip_keys(chips).items()}
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InvalidInput(f"--listen {listen}: must be HOST:PORT")
    collector = Collector(directory, load_key(key), keys)
    server = serve_collector(collector, host, int(port))
    say(f"collecting the logs of {counted(len(keys), 'chip')} at http://{host}:{server.server_address[1]}")
    try:
        server.serve_forever()
    finally:
        server.server_close()
        collector.close()
    return 0


def _do_requests(chip: ChipDirectory, made: ChipAgent) -> None:
    for name in chip.requests():
        kind, _, text = name.partition("-")
        if kind == "precommit" and len(text) == 64:
            made.precommit(parse_hex(text, n_bytes=32, what="request"))
            say(f"record {made.log[-1].record.seq}: pre-commitment {text[:16]}..")
        elif kind == "attest":
            with suppress(InvalidInput, ValueError):  # what others ask for ends no agent
                write_whole(chip.attestation_path, made.attest(bytes.fromhex(text)))
        chip.done(name)


def _once(chip: ChipDirectory, settings: ChipSettings, known: PublicKey | None) -> None:
    """Start the agent for its requests alone."""
    made = ChipAgent(
        chip, signer_of(chip), ProcessMemory(chip.observed_path), settings,
        collector=collector_of(chip),
        check_receipt=None if known is None else functools.partial(verify_receipt, key=known),
    )  # fmt: skip
    made.start()
    try:
        _do_requests(chip, made)
    finally:
        made.stop()
