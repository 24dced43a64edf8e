"""A header of a safetensors file that two readers could take for two things is refused; all others are read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import safetensors

from tallystick.commit.tensor_file import HEADER_LIMIT, check_tensor_file
from tallystick.errors import InvalidInput
from tallystick.store.files import RunDirectory
from tallystick.store.tensor_files import load_state_file

A, B = '"dtype":"F32","shape":[1],"data_offsets":[0,4]', '"dtype":"F32","shape":[1],"data_offsets":[4,8]'
BODY = bytes(range(8))


def file_of(header: str, body: bytes = BODY) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + body


def checked(data: bytes) -> None:
    check_tensor_file(io.BytesIO(data), len(data), what="f")


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (f'{{"a":{{{A}}},"b":{{{B}}}}}', BODY),
        (f'{{"b":{{{B}}},"__metadata__":{{"format":"pt","more":"x"}},"a":{{{A}}}}}   ', BODY),
        ('{"e":{"dtype":"F32","shape":[0,4],"data_offsets":[0,0]}}', b""),
        ('{"f":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}', b"ab"),
        ("{}", b""),
    ],
)
def test_what_others_write_is_read(header: str, body: bytes) -> None:
    checked(file_of(header, body))
    safetensors.deserialize(file_of(header, body))


WRONG = {
    "two of one name": (f'{{"a":{{{A}}},"a":{{{B}}}}}', "key 'a'"),
    "two of one name, both the same": (f'{{"a":{{{A}}},"b":{{{B}}},"a":{{{A}}}}}', "key 'a'"),
    "two dtypes": (f'{{"a":{{"dtype":"I32",{A}}},"b":{{{B}}}}}', "key 'dtype'"),
    "two ranges": (f'{{"a":{{"data_offsets":[4,8],{A}}},"b":{{{B}}}}}', "key 'data_offsets'"),
    "two metadata": (f'{{"__metadata__":{{}},"a":{{{A}}},"b":{{{B}}},"__metadata__":{{}}}}', "key '__metadata__'"),
    "a field too many": (f'{{"a":{{"quant":"int8",{A}}},"b":{{{B}}}}}', "data_offsets, dtype, quant, shape"),
    "a field too few": (f'{{"a":{{"dtype":"F32","shape":[1]}},"b":{{{B}}}}}', "has dtype, shape"),
    "metadata that is no text": (f'{{"__metadata__":{{"a":1}},"a":{{{A}}},"b":{{{B}}}}}', "'a' is no text"),
    "metadata in metadata": (f'{{"__metadata__":{{"a":{{}}}},"a":{{{A}}},"b":{{{B}}}}}', "'a' is no text"),
    "metadata that is null": (f'{{"__metadata__":null,"a":{{{A}}},"b":{{{B}}}}}', "must be an object"),
    "one range twice": (f'{{"a":{{{A}}},"b":{{{A}}}}}', "must begin at byte 4 of the tensors, begins at 0"),
    "a hole": (f'{{"b":{{{B}}}}}', "must begin at byte 0 of the tensors, begins at 4"),
    "bytes left over": (f'{{"a":{{{A}}}}}', "its tensors have 4 bytes, 8 follow"),
    "another size": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}', "has 4 bytes, its range 8"),
    "a range backwards": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,0]}}', "data_offsets must be"),
    "numbers with a point": ('{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', "is malformed"),
    "numbers that are truths": ('{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,8]}}', "is malformed"),
    "numbers below nought": ('{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', "is malformed"),
    "dimensions without end": (f'{{"a":{{"dtype":"F32","shape":{[0] * 65},"data_offsets":[0,0]}}}}', "is malformed"),
    "no object": ("[]", "header must be an object"),
    "text after it": (f'{{"a":{{{A}}},"b":{{{B}}}}}{{}}', "not JSON"),
    "deep": ('{"a":' + "[" * 50000 + "]" * 50000 + "}", "nested deeper"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_could_be_read_in_two_ways_is_refused(case: str, tmp_path: Path) -> None:
    header, reason = WRONG[case]
    with pytest.raises(InvalidInput, match=r"f: not a safetensors file: .*" + reason.replace("[", r"\[")):
        checked(file_of(header))
    run = RunDirectory(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    run.checkpoint_path(0).write_bytes(file_of(header))
    for read in (
        lambda: load_state_file(run.checkpoint_path(0)),
        lambda: run.load_checkpoint(0),
        lambda: run.load_entry(0, "a"),
    ):
        with pytest.raises(InvalidInput, match=r"000000\.safetensors: not a safetensors file: "):
            read()


@pytest.mark.parametrize("length", [0, 1, 1000, HEADER_LIMIT + 1, 1 << 63])
def test_a_header_of_another_length_is_refused_unread(length: int) -> None:
    data = length.to_bytes(8, "little") + json.dumps({}).encode() + b" " * 90
    with pytest.raises(InvalidInput, match=f"header must have 2 to 92 bytes, has {length}"):
        checked(data)
    with pytest.raises(InvalidInput, match="not a safetensors file"):
        checked(b"\x02")
