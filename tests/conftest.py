"""Fixtures of all tests: the standing pool of ranks, and the command line."""

import gc
import os
import sys
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

# Set before torch is imported: a test's processes share few cores, and no test may use a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# XLA reads it when jax starts; a JAX test spends most of its time in the compiler.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false"
)
# Test files import `support.x`; ranks get the same path, since spawned processes inherit sys.path.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # classes of test files are pickled as tests.x.y
# Test processes import hundreds of files; the cache compiles each only once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Other processes import this checkout's package, and the tests' jobs.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [f"{sys.path[-1]}/src", sys.path[0], os.environ.get("PYTHONPATH")])
)

from support.command import call
from support.ranks import RankPools

sys.dont_write_bytecode = False  # this process uses the cache, too
# Examples per property: 25, or 200 with `--hypothesis-profile long`, as `make test-long` and
# `make test-all` set it. Slowness is no failure, and two runs of one commit try equal examples.
for _name, _examples in {"short": 25, "long": 200}.items():
    hypothesis.settings.register_profile(
        _name,
        deadline=None,
        derandomize=True,
        max_examples=_examples,
        suppress_health_check=[
            hypothesis.HealthCheck.function_scoped_fixture,
            hypothesis.HealthCheck.too_slow,
        ],
    )
hypothesis.settings.load_profile("short")


def pytest_collection_modifyitems(items):
    """`@pytest.mark.short(n)`: all cases of a test but the first n are marked long.

    Short tests run last, so that no worker is idle before the end.
    """
    items.sort(key=lambda item: item.nodeid.startswith("tests/pure/"))
    seen = Counter()
    for item in items:
        mark = item.get_closest_marker("short")
        if mark is not None and not {"long", "slow"} & {one.name for one in item.iter_markers()}:
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if seen[name] > mark.args[0]:
                item.add_marker(pytest.mark.long)


def pytest_collection_finish():
    """Freezes imported objects, so that garbage collection skips them."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Keeps prepared tokens and calibrations of tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def fullshard(tmp_path_factory):
    """`fullshard("train", "x.yaml", code=0)` runs the command here and checks its exit code."""
    return lambda *words, **how: call(tmp_path_factory.mktemp("output"), *words, **how)


@pytest.fixture(scope="session")
def ranks(pytestconfig):
    """`ranks(n)(function, *args)` runs a module-level function on n ranks of a standing pool."""
    filters = [*pytestconfig.getini("filterwarnings"), *(pytestconfig.option.pythonwarnings or [])]
    pools = RankPools(filters or ["error"])
    yield pools
    pools.close()
