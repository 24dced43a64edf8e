"""The code behind a run: what is committed, carried and compared, and what is never executed."""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

import tallystick
from tallystick.errors import InvalidInput, JobFailed, Mismatch, Nondeterminism, OtherProgram
from tallystick.execution.job import find_source
from tallystick.execution.program_watch import ProgramJournal
from tallystick.numerics.policy import find_policy
from tallystick.roles.audit_report import AuditReport, Deviation
from tallystick.roles.auditor import audit
from tallystick.roles.claim import write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.panel import same_arithmetic
from tallystick.roles.trainer import Order, record
from tallystick.run.program import Program
from tallystick.store.files import RunDirectory

STEPS, EVERY = 4, 2
JOB = """
import importlib
import sys
import torch
import helper
from shapes.net import net
from tallystick.execution.job import Job

def build(settings):
    model = net()
    extra = importlib.import_module("drawn")

    def batch(step):
        import data_of_a_step
        return data_of_a_step.draw(step) * extra.FACTOR

    def after_step(step):
        if step == 2 and "late" in settings:
            import late
        if step == 2 and "gone" in settings:
            importlib.import_module("late")
        if step == 2 and "hidden" in settings:
            last = list(sys.modules)[-1]
            importlib.import_module("late")
            del sys.modules[next(name for name in sys.modules if name.startswith("encodings."))]
            sys.modules[last] = sys.modules.pop(last)

    return Job(model, torch.optim.SGD(model.parameters(), lr=0.125), batch,
               lambda m, x: helper.loss(m(x)), 4, after_step=after_step)
"""
FILES = {
    "work.py": JOB,
    "helper.py": "def loss(x):\n    return x.square().mean()\n",
    "shapes/__init__.py": "",
    "shapes/net.py": (
        "import torch\nfrom .sizes import WIDE\n\ndef net():\n    made = torch.nn.Linear(WIDE, 1)\n"
        "    with torch.no_grad():\n        for p in made.parameters():\n            p.fill_(0.5)\n    return made\n"
    ),
    "shapes/sizes.py": "WIDE = 4\n",
    "data_of_a_step.py": "import torch\n\ndef draw(step):\n    return torch.arange(8.0).reshape(2, 4) / (8 + step)\n",
    "drawn.py": "FACTOR = 2.0\n",
    "late.py": "LATE = True\n",
    "unused.py": "raise RuntimeError('nobody imports this')\n",
}
COMMITTED = sorted(FILES.keys() - {"late.py", "unused.py"})


def written(folder: Path, **changes: str | None) -> Path:
    """The job's file, with all its modules beside it; ``changes`` by stem, None to leave one out."""
    for name, own in FILES.items():
        text = changes.get(Path(name).stem, own)
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder / "work.py"


def recorded(job: Path, run: Path, **settings: str) -> RunDirectory:
    directory = RunDirectory(run)
    record(Order(find_source(str(job)), settings, find_policy("fp64"), checkpoint_every=EVERY), directory)
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("program")
    return recorded(written(folder / "mine"), folder / "run")


def firsts(report: AuditReport) -> list[tuple[str, str, str]]:
    return [(d.subject, d.own, d.stated) for d in report.segments[0].deviations]


def test_every_local_module_is_committed_and_carried(run: RunDirectory) -> None:
    """Imported at the top, inside a function, inside a package or by a name made at run time."""
    program = run.load_specification().job.program
    assert program.main == "work.py"
    assert [file.name for file in program.files] == COMMITTED
    assert run.load_program() == {name: FILES[name].encode() for name in COMMITTED}
    assert set(program.distributions) >= {"torch", "tallystick"}
    assert run.load_specification().job.source_digest == program.digest()
    written_there = [p for p in run.path.rglob("*") if p.is_file()]
    folder = str(run.path.parent).encode()
    assert len(written_there) > len(COMMITTED)
    assert not [p for p in written_there if folder in p.read_bytes()]


