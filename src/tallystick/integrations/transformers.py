"""The Trainer of Hugging Face's transformers, and those made from it (TRL's SFTTrainer), recorded or followed by ``tally``.

For instance::

    from tallystick.integrations.transformers import TallystickCallback      # 1
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[TallystickCallback()])      # 2
    trainer.train()

``pip install tallystick[transformers]`` and ``accelerate``, which the Trainer needs.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tallystick.errors import Nondeterminism
from tallystick.roles.attached import Attached, attach


class TallystickCallback(TrainerCallback):
    """Attaches the Trainer's model, optimizer and schedule when training begins, and ends the run when it ends.

    Args:
        smooth, resumable: as for ``tallystick.attach``.

    Attributes:
        run: the handle, once training has begun.
    """

    def __init__(self, *, smooth: tuple[str, ...] = (), resumable: bool = False) -> None:
        self._given: dict[str, Any] = {"smooth": smooth, "resumable": resumable}
        self.run: Attached | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Attach.

        Raises:
            Nondeterminism: the arguments ask for a precision of the Trainer's own.
            ProtocolViolation, InvalidInput: as ``tallystick.attach``.
        """
        if args.bf16 or args.fp16:
            raise Nondeterminism(
                f"{type(args).__name__}: bf16={args.bf16}, fp16={args.fp16}: set both to False (TRL's arguments have bf16=True "
                "by default); tally record --policy bf16 has an autocast of its own"
            )
        self.run = attach(given["model"], given["optimizer"], given.get("lr_scheduler"), **self._given)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """End the step, before anybody evaluates or saves."""
        if self.run is not None:
            self.run.close_step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()
