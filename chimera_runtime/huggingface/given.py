"""A model that is handed over: what layers made of its modules would leave out is refused, with what to do."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any

import torch

from chimera_runtime.errors import model as mistakes
from chimera_runtime.huggingface.skeleton import Skeleton

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}

_LIBRARY = ("transformers", "transformers_modules")
"""Packages in which the forwards of models are, the second of code that comes with a model."""


def given(source: torch.nn.Module, dtype: torch.dtype | None) -> Skeleton:
    """Returns the skeleton of a model whose own modules become layers.

    Raises `Misuse` if layers made of these modules would not compute what the model does.
    """
    model: Any = source
    if hasattr(model, "peft_config") and hasattr(
        model, "get_base_model"
    ):  # the adapters are in the modules of the base
        for adapter in model.peft_config.values():
            _require_lora(adapter)
        model = model.get_base_model()
    if not isinstance(model, import_module("transformers").PreTrainedModel):
        raise mistakes.model_is_wrapped(kind=type(model).__name__)
    config = deepcopy(model.config)
    if getattr(config, "quantization_config", None) is not None or getattr(model, "hf_quantizer", None) is not None:
        raise mistakes.model_is_quantized(architecture=str(config.model_type))
    skeleton = Skeleton(model, config, is_given=True)
    for obstacle, remedy in _obstacles(skeleton):
        raise mistakes.model_cannot_be_kept(obstacle=obstacle, remedy=remedy)
    if dtype is not None:
        model.to(dtype)
    skeleton.cut()
    for first, other in _unusual_ties(skeleton):
        raise mistakes.tie_is_not_of_the_library(first=first, other=other)
    return skeleton


def _require_lora(adapter: Any) -> None:
    """Raises `Misuse` unless an adapter of peft is LoRA, without what peft computes outside the layers."""
    kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
    if kind != "LORA":
        raise mistakes.adapter_is_not_lora(kind=kind)
    for option in ("alora_invocation_tokens", "trainable_token_indices", "layer_replication"):
        if getattr(adapter, option, None):
            raise mistakes.adapter_is_not_lora(kind=f"LORA with {option}")


def adapters(model: Any) -> dict[str, Any]:
    """The configurations of the adapters that peft has put into a model, by name."""
    return dict(getattr(model, "peft_config", None) or {})


def names_of_adapter(model: Any, adapter: str) -> dict[str, str]:
    """The names of the weights of an adapter in a file of peft, each with that in the model."""
    peft = import_module("peft")
    names = peft.get_peft_model_state_dict(model, {name: name for name in model.state_dict()}, adapter)
    return {f"base_model.model.{name}": of for name, of in names.items()}


def _obstacles(skeleton: Skeleton) -> Iterator[tuple[str, str]]:
    """Yields what the forward of a pipeline would leave out, and what to do."""
    model = skeleton.model
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            yield mistakes.place(name, module) + " has a hook of accelerate", mistakes.WITHOUT_DEVICE_MAP
    for name, module in skeleton.containers.items():
        place = mistakes.place(name, module)
        for attribute, kind in _HOOKS.items():
            if getattr(module, attribute):
                yield f"{place} has a {kind}", mistakes.HOOK_ON_LAYERS
        if "forward" in vars(module):
            yield f"the forward of {place} was replaced", mistakes.FORWARD_IS_NOT_CUT
        owner = type(module).forward.__module__
        if owner.partition(".")[0] not in _LIBRARY:
            yield f"the forward of {place} is of {owner}, not of the library", mistakes.FORWARD_IS_NOT_CUT
        if getattr(module, "_compiled_call_impl", None) is not None:
            yield f"{place} was compiled", mistakes.COMPILE_LAYERS
    if hasattr(model, "_loss_function"):
        yield f"the loss_function of {type(model).__name__} was replaced", mistakes.LOSS_OF_ONES_OWN
    blocks = [skeleton.block(index) for index in range(skeleton.count)]
    if any(getattr(module, "gradient_checkpointing", False) for module in (*skeleton.containers.values(), *blocks)):
        functions = [getattr(block, "_gradient_checkpointing_func", None) for block in blocks]
        if not all(isinstance(f, partial) and f.keywords.get("use_reentrant") is False for f in functions):
            yield "its layers are checkpointed in a way of their own", mistakes.CHECKPOINTS


def _unusual_ties(skeleton: Skeleton) -> Iterator[tuple[str, str]]:
    """Yields the names of parameters that are one, but not in every model of the architecture."""
    usual = getattr(skeleton.model, "all_tied_weights_keys", None) or {}
    names = {place: name for name, place in skeleton.names.items()}
    for first, *others in skeleton.ties:
        for other in others:
            if not {_unwrapped(names[first]), _unwrapped(names[other])} & usual.keys():
                yield names[first], names[other]


def _unwrapped(name: str) -> str:
    """The name that a parameter has without the wrappers of peft."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")
