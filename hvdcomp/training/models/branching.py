"""Networks whose layers branch and join by concatenation: DenseNet and GoogLeNet, for images of 32x32 pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hvdcomp.training.models.base import MODELS


class Branches(nn.Module):
    """The outputs of all branches, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _activated(given: int, made: int, size: int) -> list[nn.Module]:
    """Norm, ReLU, convolution."""
    return [nn.BatchNorm2d(given), nn.ReLU(), nn.Conv2d(given, made, size, padding=size // 2, bias=False)]


@MODELS.register("densenet-cifar100", dataset="cifar100", classes=100)
@MODELS.register("densenet-cifar10", dataset="cifar10")
def densenet(growth: int = 12, blocks: Sequence[int] = (6, 12, 24, 16), classes: int = 10) -> nn.Module:
    """DenseNet-BC: bottlenecks of 4 * growth channels, and half the channels between blocks.

    Args:
        growth: channels that each layer adds.
        blocks: layers of each block.
        classes: number of outputs.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).

    Source: Huang et al. 2017, section 3.
    """
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for number, count in enumerate(blocks):
        if number > 0:
            layers += [*_activated(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(count):
            grown = nn.Sequential(*_activated(channels, 4 * growth, 1), *_activated(4 * growth, growth, 3))
            layers.append(Branches(grown, nn.Identity()))
            channels += growth
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *head)


INCEPTION = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
"""Channels of 1x1; of the reduction before 3x3, and of 3x3; before 5x5, and of 5x5; after the pooling. None: pooling.

Source: Szegedy et al. 2015, table 1.
"""


def _layer(given: int, made: int, size: int) -> list[nn.Module]:
    """Convolution with a bias, norm, ReLU."""
    return [nn.Conv2d(given, made, size, padding=size // 2), nn.BatchNorm2d(made), nn.ReLU()]


def inception(given: int, one: int, three_in: int, three: int, five_in: int, five: int, pooled: int) -> nn.Module:
    """Four branches; the 5x5 convolution is two of 3x3, which see as far.

    Source: Szegedy et al. 2015, figure 2b; Szegedy et al. 2016, figure 5.
    """
    return Branches(
        nn.Sequential(*_layer(given, one, 1)),
        nn.Sequential(*_layer(given, three_in, 1), *_layer(three_in, three, 3)),
        nn.Sequential(*_layer(given, five_in, 1), *_layer(five_in, five, 3), *_layer(five, five, 3)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), *_layer(given, pooled, 1)),
    )


@MODELS.register("googlenet-cifar100", dataset="cifar100", classes=100)
@MODELS.register("googlenet-cifar10", dataset="cifar10")
def googlenet(classes: int = 10) -> nn.Module:
    """GoogLeNet with a 3x3 stem and batch norm, without its side outputs.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).

    Source: Szegedy et al. 2015, table 1.
    """
    channels = 192
    layers = _layer(3, channels, 3)
    for widths in INCEPTION:
        if widths is None:
            layers.append(nn.MaxPool2d(3, 2, 1))
            continue
        layers.append(inception(channels, *widths))
        one, _, three, _, five, pooled = widths
        channels = one + three + five + pooled
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
