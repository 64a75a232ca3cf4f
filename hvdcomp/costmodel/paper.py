"""The model of the paper, as it stands there: the setting ``model="paper"``.

Source: Agarwal et al. 2022, "On the Utility of Gradient Compression in Distributed Training Systems", section 4.1 and
appendix B; its measured constants from table 2 (ResNet-50, batch 64, one V100).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from hvdcomp.compressors.requests import Volume
from hvdcomp.costmodel.collectives import Network, collective_s

BUCKET_NBYTES = 25 * 2**20
GAMMA = 1.04
"""By how much communication slows down a backward pass; the paper saw 1.04 to 1.1."""
BACKWARD_S = 0.122
"""ResNet-50, batch 64, one V100."""
CODEC_S = {
    ("powersgd", 4): 0.045,
    ("powersgd", 8): 0.064,
    ("powersgd", 16): 0.130,
    ("mstopk", 100): 0.103,
    ("mstopk", 1000): 0.104,
    ("signsgd", None): 0.01634,
}
"""Encoding and decoding of ResNet-50's gradient on one V100, by method and its rank or CF."""


def dense_step_s(
    nbytes: float,
    workers: int,
    network: Network,
    compute_s: float,
    bucket_nbytes: float = BUCKET_NBYTES,
    gamma: float = GAMMA,
) -> float:
    """Backward pass and dense exchange: all buckets but the last overlap with the backward pass.

    Args:
        nbytes: of the gradients.
        compute_s: of the backward pass alone.
        gamma: by how much it is slowed down by communication, >= 1.
    """
    if workers == 1:
        return compute_s
    buckets = max(1, math.ceil(nbytes / bucket_nbytes))
    last_nbytes = nbytes - (buckets - 1) * bucket_nbytes
    hidden_s = (buckets - 1) * collective_s("allreduce", bucket_nbytes, workers, network)
    return max(gamma * compute_s, hidden_s) + collective_s("allreduce", last_nbytes, workers, network)


def compressed_step_s(
    volumes: Iterable[Volume], workers: int, network: Network, compute_s: float, codec_s: float
) -> float:
    """Backward pass, encoding and decoding, then the exchange in one bucket: nothing overlaps.

    Args:
        volumes: of all tensors; those of one phase and kind travel together.
        codec_s: encoding and decoding.
    """
    if workers == 1:
        return compute_s
    return compute_s + codec_s + communication_s(volumes, workers, network)


def communication_s(volumes: Iterable[Volume], workers: int, network: Network) -> float:
    """The collectives of one bucket, phase by phase; as in the paper, an allgather has no latency."""
    sums: defaultdict[tuple[int, str], int] = defaultdict(int)
    for volume in volumes:
        sums[volume.phase, volume.kind] += volume.nbytes
    without_latency = replace(network, latency=0.0)
    return sum(
        collective_s(kind, nbytes, workers, without_latency if kind == "allgather" else network)
        for (_, kind), nbytes in sums.items()
    )
