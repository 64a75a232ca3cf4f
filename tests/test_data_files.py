"""Readers of the data that users have, on small files of the same form."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hvdcomp.config import ConfigError, parse
from hvdcomp.errors import DataError
from hvdcomp.training.data import RandomDataset, batches
from hvdcomp.training.data import test_batches as batches_of_tests
from hvdcomp.training.images import LargeImages, SmallImages, cifar10, cifar100, imagenet, middle_box, random_box
from hvdcomp.training.parts import build_data, resolve
from hvdcomp.training.text import ptb, wikitext2

MEAN, STD = torch.tensor([0.49, 0.48, 0.45]).view(3, 1, 1), torch.tensor([0.25, 0.24, 0.26]).view(3, 1, 1)


def pixels(samples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (samples, 3072), np.uint8)


def write_cifar10(root: Path, form: str, samples: int = 3) -> None:
    """Batches 1 to 5 and the test batch, of `samples` images each; class = number of the file."""
    folder = root / ("cifar-10-batches-py" if form == "python" else "cifar-10-batches-bin")
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], 1):
        images, classes = pixels(samples, number), [number] * samples
        if form == "python":
            values = {b"data": images, b"labels": classes, b"batch_label": b"x", b"filenames": [b"a.png"] * samples}
            (folder / name).write_bytes(pickle.dumps(values, protocol=2))
        else:
            records = np.concatenate([np.array(classes, np.uint8)[:, None], images], 1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_cifar100(root: Path, form: str, samples: int = 4) -> None:
    folder = root / ("cifar-100-python" if form == "python" else "cifar-100-binary")
    folder.mkdir(parents=True)
    for number, name in enumerate(["train", "test"], 1):
        images, fine, coarse = pixels(samples, number), [90 + number] * samples, [number] * samples
        if form == "python":
            values = {b"data": images, b"fine_labels": fine, b"coarse_labels": coarse}
            (folder / name).write_bytes(pickle.dumps(values, protocol=2))
        else:
            labels = np.array([coarse, fine], np.uint8).T
            (folder / f"{name}.bin").write_bytes(np.concatenate([labels, images], 1).tobytes())


def pack(root: Path) -> None:
    """Put the one folder into an archive of its name, as it is handed out."""
    (folder,) = root.iterdir()
    names = {"cifar-10-batches-py": "cifar-10-python", "cifar-10-batches-bin": "cifar-10-binary"}
    with tarfile.open(root / f"{names.get(folder.name, folder.name)}.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
@pytest.mark.parametrize("form", ["python", "binary"])
def test_cifar10(tmp_path: Path, form: str, packed: bool) -> None:
    write_cifar10(tmp_path, form)
    if packed:
        pack(tmp_path)
    data = cifar10(str(tmp_path), augment=False)
    assert [int(target) for _, target in data.train] == [c for c in range(1, 6) for _ in range(3)]
    assert [int(target) for _, target in data.test] == [6] * 3
    image, _ = data.train[4]
    expected = (torch.from_numpy(pixels(3, 2)[1]).view(3, 32, 32) / 255 - MEAN) / STD
    torch.testing.assert_close(image, expected)


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
@pytest.mark.parametrize("form", ["python", "binary"])
def test_cifar100_has_the_fine_classes(tmp_path: Path, form: str, packed: bool) -> None:
    write_cifar100(tmp_path, form)
    if packed:
        pack(tmp_path)
    data = cifar100(str(tmp_path), augment=False)
    assert [int(target) for _, target in data.train] == [91] * 4
    assert [int(target) for _, target in data.test] == [92] * 4
    torch.testing.assert_close(data.test[0][0], (torch.from_numpy(pixels(4, 2)[0]).view(3, 32, 32) / 255 - MEAN) / STD)


class Evil:
    def __reduce__(self) -> Any:
        return eval, ("1 + 1",)


def test_faulty_cifar_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no CIFAR-10 in .*one of cifar-10-batches-py/.*cifar-10-binary\.tar\.gz"):
        cifar10(str(tmp_path))
    write_cifar10(tmp_path, "python")
    folder = tmp_path / "cifar-10-batches-py"
    (folder / "data_batch_3").unlink()
    with pytest.raises(ValueError, match=r"data_batch_3 is missing: CIFAR-10 consists of data_batch_1, .*test_batch"):
        cifar10(str(tmp_path))
    for content in (pickle.dumps({b"data": Evil()}), pickle.dumps({b"labels": [1]}), b"half", b""):
        (folder / "data_batch_3").write_bytes(content)
        with pytest.raises(ValueError, match="data_batch_3 is no part of CIFAR-10: must be a pickled dictionary"):
            cifar10(str(tmp_path))
    (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": pixels(2, 0), b"labels": [1]}))
    with pytest.raises(ValueError, match=r"must hold uint8 data of \(samples, 3072\), it has uint8 \(2, 3072\)"):
        cifar10(str(tmp_path))
    write_cifar100(tmp_path, "binary")
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(b"x" * 3073)
    with pytest.raises(ValueError, match=r"test\.bin is no part of CIFAR-100: must hold records of 3074 bytes"):
        cifar100(str(tmp_path))


@pytest.mark.parametrize("damage", ["cut short", "overwritten"])
def test_a_damaged_archive_is_named(tmp_path: Path, damage: str) -> None:
    write_cifar10(tmp_path, "binary", samples=30)
    pack(tmp_path)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    content, middle = archive.read_bytes(), archive.stat().st_size // 2
    archive.write_bytes(content[:middle] + (bytes(1000) + content[middle + 1000 :] if damage == "overwritten" else b""))
    with pytest.raises(ValueError, match=r"is no part of CIFAR-10|is missing: CIFAR-10"):
        cifar10(str(tmp_path))


def test_the_command_lists_them() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdcomp", "list", "datasets", "--json"], capture_output=True, check=True
    )
    listed = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(listed) == {"digits", "pydoc", "cifar10", "cifar100", "imagenet", "ptb", "wikitext2"}
    assert listed["cifar10"]["parameters"] == {"root": "data", "augment": True}


def test_a_missing_data_set_is_one_error_before_the_run(tmp_path: Path) -> None:
    config = {"model": "resnet18-cifar10", "data": {"name": "cifar10", "root": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"^data: no CIFAR-10 in .*; data.root=FOLDER says where they are here$"):
        resolve(parse(config))


def test_a_crop_is_a_part_of_the_padded_image_and_every_place_occurs(tmp_path: Path) -> None:
    image = torch.arange(3 * 8 * 8, dtype=torch.uint8).view(1, 3, 8, 8)
    dataset = SmallImages(image, torch.tensor([7]), (0.0,) * 3, (1 / 255,) * 3, padding=2)
    padded = torch.nn.functional.pad(image[0].float(), [2] * 4)
    crops = {
        (top, left, mirrored): (crop.flip(2) if mirrored else crop)
        for top in range(5)
        for left in range(5)
        for crop in [padded[:, top : top + 8, left : left + 8]]
        for mirrored in (False, True)
    }
    seen = set()
    for epoch in range(1000):
        drawn, target = dataset[0, 3, epoch]
        (place,) = [place for place, crop in crops.items() if torch.allclose(crop, drawn)]
        seen.add(place)
        assert int(target) == 7
    assert len(seen) == 50


class Counted(RandomDataset):
    """A sample is its number, and what chance made of it."""

    def __len__(self) -> int:
        return 23

    def draw(self, index: int, chance: random.Random) -> tuple[Any, Any]:
        return torch.tensor([index, chance.random()]), index


class Unlucky(Counted):
    def draw(self, index: int, chance: random.Random) -> tuple[Any, Any]:
        raise ConfigError("no luck")


def drawn(workers: int, seed: int = 1, epoch: int = 2, start: int = 0, readers: int = 0) -> dict[int, float]:
    how = {"seed": seed, "epoch": epoch, "start": start, "batch_size": 3, "workers": workers, "readers": readers}
    shares = [batch for worker in range(workers) for batch in batches(Counted(), worker=worker, **how)]
    return {int(index): float(value) for batch in shares for index, value in batch.inputs}


def test_a_sample_is_drawn_alike_whoever_draws_it_and_anew_in_each_epoch() -> None:
    before = random.getstate(), torch.get_rng_state()
    alone = drawn(1)
    assert len(alone) == len(set(alone.values())) == 23
    assert drawn(3) == drawn(2) == drawn(2, readers=4) == alone
    assert drawn(1, start=9).items() < alone.items()
    assert all(set(alone.values()).isdisjoint(other.values()) for other in (drawn(1, seed=2), drawn(1, epoch=3)))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_readers_keep_the_order_and_hand_on_errors() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(40), torch.arange(40))
    for readers in (0, 3):
        shares = batches_of_tests(dataset, worker=1, workers=2, batch_size=6, readers=readers)
        assert torch.cat([targets for _, targets in shares]).tolist() == list(range(1, 40, 2))
    with pytest.raises(ConfigError, match="no luck"):
        list(batches_of_tests(Unlucky(), worker=0, workers=1, batch_size=6, readers=2))


# -- ImageNet


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for part, count in (("train", 3), ("val", 1)):
        for number, name in enumerate(["n02", "n01"]):
            (tmp_path / part / name).mkdir(parents=True)
            for image in range(count):
                colour = (40 * number, 80, 20 * image)
                Image.new("RGB", (50 + image, 40), colour).save(tmp_path / part / name / f"{image}.JPEG")
    (tmp_path / "train" / "n01" / "notes.txt").write_text("no image")
    return tmp_path


def test_imagenet_folders(folders: Path) -> None:
    data = imagenet(str(folders), image_size=24)
    assert [target for _, target in data.train] == [0, 0, 0, 1, 1, 1]
    assert [target for _, target in data.test] == [0, 1]
    image, _ = data.test[0]
    assert image.shape == (3, 24, 24)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (torch.tensor([40, 80, 0]) / 255 - mean) / std  # n01 is the second that was written, the first by name
    torch.testing.assert_close(image.mean((1, 2)), expected, rtol=0, atol=0.05)
    assert data.train[0][0].shape == (3, 24, 24)


def test_images_of_other_modes_become_rgb(folders: Path) -> None:
    Image.new("L", (30, 40), 128).save(folders / "val" / "n01" / "0.JPEG")
    Image.new("CMYK", (30, 40)).save(folders / "val" / "n02" / "0.JPEG")
    assert all(image.shape == (3, 8, 8) for image, _ in imagenet(str(folders), image_size=8).test)


def test_boxes() -> None:
    assert middle_box((100, 80), 0.5) == (30, 20, 70, 60)
    chance = random.Random(0)
    areas = []
    for _ in range(300):
        left, top, right, bottom = random_box((100, 80), chance)
        assert 0 <= left < right <= 100
        assert 0 <= top < bottom <= 80
        assert 0.74 < (right - left) / (bottom - top) < 1.34
        areas.append((right - left) * (bottom - top) / 8000)
    assert 0.079 < min(areas) < 0.15
    assert max(areas) > 0.8
    assert random_box((1000, 1), chance) == (499.5, 0, 500.5, 1)


def test_faulty_imagenet_folders_are_named(folders: Path) -> None:
    with pytest.raises(ValueError, match=r"/train/ is missing: .*should hold train/CLASS/\*\.JPEG and val/CLASS"):
        imagenet(str(folders / "nowhere"))
    (folders / "val" / "n09").mkdir()
    with pytest.raises(ValueError, match=r"val/n09/ is a class that train/ does not have"):
        imagenet(str(folders))
    (folders / "val" / "n09").rmdir()
    for path in (folders / "val").glob("*/*"):
        path.rename(folders / "val" / f"{path.parent.name}-{path.name}")
    with pytest.raises(ValueError, match=r"/val/ holds no images .*must be sorted into such folders"):
        imagenet(str(folders))


def test_a_file_that_is_no_image_says_which(folders: Path) -> None:
    path = folders / "train" / "n01" / "0.JPEG"
    path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"n01/0\.JPEG cannot be read as an image .*replace or remove it"):
        LargeImages([(path, 0)], 8, True)[0]
    good = (folders / "train" / "n01" / "1.JPEG").read_bytes()
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(DataError, match=r"n01/0\.JPEG cannot be read as an image"):
        LargeImages([(path, 0)], 8, True)[0]


# -- texts


@pytest.mark.parametrize(
    ("read", "pattern", "folder"),
    [
        (ptb, "ptb.{}.txt", "."),
        (ptb, "ptb.{}.txt", "simple-examples/data"),
        (wikitext2, "wiki.{}.tokens", "wikitext-2"),
    ],
)
def test_texts_from_files(tmp_path: Path, read: Any, pattern: str, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for part, text in (("train", " the cat <unk> \n the dog sat\n"), ("valid", "the"), ("test", "a cat sat\n")):
        (tmp_path / folder / pattern.format(part)).write_text(text)
    data = read(str(tmp_path), window=3)
    # <unk> is 0; <eos> and "the" occur twice, then cat, dog, sat
    assert data.train.words.tolist() == [2, 3, 0, 1, 2, 4, 5, 1]
    assert data.test.words.tolist() == [0, 3, 5, 1]
    assert data.train.window == 3
    assert data.metric == "perplexity"
    assert read(str(tmp_path), held_out="valid").test.words.tolist() == [2, 1]
    assert max(read(str(tmp_path), vocabulary=3).train.words.tolist()) == 2


def test_faulty_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ptb\.train\.txt is missing: the Penn Treebank consists of text files ptb"):
        ptb(str(tmp_path))
    (tmp_path / "wiki.train.tokens").write_text("a b\n")
    with pytest.raises(ValueError, match=r"wiki\.test\.tokens is missing: .*data.root=FOLDER says where"):
        wikitext2(str(tmp_path))
    (tmp_path / "wiki.test.tokens").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"wiki\.test\.tokens is no text in UTF-8"):
        wikitext2(str(tmp_path))
    with pytest.raises(ConfigError, match='held_out must be "test" or "valid", got \'train\''):
        build_data(parse({"data": {"name": "ptb", "held_out": "train"}}))
