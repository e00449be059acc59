"""The auxiliary loss of a mixture of experts, whose routers are in many stages.

The loss multiplies two means over the tokens of all layers, so it is not a sum of terms of layers. Each layer adds what
it contributes to these means, and the sums go on with the hidden states to the last stage.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from chimera_runtime.errors import huggingface as mistakes

RoutingSums = tuple[torch.Tensor, ...]
"""Choices (B, E) and probabilities (B, E) of the experts, and the number of routed tokens (B), of each sequence."""


@dataclass(frozen=True)
class Routing:
    """The routers of a model with a mixture of experts, and the settings of their auxiliary loss.

    Routers are the modules of the class ``router``. Their logits are the entry number ``place`` of their result, if
    that is not a tensor. Each token chooses ``chosen`` of ``experts``. ``weight`` is the factor of the auxiliary loss.
    """

    router: type[torch.nn.Module]
    place: int
    experts: int
    chosen: int
    weight: float

    @classmethod
    def of(cls, model: Any, config: Any) -> "Routing | None":
        """Returns the routing of a model if its configuration asks for the auxiliary loss, else None.

        Raises `Misuse` if the auxiliary loss of the model is not that of the Switch Transformer.
        """
        if not getattr(config, "output_router_logits", False):
            return None
        recorder = getattr(model, "_can_record_outputs", {}).get("router_logits")
        router = getattr(recorder, "target_class", recorder)
        if not isinstance(router, type) or not hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
            raise mistakes.does_not_fit(config.model_type, mistakes.ROUTERS_ARE_UNKNOWN)
        chosen, weight = model.num_experts_per_tok, float(model.router_aux_loss_coef)
        return cls(router, getattr(recorder, "index", 1), model.num_experts, chosen, weight)

    def begin(self, hidden: torch.Tensor) -> RoutingSums:
        """Returns the sums before the first layer."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        by_expert = hidden.new_zeros((len(hidden), self.experts), dtype=dtype)
        return by_expert, by_expert.clone(), hidden.new_zeros(len(hidden), dtype=dtype)

    @contextmanager
    def listening(self, block: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
        """Yields a list that gets the logits (tokens, E) of each router of a layer when it runs."""
        logits: list[torch.Tensor] = []

        def listen(_router: torch.nn.Module, _inputs: Any, result: Any) -> None:
            logits.append(result if isinstance(result, torch.Tensor) else result[self.place])

        hooks = [m.register_forward_hook(listen) for m in block.modules() if isinstance(m, self.router)]
        try:
            yield logits
        finally:
            for hook in hooks:
                hook.remove()

    def add(
        self, sums: RoutingSums, logits: Sequence[torch.Tensor], attention_mask: torch.Tensor | None
    ) -> RoutingSums:
        """Returns ``sums`` with what the logits of further routers contribute; masked tokens contribute nothing."""
        choices, probabilities, tokens = sums
        for of_router in logits:
            shares = torch.softmax(of_router, dim=-1).to(probabilities.dtype).reshape(len(tokens), -1, self.experts)
            counted = shares.new_ones(shares.shape[:2]) if attention_mask is None else attention_mask.to(shares.dtype)
            selected = shares.detach().topk(self.chosen, dim=-1).indices
            by_choice = counted.unsqueeze(-1).expand_as(selected)
            choices = choices.scatter_add(1, selected.flatten(1), by_choice.flatten(1))
            probabilities = probabilities + (shares * counted.unsqueeze(-1)).sum(1)
            tokens = tokens + counted.sum(1)
        return choices, probabilities, tokens

    def loss(self, sums: RoutingSums) -> torch.Tensor:
        """Returns the weighted auxiliary loss: equations 4 to 6 of the Switch Transformer (arXiv:2101.03961)."""
        choices, probabilities, tokens = sums
        total = tokens.sum()
        return self.weight * self.experts * (choices.sum(0) / total * (probabilities.sum(0) / total)).sum()
