"""Directories with models of transformers: rank 0 makes a small mixture of experts, and reads what ranks exported.

    torchrun --nproc-per-node=4 hf_directories.py made FOLDER
    torchrun --nproc-per-node=4 hf_directories.py read FOLDER EXAMPLES

It makes FOLDER/experts, which has to be the same as FOLDER/again later; of FOLDER/gpt2 it prints the loss on the text
that the example was not trained on.
"""

import importlib
import os
import sys
from pathlib import Path

import torch
from hf_double import GPT2LMHeadModel, held_out_texts, mean_loss
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM


def made(folder: Path) -> None:
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        head_dim=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        bos_token_id=None,
        eos_token_id=None,
        router_aux_loss_coef=0.1,
        tie_word_embeddings=True,
    )
    MixtralForCausalLM(config).save_pretrained(folder / "experts", max_shard_size="20KB")


@torch.no_grad()
def read(folder: Path, examples: Path) -> None:
    before, after = (AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("experts", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    model = GPT2LMHeadModel.from_pretrained(folder / "gpt2").eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    sys.path.insert(0, str(examples))
    loss = mean_loss(model, *held_out_texts(importlib.import_module("hf_gpt2")))
    print(f"loss of what was exported {loss:.9f}", flush=True)


if __name__ == "__main__" and os.environ["RANK"] == "0":
    {"made": made, "read": read}[sys.argv[1]](*map(Path, sys.argv[2:]))
