"""The speed limit that MFU is measured against."""

import torch

from lightning_3d.planning.gpus import PEAK_FLOPS_PER_S


def peak_flops_per_s(device: torch.device) -> float | None:
    """Dense bfloat16 peak of ``device`` in operations per second; None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS_PER_S.items() if part in name), None)
