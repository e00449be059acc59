"""``make demo``: from a library scheme to a byte-level GPT that trains on four processes."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "demo"
RANKS = 4


STARTS = {
    "chimera-compile": ("-c", "from chimera_ir.start import compile_; compile_()"),
    "torchrun": ("-m", "torch.distributed.run"),
}
"""The programs of the tour as this interpreter starts them, wherever they are installed."""


def show(name: str, *arguments: str) -> None:
    """Runs a command of the tour, after printing it."""
    print(f"\n$ {' '.join((name, *arguments))}\n", flush=True)
    done = subprocess.run([sys.executable, *STARTS[name], *arguments], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"demo: {name} ended with status {done.returncode}")


def main() -> None:
    """Compiles, checks, trains, and says where everything is."""
    out = str(OUT.relative_to(ROOT))
    show("chimera-compile", "chimera", "--set", f"D={RANKS}", "--out", out)
    show(
        *("torchrun", f"--nproc-per-node={RANKS}", f"{out}/train.py", "--model", "examples/gpt.py"),
        *("--micro-batch-size", "8", "--steps", "90", "--check", "--metrics", f"{out}/metrics.json"),
    )
    losses = json.loads((OUT / "metrics.json").read_text(encoding="utf-8"))["loss"]
    last = sum(losses[-5:]) / 5
    print(f"\nThe loss fell from {losses[0]:.2f} to {last:.2f} nats per byte (the mean of the last five steps).")
    print(f"The picture of the schedule:  {OUT}/timeline.svg")
    print(f"What each rank ran:           {OUT}/rank_0.py .. rank_{RANKS - 1}.py")
    print(f"The program, as text:         {OUT}/schedule.sir")
    print(f"Loss and time of every step:  {OUT}/metrics.json")


if __name__ == "__main__":
    main()
