"""The speed limit that MFU is measured against.

Dense bfloat16 matrix products with float32 accumulation, from the makers' data sheets, whatever precision the run uses: the
convention of Nanotron and TorchTitan, which keeps runs comparable. Lightning's own table gives the H200 and the H100 NVL
their figures with sparsity, twice what a dense product can reach, and does not know the name that an H200 gives itself.
"""

import torch

# Part of the name that the device gives itself -> operations per second; the first match counts, so the longer names come first.
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


def peak_flops_per_s(device: torch.device) -> float | None:
    """Dense bfloat16 peak of ``device`` in operations per second; None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS_PER_S.items() if part in name), None)
