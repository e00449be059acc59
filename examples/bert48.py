"""Bert-48 of the Chimera paper (Table 4), 669,790,012 parameters: a model file for the generated train.py.

BERT's pre-training network with 48 layers, in plain PyTorch, split evenly into stages: masked words and the next
sentence. With h = 1024, the vocabulary V = 30,522 and P = 512 positions:

    embeddings     words V h, positions P h, sentences 2 h, layer norm 2 h         31,782,912
    48 layers      attention 4 h^2 + 4 h, perceptron 8 h^2 + 5 h, layer norms 4 h  48 * 12,596,224 = 604,618,752
    pooler         h^2 + h                                                          1,049,600
    masked words   h^2 + h, layer norm 2 h, projection V h + V                     32,336,698
    next sentence  2 h + 2                                                              2,050

`MODEL_SETTINGS` chooses other numbers, as in `MODEL_SETTINGS=tiny,dtype=float64`. The projection is a matrix of its
own, as in the paper; with `words=tied` it is the table of words, as in the original, and the schedule is compiled with
`--tied first,last`.
"""

import torch
from torch import nn
from torch.nn import functional

import corpus
from transformer import Attention, Perceptron, Settings, decaying, settings, split, table_of_words

SIZES = {
    "full": Settings(layers=48, hidden=1024, heads=16, vocabulary=30522, positions=512, length=128),
    "small": Settings(layers=8, hidden=192, heads=6, vocabulary=4096, positions=128, length=64, rate=1e-3),
    "tiny": Settings(layers=8, hidden=32, heads=4, vocabulary=128, positions=64, length=32, rate=5e-3, text=100_000),
}
CHOSEN = settings(SIZES)

PADDING, UNKNOWN, BEGIN, SEPARATOR, MASK, WORDS = range(6)
"""The first words of the vocabulary; the text's own follow, by frequency, from WORDS on."""

NOTHING = -100
"""The target where no word is masked."""

State = tuple[torch.Tensor, torch.Tensor]
"""What goes from stage to stage: hidden (B, T, h), and which positions hold a word (B, T), bool."""


class Embedding(nn.Module):
    """Words, positions and sentences to vectors."""

    def __init__(self, size: Settings) -> None:
        super().__init__()
        self.word = nn.Embedding(size.vocabulary, size.hidden)
        self.position = nn.Embedding(size.positions, size.hidden)
        self.sentence = nn.Embedding(2, size.hidden)
        self.norm = nn.LayerNorm(size.hidden, eps=1e-12)
        self.drop = nn.Dropout(size.dropout)

    def forward(self, item: dict[str, torch.Tensor]) -> State:
        """The input as the dataset gives it, to hidden and mask."""
        words, attended = item["words"], item["attended"]
        place = torch.arange(words.shape[1], device=words.device)
        hidden = self.word(words) + self.position(place) + self.sentence(item["sentences"])
        return self.drop(self.norm(hidden)), attended


class Layer(nn.Module):
    """Attention and a perceptron, a layer norm after each: 12 h^2 + 13 h parameters."""

    def __init__(self, size: Settings) -> None:
        super().__init__()
        self.attention = Attention(size.hidden, size.heads, size.dropout)
        self.after_attention = nn.LayerNorm(size.hidden, eps=1e-12)
        self.perceptron = Perceptron(size.hidden, nn.GELU())
        self.after_perceptron = nn.LayerNorm(size.hidden, eps=1e-12)
        self.drop = nn.Dropout(size.dropout)

    def forward(self, state: State) -> State:
        """Hidden and mask to the same."""
        x, attended = state
        x = self.after_attention(x + self.drop(self.attention(x, attended)))
        return self.after_perceptron(x + self.drop(self.perceptron(x))), attended


class Heads(nn.Module):
    """The word at every position, and from the first one whether the second sentence follows the first."""

    def __init__(self, size: Settings) -> None:
        super().__init__()
        self.pooler = nn.Sequential(nn.Linear(size.hidden, size.hidden), nn.Tanh())
        self.masked_words = nn.Sequential(
            nn.Linear(size.hidden, size.hidden),
            nn.GELU(),
            nn.LayerNorm(size.hidden, eps=1e-12),
            nn.Linear(size.hidden, size.vocabulary),
        )
        self.drop = nn.Dropout(size.dropout)
        self.next_sentence = nn.Linear(size.hidden, 2)

    def forward(self, state: State) -> State:
        """Logits (B, T, V) of words, and (B, 2) of "follows", "does not follow"."""
        hidden, _ = state
        return self.masked_words(hidden), self.next_sentence(self.drop(self.pooler(hidden[:, 0])))


