"""What it takes to split a backward: its two halves beside the whole, and a schedule of halves beside one of wholes.

    .venv/bin/python benchmarks/halves.py [--rounds 40] [--parts stages pipelines] [--markdown PAGE]

Stages alone: one process with one thread runs a stage forward and back, once as a whole and once in two halves, in
turns; the rounds alternate which is first. The halves are the runtime's own (`chimera_runtime.stage.splitting`); the
whole is ``torch.autograd.backward``. Each ratio is the median over the rounds with the 95 % interval of the sign test.

Pipelines: examples/gpt.py under 1F1B with whole backwards and with split ones, in turns in the same processes as in
benchmarks/runtime.py. With as many ranks as cores a bubble is a loss; with more ranks than cores somebody else computes
meanwhile, and what is left is what splitting costs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from paired import ratio
from runtime import milliseconds
from side_by_side import Comparison, Contender, run
from tables import circumstances, publish, put, table
from torch import nn

from chimera_runtime.ranks.devices import keep_memory
from chimera_runtime.stage.saved_tensors import SavedTensors, memory_of
from chimera_runtime.stage.splitting import SplitBackward

MODEL = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"
WHOLE, HALVES, TORCH = (
    Contender("dapple", "generated", "dapple"),
    Contender("zb_h1", "generated", "zb_h1"),
    Contender("torch Schedule1F1B", "torch", "Schedule1F1B"),
)
WIDTH, WORDS, ITEMS = 256, 128, 4


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """Four layers, each with an activation."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(64, 4 * WIDTH)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Two layers of torch's own encoder."""
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(2)
    ]
    return nn.Sequential(*layers), torch.randn(ITEMS, WORDS, WIDTH)


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    """Two layers of GPT-2 as the transformers library has them."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=WIDTH, n_head=8, n_layer=2, attn_implementation="sdpa")

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([GPT2Block(config, layer_idx=i) for i in range(2)]).train()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                made = block(x)
                x = made[0] if isinstance(made, tuple) else made
            return x

    return Blocks(), torch.randn(ITEMS, WORDS, WIDTH)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Four convolutions with batch norm."""
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    ]
    return nn.Sequential(*layers), torch.randn(8, 32, 32, 32)


KINDS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "perceptron": perceptron,
    "transformer": transformer,
    "GPT-2 of transformers": gpt2,
    "convolutions, batch norm": convolutions,
}
STAGE_HEADS = ("", "B, ms", "I, ms", "W, ms", "(I + W) / B", "I / B", "kept from I to W / M_a")
PIPELINE_HEADS = ("", "ranks", "N", "step, ms", "over dapple", "CPU of the busiest rank / dapple's")


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def whole(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> float:
    """Seconds of a backward after its forward."""
    leaf = x.detach().requires_grad_()
    output = module(leaf)
    return seconds(lambda: torch.autograd.backward((output,), (gradient,)))


def halves(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> tuple[float, float]:
    """Seconds of the two halves of a backward after its forward."""
    leaf = x.detach().requires_grad_()
    output = module(leaf)
    begun: list[SplitBackward] = []
    first = seconds(lambda: begun.append(SplitBackward((output,), (gradient,), (leaf,))))
    return first, seconds(begun[0].finish)


def between(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> float:
    """What is kept between the halves, gradients included, as a share of what the forward saves."""
    saved = SavedTensors(module.parameters)
    leaf = x.detach().requires_grad_()
    with saved.counting():
        output = module(leaf)
    activations = sum(saved.sizes.values())
    begun = SplitBackward((output,), (gradient,), (leaf,))
    del output
    return (sum(saved.sizes.values()) + sum(memory_of(begun.operands).values())) / activations


def measured(name: str, rounds: int) -> list[str]:
    """The row of a kind of stage."""
    torch.manual_seed(0)
    module, x = KINDS[name]()
    gradient = torch.randn_like(x)
    once: list[float] = []
    twice: list[tuple[float, float]] = []
    for number in range(rounds + 3):
        for is_whole in (True, False) if number % 2 else (False, True):
            if is_whole:
                once.append(whole(module, x, gradient))
            else:
                twice.append(halves(module, x, gradient))
    once, twice = once[3:], twice[3:]
    firsts, seconds_of_both = [first for first, _ in twice], [sum(both) for both in twice]
    columns = (once, firsts, [second for _, second in twice])
    return [
        *(name, *(f"{1000 * statistics.median(column):.2f}" for column in columns)),
        *(str(ratio(seconds_of_both, once)), str(ratio(firsts, once))),
        f"{between(module, x, gradient):.2f}",
    ]


def stages(options: argparse.Namespace) -> list[list[str]]:
    """Kinds of stages, one after the other, in this process."""
    torch.set_num_threads(1)
    keep_memory()
    return [measured(name, options.rounds) for name in options.kinds]


def pipelines(options: argparse.Namespace) -> list[list[str]]:
    """The small transformer with whole and with split backwards, on few ranks and on many."""
    points = [
        Comparison(f"D={d} N={n}", d, n, (WHOLE, HALVES, TORCH), options.rounds, model=str(options.model))
        for d in options.depths
        for n in options.micro_batches
    ]
    rows = []
    for point, samples in zip(points, run(points), strict=True):
        base = samples[WHOLE.label]
        rows += [
            [
                *(label, str(point.stages), str(point.micro_batches), milliseconds(each.seconds)),
                *(str(ratio(each.seconds, base.seconds)), str(ratio(each.cpu, base.cpu))),
            ]
            for label, each in samples.items()
        ]
    return rows


PARTS = {"stages": (STAGE_HEADS, stages), "pipelines": (PIPELINE_HEADS, pipelines)}


def main() -> None:
    """Measures and prints the tables, and publishes them with a page."""
    parser = argparse.ArgumentParser(description="Backwards in two halves, beside whole ones.")
    parser.add_argument("--rounds", type=int, default=40, help="rounds that count [default: 40]")
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS], help="[default: all]")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS], help="of stages [default: all]")
    parser.add_argument("--model", type=Path, default=MODEL, help="another model file for pipelines")
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 4], metavar="D", help="[default: 2 4]")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[4, 8], metavar="N", help="[default: 4 8]")
    parser.add_argument(
        "--markdown", type=Path, metavar="PAGE", help="write the data file, and tables between the page's marks"
    )
    options = parser.parse_args()
    for part in options.parts:
        heads, measure = PARTS[part]
        rows = measure(options)
        text = f"{circumstances()}\n\n{table(heads, rows)}"
        print(text)
        match options.markdown, part:
            case Path() as page, "pipelines":
                publish(page, "halves pipelines", heads, rows)
            case Path() as page, _:
                put(page, f"halves {part}", text)


if __name__ == "__main__":
    main()
