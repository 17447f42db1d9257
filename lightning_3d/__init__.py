"""Pretrain language models in PyTorch Lightning over data, tensor and pipeline parallelism."""

__version__ = "0.1.0"
