"""Measures the largest tensor over a vocabulary that a computation creates."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of a tensor with a dim of vocabulary size."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.numel = 0
        self._vocabulary = vocabulary

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and self._vocabulary in tensor.shape:
                self.numel = max(self.numel, tensor.numel())
        return result
