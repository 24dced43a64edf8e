"""A training script with two lines more: recorded, followed or left alone, as its environment says.

For instance::

    import tallystick                                        # 1
    ...
    tallystick.attach(model, optimizer, scheduler)           # 2: before the first step
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

A step begins with the first forward pass of the model in training mode that needs gradients, and ends before whatever looks at
the model next: another such pass, an evaluation, its ``state_dict``, the end of the program. Its data are all tensors from
outside that gradients follow from. ``tally record -- python train.py`` records such a script, ``tally audit RUN -- python
train.py`` follows it; without ``tally``, ``TALLYSTICK_RECORD`` or ``TALLYSTICK_FOLLOW`` names the run directory.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shlex
import sys
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tallystick.errors import InvalidInput, ProtocolViolation
from tallystick.execution.dispatch.capture import Widened
from tallystick.execution.joint_optimizer import joined
from tallystick.execution.session.hooks import Hook
from tallystick.execution.session.session import HasRun
from tallystick.roles.audit_report import AuditReport
from tallystick.roles.follower import FOLLOW_VARIABLE, Follower
from tallystick.roles.loop import FROM_OPERATORS
from tallystick.roles.recorder import Recorder
from tallystick.roles.run_writer import Phases, Progress
from tallystick.run.documents import RunStatement

RECORD_VARIABLE, POLICY_VARIABLE = "TALLYSTICK_RECORD", "TALLYSTICK_POLICY"
ARGUMENTS = "arguments"  # the setting that holds a program's arguments


@dataclass
class ProgramRun:
    """What is to become of the program that runs now.

    Attributes:
        begin: gives its recorder or follower; None to leave it alone.
        progress: called after each step.
        most: steps after which the program ends, before another; None for as many as it takes.
        leave: ends the process, where a program goes on though it was to end.
        attached: what it attached, once it has.
    """

    begin: Callable[[], Recorder | Follower] | None = None
    progress: Callable[[Progress], None] | None = None
    most: int | None = None
    leave: Callable[[Attached], None] | None = None
    attached: Attached | None = None


_WANTED: list[ProgramRun] = []


@contextmanager
def wanting(wanted: ProgramRun) -> Generator[ProgramRun]:
    """Inside, a program that attaches itself gets what is ``wanted``, whatever the environment says."""
    _WANTED.append(wanted)
    try:
        yield wanted
    finally:
        _WANTED.remove(wanted)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheduler: Any = None,
    *,
    extra: Mapping[str, nn.Module] | None = None,
    follows_up: bool = False,
    smooth: Collection[str] = (),
    resumable: bool = False,
) -> Attached:
    """Have a training script recorded, or followed, or neither, as its environment says, and return the handle.

    Args:
        model: whose forward passes are the script's; it is neither wrapped nor renamed. ``torch.compile`` does nothing while it
            is recorded or followed.
        optimizer: over its parameters; one that a library has wrapped is taken out of that. Or a list of several, each of which
            takes every step, one after another, once all gradients are there (``Recorder.prepare``).
        scheduler: part of the state, if given; or a list of several.
        extra: further modules whose tensors are part of the state (an averaged copy, say).
        follows_up: whether the script changes averages or other slow values after the optimizer, in ``handle.follow_up()``.
        smooth: operators outside the table that the script declares continuous (``"mylib::op"``).
        resumable: whether nothing that the script keeps of what it computes, but its state, decides what it does later: then an
            interrupted run goes on without its steps being repeated (``Recorder.prepare``).

    Raises:
        ProtocolViolation: the program has attached something already.
        Nondeterminism: something that no other machine could repeat, by name.
        InvalidInput: what the environment names is no run, or there is one where it is to be recorded; or something else is given
            for the model or its optimizer.
    """
    optimizers = [getattr(each, "optimizer", each) for each in _listed(optimizer)]
    schedulers = [getattr(each, "scheduler", each) for each in _listed(scheduler) if each is not None]
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    _verify_kinds(model, optimizers, {} if extra is None else extra)
    wanted = _WANTED[-1] if _WANTED else _from_environment()
    if wanted.attached is not None and wanted.begin is not None:
        raise ProtocolViolation("attach: this program has attached a model already; a run has one model")
    loop = None if wanted.begin is None else wanted.begin()
    attached = wanted.attached = Attached(loop, model, optimizers, wanted)
    if loop is not None:
        attached.listen()  # before the loop does: its own hooks come after these
        try:
            loop.prepare(
                model,
                optimizers,
                schedulers or None,
                extra=extra,
                follows_up=follows_up,
                smooth=smooth,
                resumable=resumable,
            )
            loop.session.widen()  # what the script hands to its loss is float32, whatever the model is
            attached.listen_behind()
        except BaseException:
            attached.abandon()
            raise
        if not _WANTED:
            _ENVIRONMENT.append(wanted)
            _at_exit(attached.end)
    return attached


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _verify_kinds(model: Any, optimizers: list[Any], extra: Any) -> None:
    joined(optimizers)
    for name, given, is_one, wanted in (
        ("model", model, isinstance(model, nn.Module), "a run has one torch.nn.Module"),
        ("extra", extra, isinstance(extra, Mapping), "give modules by name: extra={'average': module}"),
    ):
        if not is_one:
            raise InvalidInput(f"attach: {name} is a {type(given).__name__}; {wanted}")


def _at_exit(end: Callable[[], None]) -> None:
    """Have ``end`` called when the program ends, while threads can still be started where Python lets that be known."""
    getattr(threading, "_register_atexit", atexit.register)(end)


_ENVIRONMENT: list[ProgramRun] = []


def _from_environment() -> ProgramRun:
    """Return what the environment asks of a program that no command runs."""
    if _ENVIRONMENT:
        return _ENVIRONMENT[0]
    recorded, followed = (os.environ.get(name) for name in (RECORD_VARIABLE, FOLLOW_VARIABLE))
    if recorded and followed:
        raise InvalidInput(f"{RECORD_VARIABLE} and {FOLLOW_VARIABLE}: only one of them")
    settings = {ARGUMENTS: arguments_of(sys.argv[1:])}
    if recorded:
        policy = os.environ.get(POLICY_VARIABLE, "fp32")
        return ProgramRun(lambda: Recorder(recorded, policy=policy, steps=None, settings=settings))
    if followed:
        return ProgramRun(lambda: Follower(followed, ordered={"settings": settings}))
    return ProgramRun()


def arguments_of(arguments: list[str]) -> str:
    """Return a program's arguments as one text, which tells them apart."""
    return shlex.join(arguments)


