"""Residual networks for images: ResNet, its squeeze-and-excitation kin, and the wide ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from hvdcomp.training.models.base import MODELS

BlockFactory = Callable[[int, int, int], tuple[nn.Module, int]]
"""(channels in, width, stride) -> the block, and its channels out."""


def convolution(given: int, made: int, size: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps height and width, but for the stride."""
    return nn.Conv2d(given, made, size, stride, size // 2, bias=bias)


class Residual(nn.Module):
    """activation(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut, self.activation = body, shortcut, activation

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.body(x) + self.shortcut(x))
        return result


class PreActivated(nn.Module):
    """body(a) + shortcut, where a = ReLU(norm(x)); the shortcut is of a where it projects, else x itself.

    Source: He et al. 2016b, figure 4e. `projects_raw`: the projection is of x, as Zagoruyko and Komodakis 2016 have it.
    """

    def __init__(self, channels: int, body: nn.Module, projection: nn.Module | None, projects_raw: bool) -> None:
        super().__init__()
        self.norm, self.body, self.projection, self.projects_raw = (
            nn.BatchNorm2d(channels),
            body,
            projection,
            projects_raw,
        )

    def forward(self, x: Tensor) -> Tensor:
        activated = self.norm(x).relu()
        kept = x if self.projection is None else self.projection(x if self.projects_raw else activated)
        result: Tensor = self.body(activated) + kept
        return result


class SqueezeExcitation(nn.Module):
    """Weighs each channel by a gate that sees the means of all. Source: Hu et al. 2018, section 3, r = 16."""

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, channels // reduction, 1),
            nn.ReLU(),
            nn.Conv2d(channels // reduction, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * self.gate(x)
        return result


def _projected(given: int, made: int, stride: int, bias: bool = False) -> nn.Module:
    if stride == 1 and given == made:
        return nn.Identity()
    return nn.Sequential(convolution(given, made, 1, stride, bias), nn.BatchNorm2d(made))


def basic_block(given: int, width: int, stride: int) -> tuple[nn.Module, int]:
    """Two 3x3 convolutions."""
    body = nn.Sequential(
        convolution(given, width, 3, stride),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        convolution(width, width, 3),
        nn.BatchNorm2d(width),
    )
    return Residual(body, _projected(given, width, stride), nn.ReLU()), width


def bottleneck(given: int, width: int, stride: int) -> tuple[nn.Module, int]:
    """1x1, 3x3 and 1x1 convolutions; four times as wide outside."""
    body = nn.Sequential(
        convolution(given, width, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        convolution(width, width, 3, stride),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        convolution(width, 4 * width, 1),
        nn.BatchNorm2d(4 * width),
    )
    return Residual(body, _projected(given, 4 * width, stride), nn.ReLU()), 4 * width


def squeeze_block(given: int, width: int, stride: int) -> tuple[nn.Module, int]:
    """Two 3x3 convolutions before which there is norm and ReLU, and a gate after them."""
    body = nn.Sequential(
        convolution(given, width, 3, stride),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        convolution(width, width, 3),
        SqueezeExcitation(width),
    )
    projection = None if stride == 1 and given == width else convolution(given, width, 1, stride)
    return PreActivated(given, body, projection, projects_raw=False), width


def biased_squeeze_block(given: int, width: int, stride: int) -> tuple[nn.Module, int]:
    """Two 3x3 convolutions with biases, norm and ReLU after each, and a gate."""
    body = nn.Sequential(
        convolution(given, width, 3, stride, bias=True),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        convolution(width, width, 3, bias=True),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        SqueezeExcitation(width),
    )
    return Residual(body, _projected(given, width, stride, bias=True), nn.ReLU()), width


def wide_block(dropout: float) -> BlockFactory:
    """Two 3x3 convolutions with biases before which there is norm and ReLU, dropout between them."""

    def block(given: int, width: int, stride: int) -> tuple[nn.Module, int]:
        body = nn.Sequential(
            convolution(given, width, 3, bias=True),
            nn.Dropout(dropout),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            convolution(width, width, 3, stride, bias=True),
        )
        projects = stride != 1 or given != width
        projection = convolution(given, width, 1, stride, bias=True) if projects else None
        return PreActivated(given, body, projection, projects_raw=True), width

    return block


def small_stem(width: int = 64, bias: bool = False) -> list[nn.Module]:
    """For images of 32x32 pixels."""
    return [convolution(3, width, 3, bias=bias), nn.BatchNorm2d(width), nn.ReLU()]


def large_stem() -> list[nn.Module]:
    """For images of 224x224 pixels."""
    return [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]


def residual_network(
    stem: Sequence[nn.Module],
    block: BlockFactory,
    blocks: Sequence[int],
    widths: Sequence[int],
    classes: int,
    channels: int = 64,
    last: Callable[[int], Sequence[nn.Module]] = lambda channels: (),
) -> nn.Module:
    """Stages of blocks; the first block of each stage but the first halves height and width.

    Args:
        channels: that the stem makes.
        last: modules before the pooling, for the channels that arrive there.

    Shapes: (batch, 3, height, width) -> (batch, classes).
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(*stem))
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
        made = []
        for number in range(count):
            module, channels = block(channels, width, 2 if stage > 0 and number == 0 else 1)
            made.append(module)
        parts[f"stage{stage + 1}"] = nn.Sequential(*made)
    parts["head"] = nn.Sequential(*last(channels), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(parts)


WIDTHS = (64, 128, 256, 512)


@MODELS.register("resnet18-cifar100", dataset="cifar100", classes=100)
@MODELS.register("resnet18-cifar10", dataset="cifar10")
def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18 with a 3x3 stem, for images of 32x32 pixels. Source: He et al. 2016, table 1.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).
    """
    return residual_network(small_stem(), basic_block, (2, 2, 2, 2), WIDTHS, classes)


@MODELS.register("resnet50-cifar100", dataset="cifar100", classes=100)
@MODELS.register("resnet50-cifar10", dataset="cifar10")
def resnet50(classes: int = 10) -> nn.Module:
    """ResNet-50 with a 3x3 stem, for images of 32x32 pixels. Source: He et al. 2016, table 1.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).
    """
    return residual_network(small_stem(), bottleneck, (3, 4, 6, 3), WIDTHS, classes)


@MODELS.register("resnet101-cifar100", dataset="cifar100", classes=100)
@MODELS.register("resnet101-cifar10", dataset="cifar10")
def resnet101(classes: int = 10) -> nn.Module:
    """ResNet-101 with a 3x3 stem, for images of 32x32 pixels. Source: He et al. 2016, table 1.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).
    """
    return residual_network(small_stem(), bottleneck, (3, 4, 23, 3), WIDTHS, classes)


@MODELS.register("resnet50-imagenet", dataset="imagenet")
def resnet50_imagenet(classes: int = 1000) -> nn.Module:
    """ResNet-50, its stride in the 3x3 convolution. Source: He et al. 2016, table 1.

    Shapes: (batch, 3, height, width), of 224x224 pixels usually -> (batch, classes).
    """
    return residual_network(large_stem(), bottleneck, (3, 4, 6, 3), WIDTHS, classes)


@MODELS.register("resnet101-imagenet", dataset="imagenet")
def resnet101_imagenet(classes: int = 1000) -> nn.Module:
    """ResNet-101, its stride in the 3x3 convolution. Source: He et al. 2016, table 1.

    Shapes: (batch, 3, height, width), of 224x224 pixels usually -> (batch, classes).
    """
    return residual_network(large_stem(), bottleneck, (3, 4, 23, 3), WIDTHS, classes)


@MODELS.register("senet18-cifar10", dataset="cifar10")
def senet18(classes: int = 10) -> nn.Module:
    """SENet-18 of pre-activated blocks, as Accordion's table 8 counts it. Source: Hu et al. 2018.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).
    """
    return residual_network(small_stem(), squeeze_block, (2, 2, 2, 2), WIDTHS, classes)


@MODELS.register("senet18-cifar100", dataset="cifar100")
def senet18_biased(classes: int = 100) -> nn.Module:
    """SENet-18 of convolutions with biases; Accordion's table 9 has 122,244 parameters more. Source: Hu et al. 2018.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).
    """
    return residual_network(small_stem(bias=True), biased_squeeze_block, (2, 2, 2, 2), WIDTHS, classes)


@MODELS.register("wideresnet-cifar100", dataset="cifar100", classes=100)
@MODELS.register("wideresnet-cifar10", dataset="cifar10")
def wide_resnet(widening: int = 10, blocks: int = 4, dropout: float = 0.3, classes: int = 10) -> nn.Module:
    """Wide ResNet 28-10, its convolutions with biases. Source: Zagoruyko and Komodakis 2016, table 1.

    Args:
        widening: factor on the widths 16, 32, 64.
        blocks: in each of the three stages; the depth is 6 * blocks + 4.
        dropout: probability in [0, 1) between a block's convolutions.
        classes: number of outputs.

    Shapes: (batch, 3, 32, 32) -> (batch, classes).
    """
    widths = [16 * widening, 32 * widening, 64 * widening]

    def last(channels: int) -> list[nn.Module]:
        return [nn.BatchNorm2d(channels), nn.ReLU()]

    stem = [convolution(3, 16, 3, bias=True)]
    return residual_network(stem, wide_block(dropout), (blocks,) * 3, widths, classes, channels=16, last=last)
