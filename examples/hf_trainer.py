"""A small BERT under the Trainer of Hugging Face's transformers, with the two lines that let tally record and follow it.

    tally record --policy fp32 --run runs/bert -- python examples/hf_trainer.py
    tally audit runs/bert -- python examples/hf_trainer.py

It evaluates and saves on the way, and learns which of two words a sentence holds more often.
"""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from tallystick.integrations.transformers import TallystickCallback  # 1

WORDS, LENGTH = 50, 12


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sentences of made-up words, the same on every machine."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = np.random.default_rng(self.first + number).integers(1, WORDS, LENGTH)
        words[::2] = words[::2] % 2 + 1
        label = int((words == 1).sum() > (words == 2).sum())
        return {"input_ids": torch.from_numpy(words), "labels": torch.tensor(label)}


def main() -> None:
    set_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=20, learning_rate=2e-3,
            eval_strategy="steps", eval_steps=10, save_steps=10, use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=Sentences(0, 320), eval_dataset=Sentences(1000, 64),
            callbacks=[TallystickCallback()],  # 2
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
