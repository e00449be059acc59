"""GPT-2 of the transformers library in a training loop of one's own: clipping, a schedule, evaluation, checkpoints.

    chimera compile dapple D=4 N=4 --tied first,last --out gpt2.out
    torchrun --nproc-per-node=4 examples/hf_gpt2.py gpt2.out --checkpoints gpt2.saved --export gpt2.safetensors

The same line goes on after an interruption. GPT2LMHeadModel loads the weights that are exported.

The first and the last stage share the table of words, as in the original. The weights are random and the text is that
of Python's standard library, byte by byte, so nothing is downloaded. Texts differ in length and are padded in front: a
mask travels with each.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup
from transformers.masking_utils import create_causal_mask

import corpus
from chimera_runtime import Checkpoints, Pipeline

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


class Slice(nn.Module):
    """Some layers of GPT-2: the first stage has the embeddings as well, the last one the head."""

    def __init__(self, model: GPT2LMHeadModel, stage: int, num_stages: int) -> None:
        super().__init__()
        self.config = model.config
        layers, body = self.config.n_layer, model.transformer
        mine = range(layers * stage // num_stages, layers * (stage + 1) // num_stages)
        self.h = nn.ModuleDict({str(layer): body.h[layer] for layer in mine})
        if stage == 0:
            self.wte, self.wpe = body.wte, body.wpe
        if stage == num_stages - 1:
            self.ln_f, self.lm_head = body.ln_f, model.lm_head

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Vectors (B, T, width) to the next stage; logits (B, T, bytes) from the last one."""
        if hasattr(self, "wte"):
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        mask = create_causal_mask(self.config, x, attention_mask, past_key_values=None)
        for block in self.h.values():
            x = block(x, attention_mask=mask)
        return self.lm_head(self.ln_f(x)) if hasattr(self, "lm_head") else x


def build_stage(stage: int, num_stages: int) -> nn.Module:
    """A part of the model that ``GPT2LMHeadModel(CONFIG)`` gives after ``torch.manual_seed(0)``."""
    torch.manual_seed(0)
    return Slice(GPT2LMHeadModel(CONFIG), stage, num_stages)


def tied(num_stages: int) -> list[list[tuple[int, str]]]:
    """The table of words, and the head."""
    return [[(0, "wte.weight"), (num_stages - 1, "lm_head.weight")]]


def name(_stage: int, parameter: str) -> str:
    """What the library calls a parameter."""
    return parameter if parameter.startswith("lm_head") else f"transformer.{parameter}"


def loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of every byte after the first, in nats: its sum, and the number of these bytes."""
    predicted, following = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(predicted, following, reduction="sum"), (following != -100).sum()


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
    parser.add_argument("--export", help="a file for the weights: .pt or .safetensors")
    options = parser.parse_args()
    size = options.micro_batch_size
    dist.init_process_group("gloo")
    example = next(texts(size, seed=0))
    with Pipeline(options.directory, build_stage, loss, example, tied=tied, name=name) as pipe:
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
            pipe.export_weights(options.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
