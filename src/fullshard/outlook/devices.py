"""What devices can do, as their makers and independent measurements say.

`matmul` is what a good bf16 matmul of a good shape reaches, measured where somebody measured it;
where nobody did, the share that is usual of that maker's devices. Links are in one direction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, as a rank has it.

    Attributes:
        name: As people write it.
        peak: bf16 operations a second, dense, on paper.
        matmul: What of it a good matmul reaches.
        bandwidth: Bandwidth of its memory, bytes a second.
        memory_gib: What a framework can use of it.
        link: To its neighbours in the host, bytes a second, one way.
        fabric: To other hosts, bytes a second and device, where nobody says which fabric.
        domain: Devices that the fast link joins.
        is_tpu: Compiled as a whole by XLA; its links form a torus.
    """

    name: str
    peak: float
    matmul: float
    bandwidth: float
    memory_gib: float
    link: float
    fabric: float
    domain: int = 8
    is_tpu: bool = False

    @property
    def is_hopper(self) -> bool:
        """Of the generation whose matmuls outgrew its clock and its first attention kernels."""
        return self.name[:2] in ("H1", "H2", "H8", "GH")


def _gpu(
    name: str,
    tflops: tuple[float, float],
    memory: tuple[float, float],
    wires: tuple[float, float],
    domain: int = 8,
) -> Device:
    peak, matmul = tflops
    bandwidth, gib = memory
    link, fabric = wires
    return Device(
        name, peak * TERA, matmul * TERA, bandwidth * TERA, gib, link * GIGA, fabric * GIGA, domain
    )


def _tpu(
    name: str, tflops: float, memory: tuple[float, float], link: float, pod: int = 256
) -> Device:
    bandwidth, gib = memory
    return Device(
        name,
        tflops * TERA,
        tflops * TERA,
        bandwidth * TERA,
        gib,
        link * GIGA,
        3 * GIGA,
        pod,
        is_tpu=True,
    )


# (on paper, measured) TFLOPS, (TB/s, usable GiB), (link, fabric) GB/s. Sources: ml-engineering's
# measured matmul maxima and vendors' sheets; docs.cloud.google.com/tpu for TPUs.
DEVICES = {
    "V100": _gpu("V100", (125, 105), (0.90, 31.7), (150, 12.5)),
    "A100-40": _gpu("A100-40", (312, 271.2), (1.555, 39.4), (300, 12.5)),
    "A100": _gpu("A100", (312, 271.2), (2.039, 79.1), (300, 12.5)),
    "A800": _gpu("A800", (312, 271.2), (2.039, 79.1), (200, 25)),
    "H100-PCIE": _gpu("H100-PCIE", (756, 600), (2.0, 79.1), (63, 25)),
    "H100-96": _gpu("H100-96", (989, 740), (2.4, 95.04), (450, 50)),
    "H100": _gpu("H100", (989, 794.5), (3.35, 79.1), (450, 50)),
    "H800": _gpu("H800", (989, 794.5), (3.35, 79.1), (200, 50)),
    "H200": _gpu("H200", (989, 794.5), (4.8, 139.8), (450, 50)),
    "GH200": _gpu("GH200", (989, 828.6), (4.0, 94.5), (450, 50)),
    "B200": _gpu("B200", (2250, 1745), (8.0, 178.4), (900, 50)),
    "GB200": _gpu("GB200", (2500, 1822), (8.0, 184.3), (900, 50), 72),
    "GB300": _gpu("GB300", (2500, 1822), (8.0, 275), (900, 100), 72),
    "B300": _gpu("B300", (2250, 1769), (8.0, 268), (900, 100)),
    "A10G": _gpu("A10G", (70, 60), (0.60, 22.1), (12, 3)),
    "A10": _gpu("A10", (125, 62), (0.60, 22.1), (12, 3)),
    "L4": _gpu("L4", (121, 60), (0.30, 22.1), (12, 3)),
    "L40S": _gpu("L40S", (362, 250), (0.864, 44.5), (25, 12.5)),
    "L40": _gpu("L40", (181, 150), (0.864, 44.5), (25, 12.5)),
    "A6000": _gpu("A6000", (154.8, 120), (0.768, 47.5), (25, 12.5)),
    "RTX 3090": _gpu("RTX 3090", (71, 66), (0.936, 23.6), (7, 3)),
    "RTX 4090": _gpu("RTX 4090", (165.2, 155), (1.008, 23.6), (10, 3)),
    "RTX 5090": _gpu("RTX 5090", (209.5, 190), (1.79, 31.3), (20, 3)),
    "TITAN RTX": _gpu("TITAN RTX", (130, 90), (0.672, 23.6), (10, 3)),
    "T4": _gpu("T4", (65, 40), (0.32, 14.7), (10, 3)),
    "MI210": _gpu("MI210", (181, 130), (1.6, 63.9), (150, 25)),
    "MI250": _gpu("MI250", (181, 130), (1.6, 63.9), (150, 25)),  # one of its two dies
    "MI300X": _gpu("MI300X", (1307, 668.4), (5.3, 191.5), (336, 50)),
    "MI325X": _gpu("MI325X", (1307, 784.9), (6.0, 255.5), (336, 50)),
    "MI355X": _gpu("MI355X", (2500, 1565), (8.0, 287.5), (400, 50)),
    "GAUDI2": _gpu("GAUDI2", (432, 400), (2.46, 94.6), (150, 37.5)),
    "GAUDI3": _gpu("GAUDI3", (1835, 1400), (3.7, 126), (300, 75)),
    "TPU v2": _tpu("TPU v2", 46, (0.70, 15.5), 120, 512),
    "TPU v3": _tpu("TPU v3", 123, (0.90, 31), 160, 1024),
    "TPU v4": _tpu("TPU v4", 275, (1.20, 31), 270, 4096),
    "TPU v5e": _tpu("TPU v5e", 197, (0.82, 15.5), 200),
    "TPU v5p": _tpu("TPU v5p", 459, (2.765, 94), 600, 8960),
    "TPU v6e": _tpu("TPU v6e", 918, (1.638, 31), 400),
    "TPU7x": _tpu("TPU7x", 2307, (7.4, 188), 600, 9216),  # a chip, of two devices
}  # fmt: skip


def find_device(text: str, memory_gb: float | None = None) -> Device:
    """The device that a text names, in its variant with that memory.

    Raises:
        KeyError: nobody knows it.
    """
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    names = sorted(DEVICES, key=lambda name: -len(name))
    for name in names:
        if re.sub(r"[^a-z0-9]", "", name.lower()) in plain:
            return _variant(DEVICES[name], plain, memory_gb)
    raise KeyError(text)


def _variant(device: Device, plain: str, memory_gb: float | None) -> Device:
    said = re.search(r"(\d+)gb", plain)
    size = memory_gb or (float(said[1]) if said else None)
    if device.name == "A100" and size is not None and size <= 48:
        return DEVICES["A100-40"]
    if device.name == "H100" and size is not None and 90 < size < 100:
        return DEVICES["H100-96"]
    if device.name == "H100" and "pcie" in plain:
        return DEVICES["H100-PCIE"]
    return device
