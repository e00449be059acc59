"""A loop of one's own over two heads with losses of their own, of which one at least has counts, beside one process.

torchrun --nproc-per-node=4 heads.py DIRECTORY [both] [lacking] [varying] [numbers]

The loss of ``text`` is a sum and a count, and that of ``head`` a mean, or with ``both`` a sum and a count too. With
``lacking`` some micro-batches have no image, so neither ``image`` nor ``head``. With ``varying`` they differ in length;
with ``numbers`` each copy has other numbers of micro-batches, also none.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import BadModel, CountedLoss, Pipeline

SIZE, LENGTH, WIDTH, MICRO_BATCHES, UPDATES = 2, 5, 4, 8, 5
ASKED = {*sys.argv[2:]}
WITHOUT_COUNT = 3  # the update of which no token of the text counts
WEIGHT = 0.25


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(value))


class Joining(Part):
    def forward(self, *, pixels: torch.Tensor | None, waves: torch.Tensor) -> torch.Tensor:
        return super().forward(waves if pixels is None else pixels + 2 * waves)


def build(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return (Joining() if stage == 2 else Part()).double()


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return WEIGHT * (output - target).square()[target > 0].sum()


def count(target: torch.Tensor) -> torch.Tensor:
    return (target > 0).sum() + 0 * target.flatten()[0]  # not a number, if a target is infinite


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().mean()


LOSSES = {"text": CountedLoss(total, count), "head": CountedLoss(total, count) if "both" in ASKED else distance}


def micro_batch(update: int, copy: int, micro: int) -> tuple:
    generator = torch.Generator().manual_seed(10_000 * update + 100 * copy + micro)
    length = 1 + (update + 3 * copy + micro) % LENGTH if "varying" in ASKED and update else LENGTH
    shape = (4, SIZE, length, WIDTH)
    image, sound, text, head = torch.randn(shape, generator=generator, dtype=torch.float64)
    text -= micro / 4  # so that counts differ from micro-batch to micro-batch, and from copy to copy
    text -= copy / 2
    if update == WITHOUT_COUNT:
        text = -text.abs()
    has_image = "lacking" not in ASKED or update == 0 or (update + micro + copy) % 3 > 0
    return {"image": image if has_image else None, "sound": sound}, {"text": text, "head": head}


def mini_batch(update: int, copies: int) -> list[list[tuple]]:
    numbers = [MICRO_BATCHES] * copies
    if "numbers" in ASKED and update:
        numbers = [[7, 2], [0, 5], [4, 4], [3, 0]][update % 4][:copies]
    return [[micro_batch(update, copy, micro) for micro in range(number)] for copy, number in enumerate(numbers)]


def losses(stages: nn.ModuleList, batches: list[list[tuple]]) -> dict[str, torch.Tensor]:
    """The losses of text and head in one process: each sum is divided by its count over all micro-batches."""
    pairs = [pair for of_copy in batches for pair in of_copy]
    sums: dict[str, list] = {"text": [], "head": []}
    counts = {"text": 0.0, "head": 0.0}
    for inputs, targets in pairs:
        image = None if inputs["image"] is None else stages[0](inputs["image"])
        outputs = {"text": stages[2](pixels=image, waves=stages[1](inputs["sound"]))}
        outputs |= {} if image is None else {"head": stages[3](image)}
        for name, output in outputs.items():
            if name == "text" or "both" in ASKED:
                sums[name].append(total(output, targets[name]))
                counts[name] += count(targets[name]).item()
            else:
                sums[name].append(distance(output, targets[name]))
    if "both" not in ASKED:
        counts["head"] = len(pairs)
    return {name: sum(of_name) / (counts[name] or 1.0) for name, of_name in sums.items()}


def close(here: float, there: float) -> bool:
    return abs(here - there) <= 1e-12 * max(1.0, abs(there))


def main() -> None:
    dist.init_process_group("gloo")
    alone = nn.ModuleList(build(stage, 4) for stage in range(4))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)

    with Pipeline(Path(sys.argv[1]), build, LOSSES, micro_batch(0, 0, 0), varying="varying" in ASKED) as pipe:
        mine = {number: [*stage.parameters()] for number, stage in pipe.stages.items()}
        stepped = torch.optim.AdamW(pipe.parameters(), lr=0.1)

        def compare() -> None:
            for number, parameters in mine.items():
                for here, there in zip(parameters, alone[number].parameters(), strict=True):
                    assert torch.allclose(here.grad, there.grad, rtol=1e-10, atol=1e-15), number

        def cleared() -> None:
            for parameter in [*alone.parameters(), *pipe.parameters()]:
                parameter.grad = None

        for update in range(UPDATES):
            batches = mini_batch(update, pipe.copies)
            here = batches[pipe.copy]
            if update % 2 or "numbers" in ASKED:
                outcome = pipe.step(micro_batches=here)
            else:
                outcome = pipe.step(here.__getitem__)
            expected = losses(alone, batches)
            sum(expected.values()).backward()
            assert close(outcome.loss, sum(expected.values()).item()), (update, outcome.loss, expected)
            assert close(outcome.reports.get("loss of text", 0.0), expected["text"].item()), update
            if update == WITHOUT_COUNT:
                assert expected["text"].item() == 0
            if "lacking" not in ASKED or "both" in ASKED:
                assert close(outcome.reports["loss of head"], expected["head"].item()), update
            compare()
            for of in (stepped, optimizer):
                of.step()
            cleared()
        # An update in two steps: the mean of both.
        for step in range(2):
            batches = mini_batch(20 + 4 * step, pipe.copies)
            pipe.step(micro_batches=batches[pipe.copy], accumulate=step > 0)
            (sum(losses(alone, batches).values()) / 2).backward()
        compare()
        cleared()
        # Forwards alone.
        rounds = [
            [[micro_batch(7 + r, c, m) for m in range(MICRO_BATCHES)] for c in range(pipe.copies)] for r in (0, 1)
        ]
        with torch.no_grad():
            expected = losses(alone, [of_copy for of_round in rounds for of_copy in of_round])
        evaluated = pipe.evaluate([of_round[pipe.copy].__getitem__ for of_round in rounds])
        assert close(evaluated, sum(expected.values()).item()), (evaluated, expected)
        assert close(evaluated.reports["loss of text"], expected["text"].item())
        checked = [micro_batch(9, pipe.copy, m) for m in range(MICRO_BATCHES)]
        assert "check: passed" in pipe.check(micro_batches=checked)
        # Impossible counts stop all ranks before the update.
        batch = [micro_batch(0, pipe.copy, m) for m in range(MICRO_BATCHES)]
        batch[1][1]["text"][0, 0, 0] = torch.inf
        with pytest.raises(BadModel, match=r"stage text\[0\]"):
            pipe.step(micro_batches=batch)
        assert all(parameter.grad is None for parameter in pipe.parameters())
    dist.barrier()
    dist.destroy_process_group()


main()
