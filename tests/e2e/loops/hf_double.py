"""The training of examples/hf_gpt2.py with a smaller model in float64: on ranks, or by the library's own model on one.

    torchrun --nproc-per-node=4 hf_double.py EXAMPLES STEPS DIRECTORY
    torchrun --nproc-per-node=4 hf_double.py EXAMPLES STEPS

Both print the same lines. Without a directory rank 0 trains alone, and the others have nothing to do.
"""

import importlib
import os
import sys
from itertools import islice
from types import ModuleType

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import GPT2LMHeadModel, get_cosine_schedule_with_warmup

ITEMS = 8


def main() -> None:
    folder, steps, *directory = sys.argv[1:]
    sys.path.insert(0, folder)
    torch.set_default_dtype(torch.float64)
    example = importlib.import_module("hf_gpt2")
    example.CONFIG.update({"n_embd": 32, "n_layer": 4})
    if directory:
        sys.argv[1:] = [*directory, "--steps", steps]
        example.main()
    elif os.environ["RANK"] == "0":
        train_alone(example, int(steps))


def train_alone(example: ModuleType, steps: int) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(example.CONFIG).train()
    assert model.lm_head.weight is model.transformer.wte.weight
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    held_out = held_out_texts(example)
    for step, batch in enumerate(islice(example.texts(ITEMS, seed=1), steps), 1):
        loss = mean_loss(model, *flat(batch))
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            with torch.no_grad():
                judged = mean_loss(model.eval(), *held_out)
            model.train()
            print(f"step {step:3d}  loss {loss:.6f}  norm {norm:.6f}  held out {judged:.6f}", flush=True)


def held_out_texts(example: ModuleType) -> list[torch.Tensor]:
    """Inputs and targets of the example's held-out text, in one batch."""
    validation = islice(example.texts(ITEMS, seed=0, held_out=True), 4)
    return [torch.cat(parts) for parts in zip(*map(flat, validation), strict=True)]


def flat(batch: tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    words, labels, keywords = batch
    return words, labels, keywords["attention_mask"]


def mean_loss(
    model: GPT2LMHeadModel, words: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """The mean over all bytes of all texts that follow another."""
    logits = model(input_ids=words, attention_mask=attention_mask).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


if __name__ == "__main__":
    main()
