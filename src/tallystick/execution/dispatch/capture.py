"""One dispatch mode sees every operator of a step, forward and backward.

It does four things, each only where the operator table says so:

* an operator whose output jumps becomes a decision site (``decisions``);
* random operators draw from Philox instead of torch's generators;
* under ``fp64`` a cast to a narrower float is lifted, and its name kept;
* for calibration and for the ``jitter`` profile, outputs receive last-bit noise.

Where kernels of one device do in one operator what those of another do in two, it is two on both: the bias of a convolution
of sixteen-bit numbers is added to its rounded sums, as cuDNN does, and attention with dropout and recurrent layers are spelled
out, since a CUDA device's fused kernels draw inside, from a stream that no processor has, or hide where they jump.

The user's model is not touched; leaving the mode leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.calls import (
    Arguments,
    Handler,
    Operator,
    argument_named,
    table_name,
    widened,
)
from tallystick.execution.dispatch.decisions import DecisionContext, OperatorFindings, OperatorPass
from tallystick.execution.dispatch.handlers import handler_for
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.execution.dispatch.table import RANDOM

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
CONVOLUTION: Operator = torch.ops.aten.convolution.default
ADD: Operator = torch.ops.aten.add.Tensor
NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
DROPOUT_AT = {scaled_dot_product_attention: 4, multi_head_attention_forward: 10}  # by position or name
OF_NEW = ("dtype", "layout", "device", "pin_memory")  # arguments of what makes a tensor, which ``out`` has
RECURRENT = {torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu}
_HANDLERS: dict[Operator, Handler] = {}


class CallSink(Protocol):
    """Who writes calls down as the program makes them.

    Attributes:
        is_in_call: whether a call runs: what reads elements then is the operator, or its handler, and not the program.
    """

    is_in_call: bool

    def read(self, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """Take note of a call's arguments, before it runs."""
        ...

    def write(self, func: Operator, given: Any, result: Any) -> None:
        """Take note of the call that ``read`` gave this for."""
        ...

    def follows(self, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> bool:
        """Whether a call reads what the step computed, or the model's, or leaves a part of it."""
        ...

    def has_made(self, *given: Any) -> bool:
        """Whether any tensor among these is one that the step computed, or the model's."""
        ...

    def take(self, result: Any) -> Any:
        """Take a result for something from outside, and return it."""
        ...


class Capture(TorchDispatchMode):
    """The mode itself; active during forward, backward and clipping of one step."""

    def __init__(
        self,
        context: DecisionContext,
        random: RandomStream,
        *,
        compute: torch.dtype,
        findings: OperatorFindings,
        smooth: frozenset[str] = frozenset(),
        jitter: Jitter | None = None,
        widens: bool = False,
        sink: CallSink | None = None,
    ) -> None:
        super().__init__()
        self.operators = OperatorPass(context, random, compute, findings, smooth)
        self.jitter = jitter
        self.widens = widens
        self.sink = sink

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled modules are refused: no need of torch's guard around every operator

    def __torch_dispatch__(self, func: Operator, types: Any, args: Arguments = (), kwargs: Any = None) -> Any:
        """Run ``func``, through its handler where it has one."""
        if self.sink is None:
            return self._run(func, args, kwargs or {})
        if func._schema.name in RANDOM and argument_named(func, args, kwargs or {}, "generator") is not None:
            if self.sink.follows(func, args, kwargs or {}):
                raise Nondeterminism(
                    f"operator {func}: draws by a generator of its own from what the step computed, which other devices cannot "
                    "repeat; leave the generator out"
                )
            return self.sink.take(func(*args, **(kwargs or {})))  # a data loader's; what it draws is data
        if func._schema.name == "aten::set_":
            result = func(*args, **(kwargs or {}))
            if self.sink.has_made(result):
                raise Nondeterminism(
                    f"operator {func}: takes memory that the step computed; make a view of it"
                )
            return self.sink.take(result)  # a batch of a loader's worker, say
        given = self.sink.read(func, args, kwargs or {})
        self.sink.is_in_call = True
        try:
            result = self._run(func, args, kwargs or {})
        finally:
            self.sink.is_in_call = False
        self.sink.write(func, given, result)
        return result

    def _run(self, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        here = self.operators
        if "out" in kwargs and (plain := _without_out(func)) is not None:
            given, out = dict(kwargs), kwargs["out"]
            del given["out"]
            if any(each.name == "device" for each in plain._schema.arguments):
                given |= {"dtype": out.dtype, "device": out.device}
            result = self._run(plain, args, given)
            return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)
        if func is CONVOLUTION and args[2] is not None and args[0].dtype in SIXTEEN_BIT:
            sums = self._run(func, (*args[:2], None, *args[3:]), kwargs)
            bias = args[2].view(-1, *[1] * (sums.dim() - 2))
            return ADD(sums, bias)  # one rounding, and the same everywhere
        handler = _HANDLERS.get(func)
        if handler is None:
            handler = _HANDLERS[func] = handler_for(func)
        if here.compute is torch.float64 and kwargs.get("dtype") in NARROW:
            here.findings.lifted.add(table_name(func))
            kwargs = _lifted(kwargs)
        if self.widens:
            args, kwargs = widened(func, args, kwargs)
        try:
            if self.jitter is None:
                return handler(here, func, args, kwargs)
            return self.jitter.around(
                func, args, kwargs, lambda args, kwargs: handler(here, func, args, kwargs)
            )
        except Nondeterminism as problem:
            if here.findings.refused is None:
                raise
            here.findings.refuse(str(problem))
            return func(*args, **kwargs)


@cache
def _without_out(func: Operator) -> Operator | None:
    """Return the form of an operator that makes its result, of one that writes it into ``out``; None if there is none."""
    packet = func.overloadpacket
    wanted = [(each.name, str(each.type)) for each in func._schema.arguments if each.name != "out"]
    for name in packet.overloads() if len(func._schema.returns) == 1 else ():
        plain = getattr(packet, name)
        own = [(each.name, str(each.type)) for each in plain._schema.arguments]
        if own == wanted or [each for each in own if each[0] not in OF_NEW] == wanted:
            return plain
    return None


class Widened(TorchDispatchMode):
    """Inside, operators compute in float64 as a step's do, whatever they are given; nothing is decided, drawn or noted."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Operator, types: Any, args: Arguments = (), kwargs: Any = None) -> Any:
        """Run ``func``."""
        args, kwargs = widened(func, args, _lifted(kwargs or {}))
        return func(*args, **kwargs)


def _lifted(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "dtype": torch.float64} if kwargs.get("dtype") in NARROW else kwargs


@contextmanager
def _without_mkldnn() -> Generator[None]:
    """Inside, torch takes no kernel of oneDNN's; its own switch for that says a word about devices that are not there."""
    switch: Any = torch._C  # pyright: ignore[reportPrivateUsage] # the public switch says a word each time
    before = switch._get_mkldnn_enabled()
    switch._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        switch._set_mkldnn_enabled(before)


class SpelledOut(TorchFunctionMode):
    """What CUDA devices have one kernel for is made of the operators that processors make it of.

    So is attention with dropout, of operators that draw portable numbers; without, it is of whatever kernel torch chooses.
    Recurrent layers are made of one operator for each step of a sequence.
    """

    def __torch_function__(self, func: Any, types: Any, args: Arguments = (), kwargs: Any = None) -> Any:
        """Call ``func``, with the kernels switched off that torch would take where it has them."""
        kwargs = kwargs or {}
        if func in RECURRENT:
            with torch.backends.cudnn.flags(enabled=False), _without_mkldnn():
                return func(*args, **kwargs)
        position = DROPOUT_AT.get(func)
        if position is not None and (args[position] if len(args) > position else kwargs.get("dropout_p")):
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)
