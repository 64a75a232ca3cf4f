"""Data sets, and how ranks share them: every sample once an epoch, the same number of steps on every rank."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from hvdcomp.training.registry import Registry

IGNORED = -100
"""A target that counts in no loss and no metric, as in `torch.nn.functional.cross_entropy`."""

Metric = Literal["accuracy", "perplexity"]


@dataclass(frozen=True)
class Data:
    """A training and a test set of (input, target) pairs, map-style or a `Stream`; the loss averages over a batch.

    Attributes:
        metric: what the data set is known by; perplexity is the exponential of the loss.
        sha256: of the raw data, where it may differ between machines.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    metric: Metric = "accuracy"
    sha256: str | None = None


DATASETS: Registry[Data | tuple[Dataset[Any], Dataset[Any]]] = Registry("data set")


@DATASETS.register("digits")
def digits(test_fraction: float = 0.2, split_seed: int = 0) -> Data:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, 10 classes; needs no download.

    Args:
        test_fraction: share in (0, 1) of the samples held out, the same share of every class.
        split_seed: of the choice of those; apart from the run's seed, so that runs with several seeds are comparable.

    Shapes: (1, 8, 8) float32 in [0, 1], and an int64 class.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div_(16).view(-1, 1, 8, 8)
    targets = torch.from_numpy(classes).long()
    train, test = train_test_split(
        range(len(targets)), test_size=test_fraction, random_state=split_seed, stratify=classes
    )
    return Data(TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test]))


def as_data(made: Any, name: str) -> Data:
    """What a factory returned, as `Data`. Raises TypeError when it is neither that nor (train, test) with lengths."""
    data = Data(*made) if isinstance(made, tuple) and len(made) == 2 else made
    if isinstance(data, Data) and all(hasattr(part, "__len__") for part in (data.train, data.test)):
        return data
    raise TypeError(
        f"{name} must return (train, test), two map-style data sets with a length; it returned {made!r:.200}"
    )


def cut(samples: int, start: int, workers: int, batch_size: int) -> list[tuple[int, int]]:
    """Cut an epoch's order from `start` on into the (from, to) of each global batch.

    Each is `workers * batch_size` samples; a last one that would leave a worker without two samples (batch norm needs
    them) is added to the one before it. No sample is left out.

    Raises ValueError when there are fewer samples than workers.
    """
    if samples < workers:
        raise ValueError(f"{samples} training samples are too few for {workers} workers: use at most {samples} workers")
    bounds = list(range(start, samples, workers * batch_size))
    if len(bounds) > 1 and samples - bounds[-1] < workers * min(2, batch_size):
        bounds.pop()
    elif bounds and samples - bounds[-1] < workers:
        bounds.pop()  # a resumed epoch whose rest is fewer samples than workers
    return list(zip(bounds, [*bounds[1:], samples], strict=False))


def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """The order of the samples in one epoch, the same on every rank; it touches no global generator."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(samples, generator=generator)


@dataclass(frozen=True)
class Batch:
    """This worker's part of one step."""

    inputs: Any
    targets: Any
    samples: int
    weight: float
    """What the local mean loss counts, so that the mean over workers is the mean over all samples; 1.0 mostly."""
    total: int
    """Samples of all workers in this step."""
    end: int
    """Samples of this epoch that all workers together have seen after this step."""
    first: bool = False
    """Whether a stream begins here, so that nothing is carried over from the step before."""


class Stream(Dataset[Any]):
    """Data whose order means something, such as a text: it shares itself out, the same way in every epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """Samples of an epoch, in the unit in which `Batch.samples` counts."""

    @abstractmethod
    def spans(self, start: int, workers: int, batch_size: int) -> list[tuple[int, int]]:
        """(from, to) of each step in samples of all workers, as `cut`. Raises ValueError for too many workers."""

    @abstractmethod
    def batches(self, start: int, worker: int, workers: int, batch_size: int) -> Iterator[Batch]:
        """A worker's part of each of these steps."""

    @abstractmethod
    def test_batches(self, worker: int, workers: int, batch_size: int) -> Iterator[Any]:
        """A worker's share of an evaluation, (inputs, targets) at a time, in order."""


class RandomDataset(Dataset[Any]):
    """Samples that chance changes, such as crops: the same in each run of a seed, whoever draws them, and when.

    Training draws each sample anew in every epoch, from the run's seed, the epoch and the sample's number. By its
    number alone a sample comes as in the first epoch of seed 0.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def draw(self, index: int, chance: random.Random) -> tuple[Any, Any]:
        """The (input, target) of that number, changed by `chance`."""

    def __getitem__(self, key: int | tuple[int, int, int]) -> tuple[Any, Any]:
        """By its number, or by (number, seed, epoch)."""
        index, seed, epoch = (key, 0, 0) if isinstance(key, int) else key
        return self.draw(index, random.Random(f"{seed}/{epoch}/{index}"))


def epoch_spans(dataset: Dataset[Any], start: int, workers: int, batch_size: int) -> list[tuple[int, int]]:
    """(from, to) of each step of an epoch, in samples of all workers, from `start` on. Raises ValueError as `cut`."""
    if isinstance(dataset, Stream):
        return dataset.spans(start, workers, batch_size)
    return cut(len(dataset), start, workers, batch_size)  # type: ignore[arg-type]


def batches(
    dataset: Dataset[Any],
    *,
    seed: int,
    epoch: int,
    start: int,
    worker: int,
    workers: int,
    batch_size: int,
    readers: int = 0,
) -> Iterator[Batch]:
    """This worker's batches of an epoch, from `start` samples on (of all workers together).

    Args:
        readers: threads that make samples ahead of their use; 0: none, the caller makes them.
    """
    if isinstance(dataset, Stream):
        yield from dataset.batches(start, worker, workers, batch_size)
        return
    total = len(dataset)  # type: ignore[arg-type]
    order = epoch_order(total, seed, epoch)
    spans = cut(total, start, workers, batch_size)
    mine: list[list[Any]] = [order[lo + worker : hi : workers].tolist() for lo, hi in spans]
    if isinstance(dataset, RandomDataset):
        mine = [[(index, seed, epoch) for index in indices] for indices in mine]
    for (lo, hi), (inputs, targets), indices in zip(spans, _load(dataset, mine, readers), mine, strict=True):
        yield Batch(inputs, targets, len(indices), len(indices) * workers / (hi - lo), hi - lo, hi)


def test_batches(
    dataset: Dataset[Any],
    *,
    worker: int,
    workers: int,
    batch_size: int,
    readers: int = 0,  # noqa: PT028 - this is no test
) -> Iterator[Any]:
    """This worker's share of a test set, (inputs, targets) at a time; all shares together hold each sample once."""
    if isinstance(dataset, Stream):
        return dataset.test_batches(worker, workers, batch_size)
    mine = range(worker, len(dataset), workers)  # type: ignore[arg-type]
    return _load(dataset, [list(mine[i : i + batch_size]) for i in range(0, len(mine), batch_size)], readers)


def _load(dataset: Dataset[Any], key_lists: list[list[Any]], readers: int) -> Iterator[Any]:
    """Each list's samples as one batch; with readers, the next batch is made while this one is used."""
    if readers == 0:
        for keys in key_lists:
            yield default_collate([dataset[key] for key in keys])
        return
    with ThreadPoolExecutor(readers) as pool:
        ahead: list[Future[Any]] = []
        for keys in [*key_lists, []]:
            now, ahead = ahead, [pool.submit(dataset.__getitem__, key) for key in keys]
            if now:
                yield default_collate([sample.result() for sample in now])
