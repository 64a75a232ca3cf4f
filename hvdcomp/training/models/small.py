"""Networks for digits, which train in seconds on a CPU."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from hvdcomp.training.models.base import MODELS


@MODELS.register("cnn", dataset="digits")
def cnn(
    channels: int = 32,
    hidden: int = 128,
    dropout: float = 0.0,
    in_channels: int = 1,
    image_size: int = 8,
    classes: int = 10,
) -> nn.Module:
    """Two 3x3 convolutions, a max-pooling and two linear layers, for small images.

    Args:
        channels: of the first convolution; the second has twice as many.
        hidden: width of the first linear layer.
        dropout: probability in [0, 1) of dropping a hidden activation.
        in_channels: of the image.
        image_size: height and width of the image in pixels, even.
        classes: number of outputs.

    Shapes: (batch, in_channels, image_size, image_size) -> (batch, classes).
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * (image_size // 2) ** 2, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )


@MODELS.register("mlp", dataset="digits")
def mlp(inputs: int = 64, hidden: int = 128, layers: int = 2, classes: int = 10) -> nn.Module:
    """Linear layers with ReLU between them, for inputs of any shape.

    Args:
        inputs: values per sample, flattened.
        hidden: width of each hidden layer.
        layers: number of hidden layers, >= 0.
        classes: number of outputs.

    Shapes: (batch, ...) -> (batch, classes).
    """
    widths = [inputs] + [hidden] * layers
    body = [module for a, b in pairwise(widths) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(widths[-1], classes))
