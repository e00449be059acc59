"""The modules of a model as layers: what runs before the transformer layers, each of those, and what runs after."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from chimera_runtime.huggingface.routing import Routing
from chimera_runtime.huggingface.skeleton import LayersReached, Skeleton, apart

Hidden = torch.Tensor | tuple[torch.Tensor, ...]
"""Hidden states of shape (B, T, width); of a mixture of experts followed by the sums of `Routing`."""


class Embedding(torch.nn.Module):
    """Everything before the transformer layers: tokens of shape (B, T) become hidden states."""

    def __init__(self, skeleton: Skeleton, routing: Routing | None) -> None:
        super().__init__()
        self.model = skeleton.surroundings(skeleton.before, _stop)
        self.training = self.model.training
        self._routing = routing

    def forward(
        self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> Hidden:
        """Runs the model's own forward up to its first layer."""
        keywords = _given(attention_mask=attention_mask, position_ids=position_ids)
        try:
            self.model(input_ids=tokens, use_cache=False, **keywords)
        except LayersReached as reached:
            hidden = reached.hidden
        return hidden if self._routing is None else (hidden, *self._routing.begin(hidden))


class TransformerLayer(torch.nn.Module):
    """A transformer layer, with the masks and positions that the model gives it.

    With ``checkpoints`` it keeps only its input, and runs again for the backward.
    """

    def __init__(
        self,
        block: torch.nn.Module,
        index: int,
        surroundings: "Surroundings",
        routing: Routing | None,
        checkpoints: bool,
    ) -> None:
        super().__init__()
        self.block = block
        self.training = block.training
        self._index, self._surroundings, self._routing, self._checkpoints = index, surroundings, routing, checkpoints

    def forward(
        self, value: Hidden, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> Hidden:
        """Returns hidden states of the same shape; of a mixture of experts with its part of the sums added."""
        hidden, sums = _taken_apart(value)
        tensors = _given(attention_mask=attention_mask, position_ids=position_ids)
        arguments, keywords = self._surroundings.arguments(self._index, hidden, tensors)

        def run(hidden: torch.Tensor, *sums: torch.Tensor) -> Hidden:
            if self._routing is None:
                return _tensor(self.block(hidden, *arguments, **keywords))
            with self._routing.listening(self.block) as logits:
                result = _tensor(self.block(hidden, *arguments, **keywords))
            return result, *self._routing.add(sums, logits, attention_mask)

        if self._checkpoints and torch.is_grad_enabled():
            result: Hidden = checkpoint(run, hidden, *sums, use_reentrant=False)
            return result
        return run(hidden, *sums)


class Head(torch.nn.Module):
    """Everything after the transformer layers: hidden states become logits of shape (B, T, vocabulary)."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        self._injection = _Injection(skeleton.as_result)
        self.model = skeleton.surroundings(skeleton.after, self._injection)
        self.training = self.model.training

    def forward(self, value: Hidden) -> Hidden:
        """Runs the model's own forward from the output of its last layer on; passes on what `Routing` has summed."""
        hidden, sums = _taken_apart(value)
        self._injection.hidden = hidden
        logits: torch.Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        self._injection.hidden = None
        return (logits, *sums) if sums else logits


class _Injection:
    """Stand-in for every layer: returns ``hidden`` as the output, in the form in which a layer returns it."""

    def __init__(self, as_result: Callable[[torch.Tensor], Any]) -> None:
        self._as_result = as_result
        self.hidden: torch.Tensor | None = None

    def __call__(self, _index: int, _arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> Any:
        assert self.hidden is not None
        return self._as_result(self.hidden)


class Surroundings:
    """Computes what the model gives to its layers besides hidden states: masks, positions and rotary embeddings.

    These arguments depend on the shape of the hidden states and on the keyword arguments of the micro-batch. So they
    are computed once for all layers of a stage, and again only when shape or keyword arguments change. They have the
    dtype that the hidden states have before the first layer. ``fill`` gives values to the buffers of a model, such as
    the frequencies of rotary embeddings.
    """

    def __init__(self, skeleton: Skeleton, fill: Callable[[Any], None]) -> None:
        self._skeleton = skeleton
        self._model = skeleton.surroundings((), self._visit).eval()
        fill(self._model)
        self._of_layers: list[Any] = []
        self._key: tuple[Any, ...] = ()
        self._tensors: dict[str, torch.Tensor] = {}  # the key has their identities, which are valid while they live

    def arguments(self, index: int, hidden: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Any:
        """Returns the positional and the keyword arguments of a layer, except for the hidden states."""
        identities = ((name, id(tensor), tensor._version) for name, tensor in tensors.items())
        key = (hidden.shape, hidden.dtype, hidden.device, *identities)
        if key != self._key:
            self._of_layers.clear()
            with torch.no_grad():
                try:
                    embeddings = hidden.detach().to(self._skeleton.dtype)
                    self._model.to(hidden.device)(inputs_embeds=embeddings, use_cache=False, **tensors)
                except LayersReached:
                    self._key, self._tensors = key, tensors
        return self._of_layers[index]

    def _visit(self, index: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        hidden, others = apart(arguments, keywords)
        self._of_layers.append(others)
        if index + 1 == self._skeleton.count:
            raise LayersReached(hidden)
        return self._skeleton.as_result(hidden)


def _stop(_index: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    raise LayersReached(apart(arguments, keywords)[0])


def _given(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _taken_apart(value: Hidden) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    return (value, ()) if isinstance(value, torch.Tensor) else (value[0], tuple(value[1:]))


def _tensor(result: Any) -> torch.Tensor:
    hidden: torch.Tensor = result if isinstance(result, torch.Tensor) else result[0]
    return hidden
