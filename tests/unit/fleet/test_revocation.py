"""Revocation by lists that a reader has as files: found, known not to be, or not checked."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding

from tallystick.cli.main import main
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.attestation.certificates import parse_chain, verify_chain
from tallystick.fleet.attestation.revocation import RevocationList, check_revocation, parse_revocation_list
from tallystick.testing.devices import NOW, START, FakeMaker, encode_device_file, issue, revoke, serial_of

MAKER = FakeMaker("maker")
LEAF, DEVICE, LINE, ROOT = MAKER.device("0001").chain
CHAIN, DAY = (DEVICE, LINE, ROOT), datetime.timedelta(days=1)


def listed(issuer: str, *serials: int, **more: object) -> RevocationList:
    made = revoke(issuer, serials, **more)  # pyright: ignore[reportArgumentType]
    return parse_revocation_list(made.public_bytes(Encoding.DER))


EMPTY = (listed("maker line"), listed("maker root"))


def test_without_lists_nothing_is_checked_and_with_all_of_them_everything_is() -> None:
    found = check_revocation(CHAIN, ROOT, [], at=NOW)
    assert (found.status, found.unknown) == ("not checked", (DEVICE.subject, LINE.subject))
    assert "not checked" in str(found)
    found = check_revocation(CHAIN, ROOT, EMPTY, at=NOW)
    assert (found.status, found.checked) == ("checked", (DEVICE.subject, LINE.subject))
    for some in EMPTY:
        assert check_revocation(CHAIN, ROOT, [some], at=NOW).status == "not checked"
        with pytest.raises(InvalidInput, match=r"no list of .* was given"):
            check_revocation(CHAIN, ROOT, [some], at=NOW, required=True)
    assert (
        check_revocation(CHAIN[:2], ROOT, EMPTY, at=NOW, required=True).status == "checked"
    )  # the root not shown
    assert check_revocation([ROOT], ROOT, EMPTY, at=NOW).status == "not checked"  # nothing was there to check


@pytest.mark.parametrize("which", [0, 1])
def test_a_revoked_certificate_is_refused_whatever_else_is_given(which: int) -> None:
    serial = serial_of(CHAIN[which])
    issuer = ("maker line", "maker root")[which]
    for more in (
        {},
        {"start": START, "end": START + DAY},
    ):  # a list that is no longer in force has named it all the same
        bad = listed(issuer, 5, serial, **more)
        for lists in ([bad], [*EMPTY, bad]):
            with pytest.raises(Mismatch, match=rf"certificate {serial:x} .* was revoked by"):
                check_revocation(CHAIN, ROOT, lists, at=NOW)
    other = listed(
        ("maker root", "maker line")[which], serial
    )  # another issuer's certificate with that number
    assert check_revocation(CHAIN, ROOT, [other], at=NOW).checked


def test_a_list_counts_while_it_is_in_force() -> None:
    old = listed("maker line", end=START + DAY)
    with pytest.raises(
        Mismatch, match=r"maker line is in force from 1735689600 to 1735776000, the moment is"
    ):
        check_revocation(CHAIN, ROOT, [old, EMPTY[1]], at=NOW)
    after = int(START.timestamp())
    assert check_revocation(CHAIN, ROOT, [old, EMPTY[1]], at=after).status == "checked"
    assert check_revocation(CHAIN, ROOT, [old, *EMPTY], at=NOW).status == "checked"
    with pytest.raises(Mismatch, match="the moment is"):
        check_revocation(CHAIN, ROOT, EMPTY, at=after - 1)


def test_a_list_in_an_issuers_name_is_signed_by_that_issuers_key() -> None:
    with pytest.raises(Mismatch, match="is not signed by that issuer's key"):
        check_revocation(CHAIN, ROOT, [listed("maker line", signer="another line")], at=NOW)
    assert check_revocation(CHAIN, ROOT, [listed("another line")], at=NOW).status == "not checked"
    with pytest.raises(
        Mismatch, match="must not sign revocation lists"
    ):  # a leaf's list about what it cannot issue
        own = parse_chain(issue("maker end", "maker firmware 0001", is_ca=False).public_bytes(Encoding.PEM))
        check_revocation([*own, LEAF], LEAF, [listed("maker firmware 0001")], at=NOW)


def test_lists_are_read_strictly() -> None:
    made = revoke("maker line", [1, 2])
    der, pem = made.public_bytes(Encoding.DER), made.public_bytes(Encoding.PEM)
    assert (
        parse_revocation_list(der) == parse_revocation_list(pem) and parse_revocation_list(der).pem() == pem
    )
    part = x509.IssuingDistributionPoint(
        full_name=[x509.UniformResourceIdentifier("http://example.test/")], relative_name=None, only_contains_user_certs=True,
        only_contains_ca_certs=False, only_some_reasons=None, indirect_crl=False, only_contains_attribute_certs=False,
    )  # fmt: skip
    builder = x509.CertificateRevocationListBuilder().issuer_name(x509.Name([]))
    builder = builder.last_update(START).next_update(START + DAY)
    other = builder.sign(rsa.generate_private_key(65537, 2048), hashes.SHA256())
    for bad, why in (
        (b"", "is no list"), (der + b"\0", "is no list"), (der[:-1], "is no list"), (b"x" + pem, "is no list"),
        (pem + b"\nmore", "PEM"), (pem.replace(b"\n", b"\r\n"), "PEM"), (bytes((1 << 23) + 1), "exceed the limit"),
        (revoke("maker line", [], critical=x509.DeltaCRLIndicator(1)).public_bytes(Encoding.DER), "critical extension"),
        (revoke("maker line", [], critical=part).public_bytes(Encoding.DER), "critical extension"),
        (other.public_bytes(Encoding.DER), "not with ECDSA"),
        (revoke("maker line", [7], entry_critical=True).public_bytes(Encoding.DER), "the entry of 7 has a critical extension"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=why):
            parse_revocation_list(bad)


def test_a_list_says_until_when_it_is_in_force() -> None:
    """RFC 5280 demands it, and the library reads a list that does without: this one has its second time cut out."""
    made = revoke("maker line", [])
    end = b"\x17\x0d450101000000Z"
    told, outer = made.tbs_certlist_bytes, made.public_bytes(Encoding.DER)
    rest = outer[3 + len(told) :]  # algorithm and signature, which parsing does not look at
    told = told[2:].replace(end, b"")
    told = b"\x30" + bytes([len(told)]) + told
    cut = b"\x30\x81" + bytes([len(told + rest)]) + told + rest
    assert len(cut) == len(outer) - len(end)
    with pytest.raises(InvalidInput, match="does not say until when"):
        parse_revocation_list(cut)


def test_a_device_is_shown_with_what_is_known_of_its_revocation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nonce = bytes(range(32))
    (tmp_path / "device.json").write_bytes(encode_device_file((MAKER.device("0001").answer(nonce),)))
    (tmp_path / "root.pem").write_bytes(ROOT.pem())
    for name, made in (
        ("line", EMPTY[0]),
        ("root", EMPTY[1]),
        ("bad", listed("maker line", serial_of(DEVICE))),
    ):
        (tmp_path / f"{name}.crl").write_bytes(made.der)
    shown = ["chip", "device", str(tmp_path / "device.json"), "--device-root", str(tmp_path / "root.pem")]
    shown += ["--nonce", nonce.hex(), "--at", str(NOW), "--json"]

    def run(*names: str, code: int = 0) -> str:
        lists = [part for name in names for part in ("--crl", str(tmp_path / f"{name}.crl"))]
        assert main([*shown, *lists]) == code
        found = capsys.readouterr()
        return found.out + found.err

    assert json.loads(run())["revocation"]["status"] == "not checked"
    assert json.loads(run("line"))["revocation"]["not_checked"] == [LINE.subject]
    assert json.loads(run("line", "root"))["revocation"]["status"] == "checked"
    assert "was revoked by" in run("line", "root", "bad", code=1)
    shown.append("--require-crl")
    assert "revocation must be checked" in run("line", code=2)
    run("line", "root")


def test_a_certificate_holds_from_its_first_second_to_its_last() -> None:
    for at, holds in (
        (DEVICE.starts, True),
        (DEVICE.ends, True),
        (DEVICE.starts - 1, False),
        (DEVICE.ends + 1, False),
    ):
        if holds:
            verify_chain((LEAF, *CHAIN), ROOT, at=at)
            continue
        with pytest.raises(Mismatch, match=f"the moment is {at}"):
            verify_chain((LEAF, *CHAIN), ROOT, at=at)


@pytest.mark.parametrize(("depth", "holds"), [(0, False), (1, True), (None, True)])
def test_an_issuer_stands_as_high_above_a_leaf_as_it_may(depth: int | None, holds: bool) -> None:
    made = (
        issue("leaf", "low", is_ca=False),
        issue("low", "high"),
        issue("high", "top", depth=depth),
        issue("top", "top"),
    )
    chain = parse_chain(b"".join(each.public_bytes(Encoding.PEM) for each in made))
    if holds:
        verify_chain(chain[:-1], chain[-1], at=NOW)
        return
    with pytest.raises(Mismatch, match="may stand 0 above a leaf's issuer, stands 1"):
        verify_chain(chain[:-1], chain[-1], at=NOW)
