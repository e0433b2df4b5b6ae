"""Speed of one rank's kernels by kind and size: the operation tables of `bench calibrate`.

Kernels run as they do in a step: one after another, each reading the result of the one before it,
with operands that left the caches, and writing memory that is freed only at the end. Times are
processor time of the thread, which other processes lengthen far less than wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from fullshard.outlook.calibration import Point

KIB, MIB = 1 << 10, 1 << 20
HELD_BYTES = 48 * MIB  # results of one repetition
OPERAND_BYTES = 24 * MIB  # operands that are read in turn
MOST_CALLS = 40
ROW, SHORT, HEADS, VOCABULARY = 256, 32, 8, 2048  # elements of rows and short rows; heads; words

Step = Callable[[Any, int], Any]  # (the previous result, number of the call) -> the result
Tables = dict[str, list[Point]]


@dataclass(frozen=True)
class Sizes:
    """Which sizes are measured, and how often.

    Attributes:
        num_rounds: Repetitions, of which the median counts.
        bytes: Bytes that an elementwise operation reads and writes.
        dims: Rows, inner dimension and columns of matmuls.
        lengths, widths: Sequence lengths and head widths of attention.
        updates: Parameters that are updated at once.
        transfers: Bytes of buffers that ranks exchange.
        most_flops: Limit per matmul; larger ones are measured on a part of their rows.
    """

    num_rounds: int = 5
    bytes: tuple[int, ...] = (4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB)
    dims: tuple[int, ...] = (32, 128, 512, 2048)
    lengths: tuple[int, ...] = (64, 256, 1024)
    widths: tuple[int, ...] = (16, 64, 128)
    updates: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23)
    transfers: tuple[int, ...] = (64 * KIB, MIB, 8 * MIB, 32 * MIB)
    most_flops: float = 2e9


TINY = Sizes(
    num_rounds=1,
    bytes=(4 * KIB, 64 * KIB),
    dims=(32, 64),
    lengths=(32, 64),
    widths=(16,),
    updates=(1 << 10, 1 << 14),
    transfers=(64 * KIB, 256 * KIB),
)


@dataclass(frozen=True)
class KernelTimer:
    """Measures tables of kernels.

    Attributes:
        sizes: Which sizes.
        meet: Called before every repetition, so that all ranks begin together.
    """

    sizes: Sizes
    meet: Callable[[], Any]

    def tables(self, dtype: torch.dtype) -> Tables:
        """Every kind of operation in a dtype."""
        return {**self.products(dtype), **self.attentions(dtype), **self.passes(dtype)}

    def products(self, dtype: torch.dtype) -> Tables:
        """Every combination of three dimensions, with either factor transposed."""
        dims = self.sizes.dims
        sizes = [(rows, inner, columns) for rows in dims for inner in dims for columns in dims]
        return {
            f"matmul {layout}": [(size, self._product(layout, size, dtype)) for size in sizes]
            for layout in ("nn", "nt", "tn")
        }

    def _product(self, layout: str, size: tuple[int, int, int], dtype: torch.dtype) -> float:
        rows, inner, columns = size
        part = min(1.0, self.sizes.most_flops / (2 * prod(size)))
        rows = max(1, round(rows * part))

        def left() -> torch.Tensor:
            return torch.randn(inner, rows).t() if layout == "tn" else torch.randn(rows, inner)

        def right() -> torch.Tensor:
            flipped = layout == "nt"
            return torch.randn(columns, inner).t() if flipped else torch.randn(inner, columns)

        lefts, rights = _operands(lambda: left().to(dtype)), _operands(lambda: right().to(dtype))
        outs = _operands(lambda: torch.empty(rows, columns, dtype=dtype))
        writes = layout == "tn"  # gradients of weights are written into their slots

        def step(_: Any, at: int) -> Any:
            a, b = lefts[at % len(lefts)], rights[at % len(rights)]
            return torch.mm(a, b, out=outs[at % len(outs)]) if writes else a.mm(b)

        calls = max(2, min(MOST_CALLS, int(4e8 / (2 * prod((rows, inner, columns))))))
        held = _calls(rows * columns * dtype.itemsize)
        return self._seconds(step, None, min(calls, held)) / part

    def attentions(self, dtype: torch.dtype) -> Tables:
        """The fused kernel for one head, forward and backward."""
        found: Tables = {}
        for is_causal in (False, True):
            name = "attention causal" if is_causal else "attention"
            for length in self.sizes.lengths:
                for width in self.sizes.widths:
                    steps = _attention(length, width, dtype, is_causal=is_causal)
                    calls = max(2, min(10, int(2e8 / (4 * HEADS * length * length * width))))
                    for kind, step in zip((name, f"{name} backward"), steps, strict=True):
                        seconds = self._seconds(step, None, calls) / HEADS
                        found.setdefault(kind, []).append(((length * length, width), seconds))
        return found

    def passes(self, dtype: torch.dtype) -> Tables:
        """Everything that is bound by memory, by bytes read and written."""
        found: Tables = {}
        for num_bytes in self.sizes.bytes:
            numel = num_bytes // (2 * dtype.itemsize)
            for kind, width, first, step in _passes(numel, dtype):
                seconds = self._seconds(step, first, _calls(numel * dtype.itemsize))
                # All kinds have the same sizes, so that one can stand in for a missing one.
                found.setdefault(kind, []).append(((numel * width,), seconds))
        return found

    def updates(self) -> list[Point]:
        """Fused AdamW over four parameters."""
        found: list[Point] = []
        for numel in self.sizes.updates:
            params = [torch.randn(numel // 4).requires_grad_() for _ in range(4)]
            optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
            for param in params:
                param.grad = torch.randn(numel // 4)

            def step(_: Any, __: int, update: Any = optimizer.step) -> None:
                update()

            calls = max(1, min(10, (1 << 20) // numel))
            found.append(((numel,), self._seconds(step, None, calls)))
        return found

    def _seconds(self, step: Step, first: Any, num_calls: int) -> float:
        """Processor seconds per call: the median of the repetitions."""
        found = []
        for turn in range(-1, self.sizes.num_rounds):
            self.meet()
            start = time.thread_time()
            held = [first]
            for at in range(num_calls):
                held.append(step(held[-1], at))
            del held
            if turn >= 0:
                found.append((time.thread_time() - start) / num_calls)
        return median(found)


def _calls(num_bytes: int) -> int:
    return max(2, min(MOST_CALLS, HELD_BYTES // num_bytes))


def _operands(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    first = make()
    count = max(1, min(MOST_CALLS, OPERAND_BYTES // max(1, first.nbytes)))
    return [first, *(make() for _ in range(count - 1))]


def _attention(
    length: int, width: int, dtype: torch.dtype, *, is_causal: bool
) -> tuple[Step, Step]:
    """Forward and backward, laid out as in a model: a token's heads are neighbours in memory."""
    aten: Any = torch.ops.aten

    def heads() -> torch.Tensor:
        return torch.randn(1, length, HEADS, width).to(dtype).transpose(1, 2)

    queries, keys, values = (_operands(heads)[:4] for _ in range(3))
    options = (0.0, is_causal)

    def forward(_: Any, at: int) -> Any:
        at %= len(queries)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            queries[at], keys[at], values[at], *options
        )

    made = [forward(None, at) for at in range(len(queries))]
    gradient = heads()

    def backward(_: Any, at: int) -> Any:
        at %= len(queries)
        out, sums = made[at][:2]
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, queries[at], keys[at], values[at], out, sums, *options
        )

    return forward, backward


