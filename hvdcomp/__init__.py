"""hvdcomp: compressed gradients for Horovod and PyTorch."""

from hvdcomp import compressors, schedules
from hvdcomp.compressors import BF16, FP16, Compressor, NoCompression, PowerSGD, RandomK, TopK
from hvdcomp.errors import ReplicaError, WireError
from hvdcomp.exchange import StepRecord
from hvdcomp.optimizer import DistributedOptimizer

__all__ = [
    "BF16",
    "FP16",
    "Compressor",
    "DistributedOptimizer",
    "NoCompression",
    "PowerSGD",
    "RandomK",
    "ReplicaError",
    "StepRecord",
    "TopK",
    "WireError",
    "compressors",
    "schedules",
]
