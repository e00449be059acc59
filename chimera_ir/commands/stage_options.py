"""Options about the model: ``--tied`` and ``--split`` of its stages, ``--slice-lengths`` of its sequences."""

from pathlib import Path

import click

from chimera_ir.commands.common import WrongCommand, as_misuse
from chimera_ir.request import EqualTimes
from chimera_runtime.errors import Misuse


def parse_ties(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> list[list[int | str]]:
    """The groups of stages of a repeatable option ``--tied STAGE,STAGE``."""
    ties: list[list[int | str]] = []
    for text in given:
        stages = text.split(",")
        are_stages = all(stage in ("first", "last") or (stage.isascii() and stage.isdecimal()) for stage in stages)
        if len(stages) < 2 or not are_stages:
            raise WrongCommand(f"--tied {text}: write two stages or more, as in --tied first,last or --tied 0,3")
        if any(len(stage) > 18 for stage in stages):
            raise WrongCommand(f"--tied {text[:40]}: a stage has at most 18 digits")
        ties.append([int(stage) if stage.isdecimal() else stage for stage in stages])
    return ties


def parse_split(_: click.Context, __: click.Parameter, given: str | None) -> tuple[int, ...] | None:
    """The first layer of each stage, of an option ``--split``."""
    words = [] if given is None else given.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise WrongCommand(f"--split {given}: list the first layer of each stage, as in --split 0,9,17,25")
    return None if given is None else tuple(map(int, words))


def parse_lengths(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | str:
    """The lengths of slices, of an option ``--slice-lengths``; none if it is not given."""
    if text == EqualTimes.EQUAL_TIMES.value:
        return text
    words = [] if text is None else text.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 and int(word) for word in words):
        raise WrongCommand(
            f"--slice-lengths {'' if text is None else text[:80]}: list the length of each slice, as in "
            f"--slice-lengths 640,512,448,448, or write {EqualTimes.EQUAL_TIMES.value}"
        )
    return tuple(map(int, words))


def tied_by_transformer(source: Path) -> list[list[int | str]]:
    """The groups of stages that share parameters in a model of the transformers library; needs torch.

    Raises `WrongCommand` if the model cannot be read, or cut into layers.
    """
    from chimera_runtime.huggingface.layers import layers

    with as_misuse(Misuse):
        return [["first", "last"]] if layers(source).tied(2) else []


SLICE_LENGTHS = click.option(
    "--slice-lengths",
    callback=parse_lengths,
    metavar="L,L,..",
    help="Relative lengths of the slices, or equal-times by the profile [default: equal].",
)

TIED = click.option(
    "--tied",
    multiple=True,
    callback=parse_ties,
    metavar="STAGE,STAGE",
    help="Stages that share parameters, as the model's tied() says: by number, first or last.",
)

OFFLOAD = click.option(
    "--offload",
    type=click.Choice(["auto"]),
    metavar="auto",
    help="Move activations to the host and back so that workers keep the least and wait for no transfer.",
)

COMMUNICATORS = click.option(
    "--communicators",
    type=click.Choice(["directed", "pair"]),
    help="Of messages on NCCL: one for each direction between two workers, or for both [default: directed].",
)
