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


@MODELS.register("lstm-wikitext2", dataset="wikitext2", vocabulary=34_069, units=650, dropout=0.5, tied=True)
@MODELS.register("lstm-ptb", dataset="ptb", vocabulary=10_000, units=1500, dropout=0.65)
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


class TransformerLanguageModel(nn.Module):
    """A stack of causal self-attention layers over learnt positions; it sees no further back than its window.

    Args:
        vocabulary: number of words.
        width: of each layer, a multiple of `heads`.
        heads: of the attention.
        layers: number of them.
        context: words that it can see at most.
        dropout: probability in [0, 1), inside the layers and after the embedding.

    Shapes: (batch, words) int64, words <= context -> (batch, words, vocabulary).

    Source: Vaswani et al. 2017; norm before each part as Radford et al. 2019 have it.
    """

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.dropout, self.decoder = nn.Dropout(dropout), nn.Linear(width, vocabulary, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        count, context = words.shape[1], self.positions.num_embeddings
        if count > context:
            raise ValueError(f"{count} words are more than this model's context of {context}: raise context")
        hidden = self.dropout(self.embedding(words) + self.positions.weight[:count])
        later = nn.Transformer.generate_square_subsequent_mask(count, device=words.device)
        scores: Tensor = self.decoder(self.layers(hidden, mask=later, is_causal=True))
        return scores


@MODELS.register("transformer-pydoc", dataset="pydoc")
def transformer(
    vocabulary: int = 2000,
    width: int = 128,
    heads: int = 4,
    layers: int = 2,
    context: int = 64,
    dropout: float = 0.1,
) -> nn.Module:
    """A small Transformer language model with tied embeddings.

    Args:
        vocabulary: number of words, at least the data set's.
        width: of each layer, a multiple of `heads`.
        heads: of the attention.
        layers: number of them.
        context: words that it can see at most, more than the data set's window.
        dropout: probability in [0, 1).

    Shapes: (batch, words) int64 -> (batch, words, vocabulary).
    """
    return TransformerLanguageModel(vocabulary, width, heads, layers, context, dropout)