def test_a_run_with_modules_beside_its_job_matches(run: RunDirectory, tmp_path: Path) -> None:
    assert audit(run, find_source(str(written(tmp_path)))).verdict == "match"
    renamed = written(tmp_path).rename(tmp_path / "another_name.py")
    assert audit(run, find_source(str(renamed))).verdict == "match"
    assert audit(run, find_source(str(run.program_path / "work.py"))).verdict == "match"
    assert not list(run.path.rglob("__pycache__"))


def test_another_helper_is_said_first_and_blames_nobody(run: RunDirectory, tmp_path: Path) -> None:
    stated = run.load_specification().job.program.digests()
    changed = written(
        tmp_path,
        helper="raise SystemExit('never executed')\n",
        data_of_a_step="raise SystemExit\n",
        drawn=None,
    )
    source = find_source(str(changed))
    report = audit(run, source)

    assert report.verdict == "cannot_reproduce"
    assert firsts(report)[0][0] == "program file data_of_a_step.py"
    assert ("program file drawn.py", "absent", stated["drawn.py"]) in firsts(report)
    assert [d[2] for d in firsts(report) if d[0] == "program file helper.py"] == [stated["helper.py"]]
    claim = write_claim(run, source, RunDirectory(tmp_path / "claim"))
    assert isinstance(claim, Deviation) and claim.kind == "cannot_reproduce"
    with pytest.raises(Nondeterminism, match="cannot repeat the job: program file data_of_a_step"):
        dispute(run, run, source)


def test_a_module_that_the_run_does_not_state_is_not_executed(run: RunDirectory, tmp_path: Path) -> None:
    """A copy in the run directory next to what is stated, a .pyc, or the auditor's own."""
    here = Path(shutil.copytree(run.path, tmp_path / "run"))
    text = FILES["helper.py"] + "import trap\n"
    directory = RunDirectory(here)
    restate(directory, changes={"helper.py": text})
    (here / "program" / "helper.py").write_text(text)
    (here / "program" / "trap.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")

    report = audit(directory, find_source(str(here / "program" / "work.py")))

    assert report.verdict == "cannot_reproduce"
    assert "program file trap.py" in firsts(report)[0][1]
    assert not (tmp_path / "ran").exists()


def restate(
    run: RunDirectory,
    versions: Mapping[str, str] | None = None,
    changes: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Commit to other files, or versions, in a run's specification, and let its statement fit."""
    import hashlib
    from dataclasses import replace

    from tallystick.run.transcript import Transcript

    transcript = run.load_transcript()
    job = transcript.specification.job
    files = tuple(
        replace(f, sha256=hashlib.sha256(changes[f.name].encode()).hexdigest(), size=len(changes[f.name]))
        if f.name in changes
        else f
        for f in job.program.files
    )
    program = Program(job.program.main, files, job.program.distributions if versions is None else versions)
    specification = replace(
        transcript.specification, job=replace(job, program=program, source_digest=program.digest())
    )
    other = Transcript(specification, transcript.records)
    run.write_document(run.specification_path, specification.encode())
    run.write_document(run.statement_path, other.statement().encode())


def test_a_compiled_module_beside_the_source_is_not_executed(run: RunDirectory, tmp_path: Path) -> None:
    """A ``.pyc`` that claims to be of helper.py as it stands holds whatever its author likes."""
    import importlib.util
    import py_compile

    job = written(tmp_path / "job")
    helper = tmp_path / "job" / "helper.py"
    honest = helper.read_text()
    helper.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + honest)
    forged = py_compile.compile(
        str(helper), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True
    )
    helper.write_text(honest)
    assert forged == importlib.util.cache_from_source(str(helper))

    assert audit(run, find_source(str(job))).verdict == "match"
    assert not (tmp_path / "ran").exists()


