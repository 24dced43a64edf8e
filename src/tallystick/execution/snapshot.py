"""The whole state of a session as named entries, and back (spec/state-commitment.md 5).

Everything the next step depends on is here: parameters, buffers, optimizer tensors and numbers, scheduler,
grids and the data cursor. Floating tensors are float32, the values being float32 values by construction.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from tallystick.commit.encoding import canonical_json, hex_float, parse_canonical_json, parse_hex_float
from tallystick.commit.state import Entry, HeldState, hold
from tallystick.errors import InvalidInput
from tallystick.execution.hashing import leaf_hashes
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable

if TYPE_CHECKING:
    from concurrent.futures import Executor

CODES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float32: "F32",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
DOCUMENT_LIMIT = 1 << 26


def live_state(session: Session) -> dict[str, Tensor]:
    """Return the session's own tensors of the state by entry name; they share its memory and know no gradient."""
    found = {name: tensor.detach() for name, tensor in session.state}
    for name, p in session.parameters:
        for key, value in session.trained.state_of(p).items():
            if isinstance(value, Tensor):
                found[f"optimizer/{name}/{key}"] = value
    return found | dict(session.tensors.whole_buffers())


def state_tensors(session: Session) -> dict[str, Tensor]:
    """Return every tensor of the state by entry name: CPU, contiguous, float32 or an integer type."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in live_state(session).items():
        plain = tensor.detach()
        plain = plain.to("cpu", torch.float32) if plain.is_floating_point() else plain.cpu()
        if plain.dtype not in CODES:
            raise InvalidInput(f"{name} is {plain.dtype}; a state holds {', '.join(CODES.values())}")
        tensors[name] = plain.contiguous()
    return tensors


def state_documents(session: Session) -> dict[str, bytes]:
    """Return the parts of the state that are no tensors, by entry name: canonical JSON, or the grid table's bytes."""
    names = {id(p): name for name, p in session.model.named_parameters()}
    groups = [
        {
            "parameters": [names[id(p)] for p in group["params"]],
            "values": _tagged(
                {key: value for key, value in group.items() if key != "params"}, f"optimizer group {index}"
            ),
        }
        for index, group in enumerate(session.optimizer.param_groups)
    ]
    plain: dict[str, Any] = {}
    for name, p in session.parameters:
        values = {k: v for k, v in session.trained.state_of(p).items() if not isinstance(v, Tensor)}
        if values:
            plain[name] = _tagged(values, f"optimizer state of {name}")
    scheduler = None if session.scheduler is None else _tagged(session.scheduler.state_dict(), "scheduler")
    return {
        "document/configuration": _configuration(session),
        "document/base-grids": session.base.encode(),
        "document/cursor": canonical_json({"step": session.step}),
        "document/grids": session.table.encode(),
        "document/optimizer": canonical_json({"groups": groups, "plain": plain}),
        "document/scheduler": canonical_json({"kind": type(session.scheduler).__name__, "state": scheduler}),
    }


def _configuration(session: Session) -> bytes:
    return canonical_json(
        {
            "parameters": session.policy.parameters(),
            "policy": session.policy.name,
            "rank": session.rank,
            "seed": session.seed,
        }
    )


@overload
def state_entries(session: Session) -> list[Entry]: ...


@overload
def state_entries(session: Session, *, apart: int) -> list[Entry] | None: ...


def state_entries(session: Session, *, apart: int | None = None) -> list[Entry] | None:
    """Return the state as entries in order of their names; tensor data is shared, not copied, where it can be.

    With ``apart`` the entries hold still until the optimizer steps again: what a forward pass or the job may change
    (buffers, frozen parameters, extra modules) is copied. None if that were more than ``apart`` bytes.
    """
    tensors = state_tensors(session)
    if apart is not None:
        loose = {name for name, _ in session.tensors.all_buffers()} & tensors.keys()
        if sum(tensors[name].nbytes for name in loose) > apart:
            return None
        tensors |= {name: tensors[name].clone() for name in loose}
    entries = [
        Entry(name, CODES[tensor.dtype], tuple(tensor.shape), _bytes_of(tensor))
        for name, tensor in tensors.items()
    ]
    entries += [Entry(name, "U8", (len(data),), data) for name, data in state_documents(session).items()]
    return sorted(entries, key=lambda entry: entry.name.encode())


def held_state(session: Session, pool: Executor) -> HeldState:
    """Return a copy of the session's state with its summary; a thread pool copies and hashes."""
    return hold(pool.map(copied, state_entries(session)), pool=pool, leaves=leaf_hashes)


def copied(entry: Entry) -> Entry:
    """Return the entry with bytes of its own."""
    data = np.frombuffer(
        entry.data, dtype=np.uint8
    ).copy()  # which lets other threads run, as bytes() does not
    return Entry(entry.name, entry.dtype, entry.shape, data.data)


def _verify_sites(session: Session) -> None:
    """Return if every site that the job's tensors and its loss have has a grid; of sites that it has not, logs are asked.

    Raises:
        InvalidInput: one has none; by name.
    """
    for site in session.sites:
        if (site.kind, site.ordinal) not in session.table.sites:
            raise InvalidInput(f"state: {session.site_name((site.kind, site.ordinal))} has no grid")


