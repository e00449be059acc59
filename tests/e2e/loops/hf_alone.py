"""The training of examples/hf_gpt2.py by the library's own model in one process; prints the same lines.

python hf_alone.py EXAMPLES STEPS
"""

import importlib
import sys
from itertools import islice

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import GPT2LMHeadModel, get_cosine_schedule_with_warmup

SIZE, MICRO_BATCHES = 4, 4


def main() -> None:
    folder, count = sys.argv[1:]
    steps = int(count)
    sys.path.insert(0, folder)
    example = importlib.import_module("hf_gpt2")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(example.CONFIG).train()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    for step, batch in zip(range(1, steps + 1), example.texts(SIZE * MICRO_BATCHES, seed=1), strict=False):
        (words, mask), target = batch
        logits = model(input_ids=words, attention_mask=mask).logits
        parts = zip(logits.split(SIZE), target.split(SIZE), strict=True)
        loss = sum(example.loss(*part) for part in parts) / MICRO_BATCHES
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step:3d}  loss {float(loss):.3f}  norm {norm:.2f}", flush=True)
    losses = []
    for (words, mask), target in islice(example.texts(SIZE * MICRO_BATCHES, seed=0, held_out=True), 4):
        with torch.no_grad():
            logits = model(input_ids=words, attention_mask=mask).logits
        losses += [example.loss(*part) for part in zip(logits.split(SIZE), target.split(SIZE), strict=True)]
    print(f"held out  loss {sum(losses) / len(losses):.3f}", flush=True)


if __name__ == "__main__":
    main()
