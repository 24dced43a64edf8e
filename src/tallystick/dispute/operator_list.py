"""The operators of one step as a committed list: what each computed, from which values, and how to open one of them.

A step is one flat list: what it loads (agreed state, batch), the operators of forward and backward pass and of clipping,
the rounding sites, the optimizer's updates, and what it stores. Every line of the list, a *leaf*, names its operator,
says where each input comes from (an earlier leaf's output, and which part of it), and holds the digests of its outputs.

A party's commitment at position m covers its first m leaves, so two lists that part at one leaf have different commitments
from there on, and the bisection of ``dispute.bisection`` finds that leaf.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, cast

from tallystick.commit.codec import Document
from tallystick.commit.encoding import (
    HASH_BYTES,
    Fields,
    canonical_json,
    digest,
    parse_canonical_json,
    parse_hex,
    parse_hex_float,
)
from tallystick.commit.field_rules import Ascii, Hash, Size
from tallystick.commit.merkle import (
    EMPTY_ROOT,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    node_hash,
    verify_consistency,
    verify_inclusion,
)
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import DTYPE_BYTES, RANK_LIMIT
from tallystick.commit.tensors import TensorDigest
from tallystick.errors import InvalidInput, Mismatch

LEAF_TAG = b"tallystick/operator/1\x00"
PREFIX_TAG = "tallystick/operator-prefix/1"
ENDED_TAG = "tallystick/operator-list/1"
BASE_TAG = "tallystick/operator-base/1"
LEAF_LIMIT = 1 << 16  # bytes of JSON
MOST_LEAVES = 1 << 24
LONGEST_PATH = 64  # hashes
PHASES = ("load", "forward", "backward", "clip", "round", "update", "store")
SIZE_LIMIT = 1 << 48

LOAD = "tallystick::load"
BATCH = "tallystick::batch"
ROUND = "tallystick::round"
ADAM = "tallystick::adam"
SGD = "tallystick::sgd"
STORE = "tallystick::store"
END = "tallystick::end"
Attribute = object  # what canonical JSON holds


@dataclass(frozen=True)
class Geometry:
    """Which elements of a flat tensor a view shows: dimensions, strides and offset, in elements.

    Raises:
        InvalidInput: ranks differ, or a number is negative or out of range.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        numbers = (*self.shape, *self.stride, self.offset)
        if len(self.shape) != len(self.stride) or len(self.shape) > RANK_LIMIT:
            raise InvalidInput(f"operator: {len(self.shape)} dimensions and {len(self.stride)} strides")
        if min(numbers) < 0 or max(numbers) >= SIZE_LIMIT or self.numel >= SIZE_LIMIT:
            raise InvalidInput(
                f"operator: shape {list(self.shape)[:8]} or its strides are negative or too large"
            )

    @property
    def numel(self) -> int:
        """The number of elements shown."""
        return math.prod(self.shape)

    @property
    def last(self) -> int:
        """The largest flat index shown, -1 if there are none."""
        if not self.numel:
            return -1
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def fields(self) -> dict[str, object]:
        """Return the three as a JSON object."""
        return {"offset": self.offset, "shape": list(self.shape), "stride": list(self.stride)}


@dataclass(frozen=True)
class Input:
    """One operand: output ``source[1]`` of leaf ``source[0]``, read as ``dtype`` (a wider float than stored is exact)."""

    source: tuple[int, int]
    dtype: str
    view: Geometry

    def fields(self) -> dict[str, object]:
        """Return the operand as a JSON object."""
        return {"dtype": self.dtype, "from": list(self.source), "view": self.view.fields()}


@dataclass(frozen=True)
class Output:
    """One result: the digest of its elements as they lie in memory, and the view that the operator returned."""

    tensor: TensorDigest
    view: Geometry

    def __post_init__(self) -> None:
        if self.view.last >= self.tensor.elements:
            raise InvalidInput(
                f"operator: an output shows element {self.view.last} of {self.tensor.elements}"
            )

    def fields(self) -> dict[str, object]:
        """Return the result as a JSON object."""
        tensor = self.tensor
        return {
            "dtype": tensor.dtype, "elements": tensor.elements, "root": tensor.root.hex(), "view": self.view.fields(),
        }  # fmt: skip


def _is_root(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value, re.ASCII) is not None


