"""What is known of GPUs: memory, peak of dense bfloat16 matrix products, links.

From the makers' data sheets. Links are bytes per second in one direction a GPU: inside a node NVLink (half of the total that is advertised)
or PCIe, between nodes the network card that the maker's own eight-GPU machine has for each GPU.
"""

from dataclasses import dataclass

from lightning_3d.errors import ConfigError

GIB = 2**30
USABLE = 0.92  # of memory: CUDA's context, NCCL's buffers and what the allocator cannot join take the rest


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_nbytes: int
    peak_flops_per_s: float
    inside_nbytes_per_s: float
    between_nbytes_per_s: float

    @property
    def usable_nbytes(self) -> int:
        """What tensors may take."""
        return int(USABLE * self.memory_nbytes)

    def link_nbytes_per_s(self, link: str) -> float:
        """Of the link ``inside`` a node or ``between`` nodes."""
        return self.inside_nbytes_per_s if link == "inside" else self.between_nbytes_per_s


# Operations per second by part of the name that a device gives itself: dense bfloat16 matrix products with float32 accumulation, whatever
# precision the run uses, the convention of Nanotron and TorchTitan, which keeps runs comparable. Lightning's own table gives the H200 and
# the H100 NVL their figures with sparsity, twice what a dense product can reach, and does not know the name that an H200 gives itself.
# The first match counts, so the longer names come first.
PEAK_FLOPS_PER_S = {
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "GH200": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,
}


def _gpu(name: str, device: str, memory_gib: float, inside_gb_per_s: float, between_gb_per_s: float) -> Gpu:
    return Gpu(name, int(memory_gib * GIB), PEAK_FLOPS_PER_S[device], inside_gb_per_s * 1e9, between_gb_per_s * 1e9)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb", "A100", 40, 300, 25),  # NVIDIA A100 data sheet, 2021: NVLink 600 GB/s; DGX A100: 200 Gb/s
        _gpu("a100-80gb", "A100", 80, 300, 25),
        _gpu("h100-80gb", "H100", 80, 450, 50),  # H100 data sheet, 2023: SXM, NVLink 900 GB/s; DGX H100: 400 Gb/s
        _gpu("h200-141gb", "H200", 131, 450, 50),  # H200 data sheet, 2024: 141e9 bytes
        _gpu("b200-180gb", "B200", 167, 900, 50),  # DGX B200 data sheet, 2024: 1,440e9 bytes in 8 GPUs, NVLink 14.4 TB/s
        _gpu("l40s-48gb", "L40S", 48, 32, 25),  # L40S data sheet, 2023: PCIe 4.0 x16
        _gpu("rtx4090-24gb", "RTX 4090", 24, 32, 12.5),  # Ada GPU architecture paper, 2022; no NVLink
        _gpu("mi300x-192gb", "MI300X", 192, 448, 50),  # AMD Instinct MI300X data sheet, 2023: 7 links of 128 GB/s both ways
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        ConfigError: it is not known.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu={name!r} is not known: choose from {', '.join(GPUS)}, or give memory_gib with one of them")
    return GPUS[name]
