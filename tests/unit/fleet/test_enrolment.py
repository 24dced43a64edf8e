"""Enrolment of attestation keys: certificates, credentials and statements, and a software TPM that activates."""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tallystick.cli.main import main
from tallystick.commit.encoding import canonical_json
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.attestation.certificates import Certificate, encode_chain, parse_chain
from tallystick.fleet.attestation.credential import make_credential
from tallystick.fleet.attestation.enrolment import (
    ENROLMENT_TYPE,
    EnrolmentRequest,
    KeptChallenge,
    answer_to,
    challenge_request,
    enrol,
    enrolled_key,
    read_enrolment,
    verify_request,
)
from tallystick.fleet.attestation.tpm import (
    BOUND,
    DECRYPT,
    RESTRICTED,
    SIGN,
    PcrReference,
    TpmEvidence,
    TpmPublic,
)
from tallystick.signing.dsse import Statement
from tallystick.signing.keys import P256, P384, PublicKey, generate_key
from tallystick.testing.devices import END, NOW, key_of, revoke
from tallystick.testing.tpm_makers import NAMES, TpmMaker

MAKER, ENROLLER = TpmMaker("maker"), "11" * 32
EK_SECRET = ec.derive_private_key(12345, ec.SECP256R1())
EK = PublicKey(P256, EK_SECRET.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def attests(attributes: int = BOUND | SIGN | RESTRICTED) -> TpmPublic:
    point = key_of("attestation key").public_key().public_numbers()
    return TpmPublic(0x0B, attributes, b"", 4, point.x.to_bytes(48, "big"), point.y.to_bytes(48, "big"))


def asked(chain: tuple[Certificate, ...] | None = None, key: TpmPublic | None = None) -> EnrolmentRequest:
    return EnrolmentRequest(key or attests(), MAKER.chain(EK) if chain is None else chain)


def test_a_certificate_names_its_tpm_and_holds_under_one_of_the_roots() -> None:
    tpm, root = verify_request(asked(), [TpmMaker("another").root, MAKER.root], at=NOW)
    assert (str(tpm), root) == ("TALY software id:00010002", MAKER.root)


@pytest.mark.parametrize(
    ("request_", "at", "why"),
    [
        (asked(MAKER.chain(EK, agrees=False)), NOW, "none of a key that agrees keys"),
        (asked(MAKER.chain(EK, is_ca=True)), NOW, "none of a key that agrees keys"),
        (asked(MAKER.chain(EK, use=None)), NOW, "is for nothing, must be for 2.23.133.8.1"),
        (asked(MAKER.chain(EK, use=x509.ObjectIdentifier("2.23.133.8.3"))), NOW, "is for 2.23.133.8.3"),
        (asked(MAKER.chain(EK, names=None)), NOW, "must name 2.23.133.2.1 of the TPM once, names it 0"),
        (asked(MAKER.chain(EK, names=NAMES[:2])), NOW, "must name 2.23.133.2.3 of the TPM once"),
        (asked(MAKER.chain(EK, names=[*NAMES, NAMES[0]])), NOW, "2.23.133.2.1 of the TPM once, names it 2"),
        (
            asked(MAKER.chain(EK, names=[(NAMES[0][0], "TALY"), *NAMES[1:]])),
            NOW,
            "must be id: and eight digits",
        ),
        *(
            (
                asked(MAKER.chain(EK, names=[NAMES[0], (NAMES[1][0], bad), NAMES[2]])),
                NOW,
                "must name 2.23.133.2.2 of the TPM once",
            )
            for bad in ("m" * 101, "mod\x1b[2Jel")
        ),
        (asked(), int(END.timestamp()) + 1, "the moment is"),
        (asked(), 0, "the moment is"),
        (asked(MAKER.chain(EK)[:1]), NOW, "is not signed by"),
        (asked(TpmMaker("another").chain(EK)), NOW, "is not signed by"),
        (asked(key=attests(BOUND | SIGN)), NOW, "attributes are"),
        (asked(key=attests(BOUND | SIGN | RESTRICTED | DECRYPT)), NOW, "attributes are"),
        (asked(key=attests(SIGN | RESTRICTED)), NOW, "attributes are"),
    ],
)
def test_what_is_no_endorsement_or_no_attestation_key_is_refused(
    request_: EnrolmentRequest, at: int, why: str
) -> None:
    with pytest.raises(Mismatch, match=why):
        verify_request(request_, [MAKER.root], at=at)
    with pytest.raises(Mismatch, match=r"attributes are|holds under none of 2 roots|is for|must"):
        verify_request(request_, [MAKER.root, TpmMaker("third").root], at=at)


def test_critical_names_are_understood_in_an_endorsement_only() -> None:
    pem = encode_chain(MAKER.chain(EK))
    with pytest.raises(InvalidInput, match=r"critical extension 2\.5\.29\.17 is not understood"):
        parse_chain(pem)
    with pytest.raises(Mismatch, match="none of a key that signs data"):
        from tallystick.fleet.attestation.certificates import verify_chain

        verify_chain(MAKER.chain(EK), MAKER.root, at=NOW)


def test_an_answer_is_for_one_request_and_needs_the_secret() -> None:
    request = asked()
    challenge, kept = challenge_request(request)
    assert challenge.request == kept.request == request.digest() and kept.secret.hex() not in repr(kept)
    roots = [MAKER.root]
    right = answer_to(request.digest(), kept.secret)
    made = enrol(request, right, kept, roots, at=NOW, revocation="not checked", enroller=ENROLLER)
    assert made.certificate == hashlib.sha256(request.certificates[0].der).hexdigest()
    assert read_enrolment(made.statement(), ENROLLER) == made
    for wrong in (answer_to(request.digest(), bytes(32)), answer_to(bytes(32), kept.secret), bytes(32)):
        with pytest.raises(Mismatch, match="the answer is not that"):
            enrol(request, wrong, kept, roots, at=NOW, revocation="not checked", enroller=ENROLLER)
    other = asked(MAKER.chain(EK, serial=78))
    with pytest.raises(Mismatch, match="the challenge was for request"):
        enrol(other, right, kept, roots, at=NOW, revocation="not checked", enroller=ENROLLER)
    with pytest.raises(Mismatch, match="the moment is"):
        enrol(request, right, kept, roots, at=0, revocation="not checked", enroller=ENROLLER)


def test_an_enrolment_is_of_one_key_with_its_attributes() -> None:
    """The same point with other attributes is another key: one that may sign what no TPM states, say."""
    request, loose = asked(), attests(BOUND | SIGN)
    _, kept = challenge_request(request)
    right = answer_to(request.digest(), kept.secret)
    made = enrol(request, right, kept, [MAKER.root], at=NOW, revocation="checked", enroller=ENROLLER)
    case = json.loads((Path(__file__).parents[3] / "vectors/tpm-evidence/p384/input.json").read_text())
    evidence = TpmEvidence.parse(case["evidence"].encode())
    assert enrolled_key(made, replace(evidence, attestation_key=attests())) == attests().key()
    assert loose.key() == attests().key()
    for other in (loose, evidence.attestation_key):
        with pytest.raises(Mismatch, match="enrolment: is of attestation key"):
            enrolled_key(made, replace(evidence, attestation_key=other))


def test_what_an_enroller_kept_is_read_strictly() -> None:
    _, kept = challenge_request(asked())
    assert KeptChallenge.parse(kept.encode()) == kept
    for secret in ("", "00" * 31, "00" * 33, "AB" * 32):
        document = {**json.loads(kept.encode()), "secret": secret}
        with pytest.raises(InvalidInput, match="lower-case hexadecimal"):
            KeptChallenge.parse(canonical_json(document))
    with pytest.raises(InvalidInput, match="format"):
        KeptChallenge.parse(
            canonical_json({**json.loads(kept.encode()), "format": "tallystick/tpm-answer/1"})
        )


def test_two_challenges_are_never_the_same() -> None:
    (one, kept), (two, again) = challenge_request(asked()), challenge_request(asked())
    assert one.seed != two.seed and kept.secret != again.secret


def test_only_p256_and_whole_names_have_credentials() -> None:
    name = attests().name()
    with pytest.raises(InvalidInput, match="is ecdsa-p384, credentials are made for ecdsa-p256"):
        make_credential(generate_key(P384).public_key, name, b"x")
    for bad_name, secret in ((name[:-1], b"x"), (name, b""), (name, bytes(33))):
        with pytest.raises(InvalidInput, match="a name has"):
            make_credential(EK, bad_name, secret)


def test_a_statement_is_read_strictly() -> None:
    request = asked()
    _, kept = challenge_request(request)
    right = answer_to(request.digest(), kept.secret)
    made = enrol(
        request, right, kept, [MAKER.root], at=NOW, revocation="checked", enroller=ENROLLER
    ).statement()
    with pytest.raises(InvalidInput, match="names enroller"):
        read_enrolment(made, "22" * 32)
    with pytest.raises(InvalidInput, match="predicateType must be"):
        read_enrolment(replace(made, predicate_type=ENROLMENT_TYPE + "x"), ENROLLER)
    other = attests(BOUND | SIGN | RESTRICTED | 1 << 10).encode().hex()
    for change, why in (
        ({"revocation": "fine"}, "must be checked or not checked"), ({"at": -1}, "at a second up to"), ({"root": "00"}, "root"),
        ({"manufacturer": "TALY"}, "id: and eight digits"), ({"model": "\x1b[2J"}, "printable"),
        ({"attestationKey": "00"}, "are left"),
        ({"attestationKey": other}, "its subject is not its attestation key"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=why):
            read_enrolment(
                Statement(made.subject, made.predicate_type, {**made.predicate, **change}), ENROLLER
            )


def test_requests_have_one_spelling() -> None:
    data = asked().encode()
    assert EnrolmentRequest.parse(data).encode() == data
    pem = json.loads(data)["endorsement"]
    for other in (pem.rstrip("\n"), pem + "\n", pem.replace("\n", "\r\n"), "é" + pem):
        with pytest.raises(InvalidInput):
            EnrolmentRequest.parse(
                json.dumps(
                    {**json.loads(data), "endorsement": other}, sort_keys=True, separators=(",", ":")
                ).encode()
            )


# -- with a TPM in software ----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [P256, P384])
def test_a_tpm_reads_the_secret_of_its_own_attestation_key_alone(
    tcti: str, tmp_path: Path, algorithm: str
) -> None:
    from tallystick.errors import StoreError
    from tallystick.integrations.tpm import activate, attestation_key, endorsement_key
    from tallystick.testing.software_tpm import software_tpm

    ek, ak = endorsement_key(tcti), attestation_key(tcti, algorithm)
    secret = b"\x5a" * 32
    credential = make_credential(ek, ak.name(), secret)
    assert activate(tcti, algorithm, credential) == secret
    assert activate(tcti, algorithm, make_credential(ek, ak.name(), b"short")) == b"short"
    loose = replace(ak, attributes=ak.attributes & ~RESTRICTED)
    with software_tpm(tmp_path / "other") as other:
        for bad in (
            make_credential(ek, loose.name(), secret),  # a key with those attributes is not there
            make_credential(ek, attestation_key(other, algorithm).name(), secret),
            make_credential(endorsement_key(other), ak.name(), secret),
            replace(credential, blob=credential.blob[:-1] + bytes([credential.blob[-1] ^ 1])),
        ):
            with pytest.raises(StoreError, match="refused"):
                activate(tcti, algorithm, bad)
        with pytest.raises(StoreError, match="refused"):
            activate(other, algorithm, credential)
    assert activate(tcti, algorithm, credential) == secret  # and nothing is left in the TPM by refusals


def test_an_enrolled_key_is_worth_level_two_from_the_command_line(
    tcti: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tallystick.integrations.tpm import endorsement_key

    file = {name: str(tmp_path / name) for name in (
        "chip", "request", "challenge", "kept", "answer", "enrolment", "root.pem", "ek.pem", "token", "tpm.json", "pcrs.json",
    )}  # fmt: skip

    def run(*arguments: str, code: int = 0) -> None:
        assert main(list(arguments)) == code

    for name in ("owner", "enroller", "stranger"):
        run("key", "generate", str(tmp_path / name))
    run("chip", "init", file["chip"], "--owner", str(tmp_path / "owner.pub"), "--tpm", tcti)
    run("chip", "agent", file["chip"], "--for", "0")
    Path(file["ek.pem"]).write_bytes(encode_chain(MAKER.chain(endorsement_key(tcti))))
    Path(file["root.pem"]).write_bytes(MAKER.root.pem())
    run("chip", "enrol", "request", file["chip"], "--out", file["request"], code=2)
    assert "its maker left no certificate" in capsys.readouterr().err
    run("chip", "enrol", "request", file["chip"], "--certificates", file["ek.pem"], "--out", file["request"])
    at = ("--ek-root", file["root.pem"], "--at", str(NOW))
    run(
        "chip", "enrol", "challenge", file["request"], *at, "--keep", file["kept"], "--out", file["challenge"]
    )
    assert stat.S_IMODE(Path(file["kept"]).stat().st_mode) == 0o600
    run("chip", "enrol", "answer", file["chip"], file["challenge"], "--out", file["answer"])
    signing = ("--kept", file["kept"], *at, "--key", str(tmp_path / "enroller"), "--out", file["enrolment"])
    crl = tmp_path / "line.crl"
    crl.write_bytes(revoke("maker line", [77]).public_bytes(Encoding.DER))
    run("chip", "enrol", "sign", file["request"], file["answer"], *signing, "--crl", str(crl), code=1)
    assert "certificate 4d (without a name) was revoked by" in capsys.readouterr().err
    run("chip", "enrol", "challenge", file["request"], *at, "--keep", file["kept"] + "2", "--out", file["challenge"] + "2",
        "--crl", str(crl), code=1)  # fmt: skip
    run("chip", "enrol", "sign", file["request"], file["answer"], *signing, "--require-crl", code=2)
    run("chip", "enrol", "sign", file["request"], file["answer"], *signing)
    run(
        "chip",
        "enrol",
        "sign",
        file["request"],
        file["answer"],
        *signing[:4],
        "--at",
        "1",
        *signing[6:],
        code=1,
    )
    secret = json.loads(Path(file["kept"]).read_text())["secret"]
    assert secret not in capsys.readouterr().out + Path(file["answer"]).read_text()

    nonce = "5a" * 32
    run("chip", "attest", file["chip"], "--nonce", nonce, "--out", file["token"], "--tpm", file["tpm.json"])
    evidence = TpmEvidence.parse(Path(file["tpm.json"]).read_bytes())
    Path(file["pcrs.json"]).write_bytes(PcrReference("sha256", evidence.registers).encode())
    shown = [
        "chip",
        "verify",
        f"{file['chip']}/log.journal",
        "--key",
        f"{file['chip']}/chip.key.pub",
        "--nonce",
        nonce,
    ]
    shown += [
        "--attestation",
        file["token"],
        "--tpm",
        file["tpm.json"],
        "--pcrs",
        file["pcrs.json"],
        "--json",
    ]
    enrolled = ["--tpm-enrolment", file["enrolment"], "--enroller", str(tmp_path / "enroller.pub")]
    capsys.readouterr()
    run(*shown, *enrolled)
    found = json.loads(capsys.readouterr().out)
    assert found["assurance"]["level"] == 2
    enrolment = found["evidence"]["enrolment"]
    assert enrolment["revocation"] == "not checked" and enrolment["model"] == "software"
    run(*shown, *enrolled[:3], str(tmp_path / "stranger.pub"), code=1)
    assert "is not signed by the enroller" in capsys.readouterr().err
    run(*shown, *enrolled[:2], code=2)
    run(*shown, *enrolled, "--tpm-key", f"{file['chip']}/tpm.pub", code=2)
    assert "in place of --tpm-key" in capsys.readouterr().err
    run(*shown, code=2)


def test_the_makers_certificate_in_the_tpm_is_read(tcti: str) -> None:
    """As a maker does: the certificate in DER at its index, padded, written by the platform."""
    from tpm2_pytss import ESAPI, ESYS_TR, TPM2_ALG, TPM2B_NV_PUBLIC, TPMA_NV, TPMS_NV_PUBLIC

    from tallystick.integrations.tpm import CERTIFICATE_INDEX, endorsement_key, read_endorsement_certificate

    leaf = MAKER.chain(endorsement_key(tcti))[0]
    padded = leaf.der + b"\xff" * 200
    attributes = (
        TPMA_NV.PPWRITE
        | TPMA_NV.PPREAD
        | TPMA_NV.OWNERREAD
        | TPMA_NV.AUTHREAD
        | TPMA_NV.NO_DA
        | TPMA_NV.PLATFORMCREATE
    )
    public = TPMS_NV_PUBLIC(
        nvIndex=CERTIFICATE_INDEX, nameAlg=TPM2_ALG.SHA256, attributes=attributes, dataSize=len(padded)
    )
    with ESAPI(tcti) as esys:
        index = esys.nv_define_space(None, TPM2B_NV_PUBLIC(public), ESYS_TR.PLATFORM)
        for start in range(0, len(padded), 256):
            esys.nv_write(index, padded[start : start + 256], start, auth_handle=ESYS_TR.PLATFORM)
    assert read_endorsement_certificate(tcti) == leaf.pem()
