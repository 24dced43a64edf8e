"""tally show, tally verify and tally prove: without torch."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from tallystick.cli.evidence.bundling import BundleFile, ModelDirectory, PolicyFile
from tallystick.cli.options import AnyRun, AsJson, argument, by_party, existing_run, option, parse_root
from tallystick.cli.terminal import answer, say
from tallystick.commit.state import CHUNK_BYTES, Entry, open_chunk
from tallystick.dispute.terms import Party
from tallystick.errors import InvalidInput
from tallystick.evidence.bundle import BUNDLE_LIMIT
from tallystick.evidence.files import CHUNK_SUFFIX, verify_bundle_file, verify_proof_file
from tallystick.evidence.recognition import RUN, Recognised, recognise
from tallystick.evidence.run_verifier import verify_run
from tallystick.evidence.verification import Verification
from tallystick.reports.card import verification_card
from tallystick.reports.run import read_run
from tallystick.reports.verification import verification_page
from tallystick.run.transcript import Transcript
from tallystick.signing.keys import PublicKey
from tallystick.store.files import RunDirectory, read_whole, write_whole
from tallystick.store.keys import load_public_key

EXIT_CODES: Mapping[str, int] = {"match": 0, "mismatch": 1, "malformed": 2, "unjudged": 3}


Subject = Annotated[
    Path,
    argument(
        "PATH",
        "A bundle of evidence, a run directory, a proof by tally prove, a dispute's record; weights with --bundle.",
    ),
]
Root = Annotated[str | None, option("--root", "HEX", "The root to verify against; needed for proofs.")]
TrainerSigns = Annotated[
    Path | None, option("--trainer-signs", "FILE", "Of a dispute's record: the trainer's public key.")
]
AuditorSigns = Annotated[
    Path | None, option("--auditor-signs", "FILE", "The auditor's public key, likewise.")
]
ChunkFile = Annotated[
    Path | None, option("--chunk", "FILE", "The bytes a chunk proof is about; by default PATH.chunk.")
]
CardFile = Annotated[
    Path | None,
    option("--card", "FILE", "For a bundle: write the section that a model card has of it, as Markdown."),
]
Step = Annotated[int | None, option("--step", "N", "Prove the record of this step.", least=0)]
Checkpoint = Annotated[
    int | None, option("--checkpoint", "N", "Prove a part of the state after N steps.", least=0)
]
EntryName = Annotated[str | None, option("--entry", "NAME", "The state's entry, such as model/head.weight.")]
ChunkIndex = Annotated[
    int | None, option("--chunk", "I", f"The entry's chunk of {CHUNK_BYTES} bytes, from 0.", least=0)
]
ProofOut = Annotated[Path | None, option("--out", "FILE", "Where to write the proof; by default stdout.")]


def show(run: AnyRun, as_json: AsJson = False) -> int:
    """Show what a run directory holds: order, policy, roots, parameters and the size of its log."""
    answer(read_run(existing_run(run)), as_json=as_json)
    return 0


def verify(
    path: Subject,
    root: Root = None,
    chunk: ChunkFile = None,
    policy: PolicyFile = None,
    model: ModelDirectory = None,
    bundle: BundleFile = None,
    trainer_signs: TrainerSigns = None,
    auditor_signs: AuditorSigns = None,
    card: CardFile = None,
    as_json: AsJson = False,
) -> int:
    """Check a bundle of evidence, a run's documents, log and committed states, a proof or a dispute; repeat nothing.

    With --bundle: whether weights are the very result that the bundle speaks of. Exit codes: 0 accepted or consistent,
    1 something does not fit or is not accepted, or the weights are others, 2 malformed or a wrong argument, 3 not judged.
    """
    keys: dict[Party, PublicKey] = {
        party: load_public_key(given) for party, given in by_party(trainer_signs, auditor_signs).items()
    }
    kind = recognise(path)
    is_run = kind.what == RUN
    if card is not None:
        _only_for(not kind.is_bundle or bundle is not None, "--card", "a bundle of evidence", path, kind)
    if bundle is not None:
        _only_for(
            kind.is_bundle or is_run or kind.is_proof,
            "--bundle",
            "weights, a model or a checkpoint",
            path,
            kind,
        )
        if root is not None or chunk is not None or model is not None or keys:
            raise InvalidInput(
                "--bundle: asks of a file whether it is the bundle's result, and goes with --policy alone"
            )
        found = verify_bundle_file(bundle, policy, None, file=path)
    elif kind.is_bundle:
        _only_for(bool(keys), "--trainer-signs, --auditor-signs", "a dispute's record", path, kind)
        if root is not None or chunk is not None:
            raise InvalidInput("--root, --chunk: are for runs and proofs; a bundle has --policy and --model")
        found = verify_bundle_file(path, policy, model)
    elif is_run:
        _only_for(policy is not None or model is not None, "--policy, --model", "bundles", path, kind)
        _only_for(bool(keys), "--trainer-signs, --auditor-signs", "a dispute's record", path, kind)
        _only_for(chunk is not None, "--chunk", "a chunk proof", path, kind)
        found = verify_run(RunDirectory(path), root=None if root is None else parse_root(root))
    elif kind.is_proof:
        _only_for(policy is not None or model is not None, "--policy, --model", "bundles", path, kind)
        found = _verify_proof(path, root, chunk, keys)
    else:
        raise InvalidInput(f"{path}: {kind}")
    answer(verification_page(found), as_json=as_json)
    if card is not None:
        _write_card(card, path, found)
    return EXIT_CODES[found.verdict]


def _write_card(out: Path, bundle: Path, found: Verification) -> None:
    """Write what a model card says of a bundle, unless something in that does not fit together."""
    if found.verdict not in ("match", "unjudged") or found.stated is None:
        say(f"{out}: not written, for the bundle does not fit together or is not accepted")
        return
    data = read_whole(bundle, limit=BUNDLE_LIMIT, what="a bundle")
    digest = hashlib.sha256(data).hexdigest()
    write_whole(out, verification_card(found, bundle=bundle.name, size=len(data), digest=digest).encode())
    say(f"{out}: the section for the model card")


def _only_for(wrong: bool, options: str, things: str, path: Path, kind: Recognised) -> None:
    if wrong:
        raise InvalidInput(f"{options}: for {things}; {path} is {kind.what}")


def _verify_proof(
    path: Path, root: str | None, chunk: Path | None, keys: Mapping[Party, PublicKey]
) -> Verification:
    if root is None:
        raise InvalidInput(
            "--root: a proof is verified against a root known from elsewhere; give it with --root HEX"
        )
    return verify_proof_file(path, parse_root(root), chunk=chunk, keys=keys)


def prove(
    run: AnyRun,
    step: Step = None,
    checkpoint: Checkpoint = None,
    entry: EntryName = None,
    chunk: ChunkIndex = None,
    out: ProofOut = None,
) -> int:
    """Prove that one step, or one chunk of a committed state, lies under a root."""
    wanted = (step is not None, checkpoint is not None, entry is not None, chunk is not None)
    directory = existing_run(run)
    if wanted == (True, False, False, False):
        assert step is not None
        transcript = directory.load_transcript()
        proof = transcript.prove_step(step).encode()
        _hand_over(directory, proof, None, out, f"run root {transcript.root().hex()}")
    elif wanted == (False, True, True, True):
        assert checkpoint is not None and entry is not None and chunk is not None
        root = _root_after(directory.load_partial(), checkpoint)
        entries = directory.load_committed(checkpoint, root)
        held = _entry(entries, entry)
        proof = open_chunk(entries.values(), entry, chunk).encode()
        part = bytes(memoryview(held.data)[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])
        _hand_over(directory, proof, part, out, f"state root {root}")
    else:
        raise InvalidInput(
            "prove: give either --step N, or all of --checkpoint N, --entry NAME and --chunk I"
        )
    return 0


def _root_after(transcript: Transcript, steps_done: int) -> str:
    for checkpoint in transcript.checkpoints():
        if checkpoint.steps_done == steps_done:
            return checkpoint.state_root
    every = transcript.specification.checkpoint_every
    raise InvalidInput(
        f"--checkpoint {steps_done}: no state was committed there; "
        f"they are {every} steps apart, and at the end"
    )


def _entry(entries: Mapping[str, Entry], name: str) -> Entry:
    if name not in entries:
        near = get_close_matches(name, entries, n=3, cutoff=0.3) or sorted(entries)[:3]
        raise InvalidInput(
            f"--entry {name}: the state has none of that name; the nearest are {', '.join(near)}"
        )
    return entries[name]


def _hand_over(
    directory: RunDirectory, proof: bytes, chunk: bytes | None, out: Path | None, root: str
) -> None:
    """Write the proof, and the chunk it speaks of beside it; say what to verify it against."""
    if out is None:
        sys.stdout.write(proof.decode("ascii") + ("\n" if sys.stdout.isatty() else ""))
        sys.stdout.flush()
        say(f"proof against {root}")
        return
    write_whole(out, proof)
    if chunk is not None:
        write_whole(out.with_name(out.name + CHUNK_SUFFIX), chunk)
    say(f"{out}: proof against {root}")
    say(f"tally verify {out} --root {root.rsplit(' ', maxsplit=1)[-1]}")