def build_stage(stage: int, num_stages: int) -> nn.Module:
    """Stage 0 begins with the embeddings, the last stage ends with the two heads."""
    return split(stage, num_stages, CHOSEN, Embedding, Layer, Heads)


def tied(num_stages: int) -> list[list[tuple[int, str]]]:
    """The table of words and the projection, if the settings say so."""
    return table_of_words(num_stages, CHOSEN, "word.weight", "masked_words.3.weight")


def loss(output: State, target: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of the masked words plus that of the next sentence, in nats.

    Every item has as many masked words as any other, so the mean over all of them is a mean over the micro-batch.
    """
    words, follows = output
    masked = functional.cross_entropy(words.flatten(0, 1), target["words"].flatten(), ignore_index=NOTHING)
    return masked + functional.cross_entropy(follows, target["random"])


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, as in BERT, at a constant rate; called once per stage."""
    return torch.optim.AdamW(decaying(list(parameters), 0.01), lr=CHOSEN.rate, eps=1e-6)


class Pairs(torch.utils.data.Dataset[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]):
    """Item i: two pieces of the text, of which the second follows the first or is from elsewhere, some words masked.

    A piece is a span of words, as BERT's "sentences" are; words are runs of letters, runs of digits, or a sign. One
    item in ten is shorter than the others and padded. 15 % of ``length`` are masked, the same number in every item: of
    these 80 % are replaced by MASK, 10 % by any word, 10 % by nothing.
    """

    def __init__(self, size: Settings) -> None:
        ranks = corpus.words(r"[a-z]+|\d+|[^\sa-z\d]", size.vocabulary - WORDS, size.text, lower=True)
        self.text = torch.where(ranks > 0, ranks + WORDS - 1, UNKNOWN)
        self.length, self.vocabulary = size.length, size.vocabulary
        self.room = size.length - 3
        self.masked = max(1, round(0.15 * size.length))
        if size.length < 7 or size.vocabulary <= WORDS or len(self) < 2:
            raise ValueError(
                f"length={size.length}, vocabulary={size.vocabulary}, text={size.text} are too small for two pieces of "
                f"text: at least length=7, vocabulary={WORDS + 1}, and text for two items"
            )

    def __len__(self) -> int:
        return len(self.text) // self.room

    def __getitem__(self, i: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The words with some masked, and what they were."""
        draw = torch.Generator().manual_seed(i)

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=draw))

        words_in_all = number(self.room // 2, self.room) if number(0, 10) == 0 else self.room
        cut, random = number(1, words_in_all), number(0, 2)
        other = (i + number(1, len(self))) % len(self) if random else i
        first = self.text[i * self.room :][:cut]
        second = self.text[other * self.room + cut :][: words_in_all - cut]
        words, sentences, places = self._lay_out(first, second)
        target = torch.full_like(words, NOTHING)
        masked = places[torch.randperm(len(places), generator=draw)[: self.masked]]
        target[masked] = words[masked]
        attended = words != PADDING
        fate = torch.rand(self.masked, generator=draw)
        any_word = torch.randint(WORDS, self.vocabulary, (self.masked,), generator=draw)
        words[masked] = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, any_word, words[masked]))
        return (
            {"words": words, "sentences": sentences, "attended": attended},
            {"words": target, "random": torch.tensor(random)},
        )

    def _lay_out(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Both pieces and what stands around them, the sentence of each position, and where the text's words are."""
        begin, separator = torch.tensor([BEGIN]), torch.tensor([SEPARATOR])
        together = torch.cat([begin, first, separator, second, separator])
        words = functional.pad(together, (0, self.length - len(together)), value=PADDING)
        sentences = torch.zeros_like(words)
        sentences[len(first) + 2 : len(together)] = 1
        from_text = (words != PADDING) & (words != BEGIN) & (words != SEPARATOR)
        return words, sentences, from_text.nonzero().flatten()


def dataset() -> Pairs:
    """Pieces of text with masked words."""
    return Pairs(CHOSEN)
