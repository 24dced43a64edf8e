"""A small Llama with LoRA under TRL's SFTTrainer, with the two lines that let tally record and follow it.

    tally record --policy fp32 --run runs/llama -- python examples/sft_trainer.py
    tally audit runs/llama -- python examples/sft_trainer.py

It evaluates and saves on the way. Nothing is downloaded: words, text and model are made here, so its base has random weights.
"""

from __future__ import annotations

import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from tallystick.integrations.transformers import TallystickCallback  # 1

NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
WORDS = ["<pad>", "<end>", "?", "and", "is", *NUMBERS]


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of these words alone, made without a download."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="?"
    )


def sums(first: int, count: int) -> Dataset:
    """Questions and their answers; loss is taken of the answers."""
    pairs = [((7 * number) % 9 % 7, (5 * number + number // 9) % 7) for number in range(first, first + count)]
    return Dataset.from_list(
        [
            {"prompt": f"{NUMBERS[a]} and {NUMBERS[b]} is", "completion": f" {NUMBERS[a + b]}"}
            for a, b in pairs
        ]
    )


def main() -> None:
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=20, learning_rate=1e-2,
            eval_strategy="steps", eval_steps=10, save_steps=10, max_length=16,
            use_cpu=True, bf16=False,  # whose default is True; a run has a policy instead
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = SFTTrainer(
            model, arguments, train_dataset=sums(0, 320), eval_dataset=sums(1000, 64), processing_class=tokenizer(),
            peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[TallystickCallback()],  # 2
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
