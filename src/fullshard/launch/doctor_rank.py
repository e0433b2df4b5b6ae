"""What the doctor calls on every rank: check that sums are sums, measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

BUFFER_BYTES = 64 << 20
ROUNDS = 5


def measure(ranks: int) -> dict[str, Any]:
    """Check and time the collectives that an engine would choose here.

    Times are medians of some rounds; bytes are those that one rank receives or sends.

    Args:
        ranks: Number of ranks in the process group.

    Raises:
        EngineError: A collective gave a wrong number.
    """
    import torch
    import torch.distributed as dist

    from fullshard.config.schema import ShardConfig
    from fullshard.config.values import DType
    from fullshard.engine.homes import default_device
    from fullshard.errors import EngineError
    from fullshard.planner.mesh import Mesh
    from fullshard.planner.slots import Ring
    from fullshard.transport.select import make_transport, resolve_transport

    device = default_device()
    config, mesh = ShardConfig(), Mesh(1, ranks)
    kind = resolve_transport(config, mesh, device)
    transport = make_transport(ShardConfig.of(config, transport=kind), mesh)
    numel = BUFFER_BYTES // 4 // (64 * ranks) * 64 * ranks
    ring = Ring("doctor.grad", DType.FLOAT32, numel, count=1)
    given = transport.home.open_slots((), [ring])
    full = given[ring.name][0] if given else torch.empty(numel, device=device)
    full.fill_(float(dist.get_rank() + 1))
    part = torch.empty(numel // ranks, device=device)

    def meet() -> None:
        transport.all_reduce(torch.zeros(1, device=device))

    def seconds(action: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(ROUNDS):
            meet()
            start = time.perf_counter()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times)[ROUNDS // 2]

    reduce_s = seconds(lambda: transport.reduce([full]).sum_into([part]))
    if not bool((part == ranks * (ranks + 1) / 2).all()):
        raise EngineError(f"collectives: expected the sum over {ranks} ranks, got another number.")
    fetch_s = seconds(lambda: transport.fetch([full]).wait())
    if [float(piece[0]) for piece in full.chunk(ranks)] != [i + 1.0 for i in range(ranks)]:
        raise EngineError("collectives: expected every rank's part, got other numbers.")
    moved_gb = full.nbytes * max(ranks - 1, 1) / ranks / 1e9
    return {
        "backend": dist.get_backend(),
        "transport": transport.name,
        "fetch_gb_per_s": round(moved_gb / fetch_s, 3),
        "reduce_gb_per_s": round(moved_gb / reduce_s, 3),
        "latency_ms": round(seconds(meet) * 1e3, 3),
    }
