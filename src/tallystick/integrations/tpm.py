"""A device key that lives in a TPM 2.0, behind the ``Signer`` seam (extra ``tallystick[tpm]``).

    key = make_tpm_key("device:/dev/tpmrm0", P256)
    signer = TpmSigner(key)
    evidence = gather_evidence(key, ueid=ueid, head=head, nonce=nonce)

The key is a primary key of the owner hierarchy: the TPM derives it anew each time from its own seed and 32 bytes of
template, so nothing is stored in it, and the file that names the key holds no secret. The attestation key is a restricted
primary key of the endorsement hierarchy, the same for all chips of one TPM. Hierarchies are used with empty
authorisation; a machine that sets one is refused by the TPM with a clear error.

Not promised: that nobody else on the machine signs with the key. Whoever may talk to the TPM can; it cannot be copied.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tallystick.commit.encoding import canonical_json, parse_document, parse_hex
from tallystick.errors import InvalidInput, StoreError
from tallystick.fleet.agent.chip_log import ChipHead
from tallystick.fleet.attestation.certificates import CHAIN_LIMIT
from tallystick.fleet.attestation.credential import Credential
from tallystick.fleet.attestation.tpm import (
    CURVES,
    HASHES,
    TpmEvidence,
    TpmPublic,
    parse_tpm_public,
    parse_tpm_statement,
)
from tallystick.fleet.attestation.tpm_verification import certify_data, quote_data
from tallystick.signing.keys import P256, P384, PublicKey

KEY_FORMAT = "tallystick/tpm-key/1"
KEY_LIMIT = 1 << 14
DEFAULT_TCTI = "device:/dev/tpmrm0"
CERTIFICATE_INDEX = 0x01C0000A  # of an endorsement key on P-256 (TCG EK Credential Profile)
NV_PART = 512  # bytes read at a time; every TPM gives so many
# PolicySecret of the endorsement hierarchy, as template L-2 of that profile has it.
ENDORSEMENT_POLICY = bytes.fromhex("837197674484b3f81a90cc8d46a5d724fd52d76e06520b64f2a1da1b331469aa")
BOOT_REGISTERS = tuple(range(8))  # firmware, its settings and the boot loader (TCG PC Client profile, 3.3.4)


@dataclass(frozen=True)
class TpmKey:
    """Names a key of a TPM; holds nothing secret.

    Attributes:
        tcti: how the TPM is reached (``device:/dev/tpmrm0``, ``swtpm:path=..``).
        algorithm: ``ecdsa-p256`` or ``ecdsa-p384``.
        unique: 32 bytes of the key's template.
        public: the key's public area, as the TPM gave it when the key was made.
    """

    tcti: str
    algorithm: str
    unique: bytes
    public: TpmPublic

    def encode(self) -> bytes:
        """Return the one encoding, canonical JSON."""
        return canonical_json(
            {
                "algorithm": self.algorithm,
                "format": KEY_FORMAT,
                "public": self.public.encode().hex(),
                "tcti": self.tcti,
                "unique": self.unique.hex(),
            }
        )


def parse_tpm_key(data: bytes, *, what: str = "TPM key file") -> TpmKey:
    """Return the key named by ``data``.

    Raises:
        InvalidInput: malformed.
    """
    names = ("algorithm", "format", "public", "tcti", "unique")
    fields = parse_document(data, KEY_FORMAT, what=what, limit=KEY_LIMIT, names=names)
    text = fields.text("public")
    public = parse_tpm_public(parse_hex(text, n_bytes=len(text) // 2, what=what), what=what)
    algorithm = fields.text("algorithm")
    if algorithm != CURVES[public.curve][0]:
        raise InvalidInput(f"{what}: algorithm {algorithm[:20]!r} is not that of the key")
    unique = parse_hex(fields.text("unique"), n_bytes=32, what=f"{what}: unique")
    return TpmKey(fields.text("tcti"), algorithm, unique, public)


class TpmSigner:
    """Signs with a key that stays in its TPM; each signature opens the TPM anew, so nothing is held between them."""

    def __init__(self, key: TpmKey) -> None:
        self.key = key
        self.public_key: PublicKey = key.public.key()

    def sign(self, message: bytes) -> bytes:
        """Return a DER signature over ``message``.

        Raises:
            StoreError: the TPM is out of reach, refuses, or holds another key (it was cleared).
        """
        _, size, hashed = CURVES[self.key.public.curve]
        with _opened(self.key.tcti) as (esys, tss), _device_key(esys, tss, self.key) as handle:
            signature = esys.sign(
                handle,
                tss.TPM2B_DIGEST(hashlib.new(HASHES[hashed], message).digest()),
                tss.TPMT_SIG_SCHEME(scheme=tss.TPM2_ALG.NULL),
                tss.TPMT_TK_HASHCHECK(tag=tss.TPM2_ST.HASHCHECK, hierarchy=tss.TPM2_RH.NULL),
            )
            r, s = _halves(signature, size)
        return encode_dss_signature(int.from_bytes(r, "big"), int.from_bytes(s, "big"))


def make_tpm_key(tcti: str, algorithm: str = P256) -> TpmKey:
    """Return a new device key of the TPM at ``tcti``.

    Raises:
        InvalidInput: another algorithm, or the extra is not installed.
        StoreError: no TPM answers there, or it does not know the curve.
    """
    if algorithm not in (P256, P384):
        raise InvalidInput(f"TPM key: algorithm must be {P256} or {P384}, is {algorithm[:20]!r}")
    unique = secrets.token_bytes(32)
    with _opened(tcti) as (esys, tss), _primary(esys, tss, algorithm, "owner", unique) as (_, public):
        return TpmKey(tcti, algorithm, unique, public)


def attestation_key(tcti: str, algorithm: str = P256) -> TpmPublic:
    """Return the public area of the attestation key of the TPM at ``tcti``: what a reader must know beforehand.

    Raises:
        InvalidInput, StoreError: as ``make_tpm_key``.
    """
    with _opened(tcti) as (esys, tss), _primary(esys, tss, algorithm, "endorsement", b"") as (_, public):
        return public


def gather_evidence(
    key: TpmKey, *, ueid: bytes, head: ChipHead, nonce: bytes, registers: Sequence[int] = BOOT_REGISTERS
) -> TpmEvidence:
    """Return the certification of the device key and a quote over the head for ``nonce`` (spec/chip-log.md 7).

    Raises:
        StoreError: the TPM is out of reach, refuses, or holds another key.
    """
    size = CURVES[key.public.curve][1]
    with (
        _opened(key.tcti) as (esys, tss),
        _device_key(esys, tss, key) as device,
        _primary(esys, tss, key.algorithm, "endorsement", b"") as (signer, signer_public),
    ):
        scheme = tss.TPMT_SIG_SCHEME(scheme=tss.TPM2_ALG.NULL)
        asked = tss.TPM2B_DATA(certify_data(ueid))
        certified, signature = esys.certify(device, signer, asked, scheme)
        certification = (parse_tpm_statement(bytes(certified)), b"".join(_halves(signature, size)))
        selection = tss.TPML_PCR_SELECTION.parse("sha256:" + ",".join(map(str, registers)))
        question = tss.TPM2B_DATA(quote_data(ueid, key.public.key(), head, nonce))
        quoted, signature = esys.quote(signer, selection, question, scheme)
        quote = (parse_tpm_statement(bytes(quoted)), b"".join(_halves(signature, size)))
        values = _read_registers(esys, tss, registers)
    return TpmEvidence(signer_public, key.public, certification, quote, values)


def endorsement_key(tcti: str) -> PublicKey:
    """Return the endorsement key of the TPM at ``tcti``: the one that its maker's certificate is of, on P-256.

    Raises:
        InvalidInput, StoreError: as ``make_tpm_key``.
    """
    with _opened(tcti) as (esys, tss), _endorsement(esys, tss) as (_, point):
        numbers = ec.EllipticCurvePublicNumbers(*point, ec.SECP256R1())
        spki = numbers.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return PublicKey(P256, spki)


def read_endorsement_certificate(tcti: str) -> bytes:
    """Return the certificate of the endorsement key that the maker left in the TPM at ``tcti``, as PEM.

    Raises:
        InvalidInput: what lies there is no certificate.
        StoreError: none lies there, or as ``make_tpm_key``.
    """
    with _opened(tcti) as (esys, tss):
        try:
            index = esys.tr_from_tpmpublic(CERTIFICATE_INDEX)
            public, _ = esys.nv_read_public(index)
        except tss.TSS2_Exception:
            raise StoreError(
                f"TPM {tcti}: its maker left no certificate at {CERTIFICATE_INDEX:#x}; give one as a file"
            ) from None
        size = min(int(public.nvPublic.dataSize), CHAIN_LIMIT)
        data = b""
        while len(data) < size:
            part = min(NV_PART, size - len(data))
            data += bytes(esys.nv_read(index, part, len(data), auth_handle=index))
    try:
        return x509.load_der_x509_certificate(_without_padding(data)).public_bytes(Encoding.PEM)
    except ValueError as problem:
        raise InvalidInput(
            f"TPM {tcti}: what lies at {CERTIFICATE_INDEX:#x} is no certificate ({problem})"
        ) from None


def activate(tcti: str, algorithm: str, credential: Credential) -> bytes:
    """Return the secret of ``credential``, which the TPM gives only if its endorsement and attestation keys are those meant.

    Raises:
        InvalidInput: the extra is not installed.
        StoreError: no TPM answers there, or it refuses: the credential is for another TPM or another attestation key.
    """
    with (
        _opened(tcti) as (esys, tss),
        _primary(esys, tss, algorithm, "endorsement", b"") as (attests, _),
        _endorsement(esys, tss) as (endorses, _),
    ):
        session = esys.start_auth_session(
            tpm_key=tss.ESYS_TR.NONE,
            bind=tss.ESYS_TR.NONE,
            session_type=tss.TPM2_SE.POLICY,
            symmetric=tss.TPMT_SYM_DEF(algorithm=tss.TPM2_ALG.NULL),
            auth_hash=tss.TPM2_ALG.SHA256,
        )
        try:
            esys.policy_secret(tss.ESYS_TR.ENDORSEMENT, session, b"", b"", b"", 0)
            found = esys.activate_credential(
                attests,
                endorses,
                tss.TPM2B_ID_OBJECT(credential.blob),
                tss.TPM2B_ENCRYPTED_SECRET(credential.seed),
                session1=tss.ESYS_TR.PASSWORD,
                session2=session,
            )
        finally:
            esys.flush_context(session)
        return bytes(found)


@contextmanager
def _endorsement(esys: Any, tss: Any) -> Generator[tuple[Any, tuple[int, int]]]:
    """The endorsement key while it is needed: the TCG's template L-2, derived anew from the TPM's own seed."""
    flags = tss.TPMA_OBJECT
    parameters = tss.TPMS_ECC_PARMS(
        symmetric=tss.TPMT_SYM_DEF_OBJECT(
            algorithm=tss.TPM2_ALG.AES,
            keyBits=tss.TPMU_SYM_KEY_BITS(aes=128),
            mode=tss.TPMU_SYM_MODE(aes=tss.TPM2_ALG.CFB),
        ),
        scheme=tss.TPMT_ECC_SCHEME(scheme=tss.TPM2_ALG.NULL),
        curveID=tss.TPM2_ECC.NIST_P256,
        kdf=tss.TPMT_KDF_SCHEME(scheme=tss.TPM2_ALG.NULL),
    )
    template = tss.TPMT_PUBLIC(
        type=tss.TPM2_ALG.ECC,
        nameAlg=tss.TPM2_ALG.SHA256,
        objectAttributes=flags.FIXEDTPM | flags.FIXEDPARENT | flags.SENSITIVEDATAORIGIN
        | flags.ADMINWITHPOLICY | flags.RESTRICTED | flags.DECRYPT,
        authPolicy=ENDORSEMENT_POLICY,
        parameters=tss.TPMU_PUBLIC_PARMS(eccDetail=parameters),
        unique=tss.TPMU_PUBLIC_ID(ecc=tss.TPMS_ECC_POINT(x=bytes(32), y=bytes(32))),
    )  # fmt: skip
    handle, public, _, _, _ = esys.create_primary(
        tss.TPM2B_SENSITIVE_CREATE(), tss.TPM2B_PUBLIC(template), tss.ESYS_TR.ENDORSEMENT
    )
    try:
        point = public.publicArea.unique.ecc
        yield handle, (int.from_bytes(bytes(point.x), "big"), int.from_bytes(bytes(point.y), "big"))
    finally:
        esys.flush_context(handle)


def _without_padding(data: bytes) -> bytes:
    """A certificate in DER without what fills the rest of its place in the TPM."""
    if len(data) < 4 or data[:2] != b"\x30\x82":
        return data
    return data[: 4 + int.from_bytes(data[2:4], "big")]


def _read_registers(esys: Any, tss: Any, registers: Sequence[int]) -> tuple[tuple[int, bytes], ...]:
    # A TPM gives at most eight values at a time, and may give fewer.
    found: dict[int, bytes] = {}
    for register in sorted(set(registers)):
        _, _, values = esys.pcr_read(tss.TPML_PCR_SELECTION.parse(f"sha256:{register}"))
        found[register] = bytes(values[0])
    return tuple(sorted(found.items()))


@contextmanager
def _opened(tcti: str) -> Generator[tuple[Any, Any]]:
    os.environ.setdefault("TSS2_LOG", "all+none")  # its lines on stderr say less than the exception
    try:
        tss: Any = importlib.import_module("tpm2_pytss")
    except ImportError as problem:
        raise InvalidInput(
            "TPM: tpm2-pytss is not installed; install the extra tallystick[tpm] (it needs libtss2-dev and a compiler)"
        ) from problem
    try:
        esys = tss.ESAPI(tcti)
    except (tss.TSS2_Exception, ValueError, RuntimeError) as problem:
        raise StoreError(f"TPM {tcti}: cannot be reached ({problem})") from problem
    try:
        yield esys, tss
    except tss.TSS2_Exception as problem:
        raise StoreError(f"TPM {tcti}: refused ({problem})") from problem
    finally:
        esys.close()


@contextmanager
def _device_key(esys: Any, tss: Any, key: TpmKey) -> Generator[Any]:
    with _primary(esys, tss, key.algorithm, "owner", key.unique) as (handle, public):
        if public != key.public:
            raise StoreError(
                f"TPM {key.tcti}: derives key {public.key().key_id[:16]}.., the chip's is "
                f"{key.public.key().key_id[:16]}..: another TPM, or it was cleared"
            )
        yield handle


@contextmanager
def _primary(
    esys: Any, tss: Any, algorithm: str, hierarchy: str, unique: bytes
) -> Generator[tuple[Any, TpmPublic]]:
    """A primary signing key while it is needed; a restricted one (for attestation) in the endorsement hierarchy."""
    attests = hierarchy == "endorsement"
    is_p256 = algorithm == P256
    flags = tss.TPMA_OBJECT
    attributes = flags.FIXEDTPM | flags.FIXEDPARENT | flags.SENSITIVEDATAORIGIN | flags.USERWITHAUTH
    attributes |= flags.SIGN_ENCRYPT | (flags.RESTRICTED if attests else 0)
    hashed = tss.TPM2_ALG.SHA256 if is_p256 else tss.TPM2_ALG.SHA384
    scheme = tss.TPMT_ECC_SCHEME(
        scheme=tss.TPM2_ALG.ECDSA, details=tss.TPMU_ASYM_SCHEME(ecdsa=tss.TPMS_SCHEME_HASH(hashAlg=hashed))
    )
    parameters = tss.TPMS_ECC_PARMS(
        symmetric=tss.TPMT_SYM_DEF_OBJECT(algorithm=tss.TPM2_ALG.NULL),
        scheme=scheme,
        curveID=tss.TPM2_ECC.NIST_P256 if is_p256 else tss.TPM2_ECC.NIST_P384,
        kdf=tss.TPMT_KDF_SCHEME(scheme=tss.TPM2_ALG.NULL),
    )
    template = tss.TPMT_PUBLIC(
        type=tss.TPM2_ALG.ECC,
        nameAlg=tss.TPM2_ALG.SHA256,
        objectAttributes=attributes,
        parameters=tss.TPMU_PUBLIC_PARMS(eccDetail=parameters),
        unique=tss.TPMU_PUBLIC_ID(ecc=tss.TPMS_ECC_POINT(x=unique, y=b"")),
    )
    parent = tss.ESYS_TR.ENDORSEMENT if attests else tss.ESYS_TR.OWNER
    handle, public, _, _, _ = esys.create_primary(
        tss.TPM2B_SENSITIVE_CREATE(), tss.TPM2B_PUBLIC(template), parent
    )
    try:
        yield handle, parse_tpm_public(bytes(public.publicArea.marshal()))
    finally:
        esys.flush_context(handle)


def _halves(signature: Any, size: int) -> tuple[bytes, bytes]:
    found = signature.signature.ecdsa
    return bytes(found.signatureR).rjust(size, b"\0"), bytes(found.signatureS).rjust(size, b"\0")
