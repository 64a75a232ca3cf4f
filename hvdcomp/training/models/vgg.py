"""VGG networks: 3x3 convolutions in five groups, then linear layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from hvdcomp.training.models.base import MODELS

WIDTHS = (64, 128, 256, 512, 512)
VGG16, VGG19 = (2, 2, 3, 3, 3), (2, 2, 4, 4, 4)
"""Convolutions of each width. Source: Simonyan and Zisserman 2015, table 1, columns D and E."""


def vgg(
    convolutions: Sequence[int], norm: bool, pool: int, hidden: Sequence[int], dropout: float, classes: int
) -> nn.Module:
    """Groups of convolutions, each followed by a 2x2 max-pooling; linear layers.

    Args:
        norm: batch normalisation after each convolution.
        pool: height and width that the last group's output is pooled to.
        hidden: widths of the linear layers but the last.

    Shapes: (batch, 3, height, width), each at least 32 -> (batch, classes).
    """
    features: list[nn.Module] = []
    channels = 3
    for count, width in zip(convolutions, WIDTHS, strict=True):
        for _ in range(count):
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            # PyTorch's own default loses the signal in 16 layers without norm.
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            features += [convolution, *([nn.BatchNorm2d(width)] if norm else []), nn.ReLU()]
            channels = width
        features.append(nn.MaxPool2d(2))
    classifier: list[nn.Module] = []
    widths = [channels * pool * pool, *hidden]
    for given, made in pairwise(widths):
        classifier += [nn.Linear(given, made), nn.ReLU(), nn.Dropout(dropout)]
    classifier.append(nn.Linear(widths[-1], classes))
    flat = [nn.AdaptiveAvgPool2d(pool), nn.Flatten()]
    parts = {"features": features, "pool": flat, "classifier": classifier}
    return nn.Sequential(OrderedDict((name, nn.Sequential(*modules)) for name, modules in parts.items()))


@MODELS.register("vgg16bn-cifar10", dataset="cifar10")
def vgg16bn(dropout: float = 0.5, classes: int = 10) -> nn.Module:
    """VGG-16 with batch norm and two linear layers of 512, for images of 32x32 pixels.

    Args:
        dropout: probability in [0, 1) after each hidden linear layer.
        classes: number of outputs.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).
    """
    return vgg(VGG16, True, 1, (512, 512), dropout, classes)


@MODELS.register("vgg19bn-cifar10", dataset="cifar10")
def vgg19bn(dropout: float = 0.5, classes: int = 10) -> nn.Module:
    """VGG-19 with batch norm and two linear layers of 512, as Accordion's table 8 counts it.

    Args:
        dropout: probability in [0, 1) after each hidden linear layer.
        classes: number of outputs.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).
    """
    return vgg(VGG19, True, 1, (512, 512), dropout, classes)


@MODELS.register("vgg16bn-cifar100", dataset="cifar100")
def vgg16bn_wide(dropout: float = 0.5, classes: int = 100) -> nn.Module:
    """VGG-16 with batch norm and two linear layers of 4096, for images of 32x32 pixels.

    Args:
        dropout: probability in [0, 1) after each hidden linear layer.
        classes: number of outputs.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).
    """
    return vgg(VGG16, True, 1, (4096, 4096), dropout, classes)


@MODELS.register("vgg19bn-cifar100", dataset="cifar100")
def vgg19bn_wide(dropout: float = 0.5, classes: int = 100) -> nn.Module:
    """VGG-19 with batch norm and two linear layers of 4096, as Accordion's table 9 counts it.

    Args:
        dropout: probability in [0, 1) after each hidden linear layer.
        classes: number of outputs.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).
    """
    return vgg(VGG19, True, 1, (4096, 4096), dropout, classes)


@MODELS.register("vgg16-imagenet", dataset="imagenet")
def vgg16(dropout: float = 0.5, classes: int = 1000) -> nn.Module:
    """VGG-16 without batch norm, two linear layers of 4096 on 7x7 positions.

    Args:
        dropout: probability in [0, 1) after each hidden linear layer.
        classes: number of outputs.

    Shapes: (batch, 3, height, width), of 224x224 pixels usually -> (batch, classes).
    """
    return vgg(VGG16, False, 7, (4096, 4096), dropout, classes)
