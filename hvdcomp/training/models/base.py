"""The register of networks, and what can be said of any of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hvdcomp.training.registry import Registry

MODELS: Registry[nn.Module] = Registry("model")


class Recurrent(nn.Module):
    """A network that carries a state from one window of a text to the next.

    Attributes:
        carried: the state's tensors, detached; None at the beginning of a text.
    """

    carried: tuple[Tensor, ...] | None = None

    def get_extra_state(self) -> tuple[Tensor, ...] | None:
        """For `state_dict`: a checkpoint in the middle of a text holds it."""
        return self.carried

    def set_extra_state(self, state: tuple[Tensor, ...] | None) -> None:
        self.carried = state


def begin_text(model: nn.Module) -> None:
    """Forget what was carried; networks that carry nothing stay as they are."""
    for module in model.modules():
        if isinstance(module, Recurrent):
            module.carried = None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, without gradients, at the beginning of a text; afterwards training goes on where it was."""
    kept = [(module, module.carried) for module in model.modules() if isinstance(module, Recurrent)]
    begin_text(model)
    model.eval()
    with torch.no_grad():
        yield
    model.train()
    for module, carried in kept:
        module.carried = carried


def parameter_count(model: nn.Module) -> int:
    """Number of trainable values."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def digest(model: nn.Module) -> str:
    """SHA-256 (hex) over all parameters, in name order: equal on two ranks only if every bit is."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        sha.update(name.encode())
        sha.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
