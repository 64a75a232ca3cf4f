"""Seconds of collectives in the alpha-beta model: so long a message, so long a byte.

Source of the allreduces: Agarwal et al. 2022, "On the Utility of Gradient Compression in Distributed Training Systems",
table 1. Every function takes the bytes that one worker hands over, and says 0 for a world of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hvdcomp.checks import check_choice, check_number


@dataclass(frozen=True)
class Network:
    """A link of every worker to all others, the same in both directions.

    Attributes:
        bandwidth: bits/s, > 0.
        latency: seconds of one message without content, >= 0.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not check_number("bandwidth", self.bandwidth, 0, hint="bits/s; 1 Gbit/s is 1e9") > 0:
            raise ValueError("bandwidth must be > 0, got 0 (bits/s; 1 Gbit/s is 1e9)")
        check_number("latency", self.latency, 0, hint="seconds of one message; 50 microseconds are 5e-5")

    def transfer_s(self, nbytes: float) -> float:
        """Seconds of so many bytes on the link, latency apart."""
        return 8 * nbytes / self.bandwidth


def ring(nbytes: float, workers: int, network: Network) -> float:
    """A ring allreduce: 2 (p - 1) messages of nbytes / p each."""
    return 2 * (workers - 1) * (network.latency + network.transfer_s(nbytes / workers))


def tree(nbytes: float, workers: int, network: Network) -> float:
    """An allreduce up and down a binary tree: 2 log2(p) messages of all bytes."""
    return 2 * math.log2(workers) * (network.latency + network.transfer_s(nbytes))


def parameter_server(nbytes: float, workers: int, network: Network) -> float:
    """One worker takes everybody's bytes through its link, and returns the sum."""
    return 0.0 if workers == 1 else 2 * network.latency + 2 * (workers - 1) * network.transfer_s(nbytes)


def allgather(nbytes: float, workers: int, network: Network) -> float:
    """Everybody's ``nbytes`` to everybody, round a ring: p - 1 messages."""
    return (workers - 1) * (network.latency + network.transfer_s(nbytes))


def alltoall(nbytes: float, workers: int, network: Network) -> float:
    """A p-th of ``nbytes`` to each other worker."""
    return (workers - 1) * (network.latency + network.transfer_s(nbytes / workers))


def broadcast(nbytes: float, workers: int, network: Network) -> float:
    """One worker's bytes down a binary tree, in pieces that follow each other, so that all cross a link once."""
    return 0.0 if workers == 1 else math.ceil(math.log2(workers)) * network.latency + network.transfer_s(nbytes)


_COLLECTIVES: dict[str, Callable[[float, int, Network], float]] = {
    "allreduce": ring,
    "allgather": allgather,
    "alltoall": alltoall,
    "broadcast": broadcast,
}


def collective_s(kind: str, nbytes: float, workers: int, network: Network) -> float:
    """Seconds of a collective as :class:`hvdcomp.compressors.requests.Volume` names it.

    Raises:
        ValueError: there is no such kind.
    """
    return _COLLECTIVES[check_choice("collective", kind, _COLLECTIVES)](nbytes, workers, network)
