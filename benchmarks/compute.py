"""How long a step of a real model takes, beside torch.distributed.pipelining and beside a single process.

    .venv/bin/python benchmarks/compute.py [--rounds 20] [--stages 4] [--micro-batches 8] [--micro-batch-size 1]
                                           [--backend NAME] [--markdown PAGE]

The model is examples/gpt.py, a byte-level transformer, in four stages; every rank computes with one thread, or with
``--backend nccl`` on a GPU of its own. With ``--backend`` ours is the training loop of train.py. Data loading,
gradients and the optimizer's step are part of every contender's update. Where four ranks share fewer cores than that,
a bubble is no loss, for somebody else computes meanwhile: what counts is the work that a system adds to the model's
own.

The contenders take turns in the same processes as in benchmarks/runtime.py, and the ratios mean the same.
"""

import argparse
import os
import statistics
from pathlib import Path

from paired import ratio
from runtime import milliseconds
from side_by_side import Comparison, Contender, run
from tables import circumstances, put, table

MODEL = Path(__file__).resolve().parent.parent / "examples" / "gpt.py"
SCHEMES = ("dapple", "chimera")
TORCH = Contender("torch Schedule1F1B", "torch", "Schedule1F1B")
ALONE = Contender("one process, 1 thread", "alone", "1")
ALL_CORES = Contender("one process, a thread per core", "alone", str(os.cpu_count()))
HEADS = (
    "",
    "step, ms",
    "over torch Schedule1F1B",
    "over one process, 1 thread",
    "CPU of the busiest rank, ms",
    "over torch's",
)


def main() -> None:
    """Measures and prints the table, or writes it into a page."""
    parser = argparse.ArgumentParser(description="Step times of a real model.")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count [default: 20]")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="N", help="[default: 8]")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="B", help="items [default: 1]")
    parser.add_argument("--stages", type=int, default=4, metavar="D", help="[default: 4]")
    parser.add_argument("--model", type=Path, default=MODEL, help="another model file")
    parser.add_argument("--backend", help="gloo: CPU; nccl: a GPU for every rank; ours in its training loop")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="write the table between the page's marks")
    options = parser.parse_args()
    kind, backend = ("generated", "gloo") if options.backend is None else ("loop", options.backend)
    others = (TORCH, ALONE, ALL_CORES) if options.backend is None else (TORCH, ALONE)
    point = Comparison(
        name=options.model.name,
        stages=options.stages,
        micro_batches=options.micro_batches,
        contenders=(*(Contender(name, kind, name) for name in SCHEMES), *others),
        rounds=options.rounds,
        model=str(options.model),
        micro_batch_size=options.micro_batch_size,
        backend=backend,
    )
    (samples,) = run([point])
    torch, alone = samples[TORCH.label], samples[ALONE.label]
    rows = [
        [
            *(label, milliseconds(each.seconds)),
            *(str(ratio(each.seconds, other.seconds)) for other in (torch, alone)),
            *(f"{1000 * statistics.median(each.cpu):.0f}", str(ratio(each.cpu, torch.cpu))),
        ]
        for label, each in samples.items()
    ]
    task = f"D = {point.stages}, N = {point.micro_batches}, {point.micro_batch_size} items per micro-batch."
    text = f"{circumstances()} {task}\n\n{table(HEADS, rows)}"
    print(text)
    if options.markdown is not None:
        put(options.markdown, "compute", text)


if __name__ == "__main__":
    main()
