"""Out of memory, answered with the plan: what was planned, the largest row, what would fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from fullshard.errors import OutOfMemoryError, ran_out_of_memory
from fullshard.planner.homes import Place
from fullshard.planner.text import human_bytes
from fullshard.train.outlook import View, memory_lines


@contextlib.contextmanager
def answered(view: Callable[[], View]) -> Iterator[None]:
    """Turn running out of memory inside the block into an error that says what to change.

    Args:
        view: The run as it was planned; asked only if memory runs out.

    Raises:
        OutOfMemoryError: Memory ran out.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise OutOfMemoryError(_answer(view(), error)) from error


def _answer(view: View, error: BaseException) -> str:
    outlook = view.outlook
    peak = outlook.peak_bytes[Place.DEVICE]
    memory = view.machine.memory_bytes or 0
    said = (str(error).splitlines() or ["no more memory"])[0]
    expected = f"{human_bytes(peak)} of {human_bytes(memory)} a rank"
    advice = view.advice()
    if not advice:
        advice = ["a smaller per_device_train_batch_size, or activation_checkpointing: block"]
    return "\n".join(
        [
            f"memory: expected to need {expected}; got: {said}",
            *memory_lines(outlook.rows),
            "what would help:",
            *(f"  {line}" for line in advice),
        ]
    )
