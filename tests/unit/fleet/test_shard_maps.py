"""Shard maps: which elements of an entry a slice names, and what is none."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput
from tallystick.fleet.provenance.matcher import slice_bytes
from tallystick.fleet.provenance.transcripts import ReportOpening, Slice
from tallystick.integrations.sharded import box, shards_of, slices_of


def elements(piece: Slice, shape: tuple[int, ...]) -> list[float]:
    values = np.arange(int(np.prod(shape)), dtype="<f4")
    data = slice_bytes(piece, "F32", {piece.entry: Entry(piece.entry, "F32", shape, values.tobytes())})
    assert data is not None
    return np.frombuffer(data, "<f4").tolist()


@pytest.mark.parametrize("shape", [(7,), (4, 6), (3, 4, 5), (2, 1, 3, 4), (1, 4, 5)])
def test_a_box_is_the_elements_that_it_has_in_their_order_or_refused(shape: tuple[int, ...]) -> None:
    values = np.arange(int(np.prod(shape)), dtype="<f4").reshape(shape)
    named = refused = 0
    spans = [[(first, last) for first in range(n) for last in range(first + 1, n + 1)] for n in shape]
    for chosen in itertools.product(*spans):
        local, offset = [last - first for first, last in chosen], [first for first, _ in chosen]
        own = values[tuple(slice(first, last) for first, last in chosen)]
        try:
            piece = box("w", shape, local, offset)
        except InvalidInput as problem:
            assert "is no part that a shard map can name" in str(problem)
            refused += 1
            continue
        assert elements(piece, shape) == own.reshape(-1).tolist()
        assert bool(piece.run) == (piece.count > 1 and not _follow(own))
        named += 1
    assert named > 0
    assert (refused > 0) == (len(shape) > 2 and shape[0] > 1)


def _follow(own: np.ndarray) -> bool:
    return bool(np.all(np.diff(own.reshape(-1)) == 1))


@pytest.mark.parametrize(
    "row",
    [
        ["r", "e", 0, 6, 0, 0], ["r", "e", 0, 6, 6, 9], ["r", "e", 0, 6, 4, 9], ["r", "e", 0, 6, 3, 3], ["r", "e", 0, 6, 0, 9],
        ["r", "e", 0, 6, 3], ["r", "e", 0], ["r", "e", 0, 6, -3, 9], ["r", "e", 0, 6, 3, 9, 1], "r", None,
        ["r", "e", 0, 6, 3.0, 9],
    ],
)  # fmt: skip
def test_another_list_is_no_slice(row: object) -> None:
    document = json.loads(ReportOpening(bytes(32), ((Slice("r", "e", 0, 6, 3, 9),),)).encode())
    assert document["shards"] == [[["r", "e", 0, 6, 3, 9]]]
    assert ReportOpening.read(document).shards[0][0] == Slice("r", "e", 0, 6, 3, 9)
    with pytest.raises(InvalidInput, match=r"slice|shards"):
        ReportOpening.read({**document, "shards": [[row]]})


def test_a_slice_without_runs_is_a_list_of_four() -> None:
    opening = ReportOpening(bytes(32), ((Slice("r", "e", 2, 6),),))
    assert json.loads(opening.shards_bytes()) == [[["r", "e", 2, 6]]]
    assert ReportOpening.parse(opening.encode()) == opening


@pytest.mark.parametrize(
    "piece",
    [
        Slice("r", "w", 0, 13), Slice("r", "w", 9, 4, 2, 9), Slice("r", "w", 0, 2**62), Slice("r", "w", 2**62, 1),
        Slice("r", "w", 0, 2**61, 2, 2**61), Slice("r", "w", 0, 4, 2, 2**62), Slice("r", "v", 0, 1),
    ],
)  # fmt: skip
def test_what_the_entry_does_not_have_is_nothing(piece: Slice) -> None:
    entry = Entry("w", "F32", (3, 4), bytes(48))
    assert slice_bytes(piece, "F32", {"w": entry}) is None


def test_without_ranks_a_map_names_every_tensor_whole() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    (pieces,) = shards_of(model, optimizer)
    assert pieces == slices_of(model, optimizer)
    assert {piece.entry: (piece.start, piece.count, piece.run) for piece in pieces} == {
        f"{front}{name}{key}": (0, count, 0)
        for name, count in (("weight", 6), ("bias", 2))
        for front, key, count in (
            ("model/", "", count), ("optimizer/", "/exp_avg", count), ("optimizer/", "/exp_avg_sq", count),
            ("optimizer/", "/step", 1),
        )
    }  # fmt: skip


@pytest.mark.parametrize("form", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_a_map_made_before_the_first_step_is_the_one_after_it(form: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 2)
    optimizer = form(model.parameters(), lr=0.1, **({"momentum": 0.9} if form is torch.optim.SGD else {}))
    before = slices_of(model, optimizer)
    assert not optimizer.state
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert slices_of(model, optimizer) == before
    assert any(piece.entry.startswith("optimizer/weight/") for piece in before)


def test_what_an_optimizer_keeps_by_rows_is_known_after_its_first_step_alone() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(InvalidInput, match=r"Adafactor keeps .* is known after its first step alone"):
        slices_of(model, torch.optim.Adafactor(model.parameters()))
