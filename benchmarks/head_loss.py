"""`python -m benchmarks.head_loss`: time and memory of several cross-entropy implementations.

One process creates hidden states, a head and labels, and measures forward and backward of the loss:
from full logits, and as computed in chunks by fullshard, torch, TRL and Liger. All run once per
round and must give the same loss and gradients. Liger needs Triton; without a GPU, set
TRITON_INTERPRET=1: its memory is then measured, but not its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from benchmarks.command import JsonFlag, command_line, run_script
from benchmarks.memory_rank import live_peak_bytes
from fullshard.bench.measurement import Neighbours, Page, paired_ratio
from fullshard.cli.bench import OutFlag, show
from fullshard.cli.outcome import Outcome
from fullshard.config.schema import TrainingConfig
from fullshard.recipes.base import cross_entropy
from fullshard.recipes.head import chunked

NAME = "benchmarks.head_loss"
MIB = 1 << 20
WHOLE = "whole logits"
# Vocabulary, width, tokens of a micro-batch.
SHAPES = ((32_000, 512, 1024), (32_000, 1024, 1024), (128_256, 256, 512))
COLUMNS = ("vocabulary", "width", "tokens", "loss by", "time, whole logits = 1", "peak, MiB")
METHOD = (
    "Forward and backward of the summed loss in float32 on one thread: engines in turn, the median "
    "of the rounds' ratios with its 95 % bootstrap interval. Each result is compared with that of "
    "whole logits to 1e-4.",
    "Peak is the highest sum of live bytes of torch's CPU allocator, from torch.profiler's memory "
    "events, of the loss and both gradients; hidden states and weight were there before. Liger's "
    "kernels are run by Triton's interpreter, whose time says nothing.",
)
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Computes the loss from the logits of all tokens."""
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Computes the loss as the recipes do."""
    size = TrainingConfig().loss_chunk_size

    def loss(logits: torch.Tensor, rows: slice) -> torch.Tensor:
        return cross_entropy(logits, labels[rows])

    return chunked(hidden, weight, None, loss, size)


def torchs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """torch.nn.functional.linear_cross_entropy with its own choice of chunks."""
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    linear_cross_entropy: Any = F.linear_cross_entropy
    options = LinearCrossEntropyOptions()
    return linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def trls(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """TRL's function of SFTTrainer's loss, with the chunks of its trainer."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    found: Any = ChunkedLogProbFunction.apply(
        hidden, weight, None, labels, 1.0, 8192, None, 1.0, ()
    )
    return -found[0].sum()


def ligers(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Liger's fused head and loss."""
    from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyFunction,
    )

    return LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum"
    )[0]


ENGINES: dict[str, Loss] = {WHOLE: whole, "fullshard": ours, "torch": torchs, "TRL": trls}
LIGER = "Liger"


def measure(shape: tuple[int, int, int], rounds: int) -> list[dict[str, Any]]:
    """Returns one row per engine for one shape."""
    vocabulary, width, tokens = shape
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocabulary, width) * width**-0.5)
    labels = torch.randint(vocabulary, (tokens,))

    def step(loss: Loss) -> list[torch.Tensor]:
        total = loss(hidden, weight, labels)
        return [total.detach(), *torch.autograd.grad(total / tokens, [hidden, weight])]

    wanted = step(whole)
    times: dict[str, list[float]] = {name: [] for name in ENGINES}
    for _ in range(rounds):
        for name, loss in ENGINES.items():
            start = time.perf_counter()
            found = step(loss)
            times[name].append(time.perf_counter() - start)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=name)
    rows = []
    measured = ENGINES | ({LIGER: ligers} if find_spec("liger_kernel") else {})
    for name, loss in measured.items():
        ratio = paired_ratio(times[name], times[WHOLE]) if name in times else None
        found: list[torch.Tensor] = []
        peak = live_peak_bytes(lambda loss=loss, found=found: found.extend(step(loss)))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=name)
        rows.append(
            {
                "name": name,
                "vocabulary": vocabulary,
                "width": width,
                "tokens": tokens,
                "time_ratio": ratio and ratio.value,
                "time_ratio_interval": ratio and [ratio.low, ratio.high],
                "memory_peak_bytes": peak,
            }
        )
    return rows


def main(
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 7,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Measure the loss of a head from full logits and in chunks by several libraries."""
    torch.set_num_threads(1)
    with Neighbours() as neighbours:
        rows = [row for shape in SHAPES for row in measure(shape, rounds)]
    absent = {} if find_spec("liger_kernel") else {LIGER: "It is not installed."}
    title = "The loss of a head, in chunks"
    cells = [_cells(row) for row in rows]
    told = (NAME.partition(".")[2], title, command_line(NAME), rows, COLUMNS, cells, METHOD)
    return show(Page(*told, neighbours, absent=absent), out)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["time_ratio_interval"] or (0.0, 0.0)
    return (
        f"{row['vocabulary']:,}",
        f"{row['width']:,}",
        f"{row['tokens']:,}",
        row["name"],
        f"{row['time_ratio']:.2f} ({low:.2f} to {high:.2f})" if high else "not measured",
        f"{row['memory_peak_bytes'] / MIB:,.0f}",
    )


if __name__ == "__main__":
    run_script(NAME)
