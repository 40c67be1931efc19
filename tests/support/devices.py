"""Where tests compute: on the first GPU, as the product does of itself, else on the CPU."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
GPUS = torch.cuda.device_count()
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment of processes that compute on the CPU, whatever the machine has."""

# `train.deterministic` needs it, and PyTorch looks for it once, at the first product of matrices of the process.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def rounding(bound: float) -> float:
    """How far float32 results may be apart that are so far apart at most on a CPU.

    A GPU has other kernels for other shapes, which sum in other orders, and none of them is the CPU's.
    """
    return bound if DEVICE.type == "cpu" else 10 * bound
