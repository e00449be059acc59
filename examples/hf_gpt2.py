"""GPT-2 of the transformers library in a training loop of one's own: clipping, a schedule, evaluation, checkpoints.

    chimera compile dapple D=4 N=4 --tied first,last --out gpt2.out
    torchrun --nproc-per-node=4 examples/hf_gpt2.py gpt2.out --checkpoints gpt2.saved --export gpt2

The same line goes on after an interruption. GPT2LMHeadModel.from_pretrained("gpt2") reads what is exported.

The model is the library's own: `huggingface.layers` cuts it, so nothing here depends on the architecture, except for
its configuration. The weights are random and the text is that of Python's standard library, byte by byte, so nothing is
downloaded. Texts differ in length and are padded in front: a mask travels with each.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import corpus
from chimera_runtime import Checkpoints, Pipeline, huggingface

CONFIG = GPT2Config(
    vocab_size=256,
    n_positions=64,
    n_embd=96,
    n_layer=8,
    n_head=4,
    bos_token_id=None,
    eos_token_id=None,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
Batch = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""Bytes (B, T); labels, the same with -100 up to the first byte of a text; keyword arguments of the stages."""


def texts(size: int, seed: int, held_out: bool = False) -> Iterator[Batch]:
    """Batches without end, of texts that are between half and all of the positions long; the last tenth is held out."""
    whole, longest = corpus.characters(), CONFIG.n_positions
    text = whole[len(whole) // 10 * 9 :] if held_out else whole[: len(whole) // 10 * 9]
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - longest, (size,), generator=generator)
        pieces = torch.stack([text[start : start + longest] for start in starts.tolist()])
        lengths = torch.randint(longest // 2, longest + 1, (size, 1), generator=generator)
        places = torch.arange(longest) - (longest - lengths)
        yield pieces, pieces.masked_fill(places <= 0, -100), {"attention_mask": places >= 0}


def main() -> None:
    """Trains, and prints a line now and then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="what chimera compile wrote")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--checkpoints", default="gpt2.saved", help="where they are saved, and resumed from")
    parser.add_argument("--export", help="a directory for the model, which from_pretrained reads")
    options = parser.parse_args()
    size = options.micro_batch_size
    dist.init_process_group("gloo")
    example = next(texts(size, seed=0))
    torch.manual_seed(0)
    model = huggingface.layers(GPT2LMHeadModel(CONFIG))
    with Pipeline(options.directory, model, model.loss, example, tied=model.tied, name=model.name) as pipe:
        matrices = [p for p in pipe.parameters() if p.dim() > 1]
        others = [p for p in pipe.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        scheduler = get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
        training = texts(size * pipe.micro_batches, seed=1 + pipe.copy)
        validation = [*islice(texts(size * pipe.micro_batches, seed=pipe.copy, held_out=True), 4)]
        checkpoints = Checkpoints(options.checkpoints, pipe, optimizer, schedulers=scheduler)
        checkpoints.resume()
        for batch in islice(training, pipe.updates, options.steps):  # what was trained on before is skipped
            outcome = pipe.step(batch)
            norm = pipe.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if pipe.updates % 50 == 0:
                checkpoints.save()
            if pipe.updates % 10 == 0:
                held_out = pipe.evaluate(validation)
                if dist.get_rank() == 0:
                    line = f"step {pipe.updates:3d}  loss {outcome.loss:.6f}  norm {norm:.6f}  held out {held_out:.6f}"
                    print(line, flush=True)
        checkpoints.close()
        if options.export is not None:
            model.export(pipe, options.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
