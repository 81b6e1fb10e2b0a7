"""For the Trainer of transformers: the schedule of a warm start as a callback."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .self_bias import Schedule, set_self_bias


class SelfBiasCallback(TrainerCallback):
    """Sets the self bias of the model that is trained to ``schedule(step)`` before every optimizer step.

    ``step`` counts from the start of the training that the Trainer's state knows, so that a resumed training
    goes on where it was. :class:`depthify.WarmStart` is a schedule; any function of the step will do.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        set_self_bias(model, self.schedule(state.global_step))

    on_train_begin = on_train_end = on_step_begin
