"""Word-level language models: words in, scores of the next word out, at every position."""

from __future__ import annotations

from torch import Tensor, nn

from hvdcomp.training.models.base import MODELS, Recurrent


class LSTMLanguageModel(Recurrent):
    """Embedding, LSTM, a linear layer to the vocabulary, with dropout between them.

    Args:
        vocabulary: number of words.
        units: of each LSTM layer; words are embedded in as many dimensions.
        layers: of the LSTM.
        dropout: probability in [0, 1) after the embedding and after each layer.
        tied: the last layer's matrix is the embedding's.

    Shapes: (batch, words) int64 -> (batch, words, vocabulary).

    Source: Zaremba et al. 2014 (dropout); Press and Wolf 2017 (tying).
    """

    def __init__(self, vocabulary: int, units: int, layers: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, units)
        self.lstm = nn.LSTM(units, units, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(units, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        state = self.carried
        if state is not None and state[0].shape[1] == len(words):
            state = tuple(part.to(words.device) for part in state)
        else:
            state = None
        outputs, carried = self.lstm(self.dropout(self.embedding(words)), state)
        self.carried = tuple(state.detach() for state in carried)
        scores: Tensor = self.decoder(self.dropout(outputs))
        return scores


@MODELS.register("lstm-pydoc", dataset="pydoc")
def lstm(
    vocabulary: int = 2000, units: int = 128, layers: int = 2, dropout: float = 0.2, tied: bool = False
) -> nn.Module:
    """An LSTM language model of any size; it carries its state along the text.

    Args:
        vocabulary: number of words, at least the data set's.
        units: of each LSTM layer; words are embedded in as many dimensions.
        layers: of the LSTM.
        dropout: probability in [0, 1) after the embedding and after each layer.
        tied: the last layer's matrix is the embedding's.

    Shapes: (batch, words) int64 -> (batch, words, vocabulary).
    """
    return LSTMLanguageModel(vocabulary, units, layers, dropout, tied)
