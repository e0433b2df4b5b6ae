"""CUDA streams and events; no other file of the engine and the transports calls them.

The file is not in `engine/`, because transports also use streams, and the engine imports the
transports.

[Note: streams]
    stream       what runs on it                             who waits for it
    step         forward, backward, casts, sums, norms       the caller, at the end of backward
    gather       NCCL's all-gathers                          step, before a unit is used
    reduce       NCCL's reduce-scatters                      step, before their sums are read
                 slices of fs.owned, to owners and back      the optimizer's stream, at once
    replicate    NCCL's sums over replicas                   step, when the next unit's sums land
    world        NCCL's sums of small vectors                step, at once; the host at the end of
                                                             the next backward, to compare ranks
    copy         copies of shards from the host into slots   gather, before it sends them
    to host      copies of gradients to the host             step, when the next unit's sums land

The step's stream is the one that was current when the outermost forward began. Autograd calls a
hook on the stream of its node: the stream of its forward for a node of the graph, the stream on
which the model was sharded for a parameter. A hook that is called on another stream runs on the
step's stream, and each of the two streams waits for the other (`engine/streamed.py`).

docs/architecture.md lists the lifetime of each buffer, and which streams access it in which order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from fullshard.transport._torch_compat import stream_key


class Streams:
    """Streams and events of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index
        self._known: dict[Any, torch.cuda.Stream] = {}  # hooks ask often; torch makes one each time

    def current(self) -> Any:
        """The current stream of the caller."""
        if self._index is None:
            self._index = torch.cuda.current_device()
        key = stream_key(self._index)
        if key not in self._known:
            self._known[key] = torch.cuda.current_stream(self._index)
        return self._known[key]

    def make(self, name: str) -> Any:  # noqa: ARG002 for streams that are played
        """Creates a stream."""
        return torch.cuda.Stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Context that makes a stream current."""
        return torch.cuda.stream(stream)

    def begin_range(self, name: str) -> None:
        """Begins a range of NVTX, which Nsight Systems shows."""
        torch.cuda.nvtx.range_push(name)

    def end_range(self) -> None:
        """Ends the range that was begun last."""
        torch.cuda.nvtx.range_pop()

    def join(self, waiting: Any, stream: Any) -> None:
        """Makes `waiting` wait for all work queued on `stream` so far."""
        waiting.wait_stream(stream)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps a tensor's memory, once it is freed, until the stream's queued work is done."""
        tensor.record_stream(stream)

    def event(self, *, timed: bool = False) -> Any:
        """Records an event on the current stream; `timed` events have a time."""
        return self.current().record_event(torch.cuda.Event(enable_timing=timed))

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event."""
        self.current().wait_event(event)

    def finish(self, event: Any) -> None:
        """Makes the host wait for an event."""
        event.synchronize()

    def seconds(self, start: Any, end: Any) -> float | None:
        """Returns the seconds between two timed events; None if the second has not occurred yet."""
        return start.elapsed_time(end) / 1e3 if end.query() else None


def of(device: torch.device) -> Streams | None:
    """Returns the streams of a device; None for the CPU, which is synchronous."""
    return Streams(device) if device.type == "cuda" else None