def load_state(session: Session, entries: Mapping[str, Entry]) -> None:
    """Put the session into the state that ``entries`` hold.

    Raises:
        InvalidInput: an entry is missing, left over, or does not fit the job's model and optimizer.
    """
    left = dict(entries)
    session.state.leave(None)

    def take(name: str) -> Entry:
        if name not in left:
            raise InvalidInput(f"state: entry {name} is missing")
        entry = left.pop(name)
        form, bare = (entry.dtype, entry.shape), ("U8", (len(entry.data),))
        if name.startswith("document/") and form != bare:
            raise InvalidInput(f"state: entry {name} is {form}, a document's bytes are {bare}")
        return entry

    with torch.no_grad():
        for prefix, module in session.tensors.modules:
            for name, parameter in module.named_parameters():
                _fill(parameter, take(f"{prefix}/{name}"))
            for name, buffer in module.named_buffers():
                _fill(buffer, take(f"{prefix}/buffer/{name}"))
        _load_optimizer_tensors(session, left)
    configuration = bytes(take("document/configuration").data)
    if configuration != _configuration(session):
        raise InvalidInput("state: its policy, its numbers, its seed or its rank are not this run's")
    cursor = _document(take("document/cursor"), "cursor")
    step = cursor.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise InvalidInput(f"state: cursor's step must be a whole number, got {step!r}")
    session.step = step
    session.table = GridTable.decode(bytes(take("document/grids").data))
    _verify_sites(session)
    session.base = GridTable.decode(bytes(take("document/base-grids").data))
    _load_optimizer(session, _document(take("document/optimizer"), "optimizer"))
    scheduler = _document(take("document/scheduler"), "scheduler")
    if scheduler.get("kind") != type(session.scheduler).__name__:
        raise InvalidInput(
            f"state: scheduler is a {scheduler.get('kind')}, the job has a {type(session.scheduler).__name__}"
        )
    if session.scheduler is not None:
        stated = _untagged(scheduler.get("state"), "scheduler")
        if not _fits(session.first_schedule, stated):
            raise InvalidInput("state: the scheduler's values are not those of the job's scheduler")
        try:
            session.scheduler.load_state_dict(stated)
        except Exception as problem:  # whatever torch or a job's own scheduler makes of what somebody stated
            raise InvalidInput(
                f"state: the job's scheduler does not take what is stated: {type(problem).__name__}"
            ) from problem
    if left:
        raise InvalidInput(f"state: entry {sorted(left)[0]} belongs to nothing in the job")


def _load_optimizer_tensors(session: Session, left: dict[str, Entry]) -> None:
    """Take the entries of the optimizer's tensors out of ``left``."""
    session.optimizer.state.clear()
    for position, (name, p) in enumerate(session.parameters):
        form = session.trained.form[position]
        state: dict[str, Any] = {}
        for key, example in form.items():
            entry_name = f"optimizer/{name}/{key}"
            if entry_name in left and isinstance(example, Tensor) and key != "parameter":
                tensor = _optimizer_tensor(left.pop(entry_name), example, form, p)
                state[key] = tensor if tensor.dim() == 0 else tensor.to(p.device)
        if state:
            session.optimizer.state[p] = state


def _load_optimizer(session: Session, document: dict[str, Any]) -> None:
    names = {id(p): name for name, p in session.model.named_parameters()}
    groups = document.get("groups")
    if not isinstance(groups, list) or len(groups) != len(session.optimizer.param_groups):
        raise InvalidInput("state: the optimizer has another number of parameter groups than the job")
    for index, (stated, group) in enumerate(zip(groups, session.optimizer.param_groups, strict=True)):
        if not isinstance(stated, dict) or stated.get("parameters") != [
            names[id(p)] for p in group["params"]
        ]:
            raise InvalidInput(f"state: optimizer group {index} holds other parameters than the job's")
        values = _untagged(stated.get("values"), f"optimizer group {index}")
        if index >= len(session.first_groups) or not _fits(session.first_groups[index], values):
            raise InvalidInput(f"state: optimizer group {index} has other settings than the job's")
        group.update(values)
    plain = document.get("plain")
    if not isinstance(plain, dict):
        raise InvalidInput("state: the optimizer's plain values are missing")
    unknown = plain.keys() - {name for name, _ in session.parameters}
    if unknown:
        raise InvalidInput(f"state: optimizer values for {min(unknown)}, which the job does not train")
    for position, (name, p) in enumerate(session.parameters):
        values = _untagged(plain.get(name, {"map": []}), f"optimizer state of {name}")
        state, form = session.trained.state_of(p), session.trained.form[position]
        expected = {key: value for key, value in form.items() if not isinstance(value, Tensor)}
        tensors = form.keys() - expected.keys() - {"parameter"}
        if (state or values) and not (_fits(expected, values) and state.keys() == tensors):
            wanted = ", ".join(sorted(tensors | expected.keys())) or "none"
            raise InvalidInput(
                f"state: optimizer values for {name} must be {wanted} (or none before the first step)"
            )
        if values:
            session.optimizer.state[p].update(values)


