"""A model of three parts: an image and a sound, each through an encoder, are read by a text model that counts words."""

import torch
from torch import nn

WIDTH, WORDS, LENGTH = 16, 40, 6


class Image(nn.Module):
    """Patches of an image, as vectors: (items, 4, WIDTH)."""

    def __init__(self) -> None:
        """One convolution over patches of 4 times 4."""
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """The input of this stage is that of the dataset: no stage feeds it."""
        return self.patches(image).flatten(2).transpose(1, 2)


class Sound(nn.Module):
    """Pieces of a sound, as vectors: (items, 8, WIDTH)."""

    def __init__(self) -> None:
        """One convolution over pieces of 4 samples."""
        super().__init__()
        self.pieces = nn.Conv1d(1, WIDTH, kernel_size=4, stride=4)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        """Makes a vector of each piece."""
        return self.pieces(sound).transpose(1, 2)


class FirstText(nn.Module):
    """The words behind what the encoders have seen and heard."""

    def __init__(self) -> None:
        """An embedding and a layer."""
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, pixels: torch.Tensor, waves: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """``pixels`` and ``waves`` are fed by the encoders, ``words`` come from the dataset."""
        return self.block(torch.cat([pixels, waves, self.words(words)], dim=1))


class Text(nn.Module):
    """A further stage of the text model; the last one says how likely each word is to come next."""

    def __init__(self, last: bool) -> None:
        """A layer and, at the end, a projection to the words."""
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.end = nn.Linear(WIDTH, WORDS) if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stage before it feeds it, as in a chain."""
        return self.end(self.block(x))


def build_stage(stage: int, num_stages: int) -> nn.Module:
    """Stages are numbered as the groups stand in the scheme: image[0], sound[0], then the text."""
    kinds = [Image, Sound, FirstText]
    return (kinds[stage]() if stage < len(kinds) else Text(stage == num_stages - 1)).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of the words, which are at the end of the sequence."""
    return nn.functional.cross_entropy(output[:, -LENGTH:].flatten(0, 1), target.flatten())


class Clips(torch.utils.data.Dataset):
    """Made-up clips: an image, a sound and words."""

    def __len__(self) -> int:
        """How many clips there are."""
        return 64

    def __getitem__(self, i: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
        """The input of each group that no other feeds, the target, and keyword arguments of stages."""
        image = torch.sin(torch.arange(192, dtype=torch.float64) * (i + 1)).view(3, 8, 8)
        sound = torch.cos(torch.arange(32, dtype=torch.float64) * (i + 1)).view(1, 32)
        words = (torch.arange(LENGTH + 1) * (i + 3)) % WORDS
        return {"image": image, "sound": sound}, words[1:], {"words": words[:-1]}


dataset = Clips


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One for the parameters of each stage."""
    return torch.optim.AdamW(parameters, lr=1e-3)
