"""What the processes of a run say to each other outside of steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from fullshard import errors
from fullshard.errors import CheckpointError, FullshardError

T = TypeVar("T")


def tell(value: Any) -> list[Any]:
    """What each process says, as JSON values in the order of processes. A collective."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([data.size]))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    pairs = zip(rows, sizes.reshape(-1), strict=True)
    return [json.loads(bytes(row[: int(size)])) for row, size in pairs]


def agree(do: Callable[[], T]) -> T:
    """Do something that is no collective; where one process fails, all raise. A collective."""
    result: Any = None
    error: Exception | None = None
    try:
        result = do()
    except OSError as caught:
        error = CheckpointError(f"{caught.filename or 'checkpoint'}: {caught.strerror or caught}")
    except Exception as caught:  # noqa: BLE001  whatever it is, the others must hear of it
        error = caught
    told = tell(None if error is None else (type(error).__name__, str(error)))
    if error is not None:
        raise error
    first = next((entry for entry in told if entry is not None), None)
    if first is not None:
        raise getattr(errors, first[0], FullshardError)(first[1])
    return result
