"""The papers' networks: their parameters as printed, their families' shapes, and those of other libraries."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hvdcomp.cli import app
from hvdcomp.config import ConfigError
from hvdcomp.training.models import MODELS, parameter_count

PRINTED = {  # Accordion, tables 8 to 10; torchvision's documentation for ImageNet
    "resnet18-cifar10": 11_173_962,
    "vgg19bn-cifar10": 20_565_834,
    "senet18-cifar10": 11_260_354,
    "wideresnet-cifar10": 36_489_290,
    "densenet-cifar10": 1_000_618,
    "googlenet-cifar10": 6_166_250,
    "resnet18-cifar100": 11_220_132,
    "vgg19bn-cifar100": 39_327_652,
    "wideresnet-cifar100": 36_546_980,
    "densenet-cifar100": 1_035_268,
    "googlenet-cifar100": 6_258_500,
    "lstm-wikitext2": 28_949_319,
    "resnet50-imagenet": 25_557_032,
    "resnet101-imagenet": 44_549_160,
    "vgg16-imagenet": 138_357_544,
}


@pytest.fixture(scope="module")
def listed() -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(app, ["list", "models", "--json"])
    assert done.exit_code == 0, done.output
    return {row["name"]: row for row in json.loads(done.stdout)}


@pytest.mark.parametrize(("name", "parameters"), PRINTED.items(), ids=PRINTED)
def test_parameters_are_as_printed(listed: dict[str, dict[str, Any]], name: str, parameters: int) -> None:
    assert listed[name]["parameters"] == parameters
    assert name.endswith(listed[name]["dataset"])


def test_the_senet_of_cifar100_has_fewer_than_printed(listed: dict[str, dict[str, Any]]) -> None:
    assert listed["senet18-cifar100"]["parameters"] == 11_436_256 - 122_244


def test_the_lstm_of_ptb_has_the_size_that_gravac_prints(listed: dict[str, dict[str, Any]]) -> None:
    assert round(4 * listed["lstm-ptb"]["parameters"] / 2**20, 2) == 251.90


def test_powersgd_sends_of_a_resnet18_what_accordion_prints() -> None:
    """Tables 1 and 2: millions of floats in 300 epochs of 98 steps (the paper cuts off after one decimal)."""
    printed = {("resnet18-cifar10", 1): 1350.4, ("resnet18-cifar10", 2): 2418.4, ("resnet18-cifar100", 2): 2426.3}
    for (name, rank), millions in printed.items():
        with torch.device("meta"):
            tensors = list(MODELS.find(name).factory().parameters())
        factors = sum(rank * (len(p) + p[0].numel()) for p in tensors if p.dim() > 1)
        dense = sum(p.numel() for p in tensors if p.dim() == 1)
        assert millions <= 300 * 98 * (factors + dense) / 1e6 < millions + 0.1


FAMILIES = [
    ("resnet18-cifar10", {}),
    ("resnet50-cifar10", {}),
    ("senet18-cifar10", {}),
    ("senet18-cifar100", {}),
    ("wideresnet-cifar10", {"widening": 1, "blocks": 1}),
    ("vgg16bn-cifar10", {}),
    ("densenet-cifar100", {"growth": 4, "blocks": [1, 2, 1]}),
    ("googlenet-cifar10", {}),
    ("resnet50-imagenet", {"classes": 7}),
    ("cnn", {"in_channels": 3, "image_size": 32}),
    ("mlp", {"inputs": 3072}),
]


@pytest.mark.parametrize(("name", "arguments"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_images_become_classes(name: str, arguments: dict[str, Any]) -> None:
    entry = MODELS.find(name)
    model = entry.factory(**arguments).eval()
    classes = (entry.parameters | arguments)["classes"]
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        scores = model(images)
        assert scores.shape == (2, classes)
        assert bool(scores.isfinite().all())
        torch.testing.assert_close(model(images[:1]), scores[:1], rtol=1e-3, atol=1e-4)


def test_every_network_is_made_from_its_defaults_of_its_own_data(listed: dict[str, dict[str, Any]]) -> None:
    assert set(listed) == {entry.name for entry in MODELS}
    for name, row in listed.items():
        assert row["parameters"] > 0
        assert row["summary"], name
        if row["dataset"] in ("cifar10", "cifar100", "imagenet"):
            expected = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}[row["dataset"]]
            assert row["arguments"]["classes"] == expected, name


def test_a_transformer_sees_what_was_before_and_nothing_after() -> None:
    model = MODELS.find("transformer-pydoc").factory(vocabulary=20, width=16, heads=2, context=8).eval()
    words = torch.randint(20, (1, 8))
    scores = model(words)
    later, earlier = words.clone(), words.clone()
    later[0, 5:] = (later[0, 5:] + 1) % 20
    torch.testing.assert_close(model(later)[:, :5], scores[:, :5])
    earlier[0, 0] = (earlier[0, 0] + 1) % 20
    assert not torch.allclose(model(earlier)[:, 5:], scores[:, 5:])
    with pytest.raises(ValueError, match="9 words are more than this model's context of 8: raise context"):
        model(torch.zeros(1, 9, dtype=torch.int64))


# -- other libraries


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.models", None)
    with pytest.raises(ConfigError, match=f"{library} cannot be imported .*: pip install {library}, as"):
        MODELS.find(f"{library}:resnet18")


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_networks_of_other_libraries(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    asked: list[dict[str, Any]] = []

    def create(name: str, **arguments: Any) -> nn.Module:
        asked.append({"name": name, **arguments})
        return nn.Linear(3, arguments["num_classes"])

    content = {"list_models": lambda: ["resnet18"], "create_model": create, "get_model": create}
    installed(monkeypatch, library, **content)
    installed(monkeypatch, f"{library}.models", **content)
    entry = MODELS.find(f"{library}:resnet18")
    resolved = entry.resolve({"num_classes": 7})
    assert parameter_count(entry.factory(**resolved)) == 28
    assert asked[0]["num_classes"] == 7
    assert {"timm": asked[0].get("pretrained"), "torchvision": asked[0].get("weights")}[library] in (False, None)
    with pytest.raises(ConfigError, match=rf"{library} has no model 'resnet81' \(did you mean 'resnet18'\?\)"):
        MODELS.find(f"{library}:resnet81")


def test_a_name_is_registered_once_and_may_have_other_defaults() -> None:
    from hvdcomp.training.registry import Registry

    registry: Registry[SimpleNamespace] = Registry("thing")

    @registry.register("large", size=9)
    @registry.register("small")
    def thing(size: int = 1) -> SimpleNamespace:
        """A thing."""
        return SimpleNamespace(size=size)

    assert [(entry.name, entry.factory().size, entry.parameters, entry.summary) for entry in registry] == [
        ("small", 1, {"size": 1}, "A thing."),
        ("large", 9, {"size": 9}, "A thing."),
    ]
    assert registry.find("large").factory(size=3).size == 3
    with pytest.raises(ValueError, match="thing 'small' is registered twice"):
        registry.register("small")(thing)
