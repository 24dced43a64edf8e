"""GPT-2, Hugging Face's model with its usual configuration of 124 million parameters, from random weights.

A published model that nobody wrote with this package in mind: the loss is the model's own (``labels=``), with
its cast to float32, and attention comes in two implementations. AdamW and the text are those of
``tallystick.jobs.text``. A token is a character's byte, so at most 96 of the 50,257 rows of the embedding
are ever looked up. 124,439,808 parameters at the default size.

Settings, all optional:
    steps=100              optimizer steps, and the length of the schedule
    batch=8                blocks a step, over all micro-batches
    accumulation=1         micro-batches a step; divides batch
    block=64               tokens a block, at most positions
    layers=12  width=768  heads=12  positions=1024
    attention=sdpa         or eager
    dropout=0.1            of the embedding, the attention weights and each residual branch
    learning_rate=0.0006   at the end of the warm-up
    weight_decay=0.1       of matrices; vectors have none
    warmup_percent=10      of the steps
    init_seed=0            torch's seed for the initial weights
    data_seed=0            Philox's seed for the choice of blocks

Needs the extra ``tallystick[transformers]``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tallystick.errors import InvalidInput
from tallystick.execution.job import Job
from tallystick.jobs.digits import (
    LARGEST_SEED,
    MOST_STEPS,
    choice,
    initial_weights,
    parse_settings,
    real,
    scoring,
    whole,
)
from tallystick.jobs.text import (
    CLIP_NORM,
    adamw,
    check_divides,
    drawn_blocks,
    read_corpus,
    spread_blocks,
    warmup_cosine_schedule,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor, nn

BLOCKS = "tallystick.jobs.gpt2/blocks"


@dataclass(frozen=True)
class Gpt2Settings:
    """The settings of this job; the module's docstring says what they are."""

    steps: int = whole(100, 1, MOST_STEPS)
    batch: int = whole(8, 1, 4096)
    accumulation: int = whole(1, 1, 4096)
    block: int = whole(64, 2, 4096)  # the loss predicts a token from those before it
    layers: int = whole(12, 1, 128)
    width: int = whole(768, 1, 16384)
    heads: int = whole(12, 1, 128)
    positions: int = whole(1024, 2, 4096)
    attention: str = choice("sdpa", "eager")
    dropout: float = real(0.1, 0.0, 0.9)
    learning_rate: float = real(6e-4, 0.0, 1.0)
    weight_decay: float = real(0.1, 0.0, 1.0)
    warmup_percent: int = whole(10, 0, 100)
    init_seed: int = whole(0, 0, LARGEST_SEED)
    data_seed: int = whole(0, 0, LARGEST_SEED)


def build(settings: Mapping[str, str]) -> Job:
    """Return the job.

    Raises:
        InvalidInput: an unknown setting, a value out of range, or no transformers.
    """
    chosen = parse_settings(Gpt2Settings, settings, job="gpt2")
    check_divides("gpt2", accumulation=chosen.accumulation, batch=chosen.batch)
    check_divides("gpt2", heads=chosen.heads, width=chosen.width)
    if chosen.block > chosen.positions:
        raise InvalidInput(
            f"job gpt2: setting block must be at most positions, got block={chosen.block} and "
            f"positions={chosen.positions}"
        )
    corpus = read_corpus()
    training, held_out = map(_byte_tokens, corpus.split())
    model = _model(chosen)
    optimizer = adamw(model, chosen.learning_rate, chosen.weight_decay)

    def batch(step: int) -> Tensor:
        return drawn_blocks(training, step, chosen.batch, chosen.block, seed=chosen.data_seed, purpose=BLOCKS)

    return Job(
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=_loss,
        steps=chosen.steps,
        scheduler=warmup_cosine_schedule(optimizer, chosen.steps, chosen.warmup_percent),
        accumulation=chosen.accumulation,
        clip_norm=CLIP_NORM,
        dataset_digest=corpus.digest,
        evaluate=functools.partial(_evaluate, spread_blocks(held_out, chosen.block)),
    )


def _model(chosen: Gpt2Settings) -> nn.Module:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise InvalidInput(
            "job gpt2: transformers is not installed; install the extra tallystick[transformers]"
        ) from error
    config = GPT2Config(
        n_positions=chosen.positions,
        n_embd=chosen.width,
        n_layer=chosen.layers,
        n_head=chosen.heads,
        embd_pdrop=chosen.dropout,
        attn_pdrop=chosen.dropout,
        resid_pdrop=chosen.dropout,
        use_cache=False,
        attn_implementation=chosen.attention,  # pyright: ignore[reportCallIssue]: reaches the base class
    )
    with initial_weights(chosen.init_seed):
        model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # transformers 5 does not know this class's loss by name, and warns
    return model


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the model's own loss, nats a token; it shifts the labels itself."""
    return model(input_ids=tokens, labels=tokens).loss


def _evaluate(blocks: Tensor, model: nn.Module) -> dict[str, float]:
    with scoring(model) as placed:
        losses: list[Any] = [_loss(model, part).item() for part in placed(blocks).split(8)]
    return {"held_out_loss": sum(losses) / len(losses)}


def _byte_tokens(text: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(text, dtype=np.uint8).astype(np.int64)
