"""What one rank's kernels reach, by kind and size: the tables of `fullshard bench calibrate`.

Kernels run as a step's do: one after another, each reading what the one before it wrote, beside
operands that were not read for a while, and writing memory that is given back only at the end.
Their seconds are those of the thread's processor, which neighbours lengthen far less than the
clock's.
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
HELD_BYTES = 48 * MIB  # of a repetition's results
OPERAND_BYTES = 24 * MIB  # of operands that are read in turn
MOST_CALLS = 40
ROW, SHORT, HEADS, VOCABULARY = 256, 32, 8, 2048  # elements of rows, of short ones; heads; words

Step = Callable[[Any, int], Any]  # the result before, the number of the call -> the result


@dataclass(frozen=True)
class Sizes:
    """Which sizes are measured, how often.

    Attributes:
        num_rounds: Repetitions, whose median counts.
        bytes: Read and written by what is no product.
        dims: Rows, inner and columns of products.
        lengths, widths: Of attention's sequences and heads.
        updates: Parameters that are updated at once.
        transfers: Bytes of buffers that ranks exchange.
        most_flops: Limit per product; larger ones are measured on a part of their rows.
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


def seconds_of(
    step: Step, first: Any, num_calls: int, rounds: int, meet: Callable[[], Any]
) -> float:
    """Processor's, of a call: the median of the rounds, which all ranks begin together."""
    found = []
    for turn in range(-1, rounds):
        meet()
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


# ---- products, attention -------------------------------------------------------------------------


def products(dtype: torch.dtype, sizes: Sizes, meet: Callable[[], Any]) -> dict[str, list[Point]]:
    """Every combination of three dimensions, with either factor transposed."""
    found: dict[str, list[Point]] = {}
    for layout in ("nn", "nt", "tn"):
        points = found[f"matmul {layout}"] = []
        for rows in sizes.dims:
            for inner in sizes.dims:
                for columns in sizes.dims:
                    size = (rows, inner, columns)
                    points.append((size, _product(layout, size, dtype, sizes, meet)))
    return found


def _product(
    layout: str,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    sizes: Sizes,
    meet: Callable[[], Any],
) -> float:
    rows, inner, columns = size
    part = min(1.0, sizes.most_flops / (2 * prod(size)))
    rows = max(1, round(rows * part))

    def left() -> torch.Tensor:
        return torch.randn(inner, rows).t() if layout == "tn" else torch.randn(rows, inner)

    def right() -> torch.Tensor:
        return torch.randn(columns, inner).t() if layout == "nt" else torch.randn(inner, columns)

    lefts, rights = _operands(lambda: left().to(dtype)), _operands(lambda: right().to(dtype))
    outs = _operands(lambda: torch.empty(rows, columns, dtype=dtype))
    writes = layout == "tn"  # gradients of weights are written where they are collected

    def step(_: Any, at: int) -> Any:
        a, b = lefts[at % len(lefts)], rights[at % len(rights)]
        return torch.mm(a, b, out=outs[at % len(outs)]) if writes else a.mm(b)

    calls = max(2, min(MOST_CALLS, int(4e8 / (2 * prod((rows, inner, columns))))))
    held = _calls(rows * columns * dtype.itemsize)
    return seconds_of(step, None, min(calls, held), sizes.num_rounds, meet) / part


def attentions(dtype: torch.dtype, sizes: Sizes, meet: Callable[[], Any]) -> dict[str, list[Point]]:
    """The fused kernel for one head, forward and backward."""
    found: dict[str, list[Point]] = {}
    for is_causal in (False, True):
        name = "attention causal" if is_causal else "attention"
        forward, backward = found.setdefault(name, []), found.setdefault(f"{name} backward", [])
        for length in sizes.lengths:
            for width in sizes.widths:
                first, then = _attention(length, width, dtype, is_causal, sizes, meet)
                forward.append(((length * length, width), first / HEADS))
                backward.append(((length * length, width), then / HEADS))
    return found


def _attention(
    length: int,
    width: int,
    dtype: torch.dtype,
    is_causal: bool,  # noqa: FBT001
    sizes: Sizes,
    meet: Callable[[], Any],
) -> tuple[float, float]:
    """Laid out as a model has it: heads lie inside of tokens."""
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

    calls = max(2, min(10, int(2e8 / (4 * HEADS * length * length * width))))
    first = seconds_of(forward, None, calls, sizes.num_rounds, meet)
    return first, seconds_of(backward, None, calls, sizes.num_rounds, meet)


# ---- passes over memory --------------------------------------------------------------------------


def _steps(numel: int, dtype: torch.dtype) -> Iterator[tuple[str, int, torch.Tensor, Step]]:
    """(kind, bytes an element that are read and written, the first input, the step)."""
    size = dtype.itemsize
    rows = max(1, numel // ROW)
    x = torch.randn(rows, ROW).to(dtype)
    others = _operands(lambda: torch.randn(rows, ROW).to(dtype))
    aten: Any = torch.ops.aten
    weight, bias = torch.ones(ROW, dtype=dtype), torch.zeros(ROW, dtype=dtype)

    def of(at: int) -> torch.Tensor:
        return others[at % len(others)]

    # Half of what is read was just written, in a forward as in a backward.
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
    yield from _of_rows(numel, dtype)


def _of_rows(numel: int, dtype: torch.dtype) -> Iterator[tuple[str, int, torch.Tensor, Step]]:
    """The same for what works on rows of other lengths."""
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
    few = ids % HEADS  # few rows to fill: what counts here is what is added
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


def passes(dtype: torch.dtype, sizes: Sizes, meet: Callable[[], Any]) -> dict[str, list[Point]]:
    """Everything that is bound by memory, by bytes read and written."""
    found: dict[str, list[Point]] = {}
    for num_bytes in sizes.bytes:
        numel = num_bytes // (2 * dtype.itemsize)
        for kind, width, first, step in _steps(numel, dtype):
            calls = _calls(numel * dtype.itemsize)
            seconds = seconds_of(step, first, calls, sizes.num_rounds, meet)
            # The same sizes for all kinds, so that a missing one can be taken from another.
            found.setdefault(kind, []).append(((numel * width,), seconds))
    return found


def updates(sizes: Sizes, meet: Callable[[], Any]) -> list[Point]:
    """Fused AdamW over parameters of a width that is usual."""
    found: list[Point] = []
    for numel in sizes.updates:
        params = [torch.randn(numel // 4).requires_grad_() for _ in range(4)]
        optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
        for param in params:
            param.grad = torch.randn(numel // 4)
        calls = max(1, min(10, (1 << 20) // numel))

        def step(_: Any, __: int, update: Any = optimizer.step) -> None:
            update()

        found.append(((numel,), seconds_of(step, None, calls, sizes.num_rounds, meet)))
    return found
