"""tally check."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tallystick.cli.options import AsJson, argument, option
from tallystick.cli.profiles import run_aside
from tallystick.cli.run.programs import ASKED, INTERPRETER, Request, arguments_after, file_of
from tallystick.cli.run.second_runs import answer_of, place_of_answer
from tallystick.cli.run.workplace import Workplace
from tallystick.cli.terminal import answer, say
from tallystick.errors import InvalidInput, JobFailed
from tallystick.execution.determinism import Profile, parse_profile
from tallystick.numerics.policy import find_policy
from tallystick.reports.layout import BAD, GOOD, DonePage, Row

if TYPE_CHECKING:
    from tallystick.roles.audit_report import AuditReport

REPEATED_HERE = "it is repeated under this machine's own arithmetic: the last bits of what is computed beside the steps matter"
NOT_REPEATED_HERE = (
    "it is not repeated under this machine's own arithmetic either: it hangs on what is around it (a clock, a file of its own, "
    "numbers without a seed)"
)
WIDEST = "fp64"  # the policy with the least noise
ANOTHER = 3  # exit code: what it is cannot be recorded, or is not repeated

Script = Annotated[list[str], argument("-- python FILE ...", "The program, with its arguments.")]
PolicyName = Annotated[
    str, option("--policy", "fp64|fp32|bf16|leaf", "Precision and rounding that it is tried under.")
]
Steps = Annotated[
    int, option("--steps", "N", "Steps that are recorded and followed, then one more.", least=1)
]
Against = Annotated[
    str, option("--against", "NAME", "The arithmetic that it is followed under, as --profile.")
]


def check(
    program: Script,
    policy: PolicyName = "fp32",
    steps: Steps = 3,
    against: Against = "sse4",
    as_json: AsJson = False,
) -> int:
    """Try out whether a program can be recorded: a few steps, in a copy of its folder, and everything that is refused is named.

    What was recorded is then followed under another arithmetic, in a second copy.

    Exit codes: 0 it can be recorded, and those steps were repeated to the bit; 2 a wrong argument, or the program failed;
    3 something in it is refused, or the steps were not repeated or not accepted. 130 interrupted.
    """
    find_policy(policy)
    if len(program) == 1 and not program[0].endswith(".py") and not program[0].startswith(INTERPRETER):
        raise InvalidInput(
            f"{program[0]}: check is for programs, given as -- python FILE ARGUMENTS; a job is tried out by "
            f"tally record {program[0]} --steps {steps}"
        )
    program = ["python", *program] if program[0].endswith(".py") else program
    trial = _Trial(Workplace.of(program, file_of(program)), tuple(program), policy, steps)
    profile = parse_profile(against)
    try:
        with tempfile.TemporaryDirectory(prefix="tally-") as place:
            trial.record(Path(place, "run"))
            report = None if trial.refused else trial.follow(Path(place, "run"), profile)
            if report is not None and _verdict_of(report) not in ("match", "not_accepted"):
                trial.here = _verdict_of(trial.follow(Path(place, "run"), Profile()))
    except KeyboardInterrupt:
        say("interrupted: nothing is left of the trial")
        return 130
    page = trial.page(report, profile)
    answer(page, as_json=as_json)
    return 0 if page.style == GOOD else ANOTHER


@dataclass
class _Trial:
    """The first steps of a program, tried out.

    Attributes:
        place: the folder that it runs in.
        command: the program, with its arguments.
        policy: it is recorded under.
        most: steps that are to be followed.
        steps: that were recorded.
        refused: what is refused of it.
        has_ended: whether the last of that ended the trial, so that nobody has seen what comes behind it.
        here: what following it under this machine's own arithmetic comes to, if another one does not repeat it.
    """

    place: Workplace
    command: Sequence[str]
    policy: str
    most: int
    steps: int = 0
    refused: list[str] = field(default_factory=list[str])
    has_ended: bool = False
    here: str | None = None

    def record(self, run: Path) -> None:
        """Record one step more than are to be followed, and note what is refused.

        Raises:
            InvalidInput, JobFailed: the program attaches nothing, or fails by itself.
        """
        found = self._run(
            ["record", "--policy", self.policy, "--run", str(run), "--checkpoint-every", str(self.most)],
            Profile(),
            trial=self.most + 1,
        )
        self.refused, self.steps = found.get("refused", []), found.get("steps", 0)
        if "error" not in found:
            return
        if found["kind"] in ("InvalidInput", "JobFailed") and not self.refused:
            raise {"InvalidInput": InvalidInput, "JobFailed": JobFailed}[found["kind"]](found["error"])
        self.refused.append(found["error"])
        self.has_ended = True

    def follow(self, run: Path, profile: Profile) -> AuditReport | str:
        """Follow what was recorded under a ``profile``; return what that finds, or why there is nothing."""
        last = min(self.steps, self.most)
        found = self._run(
            ["audit", str(run), "--steps", f"0:{last}", "--profile", str(profile)],
            profile,
        )
        if "report" not in found:
            return str(found.get("error", "the program ended before anything could be said of it"))
        from tallystick.roles.audit_report import AuditReport

        return AuditReport.parse(found["report"], None)

    def _run(self, arguments: list[str], profile: Profile, trial: int = 0) -> dict[str, Any]:
        with self.place.anew() as copy, place_of_answer() as answered:
            request = Request(answered, arguments_after(self.command), trial=trial)
            variables = {**copy.variables, ASKED: request.encode()}
            code = run_aside([*arguments, "--", *copy.command], profile, variables, copy.path)
            found = answer_of(request, code)
            if "error" in found:  # without where the copy was
                found["error"] = found["error"].replace(f"{copy.path}{os.sep}", "")
            return found

    def page(self, report: AuditReport | str | None, profile: Profile) -> DonePage:
        """Return what came of it."""
        program, found = shlex.join(self.command), None if isinstance(report, str | None) else report
        first = None if found is None else found.first
        why = report if isinstance(report, str) else None
        if first is not None:
            is_of_limits = first.kind == "not_accepted"
            text = f"step {first.step}: {first.subject} is {first.own}, was {first.stated}"
            why = str(first) if is_of_limits else text
        verdict = None if report is None else _verdict_of(report)
        followed = 0 if found is None else found.steps
        values: dict[str, object] = {
            "program": program, "policy": self.policy, "steps_recorded": self.steps, "refused": self.refused,
            "ended": self.has_ended, "profile": str(profile), "verdict": verdict, "steps_followed": followed, "why": why,
            "verdict_here": self.here,
        }  # fmt: skip
        rows: list[Row] = [("program", program), ("policy", self.policy), ("recorded", f"{self.steps} steps")]
        rows += [(f"refused {number}", text) for number, text in enumerate(self.refused, start=1)]
        if self.has_ended:
            rows.append(("behind it", "nobody looked: the trial ended there; mend it and check again"))
        wider = [] if self.policy == WIDEST else [("next", f"tally check --policy {WIDEST} -- {program}")]
        if self.refused:
            is_noise = all(find_policy(self.policy).allows in text for text in self.refused)
            return DonePage(
                _counted_refusals(len(self.refused)), values, [*rows, *wider] if is_noise else rows, BAD
            )
        rows.append(("followed", f"{followed} steps under {profile}: {verdict}"))
        if verdict == "match":
            rows.append(("next", f"tally record --policy {self.policy} --run DIR -- {program}"))
            return DonePage("it can be recorded", values, rows)
        if verdict == "not_accepted":
            rows += [("why", why or ""), *wider]
            return DonePage("it was repeated, and an audit would not accept it", values, rows, BAD)
        rows.append(("why", why or ""))
        rows.append(("here", REPEATED_HERE if self.here == "match" else NOT_REPEATED_HERE))
        return DonePage("it was not repeated", values, rows, BAD)


def _verdict_of(report: AuditReport | str) -> str:
    return "cannot_reproduce" if isinstance(report, str) else report.verdict


def _counted_refusals(count: int) -> str:
    return (
        "it cannot be recorded yet: one thing is refused"
        if count == 1
        else f"it cannot be recorded yet: {count} things are refused"
    )
