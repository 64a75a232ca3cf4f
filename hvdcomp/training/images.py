"""Images that users have: CIFAR archives and ImageNet folders, with the papers' preprocessing."""

from __future__ import annotations

import io
import pickle
import random
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdcomp.errors import DataError
from hvdcomp.training.data import DATASETS, Data, RandomDataset

# -- CIFAR


@dataclass(frozen=True)
class CifarFiles:
    """How one form of a CIFAR archive is laid out."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    read: Callable[[bytes], tuple[np.ndarray, np.ndarray]]
    """A file's content -> images (n, 3072) uint8, and classes (n,)."""


def cifar_binary(content: bytes, label_nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Records of labels, the last of which counts, and 3 x 32 x 32 bytes. Raises ValueError for half a record."""
    record = label_nbytes + 3072
    if len(content) == 0 or len(content) % record:
        raise ValueError(f"must hold records of {record} bytes ({label_nbytes} of labels, 3072 of pixels)")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, label_nbytes:], records[:, label_nbytes - 1].astype(np.int64)


def cifar_pickle(content: bytes, label: bytes) -> tuple[np.ndarray, np.ndarray]:
    """A pickled dictionary with `data` and `label`. Raises ValueError for anything else; runs no code from it."""
    try:
        values = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        images, classes = np.asarray(values[b"data"]), np.asarray(values[label], np.int64)
    except Exception as error:
        raise ValueError(f"must be a pickled dictionary of data and {label.decode()} ({error!r:.100})") from error
    if images.dtype != np.uint8 or images.shape != (len(classes), 3072):
        raise ValueError(f"must hold uint8 data of (samples, 3072), it has {images.dtype} {images.shape}")
    return images, classes


class _ArrayUnpickler(pickle.Unpickler):
    """Makes numpy arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numeric", "_frombuffer"): np.empty(0).__reduce_ex__(5)[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        found = allowed.get((module.rpartition(".")[2], name))
        if found is None or module.partition(".")[0] != "numpy":
            if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 pickles them for Python 2
                return lambda text, encoding: text.encode(encoding)
            raise pickle.UnpicklingError(f"{module}.{name} is no array")
        return found


CIFAR10 = (
    CifarFiles(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        lambda content: cifar_pickle(content, b"labels"),
    ),
    CifarFiles(
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        "test_batch.bin",
        lambda content: cifar_binary(content, 1),
    ),
)
CIFAR100 = (
    CifarFiles(
        "cifar-100-python",
        "cifar-100-python.tar.gz",
        ("train",),
        "test",
        lambda content: cifar_pickle(content, b"fine_labels"),
    ),
    CifarFiles(
        "cifar-100-binary",
        "cifar-100-binary.tar.gz",
        ("train.bin",),
        "test.bin",
        lambda content: cifar_binary(content, 2),
    ),
)


class SmallImages(RandomDataset):
    """Images in memory, normalised; in training moved by up to `padding` pixels and mirrored half of the time.

    Args:
        images: (samples, 3, height, width) uint8.
        targets: (samples,) int64.
        padding: zeros around the image that a crop of its size is drawn from; 0: no augmentation at all.
    """

    def __init__(self, images: Tensor, targets: Tensor, mean: Sequence[float], std: Sequence[float], padding: int):
        self.images, self.targets, self.padding = images, targets, padding
        self._mean, self._std = (255 * torch.tensor(values).view(3, 1, 1) for values in (mean, std))

    def __len__(self) -> int:
        return len(self.targets)

    def draw(self, index: int, chance: random.Random) -> tuple[Tensor, Tensor]:
        image = (self.images[index] - self._mean) / self._std
        if self.padding:
            height, width = image.shape[1:]
            top, left = (chance.randint(0, 2 * self.padding) for _ in range(2))
            padded = nn.functional.pad(image, [self.padding] * 4)
            image = padded[:, top : top + height, left : left + width]
            image = image.flip(2) if chance.random() < 0.5 else image
        return image, self.targets[index]


def _cifar(name: str, kinds: Sequence[CifarFiles], root: str, augment: bool) -> Data:
    folder = Path(root).expanduser()
    for files in kinds:
        if (folder / files.folder).is_dir() or (folder / files.archive).is_file():
            read = _reader(name, folder, files)
            train, test = [read(part) for part in files.train], [read(files.test)]
            return Data(_small_images(train, 4 if augment else 0), _small_images(test, 0))
    raise ValueError(
        f"no {name} in {folder.resolve()}: it should hold one of {', '.join(f'{k.folder}/' for k in kinds)} "
        f"{', '.join(k.archive for k in kinds)}, with {_listed(kinds[0])} or {_listed(kinds[1])}. "
        "They are at https://www.cs.toronto.edu/~kriz/cifar.html; data.root=FOLDER says where they are here"
    )


def _listed(files: CifarFiles) -> str:
    return ", ".join([*files.train, files.test])


def _small_images(parts: Sequence[tuple[np.ndarray, np.ndarray]], padding: int) -> SmallImages:
    images = torch.from_numpy(np.concatenate([images for images, _ in parts])).view(-1, 3, 32, 32)
    targets = torch.from_numpy(np.concatenate([classes for _, classes in parts]))
    return SmallImages(images, targets, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26), padding)


