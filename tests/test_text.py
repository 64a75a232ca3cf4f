"""Texts: how they are shared out, numbered and carried on; language models on them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from training_runs import rows, summary, train

from hvdcomp.training.data import IGNORED, Batch, batches, epoch_spans
from hvdcomp.training.data import test_batches as batches_of_tests
from hvdcomp.training.models import MODELS, begin_text, evaluating, parameter_count
from hvdcomp.training.text import END, TEST_STREAMS, Text, language_data, pydoc, word_loss

SHAPES = [(41, 1, 1, 20), (41, 1, 4, 3), (100, 2, 3, 5), (101, 3, 2, 7), (102, 2, 4, 1), (8, 2, 4, 5), (97, 4, 2, 100)]
"""Predictions, workers, streams of each, window."""


def shards(predictions: int, workers: int, batch_size: int, window: int, start: int = 0) -> list[list[Batch]]:
    text = Text(torch.arange(predictions + 1), window)
    return [
        list(batches(text, seed=0, epoch=0, start=start, worker=w, workers=workers, batch_size=batch_size))
        for w in range(workers)
    ]


@pytest.mark.parametrize(("predictions", "workers", "batch_size", "window"), SHAPES)
def test_every_word_is_predicted_once_from_the_word_before_it(
    predictions: int, workers: int, batch_size: int, window: int
) -> None:
    shares = shards(predictions, workers, batch_size, window)
    assert len({len(share) for share in shares}) == 1
    targets = torch.cat([b.targets[b.targets != IGNORED] for share in shares for b in share])
    assert sorted(targets.tolist()) == list(range(1, predictions + 1))
    for batch in (b for share in shares for b in share):
        made = batch.targets != IGNORED
        assert torch.equal(batch.targets[made], batch.inputs[made] + 1)
        assert batch.samples == int(made.sum()) > 0
        assert batch.inputs.shape[0] == batch_size


@pytest.mark.parametrize(("predictions", "workers", "batch_size", "window"), SHAPES)
def test_the_weighted_mean_over_workers_is_the_mean_over_all_words(
    predictions: int, workers: int, batch_size: int, window: int
) -> None:
    for step in zip(*shards(predictions, workers, batch_size, window), strict=True):
        means = [float(b.targets[b.targets != IGNORED].double().mean()) for b in step]
        weighted = sum(b.weight * mean for b, mean in zip(step, means, strict=True)) / workers
        everything = torch.cat([b.targets[b.targets != IGNORED] for b in step]).double().mean()
        assert weighted == pytest.approx(float(everything))
        assert len({b.end for b in step}) == 1
    assert step[0].end == predictions


def test_a_stream_goes_on_from_window_to_window() -> None:
    for share in shards(100, 2, 3, 5):
        assert [batch.first for batch in share] == [True] + [False] * (len(share) - 1)
        for one, following in pairwise(share):
            assert torch.equal(following.inputs[:, 0], one.inputs[:, -1] + 1)


def test_an_epoch_of_a_text_goes_on_where_it_was_left() -> None:
    whole = shards(101, 2, 3, 7)
    for done in range(len(whole[0])):
        rest = shards(101, 2, 3, 7, start=whole[0][done].end)
        for share, again in zip(whole, rest, strict=True):
            assert [b.inputs.tolist() for b in share[done + 1 :]] == [b.inputs.tolist() for b in again]
            assert not any(b.first for b in again)
    assert len(epoch_spans(Text(torch.arange(102), 7), 0, 2, 3)) == len(whole[0])


@pytest.mark.parametrize("workers", [1, 3, 12])
def test_an_evaluation_takes_the_same_streams_whatever_the_workers(workers: int) -> None:
    text = Text(torch.arange(504), 20)
    shares = [list(batches_of_tests(text, worker=w, workers=workers, batch_size=4)) for w in range(workers)]
    found = [targets[targets != IGNORED].tolist() for share in shares for _, targets in share]
    assert sorted(word for words in found for word in words) == list(range(1, 504))
    starts = sorted(int(row[0]) for share in shares for inputs, _ in share[:1] for row in inputs)
    assert starts == [i * 503 // TEST_STREAMS for i in range(TEST_STREAMS)]


def test_too_short_a_text() -> None:
    with pytest.raises(ValueError, match="a text of 7 predictions is too short for 8 streams"):
        epoch_spans(Text(torch.arange(8), 5), 0, 2, 4)


def test_the_most_frequent_words_are_known() -> None:
    data = language_data(["b", "a", "b", "c", "a", "b", "d"], ["b", "e", "c"], 4, 5, "")
    assert data.train.words.tolist() == [1, 2, 1, 3, 2, 1, 0]  # type: ignore[attr-defined]
    assert data.test.words.tolist() == [1, 0, 3]  # type: ignore[attr-defined]


def test_the_reference_is_split_by_topics_once_for_all_seeds() -> None:
    one, same, other = pydoc(), pydoc(), pydoc(split_seed=1)
    assert torch.equal(one.test.words, same.test.words)  # type: ignore[attr-defined]
    assert not torch.equal(one.test.words[:500], other.test.words[:500])  # type: ignore[attr-defined]
    assert one.sha256 == other.sha256
    assert len(one.train) > 5 * len(one.test) > 10_000  # type: ignore[arg-type]
    words = torch.cat([one.train.words, one.test.words])  # type: ignore[attr-defined]
    assert int(words.max()) == 1999
    assert 0 < int((one.train.words == 0).sum()) < 0.03 * len(one.train)  # type: ignore[arg-type, attr-defined]
    with pytest.raises(ValueError, match="test_fraction must leave some of"):
        pydoc(test_fraction=0.001)


def test_marks_are_words_and_paragraphs_end() -> None:
    from hvdcomp.training.text import _words

    words = _words('The "assert"\nstatement.\n \n*x')
    assert words == ["the", '"', "assert", '"', "statement", ".", END, "*", "x", END]


def test_a_padded_target_counts_in_no_loss() -> None:
    scores = torch.randn(2, 3, 5)
    words = torch.tensor([[1, 2, 3], [4, 0, IGNORED]])
    expected = -scores.log_softmax(-1)[[0, 0, 0, 1, 1], [0, 1, 2, 0, 1], [1, 2, 3, 4, 0]].mean()
    assert float(word_loss(scores, words)) == pytest.approx(float(expected))


def test_an_lstm_carries_its_state_along_a_text() -> None:
    model = MODELS.find("lstm-pydoc").factory(vocabulary=20, units=8).eval()
    words = torch.randint(20, (3, 12))
    whole = model(words)
    begin_text(model)
    parts = [model(words[:, :5]), model(words[:, 5:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    again = MODELS.find("lstm-pydoc").factory(vocabulary=20, units=8).eval()
    again.load_state_dict(model.state_dict())
    with evaluating(model):
        torch.testing.assert_close(model(words), whole)  # an evaluation begins a text of its own
    assert model.training
    torch.testing.assert_close(again(words), model.eval()(words))  # and both go on where the first one was
    assert not any(state.requires_grad for state in model.carried)


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = (MODELS.find("lstm-pydoc").factory(vocabulary=30, units=8, tied=tied) for tied in (True, False))
    assert parameter_count(untied) - parameter_count(tied) == 30 * 8


@pytest.mark.ranks
def test_a_language_model_learns_on_two_ranks_and_resumes_bitwise(tmp_path: Path) -> None:
    config = tmp_path / "text.yaml"
    config.write_text(
        "model: {name: lstm-pydoc, vocabulary: 200, units: 32}\ndata: {name: pydoc, vocabulary: 200, batch_size: 8}\n"
        "optimizer: {lr: 2.0}\ncompression: {name: topk, cf: 4}\nevaluate_every: 30\ncheckpoint_every: 20\n"
    )
    folder = tmp_path / "run"
    done = train(config, "-np", "2", f"run_dir={folder}", "steps=60")
    result, lines = summary(folder), rows(folder)
    assert 10 < result["perplexity"] < 120  # of 200 words, drawn evenly, 200
    assert f"perplexity {result['perplexity']:.2f}" in done.out
    assert [line["step"] for line in lines if "perplexity" in line] == [30, 60]
    assert len(result["data_sha256"]) == 64
    train(config, "-np", "2", f"run_dir={tmp_path / 'again'}", "steps=30", "checkpoint_every=25")
    train(config, "-np", "2", f"run_dir={tmp_path / 'again'}", "steps=60", "--resume")
    assert summary(tmp_path / "again")["parameters_sha256"] == result["parameters_sha256"]