def test_another_version_of_a_distribution_is_said_first(run: RunDirectory, tmp_path: Path) -> None:
    here = RunDirectory(Path(shutil.copytree(run.path, tmp_path / "run")))
    own = run.load_specification().job.program.distributions
    job = find_source(str(written(tmp_path / "job")))
    restate(here, {**own, "torch": "1.0", "no-such-thing": "2"})
    report = audit(here, job)
    assert report.verdict == "cannot_reproduce"
    assert firsts(report) == [
        ("distribution no-such-thing", "absent", "2"),
        ("distribution torch", own["torch"], "1.0"),
    ]
    restate(here, {**own, "torch": own["torch"].partition("+")[0] + "+of.another.build"})
    assert audit(here, job).verdict == "match"


def test_a_run_that_states_no_files_is_repeated_by_nobody(run: RunDirectory, tmp_path: Path) -> None:
    from dataclasses import replace

    from tallystick.roles.replay import open_replay

    stated = run.load_specification()
    empty = replace(stated, job=replace(stated.job, program=Program(), source_digest="00" * 32))
    found = open_replay(empty, find_source(str(written(tmp_path))))
    assert isinstance(found, Deviation) and (found.kind, found.stated) == ("cannot_reproduce", "no files")


@pytest.mark.parametrize("setting", ["late", "gone"])
def test_a_module_first_imported_after_the_first_step_is_refused_by_name(
    setting: str, tmp_path: Path
) -> None:
    job = written(tmp_path / "job")
    with pytest.raises(OtherProgram, match=r"step 2: program file late.py was loaded after"):
        recorded(job, tmp_path / "run", **{setting: "1"})
    assert len((tmp_path / "run" / "steps.jsonl").read_bytes().splitlines()) == 2


def test_a_module_whose_import_is_hidden_is_refused_at_the_end_at_the_latest(tmp_path: Path) -> None:
    """As many modules as before, and the same one last: only all of them show it."""
    with pytest.raises(OtherProgram, match=r"step 2: program file late.py was loaded after"):
        recorded(written(tmp_path / "job"), tmp_path / "run", hidden="1")


def test_a_job_may_change_and_have_another_helper_in_one_process(tmp_path: Path) -> None:
    first = recorded(written(tmp_path / "a"), tmp_path / "run_a")
    second = recorded(written(tmp_path / "b", drawn="FACTOR = 4.0\n"), tmp_path / "run_b")
    source = find_source(str(tmp_path / "a" / "work.py"))
    assert audit(first, source).verdict == "match"
    assert audit(second, source).verdict == "cannot_reproduce"
    assert audit(second, find_source(str(tmp_path / "b" / "work.py"))).verdict == "match"
    (tmp_path / "a" / "drawn.py").write_text("FACTOR = 4.0\n")
    assert audit(first, source).verdict == "cannot_reproduce"
    assert audit(second, source).verdict == "match"
    assert "drawn" in sys.modules


def test_resuming_with_another_helper_is_refused(tmp_path: Path) -> None:
    job = written(tmp_path / "job")
    recorded(job, tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "job" / "helper.py").write_text(FILES["helper.py"] + "\n")
    order = Order(find_source(str(job)), {}, find_policy("fp64"), checkpoint_every=EVERY)
    with pytest.raises(OtherProgram, match=r"the run's program is another one: program file helper.py is"):
        record(order, RunDirectory(tmp_path / "run"), resume=True)


LOOP = """
import sys
import torch, tallystick
from shapes.net import net

model = net()
recorder = tallystick.Recorder(sys.argv[1], policy="fp64", steps=2, checkpoint_every=1)
model, optimizer = recorder.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.125), loss=lambda x: model(x).square().mean())
for number in range(2):
    with recorder.step(torch.ones(2, 4)) as x:
        if number == 1 and len(sys.argv) > 2:
            import late
        recorder.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
recorder.finish()
"""


