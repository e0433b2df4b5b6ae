"""The losses of DDP, FSDP2 and fullshard over a thousand steps, in one plot (`make long-parity`).

python benchmarks/long_parity.py [--steps 1000] [--out benchmarks/results]
"""

import argparse
import json
from pathlib import Path

from fullshard.bench import long_parity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    result = long_parity.run(options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "long_parity.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "long_parity.svg").write_text(long_parity.plot(result["losses"]))
    print(f"{result['model']}: {options.steps} steps")
    for name, losses in result["losses"].items():
        print(f"  {name:12} first loss {losses[0]:.4f}, last {losses[-1]:.4f}")
    for pair, difference in result["largest_difference"].items():
        print(f"  largest difference {pair}: {difference:.2e}")


if __name__ == "__main__":
    main()