@contextmanager
def uncompiled() -> Generator[None]:
    """Inside, what ``torch.compile`` has compiled runs as it is written.

    A wrapped module is passed by: what its wrapper restores when it returns hides some operators behind it from dispatch modes.
    """
    wrapper: Any = importlib.import_module("torch._dynamo").OptimizedModule
    own = wrapper.__call__

    def call(wrapped: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapped._orig_mod(*args, **kwargs)

    wrapper.__call__ = call
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        wrapper.__call__ = own


class _HalfAStep(Exception):
    """The program has ended within a step."""


class Attached:
    """A training script's handle on its recording, or on the run that it follows; or on neither, and does nothing then."""

    def __init__(
        self,
        loop: Recorder | Follower | None,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        wanted: ProgramRun,
    ) -> None:
        self._loop, self._model, self._optimizers, self._wanted = loop, model, optimizers, wanted
        self._step: AbstractContextManager[Any] | None = None
        self._handles: list[Any] = []
        self._compiler, self._widening = ExitStack(), ExitStack()
        self._backward: Callable[..., None] | None = None
        self._method: Any = None
        self._is_to_end = False

    @property
    def result(self) -> RunStatement | AuditReport | None:
        """The run's statement or the report, after ``finish``; None of a script that is left alone.

        Raises:
            ProtocolViolation: ``finish`` has not been called.
        """
        return None if self._loop is None else self._loop.result

    @property
    def phases(self) -> Phases:
        """Seconds by phase."""
        return Phases() if self._loop is None else self._loop.phases

    def listen(self) -> None:
        """Put hooks on model and optimizer, and have what is compiled run as it is written."""
        self._compiler.enter_context(uncompiled())
        self._handles = [
            self._model.register_forward_pre_hook(Hook(self._before_forward), prepend=True, with_kwargs=True),
            self._model.register_forward_hook(Hook(lambda *_: self._widening.close()), always_call=True),
            self._model.register_state_dict_pre_hook(Hook(lambda *_: self._close())),
            *(
                each.register_load_state_dict_pre_hook(Hook(self._before_loading))
                for each in self._model.modules()
            ),
            *(
                handle
                for each in self._optimizers
                for handle in (
                    each.register_state_dict_pre_hook(Hook(lambda *_: self._close())),
                    each.register_step_pre_hook(Hook(self._before_optimizer)),
                )
            ),
        ]

    def listen_behind(self) -> None:
        """Put hooks on the optimizers that come after the loop's own: switches go back in the order in which they were set."""
        self._handles += [
            each.register_step_post_hook(Hook(lambda *_: self._pause())) for each in self._optimizers
        ]

    def follow_up(self) -> AbstractContextManager[None]:
        """Be where averages of the weights and other slow values change: after ``optimizer.step()``, as in a ``Recorder``."""
        return nullcontext() if self._loop is None else self._loop.follow_up()

    def close_step(self) -> None:
        """End the step that is open, if its optimizer has stepped: the state is as the run commits to it then."""
        self._close()

    def finish(self) -> RunStatement | AuditReport | None:
        """End the run here: remove the hooks, and return its statement, the report, or None."""
        if self._loop is None:
            return None
        if not self._handles:
            return self._loop.result
        try:
            missing = None if self._step is None else self._loop.session.open_step.missing
            if missing is not None:
                self._say(f"the last step is no step of the run: {missing}")
            self._close(last=True)
            result, taken = self._loop.finish(), self._loop.session.step
            if isinstance(result, RunStatement) and result.steps < taken:
                later = (
                    "another forward pass in training mode came after the last step, without one of its own"
                )
                why = "one that nobody took followed" if missing is not None else later
                self._say(f"recorded {result.steps} of {taken} steps, up to the last committed state: {why}")
            return result
        finally:
            self._let_go()

    def abandon(self) -> None:
        """Remove the hooks; what was recorded stays, unfinished."""
        if self._loop is not None and self._handles:
            try:
                self._close(failed=True)
            finally:
                self._let_go()
                self._loop.abandon()

    def end(self) -> None:
        """End the run with its program, whose last exception, if it had any, leaves it unfinished."""
        if not self._handles or self._loop is None:
            return
        if getattr(sys, "last_value", None) is not None:
            self.abandon()
            return
        result = self.finish()
        if isinstance(result, AuditReport):
            self._say(f"{result.verdict}: {result.steps} steps followed")
        elif result is not None:
            self._say(f"recorded {result.steps} steps, root {result.root}")

    def _say(self, text: str) -> None:
        print(f"tallystick: {text}", file=sys.stderr)

    # -- steps -----------------------------------------------------------------------------------

    def open_step(self) -> None:
        """Begin a step here, unless one is open that the optimizer has not taken."""
        if self._loop is not None and (self._step is None or self._loop.session.has_stepped):
            self._close()
            if self._loop.session.step == self._wanted.most:
                self._end_program()
            if not self._is_over():
                self._open()
            else:
                self._loop.keep()  # what follows is none of the run's steps

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert self._loop is not None
        tracing: Any = torch.jit
        if tracing.is_tracing():  # it looks at every number that is made of a shape
            return None
        if module.training and torch.is_grad_enabled():
            self.open_step()
        elif self._step is None or self._loop.session.has_stepped:
            self._close()
        if self._step is None and module.training:  # what it does to buffers is no part of the last step
            self._loop.keep()
        compute = self._loop.session.arithmetic.compute
        if compute is torch.float32:
            return None

        if compute is torch.float64 and not self._loop.session.is_capturing:  # an evaluation, say
            self._widening.enter_context(Widened())

        def cast(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(compute) if is_float else value

        return tree_map(cast, args), tree_map(cast, kwargs)

    def _before_loading(self, *_: object) -> None:
        """End the step before other weights are loaded, as the best of all are after the last one."""
        assert self._loop is not None
        self._close()
        self._loop.keep(whole=True)

    def _open(self) -> None:
        assert self._loop is not None
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ProtocolViolation(
                "attach: the step is under torch.autocast already; leave it out, policy bf16 has its own"
            )
        step = self._loop.step(FROM_OPERATORS)
        step.__enter__()
        self._step, self._backward = step, torch.autograd.backward
        self._listen_to_backward()

    def _end_program(self) -> NoReturn:
        """End the program; or the process, if it went on the last time."""
        if self._is_to_end and self._wanted.leave is not None:
            self._wanted.leave(self)
        self._is_to_end = True
        raise SystemExit(0)

    def _is_over(self) -> bool:
        """Whether all steps of a run that is followed have been."""
        return isinstance(self._loop, Follower) and self._loop.is_done

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a closure that the optimizer was given, which it would run first, before gradients are rounded."""
        if isinstance(self._loop, Follower) and self._step is None and self._loop.is_done:
            self._loop.note_more_steps()
            self._end_program()  # the rest of it says nothing of the run
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None and self._step is None:
            raise ProtocolViolation(
                "attach: optimizer.step() without a forward pass of the model in training mode, with gradients, before it; "
                "call model.train(), or begin the step by run.open_step() where its first pass does not"
            )
        if closure is None or isinstance(optimizer, torch.optim.LBFGS):  # which runs it again and again
            return None
        with torch.enable_grad():
            has_run = HasRun(closure())
        return (optimizer, has_run, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _noted_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass as torch does, and take what it begins with for the loss of a micro-batch."""
        loop, backward = self._loop, self._backward
        assert loop is not None and backward is not None
        self._restore_backward()
        try:
            if isinstance(tensors, Tensor) and tensors.numel() == 1 and loop.session.is_capturing:
                loop.backward(tensors, run=lambda: backward(tensors, *args, **kwargs))
            else:
                backward(tensors, *args, **kwargs)
        finally:
            self._backward = backward
            self._listen_to_backward()

    def _pause(self) -> None:
        if self._step is not None and self._loop is not None and self._loop.session.has_stepped:
            self._restore_backward()
            self._loop.session.open_step.pause()
            self._loop.seal()

    def _listen_to_backward(self) -> None:
        """Put ``_noted_backward`` in the place of both ways to begin a backward pass.

        A tensor's own method would call it within torch's dispatch of functions, where no mode can end.
        """

        def of_tensor(
            tensor: Tensor,
            gradient: Any = None,
            retain_graph: Any = None,
            create_graph: Any = False,
            inputs: Any = None,
        ) -> None:
            self._noted_backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

        tensors: Any = Tensor
        self._method = tensors.backward
        torch.autograd.backward, tensors.backward = self._noted_backward, of_tensor

    def _restore_backward(self) -> None:
        tensors: Any = Tensor
        if self._backward is not None:
            torch.autograd.backward, tensors.backward, self._backward = self._backward, self._method, None

    def _close(self, *, last: bool = False, failed: bool = False) -> None:
        """End the step that is open; one whose optimizer has not stepped goes on, unless it is the ``last``."""
        loop, step = self._loop, self._step
        if loop is None or step is None or not (last or failed or loop.session.has_stepped):
            return
        self._step = None
        self._restore_backward()
        if failed or not loop.session.has_stepped:
            before = loop.session.open_step.slow.before()
            with suppress(_HalfAStep):
                step.__exit__(_HalfAStep, _HalfAStep(), None)
            loop.session.tensors.put_back(before)
            return
        step.__exit__(None, None, None)
        if self._wanted.progress is not None and loop.latest is not None:
            self._wanted.progress(loop.latest)

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._compiler.close()
        self._widening.close()
        self._restore_backward()
