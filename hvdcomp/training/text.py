"""Texts for language models: words as numbers, shared out as one contiguous stream for each row of a batch."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from hvdcomp.checks import check_count
from hvdcomp.training.data import DATASETS, IGNORED, Batch, Data, Stream

UNKNOWN, END = "<unk>", "<eos>"
"""A word that the vocabulary lacks; the end of a line or of a paragraph."""

TEST_STREAMS = 10
"""Streams that a text is evaluated in, of all workers together: each begins without knowing what was before it."""


class Text(Stream):
    """A text of n + 1 words: n predictions, of each word from those before it.

    An epoch cuts them into `workers * batch_size` streams of equal length (or one prediction less), one after the
    other in the text, and each step takes the next `window` predictions of every stream (truncated backpropagation
    through time). A last window of a single prediction is added to the one before it. So every prediction is made
    once an epoch, by one worker.

    Another number of workers cuts other streams: an epoch that is resumed by it goes on at the same share of each.

    Args:
        words: their numbers, flat int64.
        window: predictions of a stream in a step, >= 1 (bptt).
    """

    def __init__(self, words: Tensor, window: int) -> None:
        self.words, self.window = words, check_count("window", window, hint="words of each stream in a step")

    def __len__(self) -> int:
        return max(0, len(self.words) - 1)

    def spans(self, start: int, workers: int, batch_size: int) -> list[tuple[int, int]]:
        """(from, to) of each step, in predictions of all workers since the epoch's beginning; see `Stream`."""
        edges = self._edges(workers * batch_size)
        lengths = [end - begin for begin, end in pairwise(edges)]
        seen = [sum(min(length, stop) for length in lengths) for stop in self._stops(edges)]
        return [(lo, hi) for lo, hi in pairwise(seen) if lo >= start]

    def batches(self, start: int, worker: int, workers: int, batch_size: int) -> Iterator[Batch]:
        edges = self._edges(workers * batch_size)
        mine = list(pairwise(edges))[worker * batch_size : (worker + 1) * batch_size]
        spans = self.spans(0, workers, batch_size)
        for (begin, stop), (lo, hi) in zip(pairwise(self._stops(edges)), spans, strict=True):
            if lo < start:
                continue
            inputs, targets = self._windows(mine, begin, stop)
            count = int((targets != IGNORED).sum())
            yield Batch(inputs, targets, count, count * workers / (hi - lo), hi - lo, hi, first=begin == 0)

    def test_batches(self, worker: int, workers: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Always of `TEST_STREAMS` streams, so that what is found depends on neither batch size nor workers.

        That many workers at most: one without a stream has nothing to do.
        """
        edges = self._edges(TEST_STREAMS)
        mine = list(pairwise(edges))[worker::workers]
        for begin, stop in pairwise(self._stops(edges)) if mine else ():
            yield self._windows(mine, begin, stop)

    def _edges(self, streams: int) -> list[int]:
        """Where each stream begins, and the last one ends."""
        if len(self) < streams:
            raise ValueError(
                f"a text of {len(self)} predictions is too short for {streams} streams (workers * batch_size of the "
                f"training text, {TEST_STREAMS} of the test text): use fewer workers, a smaller batch_size or more text"
            )
        return [i * len(self) // streams for i in range(streams + 1)]

    def _stops(self, edges: Sequence[int]) -> list[int]:
        """Where the windows of the longest stream begin, and the last one ends, from the stream's own beginning."""
        length = max(end - begin for begin, end in pairwise(edges))
        stops = [*range(0, length, self.window), length]
        if len(stops) > 2 and stops[-1] - stops[-2] == 1:
            del stops[-2]
        return stops

    def _windows(self, streams: Sequence[tuple[int, int]], begin: int, stop: int) -> tuple[Tensor, Tensor]:
        """Words and their successors; a stream that ends a word earlier is filled up with a target to be ignored."""
        at = torch.tensor([first for first, _ in streams])[:, None] + torch.arange(begin, stop)
        inside = at < torch.tensor([end for _, end in streams])[:, None]
        at = at.where(inside, 0)
        return self.words[at], self.words[at + 1].where(inside, IGNORED)


def word_loss(scores: Tensor, words: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of the next word. Shapes: (batch, words, vocabulary), (batch, words) -> ()."""
    return nn.functional.cross_entropy(
        scores.flatten(0, -2), words.flatten(), ignore_index=IGNORED, label_smoothing=label_smoothing
    )


def language_data(train: Sequence[str], test: Sequence[str], vocabulary: int | None, window: int, sha256: str) -> Data:
    """Number the words by their frequency in the training text; what is not among the `vocabulary` first is unknown."""
    counts = Counter(train)
    counts.pop(UNKNOWN, None)
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    known = {word: number for number, word in enumerate([UNKNOWN, *by_frequency][:vocabulary])}

    def numbered(words: Iterable[str]) -> Text:
        return Text(torch.tensor([known.get(word, 0) for word in words]), window)

    return Data(numbered(train), numbered(test), word_loss, metric="perplexity", sha256=sha256)


@DATASETS.register("pydoc")
def pydoc(vocabulary: int = 2000, window: int = 20, test_fraction: float = 0.1, split_seed: int = 0) -> Data:
    """Python's own reference, about 115,000 words that every CPython carries (pydoc_data.topics); needs no download.

    Its text differs between Python versions, and so do results: compare runs of one `data_sha256` only, which the
    summary of a run holds. Words are lower-case, marks are words of their own, a blank line ends a paragraph.

    Args:
        vocabulary: number of words, the most frequent of the training text; all others are one.
        window: words of each stream in a step (bptt).
        test_fraction: share in (0, 1) of the topics held out, at least one of them.
        split_seed: of the choice of those; apart from the run's seed, so that runs with several seeds are comparable.

    Shapes: (batch, words) int64 each, the targets a word further on; samples are counted in words.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out = round(test_fraction * len(names))
    if not 0 < held_out < len(names):
        raise ValueError(f"test_fraction must leave some of {len(names)} topics on both sides, got {test_fraction}")
    random.Random(split_seed).shuffle(names)
    whole = "".join(f"{name}\n{topics[name]}" for name in sorted(topics))
    return language_data(
        [word for name in sorted(names[held_out:]) for word in _words(topics[name])],
        [word for name in sorted(names[:held_out]) for word in _words(topics[name])],
        check_count("vocabulary", vocabulary, hint="number of words"),
        window,
        hashlib.sha256(whole.encode()).hexdigest(),
    )


def _words(text: str) -> list[str]:
    paragraphs = re.split(r"\n\s*\n", text.lower())
    return [word for paragraph in paragraphs for word in (*re.findall(r"\w+|[^\w\s]", paragraph), END)]


@DATASETS.register("ptb")
def ptb(root: str = "data", vocabulary: int | None = None, window: int = 35, held_out: str = "test") -> Data:
    """The Penn Treebank's text as Mikolov prepared it, 10,000 words; nothing is downloaded.

    Args:
        root: folder that holds ptb.train.txt and ptb.test.txt, or ptb/ or simple-examples/data/ with them.
        vocabulary: number of words, the most frequent of the training text; null: all.
        window: words of each stream in a step (bptt).
        held_out: "test" or "valid", the text that is evaluated.

    Shapes: (batch, words) int64 each, the targets a word further on; samples are counted in words.
    """
    folders = (".", "ptb", "simple-examples/data")
    return _from_files("the Penn Treebank", root, folders, "ptb.{}.txt", vocabulary, window, held_out)


@DATASETS.register("wikitext2")
def wikitext2(root: str = "data", vocabulary: int | None = None, window: int = 35, held_out: str = "test") -> Data:
    """WikiText-2, its 33,278 words as its files separate them (not by spaCy, as Accordion did); nothing is downloaded.

    Args:
        root: folder that holds wiki.train.tokens and wiki.test.tokens, or wikitext-2/ with them.
        vocabulary: number of words, the most frequent of the training text; null: all.
        window: words of each stream in a step (bptt).
        held_out: "test" or "valid", the text that is evaluated.

    Shapes: (batch, words) int64 each, the targets a word further on; samples are counted in words.
    """
    return _from_files("WikiText-2", root, (".", "wikitext-2"), "wiki.{}.tokens", vocabulary, window, held_out)


def _from_files(
    name: str,
    root: str,
    folders: Sequence[str],
    pattern: str,
    vocabulary: int | None,
    window: int,
    held_out: str,
) -> Data:
    if held_out not in ("test", "valid"):
        raise ValueError(f'held_out must be "test" or "valid", got {held_out!r}')
    base = Path(root).expanduser()
    parts = [pattern.format("train"), pattern.format(held_out)]
    folder = next((base / f for f in folders if (base / f / parts[0]).is_file()), base)
    for part in parts:
        if not (folder / part).is_file():
            raise ValueError(
                f"{(folder / part).resolve()} is missing: {name} consists of text files {pattern.format('train')}, "
                f"{pattern.format('valid')} and {pattern.format('test')}, words separated by blanks, a sentence or "
                "paragraph a line; data.root=FOLDER says where they are"
            )
    contents = [(folder / part).read_bytes() for part in parts]
    train, test = (_lines(folder / part, content) for part, content in zip(parts, contents, strict=True))
    size = None if vocabulary is None else check_count("vocabulary", vocabulary, hint="number of words")
    return language_data(train, test, size, window, hashlib.sha256(b"".join(contents)).hexdigest())


def _lines(path: Path, content: bytes) -> list[str]:
    """The words of a file, and the end of each line."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None
    return [word for line in lines for word in (*line.split(), END)]