def test_a_loop_of_the_users_own_commits_to_its_modules_too(tmp_path: Path) -> None:
    written(tmp_path / "mine", work=LOOP)

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "mine/work.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert ran("run").returncode == 0
    run = RunDirectory(tmp_path / "run")
    stated = run.load_specification().job
    assert (stated.path, stated.program.main) == ("work.py", "work.py")
    names = ["shapes/__init__.py", "shapes/net.py", "shapes/sizes.py", "work.py"]
    assert list(run.load_program()) == names == [file.name for file in stated.program.files]
    late = ran("other", "late")
    assert late.returncode == 1 and "step 1: program file late.py was loaded after" in late.stderr
    written(tmp_path / "changed", work=LOOP, sizes="WIDE = 2 + 2\n")
    tallystick.Follower(run.path, program=tmp_path / "mine" / "work.py")
    with pytest.raises(
        OtherProgram, match=r"another one: program file shapes/sizes.py is [0-9a-f]{64}, stated is"
    ):
        tallystick.Follower(run.path, program=tmp_path / "changed" / "work.py")


def test_an_import_that_is_not_there_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    job = written(tmp_path, sizes=None)
    with pytest.raises(InvalidInput, match=r"No module named 'shapes.sizes'; its own modules lie beside"):
        find_source(str(job)).build({})
    (tmp_path / "shapes" / "job.py").write_text("from .net import build\n")
    with pytest.raises(InvalidInput, match=r"by its dotted path, package\.module"):
        find_source(str(tmp_path / "shapes" / "job.py")).build({})


