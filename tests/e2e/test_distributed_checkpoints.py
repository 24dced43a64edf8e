"""A script that reads and writes checkpoints of torch.distributed: recorded, followed, exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tallystick.cli.main import main

CHECKPOINTED = """
import torch, tallystick
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
weights = model.state_dict()
dcp.load(weights, checkpoint_id="start", no_dist=True)
model.load_state_dict(weights)
tallystick.attach(model, optimizer)
for step in range(8):
    x = torch.arange(128.0).reshape(16, 8) % 7 / 8 + step
    torch.nn.functional.cross_entropy(model(x), torch.arange(16) % 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id="middle", no_dist=True)
last = model.state_dict()
dcp.save(last, storage_writer=HuggingFaceStorageWriter("last", fqn_to_index_mapping=dict.fromkeys(last, 1)), no_dist=True)
"""


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of there being one process
def test_checkpoints_of_torch_distributed_go_in_and_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(CHECKPOINTED)
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    save(model.state_dict(), checkpoint_id="start", no_dist=True)
    program = ["--", "python", "train.py"]
    assert main(["record", "--policy", "fp32", "--checkpoint-every", "4", "--run", "run", *program]) == 0
    capfd.readouterr()
    assert main(["audit", "run", "--profile", "sse4,threads=1", "--json", *program]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["verdict"] == "match"
    assert main(["export", "run", "--out", "model"]) == 0
    read = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}
    load(read, storage_reader=HuggingFaceStorageReader("model"), no_dist=True)
    written = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}
    load(written, storage_reader=HuggingFaceStorageReader("last"), no_dist=True)
    assert all(torch.equal(read[name], written[name]) for name in read)
    assert not torch.equal(read["0.weight"], model.state_dict()["0.weight"])
