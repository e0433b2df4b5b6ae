"""What the doctor starts on every rank: meet, check that sums are sums, measure."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

BUFFER_BYTES = 64 << 20
ROUNDS = 5


@dataclass(frozen=True)
class Measured:
    """What rank 0 measured: medians of some rounds; bytes that one rank receives or sends."""

    backend: str
    transport: str
    fetch_gb_per_s: float
    reduce_gb_per_s: float
    latency_ms: float


def main(folder: Path) -> None:
    """Measure on this rank; rank 0 leaves the figures."""
    import torch.distributed as dist

    from fullshard.launch import rendezvous

    rendezvous.init_process_group(60.0)
    measured = _measure(dist.get_world_size(), dist.get_rank())
    if dist.get_rank() == 0:
        (folder / "measured.json").write_text(json.dumps(asdict(measured)))
    rendezvous.shutdown()


def _measure(ranks: int, rank: int) -> Measured:
    """Check and time the collectives that an engine would choose here.

    Raises:
        EngineError: A collective gave a wrong number.
    """
    import torch
    import torch.distributed as dist

    from fullshard.config.schema import ShardConfig
    from fullshard.config.values import DType
    from fullshard.errors import EngineError
    from fullshard.planner.mesh import Mesh
    from fullshard.planner.slots import Ring
    from fullshard.transport.select import make_transport, resolve_transport

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    config, mesh = ShardConfig(), Mesh(1, ranks)
    kind = resolve_transport(config, mesh, device)
    transport = make_transport(ShardConfig.of(config, transport=kind), mesh)
    numel = BUFFER_BYTES // 4 // (64 * ranks) * 64 * ranks
    ring = Ring("doctor.grad", DType.FLOAT32, numel, count=1)
    given = transport.home.open_slots((), [ring])
    full = given[ring.name][0] if given else torch.empty(numel, device=device)
    full.fill_(float(rank + 1))
    part = torch.empty(numel // ranks, device=device)

    def meet() -> None:
        transport.all_reduce(torch.zeros(1, device=device))

    def seconds(action: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(ROUNDS):
            meet()
            start = time.perf_counter()
            action()
            if gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times)[ROUNDS // 2]

    reduce_s = seconds(lambda: transport.reduce([full]).sum_into([part]))
    if not bool((part == ranks * (ranks + 1) / 2).all()):
        raise EngineError(f"collectives: expected the sum over {ranks} ranks, got another number.")
    fetch_s = seconds(lambda: transport.fetch([full]).wait())
    if [float(piece[0]) for piece in full.chunk(ranks)] != [i + 1.0 for i in range(ranks)]:
        raise EngineError("collectives: expected every rank's part, got other numbers.")
    latency_ms = round(seconds(meet) * 1e3, 3)
    moved_gb = full.nbytes * max(ranks - 1, 1) / ranks / 1e9
    speeds = round(moved_gb / fetch_s, 3), round(moved_gb / reduce_s, 3)
    return Measured(dist.get_backend(), transport.name, *speeds, latency_ms)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