def test_distributions_elsewhere_on_the_path_are_installed(tmp_path: Path) -> None:
    """As PYTHONPATH has them where modules are loaded by a cluster; what lies beside a job, or is edited in place, is not."""
    job, place, edited = written(tmp_path / "mine"), tmp_path / "apps", tmp_path / "edited"
    for name, where in (("placed", place), ("worked_on", edited)):
        (where / name).mkdir(parents=True)
        (where / name / "__init__.py").write_text("FACTOR = 2.0\n")
        (place / f"{name}-1.0.dist-info").mkdir()
        (place / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (place / f"{name}-1.0.dist-info" / "top_level.txt").write_text(f"{name}\n")
    job.write_text("import placed\nimport worked_on\n" + JOB)
    code = (
        "from tallystick.execution.job import find_source\n"
        f"source = find_source({str(job)!r})\nsource.build({{}})\nprogram = source.program.collect()[0]\n"
        "names = [file.name for file in program.files]\n"
        "assert 'worked_on/__init__.py' in names and 'placed/__init__.py' not in names, names\n"
        "assert program.distributions['placed'] == '1.0', program.distributions\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(place), str(edited), *filter(None, sys.path)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", ["beside the script", "below the working folder"])
def test_what_lies_beside_a_script_is_no_distribution_because_a_file_says_so(
    where: str, tmp_path: Path
) -> None:
    """A run committed to the words "helper 1.0" in place of the file, and two auditors could be shown two of them."""
    job = written(tmp_path / "mine")
    place = job.parent if where == "beside the script" else tmp_path / "run" / "vendor"
    (place / "helper-1.0.dist-info").mkdir(parents=True)
    (place / "helper-1.0.dist-info" / "METADATA").write_text("Name: helper\nVersion: 1.0\n")
    (place / "helper-1.0.dist-info" / "top_level.txt").write_text("added\n")
    (place / "added.py").write_text("FACTOR = 2.0\n")
    script = job.parent / "script.py"
    script.write_text(
        "import added\nfrom tallystick.roles.loop import main_program\n"
        "program = main_program(__file__).collect()[0]\n"
        "assert [file.name for file in program.files] == ['added.py', 'script.py'], program\n"
        "assert 'helper' not in program.distributions\n"
    )
    (tmp_path / "run").mkdir(exist_ok=True)
    paths = [str(place), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path / "run",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def spoil_link(place: Path) -> None:
    (place / "helper.py").unlink()
    (place / "helper.py").symlink_to(place / "drawn.py")


def spoil_folder(place: Path) -> None:
    (place / "shapes").rename(place.parent / "elsewhere")
    (place / "shapes").symlink_to(place.parent / "elsewhere")


SPOILED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "changed": (lambda p: (p / "helper.py").write_text(FILES["helper.py"].replace("mean", "sums")), Mismatch, "SHA-256 is"),
    "longer": (lambda p: (p / "helper.py").write_text("#" * 4096), InvalidInput, "at most"),
    "gone": (lambda p: (p / "helper.py").unlink(), InvalidInput, "not found"),
    "a link": (spoil_link, InvalidInput, "not a regular file"),
    "a linked folder": (spoil_folder, InvalidInput, "is a link"),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_carried_files_are_checked(how: str, run: RunDirectory, tmp_path: Path) -> None:
    here = RunDirectory(Path(shutil.copytree(run.path, tmp_path / "run")))
    spoil, error, reason = SPOILED[how]
    spoil(here.program_path)
    with pytest.raises(error, match=reason):
        here.load_program()


EDITS = {
    "in place": "model.weight.add_(1.0)",
    "behind autograd": "model.weight.data.add_(1.0)",
    "only once": "model.weight.add_(float(step == 1))",
}


@pytest.mark.parametrize("how", EDITS)
def test_weights_edited_in_batch_are_refused_by_name(how: str, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(EDITING.replace("EDIT", EDITS[how]))
    with pytest.raises(Nondeterminism, match=r"step [01]: weight was changed by something other than"):
        recorded(job, tmp_path / "run")


EDITING = """
import torch
from tallystick.execution.job import Job

def build(settings):
    model = torch.nn.Linear(4, 1)

    def batch(step):
        with torch.no_grad():
            EDIT
        return torch.ones(2, 4)

    return Job(model, torch.optim.SGD(model.parameters(), lr=0.125), batch, lambda m, x: m(x).square().mean(), 4)
"""


def test_an_audit_notices_weights_edited_in_batch_and_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tallystick.execution.session.state import FloatingState

    job = tmp_path / "job.py"
    job.write_text(EDITING.replace("EDIT", EDITS["only once"]))
    with monkeypatch.context() as patched:
        patched.setattr(FloatingState, "verify_left", lambda self, step: None)
        run = recorded(job, tmp_path / "run")
    report = audit(run, find_source(str(job)))
    assert (report.verdict, report.segments[0].first_step) == ("cannot_reproduce", 1)
    assert "weight was changed by something other than the optimizer" in firsts(report)[-1][1]


def test_a_job_that_changes_nothing_between_steps_may_write_what_is_there(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(EDITING.replace("EDIT", "model.weight.copy_(model.weight.clone())"))
    run = recorded(job, tmp_path / "run")
    assert audit(run, find_source(str(job))).verdict == "match"
    assert json.loads((run.path / "run.json").read_bytes())["steps"] == STEPS


def test_a_step_that_does_not_end_on_the_auditors_machine_is_nobodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = "import os\n\ndef loss(x):\n    if os.environ.get('NO_SUCH_KERNEL'):\n"
    helper += "        raise RuntimeError('could not create a primitive')\n    return x.square().mean()\n"
    job = written(tmp_path / "mine", helper=helper)
    run = recorded(job, tmp_path / "run")
    monkeypatch.setenv("NO_SUCH_KERNEL", "1")
    report = audit(run, find_source(str(job)))
    assert report.verdict == "cannot_reproduce"
    said = "the step does not end here under this log: job: step 0: loss raised RuntimeError: could not create a primitive"
    assert said in str(report.first)


OTHERWISE = """
import importlib
import importlib.util
import runpy
import sys
from pathlib import Path

import torch
from tallystick.execution.job import Job

HERE = Path(__file__).parent


def build(settings):
    WAY
    model = torch.nn.Linear(4, 1)
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.125), lambda step: torch.arange(8.0).reshape(2, 4) * factor,
               lambda m, x: m(x).square().mean(), 4)
"""
ON_PATH = "sys.path.insert(0, str(HERE / 'lib')); "
LOADED = "loader = importlib.util.spec_from_file_location('aside', HERE / 'lib' / 'aside.py'); "


@pytest.mark.parametrize(
    ("way", "is_refused"),
    [
        (f"{ON_PATH}factor = importlib.import_module('asi' + 'de').FACTOR", False),
        (f"{ON_PATH}from package import aside; factor = aside.FACTOR", False),
        (f"{ON_PATH}import aside; factor = aside.FACTOR", False),
        ("factor = runpy.run_path(str(HERE / 'lib' / 'aside.py'))['FACTOR']", True),
        (
            f"{LOADED}aside = importlib.util.module_from_spec(loader); loader.loader.exec_module(aside); factor = aside.FACTOR",
            True,
        ),
        (
            "from concurrent.futures import ThreadPoolExecutor; "
            "factor = ThreadPoolExecutor(1).submit(runpy.run_path, str(HERE / 'lib' / 'aside.py')).result()['FACTOR']",
            True,
        ),
        (
            f"{LOADED}import types; made = {{}}; types.FunctionType(loader.loader.get_code('aside'), made)(); "
            "factor = made['FACTOR']",
            True,
        ),
    ],
)
def test_what_a_program_executes_is_committed_or_refused(
    way: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, two programs with other code behind such an import were one program by their digests, and both matched."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    lib = tmp_path / "job" / "lib"
    (lib / "package").mkdir(parents=True)
    file = tmp_path / "job" / "work.py"
    file.write_text(OTHERWISE.replace("WAY", way))

    def says(factor: float) -> None:
        for each in (lib / "aside.py", lib / "package" / "aside.py"):
            each.write_text(f"FACTOR = {factor}\n")
        for name in [name for name in sys.modules if name.split(".")[0] in ("aside", "package")]:
            del sys.modules[name]
        sys.path[:] = [place for place in sys.path if place != str(lib)]
        sys.path_importer_cache.clear()

    says(1.0)
    if is_refused:
        with pytest.raises(
            OtherProgram, match=r"aside.py was executed by the program, and no import in it says so"
        ):
            recorded(file, tmp_path / "run")
        return
    run = recorded(file, tmp_path / "run")
    assert any(each.name.endswith("aside.py") for each in run.load_specification().job.program.files)
    says(1.0)
    assert audit(run, find_source(str(file))).verdict == "match"
    says(2.0)
    report = audit(run, find_source(str(file)))
    assert report.verdict == "cannot_reproduce"
    assert "aside.py" in str(firsts(report)[0])


COMPILED = """
import importlib.util
from importlib.machinery import SourcelessFileLoader
file = str(HERE / 'lib' / 'aside.pyc')
    loader = importlib.util.spec_from_file_location('aside', file, loader=SourcelessFileLoader('aside', file))
    aside = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(aside)
    factor = aside.FACTOR
"""


@pytest.mark.parametrize("said", ["<frozen os>", "aside.py"])
def test_compiled_code_is_known_by_its_file_and_not_by_what_it_says(said: str, tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "aside.py").write_text("FACTOR = 1.0\n")
    py_compile.compile(str(lib / "aside.py"), cfile=str(lib / "aside.pyc"), dfile=said, doraise=True)
    (lib / "aside.py").unlink()
    file = tmp_path / "work.py"
    file.write_text(OTHERWISE.replace("WAY", COMPILED.strip().replace("\nf", "\n    f")))
    with pytest.raises(OtherProgram, match=r"aside.pyc was executed by the program"):
        recorded(file, tmp_path / "run")


def test_a_shared_library_beside_a_job_is_refused_and_an_installed_one_is_not(tmp_path: Path) -> None:
    import numpy._core._multiarray_umath as compiled

    library = tmp_path / "aside.so"
    shutil.copy(str(compiled.__file__), library)
    for name, is_refused in ((str(library), True), (str(compiled.__file__), False)):
        file = tmp_path / f"work_{is_refused}.py"
        file.write_text(OTHERWISE.replace("WAY", f"import ctypes; ctypes.CDLL({name!r}); factor = 1.0"))
        if is_refused:
            with pytest.raises(OtherProgram, match=r"aside.so was executed by the program"):
                recorded(file, tmp_path / "run")
        else:
            recorded(file, tmp_path / "run_of_another")


def test_a_library_on_the_path_that_nobody_installed_reads_for_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are committed; before, what they read was not, and another value convicted the trainer."""
    for member in same_arithmetic():
        member.start()  # before anybody says where the library lies
    place, file = tmp_path / "elsewhere", tmp_path / "job" / "work.py"
    for each in (place, file.parent):
        each.mkdir()
    (place / "read_elsewhere.py").write_text(
        "import os\nFIRST = os.environ.get('FIRST')\n\ndef factor():\n    return float(os.environ.get('FACTOR', '1'))\n"
    )
    file.write_text(OTHERWISE.replace("WAY", "import read_elsewhere; factor = read_elsewhere.factor()"))
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("FIRST", "a")
    run = recorded(file, tmp_path / "run")
    stated = run.load_specification().job.program
    first = hashlib.sha256(b"a").hexdigest()
    assert [each.name for each in stated.files] == ["read_elsewhere.py", "work.py"]
    assert stated.environment == {"FACTOR": "absent", "FIRST": first}
    assert audit(run, find_source(str(file))).verdict == "match"
    monkeypatch.setenv("FACTOR", "2")
    report = audit(run, find_source(str(file)))
    assert report.verdict == "cannot_reproduce"
    assert firsts(report)[0] == ("environment variable FACTOR", hashlib.sha256(b"2").hexdigest(), "absent")


READING = """
import os
import torch
from tallystick.execution.job import Job

def build(settings):
    model = torch.nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
    rate = float(os.environ.get("RATE", "0.125"))
    where = os.environ["PLACE"] if "PLACE" in os.environ else "nowhere"

    def batch(step):
        if step == 2 and "late" in settings:
            os.getenv("LATE")
        if step == 2 and "gone" in settings and not os.path.exists(settings["gone"]):
            raise FileNotFoundError(2, "No such file", settings["gone"])
        return torch.arange(8.0).reshape(2, 4) / (8 + step)

    return Job(model, torch.optim.SGD(model.parameters(), lr=rate), batch, lambda m, x: m(x).square().mean(), 4)
"""


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RATE", raising=False)
    monkeypatch.setenv("PLACE", "/a/directory/of/mine")
    (tmp_path / "job").mkdir()
    file = tmp_path / "job" / "reading.py"
    file.write_text(READING)
    return file


def test_variables_that_a_job_reads_are_committed_without_their_values(reading: Path, tmp_path: Path) -> None:
    run = recorded(reading, tmp_path / "run")
    place = hashlib.sha256(b"/a/directory/of/mine").hexdigest()
    assert run.load_specification().job.program.environment == {"PLACE": place, "RATE": "absent"}
    assert not [p for p in run.path.rglob("*") if p.is_file() and b"/a/directory" in p.read_bytes()]
    report = audit(run, find_source(str(reading)))
    assert report.verdict == "match" and not report.environment


@pytest.mark.parametrize(
    "how",
    ["os.path.expandvars('$RATE')", "os.fsdecode(os.getenvb(b'RATE'))", "dict(os.environ.items())['RATE']"],
)
def test_a_variable_is_committed_however_the_standard_library_reads_it(
    how: str, reading: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, another party's value was a mismatch that convicted the trainer.

    The processes that are asked whether the job is the same in each have been there since before the variable was set.
    """
    for member in same_arithmetic():
        member.start()
    reading.write_text(READING.replace('os.environ.get("RATE", "0.125")', how))
    monkeypatch.setenv("RATE", "0.25")
    run = recorded(reading, tmp_path / "run")
    monkeypatch.setenv("RATE", "0.125")
    report = audit(run, find_source(str(reading)))
    assert report.verdict == "cannot_reproduce"
    assert firsts(report)[0][0] == "environment variable RATE"


def test_a_job_whose_files_read_no_variable_commits_to_none(run: RunDirectory) -> None:
    assert b'"environment"' not in (run.path / "specification.json").read_bytes()


def test_a_variable_of_another_value_accuses_nobody(
    reading: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATE", "0.25")
    run, source = recorded(reading, tmp_path / "run"), find_source(str(reading))
    stated = hashlib.sha256(b"0.25").hexdigest()
    monkeypatch.setenv("RATE", "0.125")
    claimed = RunDirectory(tmp_path / "claimed")
    assert not isinstance(write_claim(run, source, claimed), Deviation)
    own = hashlib.sha256(b"0.125").hexdigest()

    report = audit(run, source)
    assert report.verdict == "cannot_reproduce"
    assert firsts(report)[0] == ("environment variable RATE", own, stated)
    assert report.environment["environment variable RATE"] == (own[:32], stated[:32])
    with pytest.raises(OtherProgram, match=f"environment variable RATE is {own}, stated is {stated}"):
        dispute(run, claimed, source, level="steps")
    monkeypatch.setenv("RATE", "0.25")
    assert audit(run, source).verdict == "match"
    assert dispute(run, claimed, source, level="steps").outcome == "agreement"


def test_a_variable_that_changes_nothing_leaves_a_match(
    reading: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(reading, tmp_path / "run")
    monkeypatch.setenv("PLACE", "/elsewhere")
    report = audit(run, find_source(str(reading)))
    assert report.verdict == "match"
    assert list(report.environment) == ["environment variable PLACE"]


def test_a_run_that_keeps_silent_about_a_variable_accuses_nobody_either(
    reading: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATE", "0.25")
    with monkeypatch.context() as patched:
        patched.setattr(ProgramJournal, "note_variable", lambda *_: None)
        run = recorded(reading, tmp_path / "run")
    assert run.load_specification().job.program.environment == {}
    monkeypatch.setenv("RATE", "0.5")
    report = audit(run, find_source(str(reading)))
    assert report.verdict == "cannot_reproduce"
    assert firsts(report)[0][::2] == ("environment variable PLACE", "not read")


def test_a_forged_result_is_a_mismatch_whatever_the_variables_are(
    reading: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What contradicts itself needs no repetition."""
    run = recorded(reading, tmp_path / "run")
    final = max(run.path.glob("checkpoints/*"))
    data = bytearray(final.read_bytes())
    data[-1] ^= 1
    final.write_bytes(data)
    monkeypatch.setenv("PLACE", "/elsewhere")
    assert audit(run, find_source(str(reading))).verdict == "mismatch"


def test_a_variable_read_late_or_changed_before_resuming_is_refused(
    reading: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OtherProgram, match="step 2: environment variable LATE was read after"):
        recorded(reading, tmp_path / "late", late="1")
    recorded(reading, tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    monkeypatch.setenv("RATE", "0.25")
    order = Order(find_source(str(reading)), {}, find_policy("fp64"), checkpoint_every=EVERY)
    with pytest.raises(OtherProgram, match="another one: environment variable RATE is"):
        record(order, RunDirectory(tmp_path / "run"), resume=True)


def test_a_job_that_raises_is_said_to_with_its_line(reading: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.pt"
    with pytest.raises(
        JobFailed, match=r"batch\(2\) raised FileNotFoundError: .*data\.pt.*\(line 17 of reading.py\)"
    ):
        recorded(reading, tmp_path / "failed", gone=str(data))
    data.touch()
    run = recorded(reading, tmp_path / "run", gone=str(data))
    data.unlink()
    report = audit(run, find_source(str(reading)))
    assert report.verdict == "cannot_reproduce" and "batch(2) raised FileNotFoundError" in str(report.first)
    reading.write_text(READING.replace("model = ", "model = 1 / 0\n    model = "))
    with pytest.raises(
        JobFailed, match=r"build raised ZeroDivisionError: division by zero \(line 7 of reading.py\)$"
    ):
        find_source(str(reading)).build({})
