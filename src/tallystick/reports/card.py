"""What a model card says of how its weights were trained and how a stranger checks that: Markdown, from a bundle of evidence."""

from __future__ import annotations

import shlex

from tallystick.evidence.verification import Audited, Stated, Verification, quoted
from tallystick.reports.layout import share
from tallystick.run.statements import time_text

HEADING = "## Verification"


def verification_card(found: Verification, *, bundle: str, size: int, digest: str) -> str:
    """Return a model card's section on the evidence that ``found`` was read from.

    Args:
        found: the verification of a bundle in which nothing failed; whoever reads the card judges it by a policy of its own.
        bundle: the file's name, as it is published beside the weights.
        size: its bytes.
        digest: its SHA-256, hexadecimal.
    """
    stated = found.stated
    assert stated is not None
    lines = [
        HEADING,
        "",
        "The training of these weights was recorded, so that others can repeat it, on other hardware, to the last bit. "
        f"The evidence is {_code(bundle)} ({size:,} bytes, SHA-256 {_code(digest)}).",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in _rows(found, stated)),
        "",
        "To check it, without torch, a GPU or the network, get the public keys from their owners, not from this page, and "
        "read what `policy.json` asks for:",
        "",
        "```sh",
        "pip install tallystick",
        f"tally policy init {_keys(found, stated)}--bundle {shlex.quote(bundle)} --out policy.json",
        f"tally verify model.safetensors --bundle {shlex.quote(bundle)} --policy policy.json",
        "```",
        "",
        f"This does not show {found.shows_not}.",
        "",
    ]
    return "\n".join(lines)


def _rows(found: Verification, stated: Stated) -> list[tuple[str, str]]:
    settings = ", ".join(
        f"{_code(quoted(name))} = {_code(quoted(text))}" for name, text in sorted(stated.settings.items())
    )
    rows = [
        ("run", _code(str(found.root))),
        ("program", f"{_code(stated.program)}, called {_code(quoted(stated.job))}"),
        (
            "data",
            "none stated: the program makes or fetches its own"
            if stated.data is None
            else _code(stated.data),
        ),
        ("settings", settings or "none"),
        ("steps, seed, policy", f"{stated.steps:,}, {stated.seed}, {_code(quoted(stated.policy))}"),
        ("weights", "not stated" if stated.weights is None else f"root digest {_code(stated.weights)}"),
        ("trainer's key", "none" if stated.trainer is None else _code(stated.trainer)),
    ]
    audits = [("audit", _audit(audited)) for audited in found.audits]
    return rows + (audits or [("audit", "none: nobody has repeated the training")])


def _audit(audited: Audited) -> str:
    claim = audited.claim
    drawn = "" if claim.draw is None else ", drawn"
    return (
        f"**{claim.result}**: {claim.steps:,} of {claim.identity.run.steps:,} steps{drawn} repeated by key "
        f"{_code(audited.key_id)}, {time_text(claim.at)}; the log could choose {share(claim.freedom.fraction)} of roundings"
    )


def _keys(found: Verification, stated: Stated) -> str:
    trainer = "" if stated.trainer is None else "--trainer trainer.pub "
    return trainer + "".join(
        f"--auditor auditor{n or ''}.pub " for n in range(len({a.key_id for a in found.audits}))
    )


def _code(text: str) -> str:
    """Return somebody's text as Markdown shows it letter by letter, in a cell of a table."""
    return f"`{text.replace('`', ' ').replace('|', ' ')}`"
