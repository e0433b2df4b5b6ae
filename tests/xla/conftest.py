"""A standing process with eight CPU devices, for every test of XLA."""

import os

import pytest

from support.ranks import RankPool

NUM_DEVICES = 8
FLAGS = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={NUM_DEVICES}"
TIMEOUT_S = 110.0


@pytest.fixture(scope="session")
def devices(pytestconfig):
    """`devices(function, *args)` runs a module-level function where jax has eight devices."""
    filters = [*pytestconfig.getini("filterwarnings"), *(pytestconfig.option.pythonwarnings or [])]
    pool = RankPool(1, filters or ["error"])

    def run(function, *args):
        with pytest.MonkeyPatch.context() as patch:  # read when the process starts
            patch.setenv("XLA_FLAGS", FLAGS)
            patch.setenv("JAX_ENABLE_X64", "1")
            patch.setenv("JAX_PLATFORMS", "cpu")
            return pool(function, *args, timeout=TIMEOUT_S)[0]

    yield run
    pool.close()
