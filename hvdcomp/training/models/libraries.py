"""Networks of other libraries, by `timm:NAME` and `torchvision:NAME`, where these are installed; without weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from torch import nn

from hvdcomp.config import ConfigError, did_you_mean
from hvdcomp.training.models.base import MODELS


@MODELS.source("timm")
def timm_model(name: str) -> Callable[..., nn.Module]:
    """`timm.create_model(NAME, ...)`. Raises ConfigError where timm or the model is missing."""
    timm = _installed("timm")
    _check_known("timm", name, timm.list_models())

    def create(**arguments: object) -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
        return model

    return create


@MODELS.source("torchvision")
def torchvision_model(name: str) -> Callable[..., nn.Module]:
    """`torchvision.models.get_model(NAME, ...)`. Raises ConfigError where torchvision or the model is missing."""
    models = _installed("torchvision.models")
    _check_known("torchvision", name, models.list_models())

    def create(**arguments: object) -> nn.Module:
        model: nn.Module = models.get_model(name, weights=None, **arguments)
        return model

    return create


def _installed(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # RuntimeError, too: of a torchvision that was built for another PyTorch
        library = module.partition(".")[0]
        raise ConfigError(
            f"{library} cannot be imported ({error}): pip install {library}, as it suits this PyTorch"
        ) from error


def _check_known(library: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise ConfigError(f"{library} has no model {name!r}{did_you_mean(name, known)}")