def _reader(name: str, root: Path, files: CifarFiles) -> Callable[[str], tuple[np.ndarray, np.ndarray]]:
    """Reads a file of the folder, else of the archive. Raises ValueError where it is missing or something else."""

    def content(part: str) -> bytes:
        if (root / files.folder).is_dir():
            return (root / files.folder / part).read_bytes()
        with tarfile.open(root / files.archive) as archive:
            member = archive.extractfile(f"{files.folder}/{part}")
            return member.read() if member else b""

    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        path = root / files.folder / part
        try:
            return files.read(content(part))
        except (FileNotFoundError, KeyError):
            raise ValueError(f"{path} is missing: {name} consists of {_listed(files)}") from None
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
            raise ValueError(f"{path} is no part of {name}: {error}") from error

    return read


@DATASETS.register("cifar10")
def cifar10(root: str = "data", augment: bool = True) -> Data:
    """CIFAR-10 from its binary or Python archive, packed or unpacked; nothing is downloaded.

    Normalised by mean .49, .48, .45 and deviation .25, .24, .26; in training a random crop of the image with four
    pixels of zeros around it, mirrored half of the time (Accordion, appendix A).

    Args:
        root: folder that holds cifar-10-batches-py/, cifar-10-batches-bin/, or one of the archives.
        augment: crop and mirror in training.

    Shapes: (3, 32, 32) float32, and an int64 class of 10.
    """
    return _cifar("CIFAR-10", CIFAR10, root, augment)


@DATASETS.register("cifar100")
def cifar100(root: str = "data", augment: bool = True) -> Data:
    """CIFAR-100, its 100 fine classes, from its binary or Python archive; nothing is downloaded.

    Preprocessed as CIFAR-10.

    Args:
        root: folder that holds cifar-100-python/, cifar-100-binary/, or one of the archives.
        augment: crop and mirror in training.

    Shapes: (3, 32, 32) float32, and an int64 class of 100.
    """
    return _cifar("CIFAR-100", CIFAR100, root, augment)


# -- ImageNet

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")


class LargeImages(RandomDataset):
    """Image files, read when they are asked for.

    In training a random part of 8 to 100 % of the area and a ratio of 3:4 to 4:3, mirrored half of the time; otherwise
    the middle of the image, whose shorter side is 8/7 of the size. Source: Szegedy et al. 2015; Goyal et al. 2017.

    Args:
        files: path and class of each.
        size: height and width that comes out, in pixels.
        augment: whether it is for training.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], size: int, augment: bool) -> None:
        self.files, self.size, self.augment = files, size, augment
        self._mean = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
        self._std = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.files)

    def draw(self, index: int, chance: random.Random) -> tuple[Tensor, int]:
        from PIL import Image

        path, target = self.files[index]
        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} cannot be read as an image ({error}): replace or remove it") from error
        box = random_box(image.size, chance) if self.augment else middle_box(image.size, 7 / 8)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if self.augment and chance.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (values - self._mean) / self._std, target


Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


def random_box(size: tuple[int, int], chance: random.Random) -> Box:
    """A part of the image to be resized to a square; the largest square in the middle where ten draws do not fit."""
    width, height = size
    for _ in range(10):
        area = chance.uniform(0.08, 1) * width * height
        ratio = (3 / 4) ** chance.uniform(-1, 1)
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            left, top = chance.uniform(0, width - w), chance.uniform(0, height - h)
            return left, top, left + w, top + h
    return middle_box(size, 1.0)


def middle_box(size: tuple[int, int], share: float) -> Box:
    """A square in the middle, `share` of the shorter side."""
    width, height = size
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


@DATASETS.register("imagenet")
def imagenet(root: str = "data/imagenet", image_size: int = 224) -> Data:
    """Images in folders, one a class, such as ImageNet's; nothing is downloaded.

    Args:
        root: folder that holds train/CLASS/*.JPEG and val/CLASS/*.JPEG; classes are numbered in the order of the names
            of train's folders.
        image_size: height and width in pixels.

    Shapes: (3, image_size, image_size) float32, and an int64 class.
    """
    folder = Path(root).expanduser()
    expected = (
        f"{folder.resolve()} should hold train/CLASS/*.JPEG and val/CLASS/*.JPEG, a folder for each class "
        "(n01440764, ...; the validation images of ImageNet come unsorted and must be sorted into such folders)"
    )
    for part in ("train", "val"):
        if not (folder / part).is_dir():
            raise ValueError(f"{folder / part}/ is missing: {expected}; data.root=FOLDER says where it is")
    classes = {path.name: i for i, path in enumerate(sorted(p for p in (folder / "train").iterdir() if p.is_dir()))}
    parts = {part: _files(folder / part, classes, expected) for part in ("train", "val")}
    return Data(LargeImages(parts["train"], image_size, True), LargeImages(parts["val"], image_size, False))


def _files(folder: Path, classes: dict[str, int], expected: str) -> list[tuple[Path, int]]:
    strange = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in classes)
    if strange:
        raise ValueError(f"{folder / strange[0]}/ is a class that train/ does not have: {expected}")
    found = [
        (path, number)
        for name, number in classes.items()
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise ValueError(f"{folder}/ holds no images ({', '.join(SUFFIXES)}): {expected}")
    return found