@dataclass(frozen=True)
class Operator:
    """One leaf of the list.

    Attributes:
        name, overload: as torch names it, or one of the step's own (``tallystick::...``).
        module: path of the module it ran in, or the name of the state entry, batch tensor or site it is about.
        phase: one of ``PHASES``.
        micro_batch: which, 0 outside of micro-batches.
        attributes: arguments by name; tensors as ``{"input": n}``, floats as ``{"float": hex}``.
        inputs, outputs: operands and results.
    """

    name: str
    overload: str
    module: str
    phase: str
    micro_batch: int
    attributes: Mapping[str, Attribute]
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise InvalidInput(f"operator: phase {self.phase[:40]!r} is unknown")
        if not 0 <= self.micro_batch < SIZE_LIMIT:
            raise InvalidInput(f"operator: micro-batch {self.micro_batch} is out of range")

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        return f"{self.name}{where} ({self.phase})"

    def fields(self) -> dict[str, object]:
        """Return the leaf as a JSON object."""
        return {
            "attributes": dict(self.attributes),
            "inputs": [operand.fields() for operand in self.inputs],
            "micro_batch": self.micro_batch,
            "module": self.module,
            "name": self.name,
            "outputs": [result.fields() for result in self.outputs],
            "overload": self.overload,
            "phase": self.phase,
        }

    @cached_property
    def structure(self) -> bytes:
        """Everything but the digests of the outputs: equal for honest parties on any machine."""
        fields = self.fields()
        fields["outputs"] = [{**result.fields(), "root": ""} for result in self.outputs]
        # What is stored is a result, as digests of outputs are.
        # One that is no root, or stands beside anything else, is another structure than any honest party's.
        attributes = dict(self.attributes)
        entry = attributes.get("entry")
        if self.name == STORE and isinstance(entry, dict) and _is_root(entry.get("tensor_root")):
            attributes["entry"] = {**cast("dict[str, object]", entry), "tensor_root": ""}
        if self.name == END and _is_root(attributes.get("state_root")):
            attributes["state_root"] = ""
        fields["attributes"] = attributes
        return canonical_json(fields)

    def has_structure_of(self, other: Operator) -> bool:
        """Whether the two have one structure; quicker than comparing ``structure``."""
        if self.name in (STORE, END):
            return self.structure == other.structure
        mine = [(output.tensor.dtype, output.tensor.elements, output.view) for output in self.outputs]
        theirs = [(output.tensor.dtype, output.tensor.elements, output.view) for output in other.outputs]
        return mine == theirs and (
            (
                self.name,
                self.overload,
                self.module,
                self.phase,
                self.micro_batch,
                self.inputs,
                self.attributes,
            )
            == (
                other.name,
                other.overload,
                other.module,
                other.phase,
                other.micro_batch,
                other.inputs,
                other.attributes,
            )
        )

    def encode(self) -> bytes:
        """Return the canonical JSON of the leaf.

        Raises:
            InvalidInput: an attribute has no canonical form.
        """
        try:  # a list has thousands of leaves: what is encodable is checked where one is parsed
            return json.dumps(self.fields(), sort_keys=True, separators=(",", ":"), allow_nan=False).encode(
                "ascii"
            )
        except (TypeError, ValueError) as problem:
            raise InvalidInput(f"operator {self.name}: {problem}") from None

    def number(self, name: str, default: float | None = None) -> float:
        """Return a numeric attribute.

        Raises:
            InvalidInput: it is absent and has no default, or is no number.
        """
        value = self.attributes.get(name)
        if value is None and default is not None:
            return default
        return number_of(value, f"operator {self.name}: {name}")

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an attribute that is a list of integers."""
        value = self.attributes.get(name)
        if not isinstance(value, list):
            raise InvalidInput(f"operator {self.name}: {name} must be a list of integers")
        items = cast("list[object]", value)
        return tuple(int(number_of(item, f"operator {self.name}: {name}")) for item in items)

    def slot(self, name: str) -> int | None:
        """Return which input the tensor argument ``name`` is, None if it was not given."""
        value = self.attributes.get(name)
        if not isinstance(value, dict) or "input" not in value:
            return None
        at = cast("dict[str, object]", value)["input"]
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < len(self.inputs):
            raise InvalidInput(f"operator {self.name}: {name} names input {at}, of {len(self.inputs)}")
        return at


def number_of(value: object, what: str) -> float:
    """Return the number that an attribute holds.

    Raises:
        InvalidInput: it holds none.
    """
    if isinstance(value, int):
        return int(value)
    if isinstance(value, dict):
        held = cast("dict[str, object]", value)
        if set(held) == {"float"} and isinstance(held["float"], str):
            return parse_hex_float(held["float"], what=what)
    raise InvalidInput(f"{what} must be a number")


def parse_operator(data: bytes) -> Operator:
    """Return the leaf that ``data`` encodes.

    Raises:
        InvalidInput: ``data`` is not what ``Operator.encode`` returns.
    """
    what = "operator"
    names = ("attributes", "inputs", "micro_batch", "module", "name", "outputs", "overload", "phase")
    fields = Fields(parse_canonical_json(data, what=what, limit=LEAF_LIMIT), what=what, names=names)
    return Operator(
        name=fields.text("name"),
        overload=fields.text("overload"),
        module=fields.text("module"),
        phase=fields.text("phase"),
        micro_batch=fields.integer("micro_batch"),
        attributes=fields.mapping("attributes"),
        inputs=tuple(_parse_input(item) for item in fields.items("inputs")),
        outputs=tuple(_parse_output(item) for item in fields.items("outputs")),
    )


def _parse_view(value: object) -> Geometry:
    fields = Fields(value, what="operator: view", names=("offset", "shape", "stride"))
    return Geometry(fields.integers("shape"), fields.integers("stride"), fields.integer("offset"))


def _parse_input(value: object) -> Input:
    fields = Fields(value, what="operator: input", names=("dtype", "from", "view"))
    source = fields.integers("from")
    if len(source) != 2 or not 0 <= source[0] < MOST_LEAVES or not 0 <= source[1] < 256:
        raise InvalidInput(f"operator: input comes from {list(source)[:4]}, which is no output of a leaf")
    if fields.text("dtype") not in DTYPE_BYTES:
        raise InvalidInput(f"operator: input dtype {fields.text('dtype')[:40]!r} is unknown")
    return Input((source[0], source[1]), fields.text("dtype"), _parse_view(fields.value("view")))


def _parse_output(value: object) -> Output:
    fields = Fields(value, what="operator: output", names=("dtype", "elements", "root", "view"))
    root = parse_hex(fields.text("root"), n_bytes=HASH_BYTES, what="operator: root")
    tensor = TensorDigest(fields.text("dtype"), fields.integer("elements"), root)
    return Output(tensor, _parse_view(fields.value("view")))


def base_of(*, agreed: bytes, specification: bytes, record: bytes, chunk: int) -> bytes:
    """Return what both lists begin with: agreed state, order, the trainer's record of the step, and the chunk size."""
    return digest(BASE_TAG, agreed, specification, record, struct.pack("<Q", chunk))