def _passes(numel: int, dtype: torch.dtype) -> Iterator[tuple[str, int, torch.Tensor, Step]]:
    """(kind, bytes read and written per element, the first input, the step)."""
    size = dtype.itemsize
    rows = max(1, numel // ROW)
    x = torch.randn(rows, ROW).to(dtype)
    others = _operands(lambda: torch.randn(rows, ROW).to(dtype))
    aten: Any = torch.ops.aten
    weight, bias = torch.ones(ROW, dtype=dtype), torch.zeros(ROW, dtype=dtype)

    def of(at: int) -> torch.Tensor:
        return others[at % len(others)]

    # Half of what is read was just written, as in a forward and a backward.
    yield "add", 3 * size, x, lambda y, at: (y if at % 2 else of(at + 1)) + of(at)
    yield "copy", 2 * size, x, lambda y, at: (y if at % 2 else of(at)).clone()
    yield "fill", size, x, lambda y, _: torch.zeros_like(y)
    yield "exp", 2 * size, x, lambda y, _: torch.tanh(y)
    yield "silu", 2 * size, x, lambda y, _: F.silu(y)
    yield "silu_backward", 3 * size, x, lambda y, at: aten.silu_backward(y, of(at))
    yield "gelu", 2 * size, x, lambda y, _: F.gelu(y)
    yield "gelu_backward", 3 * size, x, lambda y, at: aten.gelu_backward(y, of(at))
    yield "sum", size, x, lambda _, at: of(at).mean(-1, keepdim=True)
    yield "sum columns", size, x, lambda _, at: of(at).sum(0)
    yield "norm", size, x, lambda _, at: torch.linalg.vector_norm(of(at))

    def normed(y: torch.Tensor) -> Any:
        return aten.native_layer_norm(y, [ROW], weight, bias, 1e-5)

    _, mean, scale = normed(x)
    yield "native_layer_norm", 2 * size, x, lambda y, _: normed(y)[0]
    yield (
        *("native_layer_norm_backward", 3 * size, x),
        lambda y, at: aten.native_layer_norm_backward(
            y, of(at), [ROW], mean, scale, weight, bias, [True, True, True]
        )[0],
    )
    yield from _row_passes(numel, dtype)


def _row_passes(numel: int, dtype: torch.dtype) -> Iterator[tuple[str, int, torch.Tensor, Step]]:
    """The same for operations on rows of other lengths."""
    size, aten = dtype.itemsize, torch.ops.aten
    softmax: Any = aten._softmax
    softmax_back: Any = aten._softmax_backward_data
    log_softmax: Any = aten._log_softmax
    log_softmax_back: Any = aten._log_softmax_backward_data
    x = torch.randn(max(1, numel // ROW), ROW).to(dtype)
    p = softmax(x, -1, False)
    yield "softmax", 2 * size, x, lambda y, _: softmax(y, -1, False)
    yield "softmax_backward_data", 3 * size, x, lambda y, _: softmax_back(y, p, -1, dtype)
    x = torch.randn(max(1, numel // VOCABULARY), min(numel, VOCABULARY)).to(dtype)
    logs = log_softmax(x, -1, False)
    yield "log_softmax", 2 * size, x, lambda y, _: log_softmax(y, -1, False)
    yield (
        *("log_softmax_backward_data", 3 * size, x),
        lambda y, _: log_softmax_back(y, logs, -1, dtype),
    )
    count = max(1, numel // ROW)
    table = torch.randn(VOCABULARY, ROW).to(dtype)
    ids = torch.randint(VOCABULARY, (count,))
    few = ids % HEADS  # few rows to fill, since the additions are what is measured
    grad = torch.randn(count, ROW).to(dtype)
    back: Any = aten.embedding_dense_backward
    yield "embedding", size, x, lambda _, __: F.embedding(ids, table)
    yield "embedding_dense_backward", size, x, lambda _, __: back(grad, few, HEADS, -1, False)
    pairs = _operands(lambda: torch.randn(max(1, numel // SHORT), 2 * SHORT).to(dtype))

    def halves(at: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = pairs[at % len(pairs)]
        return both[:, :SHORT], both[:, SHORT:]

    yield "add rows", 2 * size, x, lambda _, at: -halves(at)[0]
    yield "copy rows", 4 * size, x, lambda _, at: torch.cat(halves(at)[::-1], -1)
