"""Descriptions of GPUs, so that XLA can compile for them on a machine without one.

    8xH100-80GB      one machine
    4x8xH100-80GB    four machines

XLA's GPU compiler reads a few properties of a device. It also accepts them as text (OpenXLA's
GpuTargetConfigProto). Properties of a compute capability are from NVIDIA's "CUDA C++ Programming
Guide", table "Technical Specifications per Compute Capability"; others are from the data sheets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from fullshard.errors import ConfigError
from fullshard.outlook.devices import parse_gpus
from fullshard.xla import processes

_KEY = "--topology"
_FORM = re.compile(r"(?:(?P<hosts>[1-9]\d*)x)?(?P<gpus>\d+x[A-Za-z]\S*)")


@dataclass(frozen=True)
class Capability:
    """Properties of all chips of a compute capability.

    Attributes:
        shared_bytes: Shared memory per multiprocessor, in bytes.
        block_shared_bytes: Maximum shared memory per thread block, in bytes.
        num_threads: Maximum number of resident threads per multiprocessor.
        num_fpus: Float32 units per multiprocessor.
    """

    shared_bytes: int
    block_shared_bytes: int
    num_threads: int
    num_fpus: int


@dataclass(frozen=True)
class Chip:
    """Properties of a chip other than its memory size.

    Attributes:
        capability: (major, minor) compute capability.
        num_cores: Number of multiprocessors.
        clock_ghz: Maximum clock rate, in GHz.
        bandwidth: Memory bandwidth, in bytes per second.
        l2_bytes: Size of the L2 cache, in bytes.
    """

    capability: tuple[int, int]
    num_cores: int
    clock_ghz: float
    bandwidth: int
    l2_bytes: int


_KIB, _MIB, _GB_S = 1 << 10, 1 << 20, 10**9
CAPABILITIES = {
    (8, 0): Capability(164 * _KIB, 163 * _KIB, 2048, 64),
    (8, 9): Capability(100 * _KIB, 99 * _KIB, 1536, 128),
    (9, 0): Capability(228 * _KIB, 227 * _KIB, 2048, 128),
    (10, 0): Capability(228 * _KIB, 227 * _KIB, 2048, 128),
}
CHIPS = {
    "A100": Chip((8, 0), 108, 1.41, 2039 * _GB_S, 40 * _MIB),
    "B200": Chip((10, 0), 148, 1.965, 8000 * _GB_S, 126 * _MIB),
    "H100": Chip((9, 0), 132, 1.98, 3352 * _GB_S, 50 * _MIB),
    "H200": Chip((9, 0), 132, 1.98, 4800 * _GB_S, 50 * _MIB),
    "L4": Chip((8, 9), 58, 2.04, 300 * _GB_S, 48 * _MIB),
    "L40S": Chip((8, 9), 142, 2.52, 864 * _GB_S, 96 * _MIB),
}


def gpu_devices(topology: str) -> list[Any]:
    """Returns the devices of a topology to compile for.

    Args:
        topology: A topology in the module docstring's notation.

    Raises:
        ConfigError: The GPU is unknown, or XLA's CUDA plugin is not installed.
    """
    match = _FORM.fullmatch(topology)
    if match is None:
        raise ConfigError(
            f"{_KEY}: expected a TPU slice by libtpu's name, such as v5p:2x2x2, or a machine's "
            f"GPUs, such as 8xH100-80GB (4x8xH100-80GB: four machines); got {topology!r}."
        )
    gpus = parse_gpus(match["gpus"], _KEY)
    if gpus.name not in CHIPS or gpus.memory_bytes is None:
        raise ConfigError(
            f"{_KEY}: expected one of {', '.join(CHIPS)}, which XLA can compile for while none is "
            f"there; got {gpus.name!r}."
        )
    if find_spec("jax_plugins") is None or find_spec("jax_plugins.xla_cuda12") is None:
        version = jax.__version__
        raise ConfigError(
            f"{_KEY}: expected XLA's plugin for CUDA to compile for {topology!r}; it is not "
            f"installed. Run pip install --no-deps jax-cuda12-plugin=={version} "
            f"jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12 nvidia-cuda-runtime-cu12 (no GPU is "
            f"needed), or leave {_KEY} out: the step is then compiled for CPUs."
        )
    processes.play(1)
    text = target_config(gpus.name, gpus.memory_bytes)
    described = topologies.get_topology_desc(
        gpus.name,
        platform="cuda",
        topology=f"1x{match['hosts'] or 1}x{gpus.count}",
        target_config=text,
    )
    return list(described.devices)


def target_config(name: str, memory_bytes: int) -> str:
    """Returns a chip as XLA's GpuTargetConfigProto in protobuf text format."""
    chip = CHIPS[name]
    capability = CAPABILITIES[chip.capability]
    major, minor = chip.capability
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": capability.num_threads,
        "shared_memory_per_block": 48 * _KIB,
        "shared_memory_per_block_optin": capability.block_shared_bytes,
        "shared_memory_per_core": capability.shared_bytes,
        "registers_per_core_limit": 64 * _KIB,
        "registers_per_block_limit": 64 * _KIB,
        "block_dim_limit_x": (1 << 31) - 1,
        "block_dim_limit_y": (1 << 16) - 1,
        "block_dim_limit_z": (1 << 16) - 1,
        "fpus_per_core": capability.num_fpus,
        "core_count": chip.num_cores,
        "clock_rate_ghz": chip.clock_ghz,
        "memory_bandwidth": chip.bandwidth,
        "l2_cache_size": chip.l2_bytes,
        "device_memory_size": memory_bytes,
    }
    fields = " ".join(f"{key}: {value}" for key, value in numbers.items())
    version = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    return (
        f'gpu_device_info {{ {fields} {version} }} platform_name: "CUDA" '
        f'dnn_version_info {{ major: 9 minor: 8 patch: 0 }} device_description_str: "{name}"'
    )


def compiler_options(devices: list[Any]) -> dict[str, str]:
    """Compiler options for these devices: the path of NVIDIA's assembler."""
    spec = None
    if devices[0].platform == "gpu" and find_spec("nvidia") is not None:
        spec = find_spec("nvidia.cuda_nvcc")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return {"xla_gpu_cuda_data_dir": folders[0]} if folders else {}
