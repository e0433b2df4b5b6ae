"""Receive buffers that are kept, because fresh memory costs a page fault a page."""

from __future__ import annotations

import torch


class Scratch:
    """Buffers lent for the time of one collective; the pool grows to what is in flight at most."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self.num_bytes = 0  # of all buffers, lent ones too

    def take(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """(numel,) uninitialised, dtype and device of `like`; the smallest free one that fits."""
        fitting = [
            i
            for i, free in enumerate(self._free)
            if free.numel() >= numel and free.dtype is like.dtype
        ]
        if fitting:
            best = min(fitting, key=lambda i: self._free[i].numel())
            return self._free.pop(best)[:numel]
        buffer = like.new_empty(numel)
        self.num_bytes += buffer.nbytes
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back, whole."""
        whole = buffer if buffer._base is None else buffer._base
        self._free.append(whole)