def prefix_commitment(base: bytes, count: int, root: bytes) -> bytes:
    """Return the commitment to the first ``count`` leaves."""
    return digest(PREFIX_TAG, base, struct.pack("<Q", count), root)


def ended_commitment(base: bytes, position: int, count: int, root: bytes) -> bytes:
    """Return the commitment at a position after the end of a list of ``count`` leaves."""
    return digest(ENDED_TAG, base, struct.pack("<QQ", position, count), root)


@dataclass
class OperatorList:
    """One party's list: the trace of level three of the game.

    Attributes:
        base: what ``base_of`` gives.
        leaves: encoded operators.
    """

    base: bytes
    leaves: Sequence[bytes]
    _hashes: list[bytes] = field(default_factory=list[bytes])

    @property
    def hashes(self) -> list[bytes]:
        """The leaf hashes."""
        if len(self._hashes) != len(self.leaves):
            self._hashes = [hash_of(leaf) for leaf in self.leaves]
        return self._hashes

    def commitment_at(self, index: int) -> bytes:
        """Return the 32 bytes that commit to the first ``index`` leaves, or to the whole list and its end."""
        count = len(self.leaves)
        if index <= count:
            return prefix_commitment(self.base, index, merkle_root(self.hashes[:index]))
        return ended_commitment(self.base, index, count, merkle_root(self.hashes))

    def witness_at(self, index: int) -> OpenedLeaf:
        """Return leaf ``index``, opened under the commitments on both sides of it."""
        if index >= len(self.leaves):
            return OpenedLeaf(index, None, tuple(_peaks(self.hashes)))
        path = inclusion_proof(self.hashes[: index + 1], index)
        rest = consistency_proof(self.hashes, index + 1)
        return OpenedLeaf(index, self.leaves[index], tuple(path), tuple(rest))

    def open_earlier(self, index: int, before: int) -> EarlierLeaf:
        """Return leaf ``index`` with its path to the root over the first ``before`` leaves."""
        return EarlierLeaf(index, self.leaves[index], tuple(inclusion_proof(self.hashes[:before], index)))


