"""Shows truncated, re-ordered, shifted and foreign inclusion proofs of a step."""

from dataclasses import replace

from stage import AT, Stage, main

from tallystick.run.proofs import StepProof, parse_step_proof, verify_step_proof
from tallystick.testing.attacks import must_refuse


def attack(stage: Stage) -> str:
    run = stage.honest_run()
    transcript = run.load_transcript()
    root, proof = transcript.root(), transcript.prove_step(AT)
    verify_step_proof(proof, root)
    path = proof.path
    other = replace(proof.record, loss=transcript.record(AT + 1).loss)
    altered: dict[str, StepProof] = {
        "truncated": replace(proof, path=path[:-1]),
        "extended": replace(proof, path=(*path, path[0])),
        "re-ordered": replace(proof, path=path[::-1]),
        "another step's path": replace(proof, path=transcript.prove_step(AT + 1).path),
        "another record": replace(proof, record=other),
    }
    for forged in altered.values():
        must_refuse(
            lambda forged=forged: verify_step_proof(parse_step_proof(forged.encode()), root), naming=""
        )
    must_refuse(lambda: parse_step_proof(proof.encode()[:-2]), naming="step proof")
    must_refuse(lambda: parse_step_proof(proof.encode() + b" "), naming="step proof")
    return f"the verifier, without repeating anything: {', '.join(altered)}, cut short and lengthened"


if __name__ == "__main__":
    main(attack, __doc__)