def _optimizer_tensor(entry: Entry, example: Tensor, form: Mapping[str, Any], p: Tensor) -> Tensor:
    """Return the tensor of an optimizer entry, its form being that of ``example``, made for a slice of ``p``."""
    tensor = _tensor_of(entry)
    dtype = torch.float32 if example.is_floating_point() else example.dtype
    like_parameter = example.shape == form["parameter"].shape
    good = tensor.shape == p.shape if like_parameter else tensor.dim() == example.dim()
    if tensor.dtype != dtype or not good:
        raise InvalidInput(
            f"state: entry {entry.name} is {tensor.dtype}{list(tensor.shape)}, which the job's optimizer does not keep "
            f"for a parameter of shape {list(p.shape)}"
        )
    return tensor


def _fits(own: Any, stated: Any) -> bool:
    """Whether ``stated`` has the form of the job's ``own`` plain value: keys, lengths and types; numbers may differ."""
    if isinstance(own, Mapping):
        same = isinstance(stated, Mapping) and own.keys() == stated.keys()
        return same and all(_fits(value, stated[key]) for key, value in own.items())
    if isinstance(own, (list, tuple)):
        same = type(own) is type(stated) and len(own) == len(stated)
        return same and all(map(_fits, own, stated))
    if own is None or (isinstance(own, (int, float)) and not isinstance(own, bool)):
        number = isinstance(stated, (int, float)) and not isinstance(stated, bool)
        return number or (own is None and stated is None)
    return type(own) is type(stated)


def _document(entry: Entry, what: str) -> dict[str, Any]:
    value = parse_canonical_json(bytes(entry.data), what=f"state: {what}", limit=DOCUMENT_LIMIT)
    if not isinstance(value, dict):
        raise InvalidInput(f"state: {what} must be an object")
    return value


def copied_state(session: Session) -> dict[str, Entry]:
    """Return the state by entry name, in bytes of its own: the session may go on."""
    return {entry.name: copied(entry) for entry in state_entries(session)}


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensor_of(entry: Entry) -> Tensor:
    if entry.dtype not in DTYPES:
        raise InvalidInput(
            f"state: entry {entry.name} has dtype {entry.dtype}; known are {', '.join(DTYPES)}"
        )
    if 0 in entry.shape:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    return torch.frombuffer(bytearray(entry.data), dtype=DTYPES[entry.dtype]).reshape(entry.shape)


def _fill(target: Tensor, entry: Entry) -> None:
    source = _tensor_of(entry)
    expected = torch.float32 if target.is_floating_point() else target.dtype
    if source.dtype != expected or source.shape != target.shape:
        raise InvalidInput(
            f"state: entry {entry.name} is {source.dtype}{list(source.shape)}, the job has {expected}{list(target.shape)}"
        )
    target.copy_(source)


def _tagged(value: Any, what: str) -> Any:
    """Return ``value`` as JSON without floats: floats, tuples and mappings carry a tag."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": hex_float(value)}
    if isinstance(value, list):
        return [_tagged(item, what) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_tagged(item, what) for item in value]}
    if isinstance(value, Mapping):
        items = [[_tagged(key, what), _tagged(item, what)] for key, item in value.items()]
        return {"map": sorted(items, key=lambda pair: canonical_json(pair[0]))}
    raise InvalidInput(
        f"{what}: a value of type {type(value).__name__} cannot be committed; keep numbers, strings, lists and mappings"
    )


def _untagged(value: Any, what: str) -> Any:
    if isinstance(value, list):
        return [_untagged(item, what) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag == "float" and isinstance(body, str):
            return parse_hex_float(body, what=what)
        if tag == "tuple" and isinstance(body, list):
            return tuple(_untagged(item, what) for item in body)
        if (
            tag == "map"
            and isinstance(body, list)
            and all(isinstance(pair, list) and len(pair) == 2 for pair in body)
        ):
            try:
                return {_untagged(key, what): _untagged(item, what) for key, item in body}
            except TypeError as problem:
                raise InvalidInput(f"{what}: {problem}") from None
    raise InvalidInput(f"{what}: {sorted(value)} is not a tagged value")


@dataclass(frozen=True)
class BeforeStep:
    """What a step's passes follow from, as it was before the step."""

    weights: list[Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, session: Session) -> BeforeStep:
        """Return copies of what the session has now."""
        return cls(
            [p.detach().clone() for _, p in session.parameters],
            {name: each.clone() for name, each in session.tensors.all_buffers()},
        )

    @contextmanager
    def again(self, session: Session, step: int) -> Generator[None]:
        """Inside, the session is before ``step``, but for what its optimizer keeps."""
        now, done = BeforeStep.of(session), session.step
        try:
            self._put(session, step)
            yield
        finally:
            now._put(session, done)

    def _put(self, session: Session, step: int) -> None:
        session.step = step
        with torch.no_grad():
            for (_, p), value in zip(session.parameters, self.weights, strict=True):
                p.data.copy_(value)  # no change that torch counts
        session.tensors.put_back(self.buffers)
