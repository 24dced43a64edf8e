"""Trains on one rank, states that there were two, and invents the other one's records: data, loss and log of nobody's."""

from dataclasses import replace

from stage import Stage, audit, main

from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript
from tallystick.testing.attacks import must


def attack(stage: Stage) -> str:
    run = stage.honest_run()
    honest = run.load_transcript()

    def invented(record: StepRecord) -> StepRecord:
        return replace(record, rank=1, batch="ab" * 32, log="cd" * 32)

    records = [each for record in honest.records for each in (record, invented(record))]
    forged = Transcript(replace(honest.specification, world_size=2), tuple(records))
    run.write_document(run.specification_path, forged.specification.encode())
    run.write_document(run.records_path, forged.encode_records())
    run.write_document(run.statement_path, forged.statement().encode())
    report = audit(run, stage.source)
    must(report.verdict == "cannot_reproduce", f"the audit says {report.verdict}")
    assert report.first is not None
    must(report.first.subject == "ranks", f"the audit names {report.first}")
    return f"audit, which repeats one rank and says no match: {report.first}"


if __name__ == "__main__":
    main(attack, __doc__)
