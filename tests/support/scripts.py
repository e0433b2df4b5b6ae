"""Users' training scripts, run twice: sharded over the ranks, and unsharded in one process.

    def script(run):                        # the lines as people write them
        model = run.shard(run.model())      # the only added line; does nothing in one process
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            run.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return run.result(model, ...)       # its weights and what the script logged

    ranks(2)(compare, script)               # the results agree to 1e-12 in float64

On a rank, `run.loss` is the loss of the rank's own batch. In one process it is the mean of all
ranks' losses, whose gradient must equal the ranks' mean gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fullshard as fs
from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import FullshardError
from support.models import perturbed

TOLERANCE = 1e-12
NUM_TOKENS = 11
WIDTH = 10


class Block(nn.Module):
    """A residual block; its unit of 1,344 elements is cut inside a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 22)
        self.mid = nn.Linear(22, 22)
        self.down = nn.Linear(22, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.mid(torch.tanh(self.up(self.norm(x))))))


class Tiny(nn.Module):
    """Embedding, blocks and a head; a zero-dimensional scale, and an unused parameter.

    Args:
        tied: Whether the head's weight is the embedding's.
    """

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.scale * hidden)


class Run:
    """One side of a comparison.

    Args:
        world_size: Number of ranks, real or simulated.
        rank: This rank; None: one process simulates all.
    """

    def __init__(self, world_size: int, rank: int | None) -> None:
        self.world_size = world_size
        self.rank = rank

    @property
    def sharded(self) -> bool:
        return self.rank is not None

    @property
    def ranks(self) -> range:
        """Ranks whose batches this process uses."""
        return range(self.world_size) if self.rank is None else range(self.rank, self.rank + 1)

    def model(self, kind: Callable[..., nn.Module] = Tiny, **arguments: Any) -> nn.Module:
        """Builds a model in float64, equal everywhere."""
        torch.manual_seed(0)
        return perturbed(kind(**arguments).double())

    def shard(self, model: nn.Module, **config: Any) -> nn.Module:
        """Shards under poison; does nothing in one process."""
        if self.sharded:
            fs.shard(model, **{"poison": True, **config})
        return model

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Returns the next-token loss of this rank's batch, or the mean over all ranks."""
        return torch.stack([loss_of(model, step, rank) for rank in self.ranks]).mean()

    def result(self, model: nn.Module, **logged: Any) -> dict[str, Any]:
        """Returns the values to compare: the weights by name, and what the script logged."""
        state = fs.full_state_dict(model, rank0_only=False) if self.sharded else model.state_dict()
        return {"weights": {name: value.clone() for name, value in state.items()}, **logged}


Script = Callable[[Run], Any]


def sharded_run(**config: Any) -> tuple[Run, Any]:
    """Returns this rank's side of a comparison, and its sharded model."""
    run = Run(torch.distributed.get_world_size(), torch.distributed.get_rank())
    return run, run.shard(run.model(), **config)


@contextmanager
def whole_parameters(seen: Callable[[list[nn.Parameter]], Any]) -> Iterator[None]:
    """Context that calls `seen` with the full parameters of each owner's optimizer step."""

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not any(isinstance(param, ShardedParameter) for param in params):
            seen(params)

    hook = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()


def bytes_with_gradients(params: Iterable[nn.Parameter]) -> int:
    """Returns the bytes of parameters with a gradient, and of their gradients."""
    return sum(p.nbytes + p.grad.nbytes for p in params if p.grad is not None)


def tokens_of(step: int, rank: int) -> torch.Tensor:
    """Returns (3, 5) token ids."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, NUM_TOKENS, (3, 5), generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Returns the next-token loss of one rank's batch."""
    tokens = tokens_of(step, rank)
    scores = model(tokens[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 4) -> None:
    """Runs plain steps: backward, update, gradients to None."""
    for step in range(num_steps):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def both(script: Script) -> tuple[Any, Any]:
    """Returns the script's results on this rank's shards and in one process."""
    import torch.distributed as dist

    world_size = dist.get_world_size()
    found = script(Run(world_size, dist.get_rank()))
    torch.manual_seed(0)
    return found, script(Run(world_size, None))


def compare(script: Script, tolerance: float = TOLERANCE) -> None:
    """Runs the script on this rank's shards and in one process, and compares the results."""
    found, wanted = both(script)
    problems = list(differences(found, wanted, tolerance))
    assert not problems, "\n".join(problems)


def differences(found: Any, wanted: Any, tolerance: float, at: str = "result") -> Any:
    """Returns every place where two nested results differ."""
    if isinstance(wanted, Mapping):
        assert list(found) == list(wanted), f"{at}: {list(found)} != {list(wanted)}"
        for key, value in wanted.items():
            yield from differences(found[key], value, tolerance, f"{at}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), f"{at}: {len(found)} != {len(wanted)} entries"
        for index, value in enumerate(wanted):
            yield from differences(found[index], value, tolerance, f"{at}[{index}]")
    elif isinstance(wanted, float | torch.Tensor):
        one, other = _as_float64(found), _as_float64(wanted)
        if one.shape != other.shape:
            yield f"{at}: shape {tuple(one.shape)} != {tuple(other.shape)}"
        elif not torch.allclose(one, other, tolerance, tolerance, equal_nan=True):
            yield f"{at}: up to {(one - other).abs().max():.2g} apart"
    elif found != wanted:
        yield f"{at}: {found!r} != {wanted!r}"


def _as_float64(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).to(torch.float64)


@contextmanager
def counted(*names: str) -> Iterator[dict[str, MagicMock]]:
    """Counts calls of functions of torch, which still run."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(patch.object(torch, name, wraps=getattr(torch, name)))
            for name in names
        }


def error_of(function: Callable[[], Any]) -> str:
    """Returns class and text of a call's typed error, or its result."""
    try:
        result = function()
    except FullshardError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 the text shows what a user would meet
        return f"UNTYPED {type(error).__name__}: {error}"
    return f"NO ERROR: {type(result).__name__}"


def said_by(calls: Iterable[Callable[[], Any]]) -> list[str]:
    """Returns the text of each call's typed error, or a description of another outcome."""
    texts = [error_of(call) for call in calls]
    return [t if t.startswith(("UNTYPED", "NO ERROR")) else t.partition(": ")[2] for t in texts]
