"""The training of examples/hf_gpt2.py in float64: as it is, or by the library's own model in one process.

    torchrun --nproc-per-node=4 hf_double.py EXAMPLES STEPS DIRECTORY
    python hf_double.py EXAMPLES STEPS
    python hf_double.py EXAMPLES EXPORTED

The first two print the same lines; the last prints the held-out loss of the model that was exported.
"""

import importlib
import sys
from itertools import islice
from types import ModuleType

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import GPT2LMHeadModel, get_cosine_schedule_with_warmup

ITEMS = 16


def main() -> None:
    folder, steps, *directory = sys.argv[1:]
    sys.path.insert(0, folder)
    if not steps.isdecimal():
        judge(importlib.import_module("hf_gpt2"), steps)
        return
    torch.set_default_dtype(torch.float64)
    example = importlib.import_module("hf_gpt2")
    if directory:
        sys.argv[1:] = [*directory, "--steps", steps]
        example.main()
    else:
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
    validation = [*islice(example.texts(ITEMS, seed=0, held_out=True), 4)]
    held_out = [torch.cat(parts) for parts in zip(*map(flat, validation), strict=True)]
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


def judge(example: ModuleType, directory: str) -> None:
    model = GPT2LMHeadModel.from_pretrained(directory).eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    validation = [*islice(example.texts(ITEMS, seed=0, held_out=True), 4)]
    with torch.no_grad():
        loss = mean_loss(model, *[torch.cat(parts) for parts in zip(*map(flat, validation), strict=True)])
    print(loss.item())


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