def hash_of(leaf: bytes) -> bytes:
    """Return the leaf hash of an encoded operator."""
    return leaf_hash(LEAF_TAG + leaf)


@dataclass(frozen=True)
class OpenedLeaf(Document, what="dispute: leaf"):
    """The leaf at the disputed position, or None where the list ends there, with the subtrees before it.

    ``rest`` shows that the list up to this leaf begins the whole list that its party committed to.
    """

    index: int
    leaf: Annotated[bytes, Ascii()] | None
    path: Annotated[tuple[Hash, ...], Size(0, LONGEST_PATH)]
    rest: Annotated[tuple[Hash, ...], Size(0, LONGEST_PATH)] = ()

    @property
    def nbytes(self) -> int:
        """What a judge reads of it."""
        return len(self.leaf or b"") + HASH_BYTES * (len(self.path) + len(self.rest))


@dataclass(frozen=True)
class EarlierLeaf(Document, what="dispute: source"):
    """A leaf before the disputed one, under the agreed commitment."""

    index: int
    leaf: Annotated[bytes, Ascii()]
    path: tuple[Hash, ...]

    @property
    def nbytes(self) -> int:
        """What a judge reads of it."""
        return len(self.leaf) + HASH_BYTES * len(self.path)


def verify_opened_leaf(
    base: bytes, opened: OpenedLeaf, *, agreed: bytes, claimed: bytes, whole: tuple[int, bytes] | None = None
) -> bytes:
    """Return the root over the leaves before ``opened``, if it follows them and leads to what its party claimed.

    ``whole`` is the size and root of the list that the party committed to before the first round, if it must be part of it.

    The path of the last leaf of a tree consists of the subtrees before it, so it gives both roots.

    Raises:
        InvalidInput: a path of another length.
        Mismatch: the leaf leads to another agreed or claimed commitment.
    """
    expected = opened.index.bit_count()
    if len(opened.path) != expected or any(len(node) != HASH_BYTES for node in opened.path):
        raise InvalidInput(f"operator {opened.index}: its path needs {expected} nodes of 32 bytes")
    if not 0 <= opened.index < MOST_LEAVES:
        raise InvalidInput(f"operator {opened.index}: is out of range")
    before = opened.path[0] if opened.path else EMPTY_ROOT
    for peak in opened.path[1:]:
        before = node_hash(peak, before)
    if prefix_commitment(base, opened.index, before) != agreed:
        raise Mismatch(f"operator {opened.index}: it does not follow the agreed operators")
    after = before
    if opened.leaf is None:
        stated = ended_commitment(base, opened.index + 1, opened.index, before)
    else:
        after = hash_of(opened.leaf)
        for peak in opened.path:
            after = node_hash(peak, after)
        stated = prefix_commitment(base, opened.index + 1, after)
    if stated != claimed:
        raise Mismatch(f"operator {opened.index}: what was opened is not what was claimed")
    if whole is not None:
        size, root = whole
        old = opened.index + (opened.leaf is not None)
        verify_consistency(old_size=old, size=size, old_root=after, root=root, proof=opened.rest)
    return before


def verify_earlier(earlier: EarlierLeaf, *, before: int, root: bytes) -> Operator:
    """Return the operator of a leaf that lies under ``root``, the root over the first ``before`` leaves.

    Raises:
        InvalidInput: no such leaf, a malformed one, or a path of another length.
        Mismatch: it does not lie under the root.
    """
    verify_inclusion(hash_of(earlier.leaf), index=earlier.index, size=before, proof=earlier.path, root=root)
    return parse_operator(earlier.leaf)


def _peaks(hashes: Sequence[bytes]) -> list[bytes]:
    """Return the roots of the full subtrees of a tree, smallest first."""
    found: list[bytes] = []
    end, size = len(hashes), len(hashes)
    while size:
        width = size & -size
        found.append(merkle_root(hashes[end - width : end]))
        end, size = end - width, size - width
    return found
