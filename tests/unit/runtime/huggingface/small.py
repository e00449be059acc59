"""Small configurations of transformers, and what its own models compute in one piece."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from chimera_runtime.huggingface import TransformerLayers
from chimera_runtime.values.boundary import Stack

WORDS = 40
_SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_POSITIONS = {"max_position_embeddings": 16, "intermediate_size": 24}
_GROUPED = {**_SIZES, **_POSITIONS, "num_key_value_heads": 2, "head_dim": 4}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
_NO_WORDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_DRY = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GROUPED, **_NO_WORDS, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_GROUPED, **_NO_WORDS}),
    "mistral": ("MistralConfig", {**_GROUPED, **_NO_WORDS, "sliding_window": 3}),
    "gemma": ("GemmaConfig", {**_GROUPED, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_GROUPED, **_NO_WORDS, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt2": (
        "GPT2Config",
        {**_NO_WORDS, **_DRY, "vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4},
    ),
    "gpt_neox": ("GPTNeoXConfig", {**_SIZES, **_POSITIONS, **_NO_WORDS}),
    "mixtral": ("MixtralConfig", {**_EXPERTS, **_NO_WORDS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, **_NO_WORDS, "num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [0]},
    ),
}
"""Classes of configurations with their arguments: the first test that makes one imports transformers."""


def configuration(name: str, **changes: Any) -> Any:
    """One of `CONFIGS`, with some arguments changed."""
    kind, arguments = CONFIGS[name]
    return getattr(import_module("transformers"), kind)(**arguments | changes)


def whole(config: Any, dtype: torch.dtype = torch.float64) -> Any:
    """The library's own model; of a mixture of experts, with operations that are there in float64."""
    torch.manual_seed(1)
    implementation = "eager" if "moe" in config.model_type or config.model_type == "mixtral" else None
    return import_module("transformers").AutoModelForCausalLM.from_config(
        config, dtype=dtype, **({} if implementation is None else {"experts_implementation": implementation})
    )


def stack(layers: TransformerLayers) -> Stack:
    """All layers in one module, with their ties."""
    made = Stack({str(index): make() for index, make in enumerate(layers.layers)})
    for (first, name), *others in layers.tied(1):
        for layer, other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(made[str(layer)].get_submodule(owner), attribute, made[str(first)].get_parameter(name))
    return made


def parameters(layers: TransformerLayers, made: Stack) -> dict[str, torch.nn.Parameter]:
    """The parameters by the library's names."""
    ends = ((*name.split(".", 1), parameter) for name, parameter in made.named_parameters(remove_duplicate=False))
    return {layers.name(int(layer), inside): parameter for layer, inside, parameter in ends}


def loss_in_one_piece(model: Any, tokens: torch.Tensor, labels: torch.Tensor, **keywords: torch.Tensor) -> torch.Tensor:
    """The mean loss of the library's model in its own dtype; the library computes losses in float32."""
    result = model(input_ids=tokens, use_cache=False, **keywords)
    loss = cross_entropy(result.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    if not getattr(model.config, "output_router_logits", False):
        return loss
    shares = torch.softmax(torch.cat(result.router_logits), -1)
    chosen = one_hot(shares.topk(model.num_experts_per_tok).indices, model.num_experts).sum(1).to(shares.dtype)
    if "attention_mask" in keywords:
        counted = keywords["attention_mask"].flatten().bool().repeat(len(result.router_logits))
        shares, chosen = shares[counted], chosen[counted]
    balance = model.num_experts * (chosen.mean(0) * shares.mean(0)).sum()
    torch.testing.assert_close(balance.float(), result.aux_loss)
    return loss + model.router_aux_loss_coef * balance


def train_beside(pipe: Any, theirs: Any, tokens: torch.Tensor, updates: int = 1) -> None:
    """Trains a pipeline and the library's model by SGD; both have the same losses."""
    optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (pipe, theirs)]
    for _ in range(updates):
        outcome, expected = pipe.step((tokens, tokens)), loss_in_one_piece(theirs, tokens, tokens)
        expected.backward()  # type: ignore[no-untyped-call]
        assert outcome.loss == pytest.approx(expected.item(), rel=1e-8)  # norms are in float32
        pipe.evaluate([(tokens, tokens)])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
