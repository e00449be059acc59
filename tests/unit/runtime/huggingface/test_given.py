"""A model that is handed over to `layers` is honoured with all that was changed in it, or refused."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from chimera_runtime import Misuse, Pipeline
from chimera_runtime.huggingface import layers
from chimera_runtime.ranks.world import World
from tests.unit.runtime.huggingface.small import (
    WORDS,
    configuration,
    loss_in_one_piece,
    parameters,
    stack,
    train_beside,
    whole,
)

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: pip install -e '.[hf]'")

B, N, LENGTH = 2, 4, 8


class Cast(nn.Module):
    """A layer in another dtype, between hidden states in the dtype of the model."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = layer.to(dtype), dtype

    def forward(self, hidden: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        positions = tuple(t.to(self.dtype) for t in keywords.pop("position_embeddings"))
        result: torch.Tensor = self.layer(hidden.to(self.dtype), *arguments, position_embeddings=positions, **keywords)
        return result.to(hidden.dtype)


class TwoHeads(nn.Module):
    """A projection to words that is not of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, WORDS), nn.Linear(16, WORDS, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(hidden) + self.second(hidden).tanh()
        return result


def frozen(model: Any) -> None:
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)


def frozen_embeddings(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(False)


def activations(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


def modules(model: Any) -> None:
    model.model.layers[1].mlp = nn.Sequential(nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 16))
    model.model.norm = nn.LayerNorm(16)
    model.lm_head = TwoHeads()


def hooks(model: Any) -> None:
    scale = torch.tensor(0.5)
    model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output * scale)
    model.model.layers[1].register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 0.75, *inputs[1:]))
    model.model.layers[1].mlp.register_full_backward_hook(lambda _module, gradients, _outputs: (gradients[0] * 3,))
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        module.register_forward_hook(lambda _module, _inputs, output: output * 1.5)


def forward_of_a_layer(model: Any) -> None:
    layer = model.model.layers[1]
    former = layer.forward
    layer.forward = lambda *arguments, **keywords: former(*arguments, **keywords).sin()


def dtype_of_a_layer(model: Any) -> None:
    model.model.layers[1] = Cast(model.model.layers[1], torch.float32)


def parametrized(model: Any) -> None:
    parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    parametrizations.weight_norm(model.lm_head)


def evaluating(model: Any) -> None:
    layer = model.model.layers[1]
    layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5)).eval()


def all_evaluating(model: Any) -> None:
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.eval()


def untied(model: Any) -> None:
    model.config.tie_word_embeddings = True


def checkpointing(model: Any, is_reentrant: bool) -> None:
    former = model.gradient_checkpointing_enable  # its name in version 5.0
    getattr(model, "activation_checkpointing_enable", former)({"use_reentrant": is_reentrant})


def checkpointed(model: Any) -> None:
    checkpointing(model, is_reentrant=False)


CHANGES: tuple[Callable[[Any], None], ...] = (
    *(frozen, frozen_embeddings, activations, modules, hooks, forward_of_a_layer, dtype_of_a_layer, parametrized),
    *(evaluating, all_evaluating, untied, checkpointed),
)


def made(change: Callable[[Any], None], name: str = "qwen3") -> Any:
    model = whole(configuration(name)).train()
    torch.manual_seed(2)
    change(model)
    return model.double() if change is not dtype_of_a_layer else model


def gradients(named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in named.items()}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_in_a_model_is_there_in_its_layers(change: Callable[[Any], None]) -> None:
    tokens = torch.randint(3, WORDS, (B, LENGTH), generator=torch.Generator().manual_seed(0))
    theirs = made(change)
    expected = loss_in_one_piece(theirs, tokens, tokens)
    expected.backward()  # type: ignore[no-untyped-call]

    model = made(change)
    state = torch.get_rng_state()
    cut = layers(model)
    assert torch.equal(torch.get_rng_state(), state)
    mine = parameters(cut, stack(cut))
    assert dict(model.named_parameters(remove_duplicate=False)) == mine, "the model's own, under their names"
    total, count = cut.loss(stack(cut)(tokens), tokens)
    (total / count).backward()
    assert (total / count).item() == pytest.approx(expected.item(), rel=1e-12)
    of_model = gradients(dict(theirs.named_parameters()))
    assert {name for name, gradient in gradients(mine).items() if gradient is None} == {
        name for name, gradient in of_model.items() if gradient is None
    }
    for name, gradient in of_model.items():
        torch.testing.assert_close(mine[name].grad, gradient, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("change", [frozen, hooks, evaluating, all_evaluating, checkpointed])
def test_a_pipeline_over_a_model_trains_as_the_library_does(
    alone: World, four_stages: Path, change: Callable[[Any], None]
) -> None:
    tokens = torch.randint(3, WORDS, (B * N, LENGTH), generator=torch.Generator().manual_seed(0))
    theirs, cut = made(change), layers(made(change))
    example = tokens[:B], tokens[:B]
    with Pipeline(four_stages, cut, cut.loss, example, tied=cut.tied, name=cut.name) as pipe:
        assert any("evaluation mode, as from_pretrained" in words for words in pipe.remarks) == (
            change is all_evaluating
        )
        train_beside(pipe, theirs, tokens, 2)
        assert "check: passed" in pipe.check((tokens, tokens))


def test_another_pipeline_over_the_same_modules_unfreezes_more(alone: World, four_stages: Path) -> None:
    tokens = torch.randint(3, WORDS, (B * N, LENGTH), generator=torch.Generator().manual_seed(0))
    models = theirs, mine = made(frozen), made(frozen)
    for unfrozen in (0, 1, 2):
        for model in models:
            model.model.layers[2 - unfrozen :].requires_grad_(True)
        cut = layers(mine)
        with Pipeline(four_stages, cut, cut.loss, (tokens[:B], tokens[:B]), tied=cut.tied, name=cut.name) as pipe:
            train_beside(pipe, theirs, tokens)


def hook_on_the_model(model: Any) -> None:
    model.register_forward_hook(lambda _module, _inputs, output: output)


def hook_on_the_decoder(model: Any) -> None:
    model.model.register_forward_pre_hook(lambda _module, inputs: inputs)


def forward_of_the_model(model: Any) -> None:
    former = model.forward
    model.forward = lambda *arguments, **keywords: former(*arguments, **keywords)


def subclass(model: Any) -> None:
    class Own(type(model)):  # type: ignore[misc]
        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            return super().forward(*arguments, **keywords)

    model.__class__ = Own


def compiled_model(model: Any) -> None:
    model.model.compile(backend="eager")


def loss_function(model: Any) -> None:
    model.loss_function = nn.functional.mse_loss


def device_map(model: Any) -> None:
    model.model.norm._hf_hook = object()


def reentrant(model: Any) -> None:
    checkpointing(model, is_reentrant=True)


def quantized(model: Any) -> None:
    model.hf_quantizer = object()


def tie_of_layers(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


REFUSED: dict[Callable[[Any], None], str] = {
    hook_on_the_model: r"the model \(Qwen3ForCausalLM\) has a forward hook, .*; register it on a transformer layer",
    hook_on_the_decoder: r"model \(Qwen3Model\) has a forward pre-hook, .*; register it on a transformer layer",
    forward_of_the_model: r"the forward of the model \(Qwen3ForCausalLM\) was replaced, .*; write a model file",
    subclass: r"the forward of the model \(Own\) is of tests\..*, not of the library, .*; write a model file",
    compiled_model: r"model \(Qwen3Model\) was compiled, .*; compile the transformer layers",
    loss_function: "the loss_function of Qwen3ForCausalLM was replaced, .*; give the Pipeline a loss of your own",
    device_map: r"model.norm \(Qwen3RMSNorm\) has a hook of accelerate, .*; load it without device_map",
    reentrant: r"its layers are checkpointed in a way of their own, .*; call gradient_checkpointing_disable\(\)",
    quantized: "the weights of this qwen3 are quantized, .*; load it without quantization_config",
    tie_of_layers: r"model.layers.0.mlp.\w+.weight and model.layers.1.mlp.\w+.weight are one parameter, .*; give each",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_layers_would_leave_out_is_refused_with_a_remedy(change: Callable[[Any], None]) -> None:
    with pytest.raises(Misuse, match=rf"^huggingface.layers\(model\): {REFUSED[change]}"):
        layers(made(change))


def test_what_is_not_a_causal_language_model_is_refused() -> None:
    import transformers

    model = whole(configuration("qwen3"))
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model), nn.Linear(1, 1)):
        with pytest.raises(Misuse, match=rf"a {type(wrapped).__name__} is not a model of transformers; give the model"):
            layers(wrapped)
    config = configuration("qwen3", pad_token_id=0)
    for kind in (transformers.Qwen3Model, transformers.Qwen3ForSequenceClassification):
        with pytest.raises(Misuse, match=r"its result has no logits \(B, T, vocabulary\)"):
            layers(kind(config))


@pytest.mark.parametrize(("name", "is_tied"), [("llama", True), ("qwen3", False), ("llama", False)])
def test_an_export_ties_what_the_model_ties(tmp_path: Path, name: str, is_tied: bool) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = whole(configuration(name), torch.float32)
    if not is_tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() + 1)
    model.generation_config.max_length = 77
    cut = layers(model)
    assert bool(cut.tied(1)) == is_tied
    save_file(
        {key: value.detach() for key, value in model.named_parameters()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    cut.describe(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read.generation_config.max_length == 77
    for key, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[key], value), key
