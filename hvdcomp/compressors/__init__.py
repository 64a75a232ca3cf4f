"""The compressors, by name."""

from __future__ import annotations

from typing import Any

from hvdcomp.checks import check_choice
from hvdcomp.compressors.artopk import ARTopK
from hvdcomp.compressors.atomo import ATOMO
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bf16 import BF16
from hvdcomp.compressors.dgc import DGC
from hvdcomp.compressors.fp16 import FP16
from hvdcomp.compressors.gaussiank import GaussianK
from hvdcomp.compressors.gradiveq import GradiVeQ
from hvdcomp.compressors.int8 import Int8
from hvdcomp.compressors.mstopk import MSTopK
from hvdcomp.compressors.natural import Natural
from hvdcomp.compressors.none import NoCompression
from hvdcomp.compressors.oktopk import OkTopK
from hvdcomp.compressors.onebit import EFSignSGD, OneBit
from hvdcomp.compressors.powersgd import PowerSGD
from hvdcomp.compressors.qsgd import QSGD
from hvdcomp.compressors.randomk import RandomK
from hvdcomp.compressors.redsync import RedSync
from hvdcomp.compressors.sidco import SIDCoE, SIDCoGP, SIDCoP
from hvdcomp.compressors.signsgd import SignSGD, Signum
from hvdcomp.compressors.terngrad import TernGrad
from hvdcomp.compressors.threshold import Threshold
from hvdcomp.compressors.topk import TopK

_METHODS: tuple[type[Compressor], ...] = (
    NoCompression,
    FP16,
    BF16,
    TopK,
    DGC,
    RedSync,
    MSTopK,
    GaussianK,
    Threshold,
    SIDCoE,
    SIDCoGP,
    SIDCoP,
    RandomK,
    ARTopK,
    OkTopK,
    PowerSGD,
    GradiVeQ,
    SignSGD,
    Signum,
    EFSignSGD,
    OneBit,
    QSGD,
    TernGrad,
    Natural,
    Int8,
    ATOMO,
)
_REGISTRY: dict[str, type[Compressor]] = {cls.name: cls for cls in _METHODS}


def available() -> dict[str, type[Compressor]]:
    """Every compressor's class by its name."""
    return dict(_REGISTRY)


def create(name: str, **parameters: Any) -> Compressor:
    """The compressor of that name; hyphens, underscores and case do not matter ("top-k" is "topk").

    Raises:
        ValueError: there is no such compressor or parameter, or a value is not allowed.
    """
    if ":" in name:
        raise ValueError(
            f"compression must be a name, got {name!r} (its parameters are arguments of their own, such as "
            "TopK(cf=100); a configuration's are compression: {name: topk, cf: 100})"
        )
    cls = _REGISTRY[check_choice("compression", name.lower().replace("-", "").replace("_", ""), _REGISTRY)]
    for parameter in parameters:
        check_choice(f"parameter of compression {cls.name!r}", parameter, cls.parameters())
    return cls(**parameters)


__all__ = [
    "ATOMO",
    "BF16",
    "DGC",
    "FP16",
    "QSGD",
    "ARTopK",
    "Compressor",
    "EFSignSGD",
    "GaussianK",
    "GradiVeQ",
    "Int8",
    "MSTopK",
    "Natural",
    "NoCompression",
    "OkTopK",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "RedSync",
    "SIDCoE",
    "SIDCoGP",
    "SIDCoP",
    "SignSGD",
    "Signum",
    "TernGrad",
    "Threshold",
    "TopK",
    "available",
    "create",
]
