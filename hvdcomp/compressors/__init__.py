"""The compressors, by name."""

from __future__ import annotations

from typing import Any

from hvdcomp.checks import check_choice
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bf16 import BF16
from hvdcomp.compressors.fp16 import FP16
from hvdcomp.compressors.none import NoCompression
from hvdcomp.compressors.powersgd import PowerSGD
from hvdcomp.compressors.randomk import RandomK
from hvdcomp.compressors.topk import TopK

_REGISTRY: dict[str, type[Compressor]] = {cls.name: cls for cls in (NoCompression, FP16, BF16, TopK, RandomK, PowerSGD)}


def available() -> dict[str, type[Compressor]]:
    """Every compressor's class by its name."""
    return dict(_REGISTRY)


def create(name: str, **parameters: Any) -> Compressor:
    """The compressor of that name; hyphens, underscores and case do not matter ("top-k" is "topk").

    Raises:
        ValueError: there is no such compressor or parameter, or a value is not allowed.
    """
    cls = _REGISTRY[check_choice("compression", name.lower().replace("-", "").replace("_", ""), _REGISTRY)]
    for parameter in parameters:
        check_choice(f"parameter of compression {cls.name!r}", parameter, cls.parameters())
    return cls(**parameters)


__all__ = [
    "BF16",
    "FP16",
    "Compressor",
    "NoCompression",
    "PowerSGD",
    "RandomK",
    "TopK",
    "available",
    "create",
]
