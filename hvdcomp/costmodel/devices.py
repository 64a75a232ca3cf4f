"""What methods cost where nobody has probed: two devices, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdcomp.costmodel import cpu_rates, paper
from hvdcomp.costmodel.cluster import MEMORY_BANDWIDTH, TENSOR_S
from hvdcomp.costmodel.rates import Cost, Rates


@dataclass(frozen=True)
class Device:
    """A kind of worker.

    Attributes:
        rates: by :func:`hvdcomp.costmodel.rates.key_of`.
        tensor_s: a worker's work for one operation; 0 where it hides behind the device's.
        memory_bandwidth: of a copy, bytes/s.
        source: of these figures, in words.
    """

    rates: Mapping[str, Rates]
    tensor_s: float
    memory_bandwidth: float
    source: str


_V100_BANDWIDTH = 900e9
_RESNET50_MATRICES = 25_502_912
"""Elements of the tensors that the paper's methods compress."""
_SUM_NBYTES = 8
"""Of an element's float32 sum, read and written."""
_SECTOR_NBYTES = 32
"""What a scattered access moves at least."""
_PAIR_NBYTES = 6
"""A sparse payload's value, with its position in about 12 to 16 bits."""


def _measured(seconds: float, moved_per_byte: float) -> Rates:
    """Seconds for ResNet-50's gradient, and the memory traffic of each byte of payload that one more worker sends."""
    return Rates(
        Cost(element_s=seconds / _RESNET50_MATRICES), Cost(byte_s=moved_per_byte / _V100_BANDWIDTH)
    )  # fmt: skip


_CAST = Cost(element_s=6 / _V100_BANDWIDTH)

DEVICES = {
    "v100": Device(
        rates={
            "none": Rates(),
            "fp16": Rates(_CAST, _CAST),
            **{f"powersgd:rank={rank}": _measured(paper.CODEC_S["powersgd", rank], 0) for rank in (4, 8, 16)},
            "mstopk": _measured(paper.CODEC_S["mstopk", 1000], 2 * _SECTOR_NBYTES / _PAIR_NBYTES),
            "signsgd": _measured(paper.CODEC_S["signsgd", None], 8 * _SUM_NBYTES),
        },
        tensor_s=0.0,
        memory_bandwidth=_V100_BANDWIDTH,
        source="one V100: Agarwal et al. 2022, table 2; casts, and adding one more worker's payload, as fast as its "
        "memory (900 GB/s)",
    ),
    "cpu": Device(
        rates=cpu_rates.RATES,
        tensor_s=TENSOR_S,
        memory_bandwidth=MEMORY_BANDWIDTH,
        source="one CPU thread, measured by `hvdcomp probe` (docs/costmodel.md)",
    ),
}
"""By name."""
