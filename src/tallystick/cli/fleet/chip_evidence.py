"""What a chip's evidence is made of and read from: keys in a TPM, a TPM's quote, a device's measurements, an endorsement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tallystick.cli.options import AsJson, argument, flag, option
from tallystick.cli.terminal import console, print_json
from tallystick.commit.encoding import parse_hex
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_log import ChipHead
from tallystick.fleet.agent.chip_record import LoggedRecord
from tallystick.fleet.attestation.certificates import (
    LATEST,
    Certificate,
    parse_chain,
    parse_root,
    verify_endorsement,
)
from tallystick.fleet.attestation.enrolment import Enrolment, enrolled_key, read_enrolment
from tallystick.fleet.attestation.revocation import (
    LIST_LIMIT,
    Revocation,
    check_revocation,
    parse_revocation_list,
)
from tallystick.fleet.attestation.spdm import (
    DeviceFacts,
    DeviceQuestion,
    MeasurementReference,
    device_nonce,
    parse_device_file,
    verify_device,
)
from tallystick.fleet.attestation.tpm import PcrReference, TpmEvidence
from tallystick.fleet.attestation.tpm_verification import TpmFacts, TpmQuestion, verify_tpm
from tallystick.reports.layout import GOOD, Row, page
from tallystick.signing.dsse import ENVELOPE_LIMIT, parse_envelope
from tallystick.signing.keys import PublicKey, Signer
from tallystick.store.chips import ChipDirectory
from tallystick.store.documents import read_document
from tallystick.store.files import read_whole, write_whole
from tallystick.store.keys import load_key, load_public_key

if TYPE_CHECKING:
    from tallystick.integrations.tpm import TpmKey

TPM_KEY_LIMIT = 1 << 14  # bytes
EVIDENCE_LIMIT = 1 << 24

TpmEvidenceFile = Annotated[
    Path | None,
    option("--tpm", "FILE", "A TPM's evidence, as tally chip attest --tpm wrote it for your nonce."),
]
TpmKeyFile = Annotated[
    Path | None, option("--tpm-key", "FILE", "The TPM's attestation key, known beforehand.")
]
EnrolmentFile = Annotated[
    Path | None,
    option(
        "--tpm-enrolment",
        "FILE",
        "Instead of --tpm-key: the attestation key's enrolment, signed by --enroller.",
    ),
]
EnrollerFile = Annotated[
    Path | None, option("--enroller", "FILE", "The enroller's public key, known beforehand.")
]
PcrFile = Annotated[
    Path | None, option("--pcrs", "FILE", "Register values of a machine that booted what it should.")
]
DeviceFile = Annotated[
    Path | None, option("--device", "FILE", "The accelerator's evidence, in the form of NVIDIA's tools.")
]
RootFile = Annotated[Path | None, option("--device-root", "FILE", "The maker's root certificate, PEM.")]
MeasurementFile = Annotated[
    Path | None, option("--measurements", "FILE", "Measurements that the reader accepts.")
]
ChainFile = Annotated[
    Path | None,
    option("--endorsement", "FILE", "Certificates of the log's own key, PEM, up to the maker's root."),
]
ListFiles = Annotated[
    list[Path] | None, option("--crl", "FILE", "A list of revoked certificates, PEM or DER; may be repeated.")
]
ListsRequired = Annotated[
    bool, flag("--require-crl", "Refuse a chain without a list for each certificate below the root.")
]
Moment = Annotated[
    int | None,
    option("--at", "SECONDS", "When certificates must hold; by default now.", least=0, most=LATEST),
]


@dataclass(frozen=True)
class Lists:
    """What a reader knows of revoked certificates, and whether a chain without a list is accepted."""

    files: tuple[Path, ...] = ()
    required: bool = False

    def check(self, chain: Sequence[Certificate], root: Certificate, *, at: int, what: str) -> Revocation:
        """Return what the lists say of a verified chain; raises as ``check_revocation``."""
        found = [
            parse_revocation_list(
                read_whole(path, limit=LIST_LIMIT, what="a revocation list"), what=str(path)
            )
            for path in self.files
        ]
        return check_revocation(chain, root, found, at=at, what=what, required=self.required)


@dataclass(frozen=True)
class HandedFiles:
    """Files handed over besides the log, and what the reader knows beforehand to judge them by."""

    tpm: Path | None = None
    tpm_key: Path | None = None
    tpm_enrolment: Path | None = None
    enroller: Path | None = None
    pcrs: Path | None = None
    device: Path | None = None
    device_root: Path | None = None
    measurements: Path | None = None
    endorsement: Path | None = None
    at: int | None = None
    lists: Lists = field(default_factory=Lists)

    def __post_init__(self) -> None:
        if (self.lists.files or self.lists.required) and self.device_root is None:
            raise InvalidInput(
                "--crl and --require-crl are about the chains of --device and --endorsement, under --device-root"
            )
        enrolled = (self.tpm_enrolment, self.enroller)
        if any(enrolled) and (not all(enrolled) or self.tpm_key is not None):
            raise InvalidInput("--tpm-enrolment and --enroller go together, in place of --tpm-key")
        tpm = (self.tpm, self.tpm_key or self.tpm_enrolment, self.pcrs)
        if any(tpm) and not all(tpm):
            raise InvalidInput(
                "--tpm, --tpm-key (or --tpm-enrolment and --enroller) and --pcrs go together: evidence, a key known "
                "beforehand or enrolled, what must have booted"
            )
        if (self.device or self.endorsement) and self.device_root is None:
            raise InvalidInput("--device and --endorsement need --device-root, the maker's root that you pin")
        if self.device_root is not None and not (self.device or self.endorsement):
            raise InvalidInput("--device-root goes with --device or --endorsement")
        if self.measurements is not None and self.device is None:
            raise InvalidInput("--measurements goes with --device")

    @property
    def needs_nonce(self) -> bool:
        """Whether something here answers a nonce."""
        return self.tpm is not None or self.device is not None


@dataclass(frozen=True)
class Shown:
    """What the files were found to show."""

    quote: TpmFacts | None = None
    device: DeviceFacts | None = None
    endorsed: bool = False
    enrolment: Enrolment | None = None
    revocation: tuple[tuple[str, Revocation], ...] = ()

    def rows(self) -> list[Row]:
        """Return lines for people."""
        rows: list[Row] = []
        if self.quote is not None:
            compared = ", ".join(map(str, self.quote.compared))
            rows.append(
                (
                    "TPM",
                    f"holds the device key; registers {compared} are the reference's; {self.quote.resets} resets",
                )
            )
        if self.enrolment is not None:
            rows.append(
                (
                    "enrolled",
                    f"the attestation key, by {self.enrolment.enroller[:16]}.., in TPM {self.enrolment.tpm}; "
                    f"revocation {self.enrolment.revocation}",
                )
            )
        if self.device is not None:
            rows.append(("device", f"{self.device.name} {self.device.serial}, the one that the log names"))
            rows.append(("measured", measured(self.device)))
        if self.endorsed:
            rows.append(("endorsement", "the maker vouches for the log's key"))
        rows += [(f"{name}'s chain", str(found)) for name, found in self.revocation]
        return rows

    def fields(self) -> dict[str, object]:
        """Return the same as JSON."""
        return {
            "tpm": None if self.quote is None else tpm_fields(self.quote),
            "device": None if self.device is None else device_fields(self.device),
            "endorsed": self.endorsed,
            "enrolment": None if self.enrolment is None else self.enrolment.fields(),
            "revocation": {name: found.fields() for name, found in self.revocation},
        }


def check_handed(handed: HandedFiles, log: list[LoggedRecord], key: PublicKey, nonce: bytes) -> Shown:
    """Return what the files show about the log that ends with ``log``'s last record.

    Raises:
        InvalidInput: malformed files, or evidence for an empty log.
        Mismatch: something does not hold.
    """
    if not (handed.needs_nonce or handed.endorsement):
        return Shown()
    if not log:
        raise InvalidInput("log: is empty; evidence is about its last record")
    last = log[-1]
    head, ueid = ChipHead(last.record.seq, last.digest, "the log shown"), last.record.ueid
    moment = int(time.time()) if handed.at is None else handed.at
    quote = device = enrolment = None
    revocation: list[tuple[str, Revocation]] = []
    if handed.tpm is not None and handed.pcrs is not None:
        evidence = read_document(TpmEvidence, handed.tpm)
        if handed.tpm_key is not None:
            known = load_public_key(handed.tpm_key)
        elif handed.tpm_enrolment is not None and handed.enroller is not None:
            enrolment = load_enrolment(handed.tpm_enrolment, load_public_key(handed.enroller))
            known = enrolled_key(enrolment, evidence)
        else:
            raise InvalidInput("--tpm: needs --tpm-key, or --tpm-enrolment and --enroller")
        question = TpmQuestion(known, key, ueid, head, nonce)
        quote = verify_tpm(evidence, question, read_document(PcrReference, handed.pcrs))
    if handed.device is not None and handed.device_root is not None:
        device, known_of = read_device(
            handed.device, handed.device_root, handed.measurements, device_nonce(ueid, key, head, nonce), moment, handed.lists
        )  # fmt: skip
        revocation.append(("device", known_of))
        if device.ueid != ueid:
            raise Mismatch(
                f"device evidence: is of device {device.ueid.hex()}, the log is of chip {ueid.hex()}"
            )
    if handed.endorsement is not None and handed.device_root is not None:
        chain = parse_chain(_read(handed.endorsement), what=str(handed.endorsement))
        root = parse_root(_read(handed.device_root), what=str(handed.device_root))
        verify_endorsement(chain, root, key, at=moment)
        revocation.append(("endorsement", handed.lists.check(chain, root, at=moment, what="endorsement")))
    return Shown(quote, device, handed.endorsement is not None, enrolment, tuple(revocation))


def read_device(
    file: Path, root: Path, measurements: Path | None, nonce: bytes | None, at: int, lists: Lists
) -> tuple[DeviceFacts, Revocation]:
    """Return what the one device in ``file`` states for ``nonce`` (None: for whichever nonce it answered), and is it revoked.

    The leaf is what the device issues itself, for the firmware that runs: nobody lists it, it falls with the device's own.

    Raises:
        InvalidInput: malformed, or not exactly one device.
        Mismatch: something does not hold.
    """
    devices = parse_device_file(_read(file), what=str(file))
    if len(devices) != 1:
        raise InvalidInput(f"{file}: holds {len(devices)} devices; a chip's log is of one")
    asked = devices[0].exchange.nonce if nonce is None else nonce
    reference = None if measurements is None else read_document(MeasurementReference, measurements)
    pinned = parse_root(_read(root), what=str(root))
    facts = verify_device(devices[0], DeviceQuestion(pinned, asked, at), reference)
    return facts, lists.check(devices[0].chain[1:], pinned, at=at, what="device evidence")


def signer_of(chip: ChipDirectory) -> Signer:
    """Return what signs for the chip: its key in a TPM, or the one in its directory.

    Raises:
        StoreError, InvalidInput: no key, or none that can be read.
    """
    if chip.tpm_path.exists():
        from tallystick.integrations.tpm import TpmSigner

        return TpmSigner(tpm_key_of(chip))
    return load_key(str(chip.key_path))


def tpm_key_of(chip: ChipDirectory) -> TpmKey:
    """Return what names the chip's device key in its TPM.

    Raises:
        InvalidInput: the key lies in no TPM, or what names it is malformed.
    """
    from tallystick.integrations.tpm import parse_tpm_key

    if not chip.tpm_path.exists():
        raise InvalidInput(
            f"{chip.path}: its key lies in no TPM; `tally chip init --tpm` makes one that does"
        )
    data = read_whole(chip.tpm_path, limit=TPM_KEY_LIMIT, what="the key of a TPM")
    return parse_tpm_key(data, what=str(chip.tpm_path))


def make_key_in_tpm(chip: ChipDirectory, tcti: str, algorithm: str) -> Path:
    """Make the chip's device key in a TPM; write how it is found, its public key, and the attestation key beside it.

    Raises:
        InvalidInput, StoreError: no TPM there, or it refuses.
    """
    from tallystick.integrations.tpm import attestation_key, make_tpm_key

    key = make_tpm_key(tcti, algorithm)
    vouching = attestation_key(tcti, algorithm)
    public = chip.key_path.with_name("chip.key.pub")
    write_whole(chip.tpm_path, key.encode(), mode=0o600)
    write_whole(chip.path / "tpm.pub", vouching.key().pem())
    write_whole(public, key.public.key().pem())
    return public


def write_tpm_evidence(chip: ChipDirectory, out: Path, last: LoggedRecord, nonce: bytes) -> None:
    """Have the chip's TPM certify its key and quote over the log's head, and write what it said.

    Raises:
        InvalidInput: the chip's key lies in no TPM.
        StoreError: the TPM refuses.
    """
    from tallystick.integrations.tpm import gather_evidence

    key = tpm_key_of(chip)
    head = ChipHead(last.record.seq, last.digest, "the log")
    write_whole(out, gather_evidence(key, ueid=last.record.ueid, head=head, nonce=nonce).encode())


def load_enrolment(path: Path, enroller: PublicKey) -> Enrolment:
    """Return the enrolment in ``path``, signed by ``enroller``.

    Raises:
        InvalidInput: malformed.
        Mismatch: somebody else signed it.
    """
    envelope = parse_envelope(read_whole(path, limit=ENVELOPE_LIMIT, what="an enrolment"), what=str(path))
    if not envelope.signers([enroller]):
        raise Mismatch(f"{path}: is not signed by the enroller {enroller.key_id[:16]}..")
    return read_enrolment(envelope.statement(what=str(path)), enroller.key_id, what=str(path))


def device(
    file: Annotated[Path, argument("FILE", "Evidence of one accelerator, as NVIDIA's tools write it.")],
    root: Annotated[Path, option("--device-root", "FILE", "The maker's root certificate, PEM.")],
    nonce: Annotated[
        str | None,
        option(
            "--nonce",
            "HEX",
            "The 32 bytes that the device was asked with; without it, freshness is not shown.",
        ),
    ] = None,
    measurements: MeasurementFile = None,
    lists: ListFiles = None,
    require_lists: ListsRequired = False,
    at: Moment = None,
    as_json: AsJson = False,
) -> int:
    """Check an accelerator's signed measurements offline; exit code 1 if anything does not hold, 3 without a nonce."""
    asked = None if nonce is None else parse_hex(nonce, n_bytes=32, what="--nonce")
    moment = int(time.time()) if at is None else at
    found, revocation = read_device(
        file, root, measurements, asked, moment, Lists(tuple(lists or ()), require_lists)
    )
    if as_json:
        print_json({**device_fields(found), "fresh": nonce is not None, "revocation": revocation.fields()})
    else:
        rows = [
            ("device", f"{found.name} {found.serial}"),
            ("UEID", found.ueid.hex()),
            ("measured", measured(found)),
            *found.versions,
            ("fresh", "answers your nonce" if nonce else "not shown: no nonce was given"),
            ("revocation", str(revocation)),
            ("not shown", "what was computed on it, and whether its firmware logs snapshots"),
        ]
        console().print(page("device evidence: genuine under the root given", GOOD, rows))
    return 0 if nonce is not None else 3


def measured(found: DeviceFacts) -> str:
    """Return how many measurements there are and were compared, in words."""
    used = sum(any(m.value) for m in found.measurements)
    compared = (
        f"{len(found.compared)} equal to the reference"
        if found.compared
        else "none compared: no reference was given"
    )
    return f"{used} of {len(found.measurements)} values in use, {compared}"


def device_fields(found: DeviceFacts) -> dict[str, object]:
    """Return a device's facts as JSON."""
    return {
        "name": found.name,
        "serial": found.serial,
        "ueid": found.ueid.hex(),
        "measurements": {str(m.index): m.value.hex() for m in found.measurements},
        "compared": list(found.compared),
        "versions": dict(found.versions),
    }


def tpm_fields(found: TpmFacts) -> dict[str, object]:
    """Return a TPM's facts as JSON."""
    return {
        "head": found.head.seq,
        "registers": {str(register): value.hex() for register, value in found.registers},
        "compared": list(found.compared),
        "clock_ms": found.clock,
        "resets": found.resets,
        "restarts": found.restarts,
        "clock_safe": found.safe,
        "firmware": f"{found.firmware:016x}",
    }


def _read(path: Path) -> bytes:
    return read_whole(path, limit=EVIDENCE_LIMIT, what="evidence")
