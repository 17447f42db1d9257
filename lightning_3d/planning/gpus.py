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


def _gpu(name: str, memory_gib: float, peak_tflops_per_s: float, inside_gb_per_s: float, between_gb_per_s: float) -> Gpu:
    return Gpu(name, int(memory_gib * GIB), peak_tflops_per_s * 1e12, inside_gb_per_s * 1e9, between_gb_per_s * 1e9)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb", 40, 312, 300, 25),  # NVIDIA A100 data sheet, 2021: NVLink 600 GB/s; DGX A100: 200 Gb/s
        _gpu("a100-80gb", 80, 312, 300, 25),
        _gpu("h100-80gb", 80, 989.4, 450, 50),  # H100 data sheet, 2023: SXM, NVLink 900 GB/s; DGX H100: 400 Gb/s
        _gpu("h200-141gb", 131, 989.4, 450, 50),  # H200 data sheet, 2024: 141e9 bytes
        _gpu("b200-180gb", 167, 2250, 900, 50),  # DGX B200 data sheet, 2024: 1,440e9 bytes in 8 GPUs, NVLink 14.4 TB/s
        _gpu("l40s-48gb", 48, 362, 32, 25),  # L40S data sheet, 2023: PCIe 4.0 x16
        _gpu("rtx4090-24gb", 24, 165.2, 32, 12.5),  # Ada GPU architecture paper, 2022; no NVLink
        _gpu("mi300x-192gb", 192, 1307, 448, 50),  # AMD Instinct MI300X data sheet, 2023: 7 links of 128 GB/s both ways
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
