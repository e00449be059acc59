"""A causal language model of the transformers library, to cut layers from: given, or made without memory for weights.

The model is whatever the library makes of its configuration: nothing here knows an architecture. `Skeleton` runs the
model's own forward on shapes alone, with stand-ins for its transformer layers. So it learns which modules run before
the layers and which after them. It also checks that the model is a chain: each layer gets the output of the layer
before, and nothing else that depends on tokens or weights.
"""

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset

from chimera_runtime.errors import model as mistakes
from chimera_runtime.values.files import require_regular

# A text file as a dataset: its tokens, or its bytes, cut into items of one length.

Item = tuple[torch.Tensor, torch.Tensor]
"""Tokens of shape (length), and the same as labels, which the loss shifts by one."""

HELD_OUT = 10
"""One of this number of items is held out: the last ones of the text."""

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class TextItems(Dataset[Item]):
    """Items of ``length`` tokens, cut from a text one after the other; the rest at its end is left out."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self._rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:
        return self._rows[index], self._rows[index]

    def split(self) -> tuple["TextItems", "TextItems"]:
        """Returns the items for training, and the last ones as held-out items; at least one of each if two exist."""
        length, last = self._rows.shape[1], max(1, len(self) // HELD_OUT)
        return TextItems(self._rows[:-last].flatten(), length), TextItems(self._rows[-last:].flatten(), length)


def read_text(path: Path, tokenizer: Path | None, length: int, vocabulary: int) -> TextItems:
    """Reads a text file by the tokenizer of a directory, or as bytes without one. Raises `Misuse` if a file cannot be
    read, the text is shorter than two items, or a token is outside the vocabulary.
    """
    try:
        text = require_regular(path).read_bytes()
    except OSError as error:
        raise mistakes.text_cannot_be_read(path=path, why=str(error.strerror)) from error
    if tokenizer is None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64) if text else torch.zeros(0).long()
    else:
        tokens = _tokens(path, text, tokenizer)
    if len(tokens) < 2 * length:
        raise mistakes.text_is_too_short(path=path, tokens=len(tokens), fewest=2 * length, length=length)
    if (largest := int(tokens.max())) >= vocabulary:
        raise mistakes.tokens_are_outside(path=path, largest=largest, size=vocabulary)
    return TextItems(tokens, length)


def has_tokenizer(directory: Path | None) -> bool:
    """Whether a directory has the files of a tokenizer."""
    return directory is not None and any((directory / name).is_file() for name in _TOKENIZERS)


def _tokens(path: Path, text: bytes, tokenizer: Path) -> torch.Tensor:
    """Tokens of a text, tokenized line by line: tokenizers are slow on long texts."""
    try:
        encode = import_module("transformers").AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except Exception as error:  # transformers refuses files of tokenizers with errors of any kind
        raise mistakes.tokenizer_cannot_be_read(path=tokenizer, why=mistakes.reason(error)) from error
    try:
        lines = text.decode().splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise mistakes.text_cannot_be_read(
            path=path, why=f"it is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    rows = encode(lines, add_special_tokens=False)["input_ids"] if lines else []
    return torch.tensor([*chain.from_iterable(rows)], dtype=torch.int64)


Visit = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the place of a layer: gets its index and its arguments, and returns its result."""

_INTERNALS = frozenset({*vars(torch.nn.Module()), "forward", "_compiled_call_impl"})


class LayersReached(Exception):
    """Exception that ends a forward at a layer; ``hidden`` are the hidden states that the model gives the layer."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class StandIn(torch.nn.Module):
    """Stand-in for a layer that calls ``visit`` instead of computing; it has the layer's plain attributes, as the model
    may read them.
    """

    stands_for: int
    visit: Visit

    def __init__(self, layer: torch.nn.Module, index: int, visit: Visit) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer).items() if name not in _INTERNALS})
        self.__dict__.update(stands_for=index, visit=visit)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls ``visit`` with the index of the layer."""
        return self.visit(self.stands_for, arguments, keywords)


class Absent(torch.nn.Module):
    """Stand-in for a module that this copy of the model lacks; nothing uses its result, which must be a tensor."""

    def forward(self, value: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        """Returns hidden states as they are, and zero in place of anything else."""
        is_hidden = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2
        return value if is_hidden else torch.zeros(())


class Skeleton:
    """A model, cut at its transformer layers.

    ``path`` is the name of their list, ``count`` its length. After `cut`, ``before`` and ``after`` are the names of the
    modules with parameters that run before and after them, ``as_result`` turns hidden states into the form in which a
    layer returns them, whose ``dtype`` is that before the first. If the model ``is_given``, its parts are its own
    modules; otherwise it is on the meta device, and parts are copies.
    """

    def __init__(self, model: Any, config: Any, *, is_given: bool) -> None:
        self.model, self.config, self.is_given = model, config, is_given
        self.architecture = str(config.model_type)
        self.path, self._blocks = self._find_layers()
        self.count = len(self._blocks)
        self._containers = [
            name for name, _ in model.named_modules() if f"{self.path}.".startswith(f"{name}." * bool(name))
        ]
        self._owners = frozenset(_owners(model, self.path))
        self.before: frozenset[str] = frozenset()
        self.after: frozenset[str] = frozenset()
        self.as_result: Callable[[torch.Tensor], Any] = _tensor
        self.dtype = torch.get_default_dtype()

    @classmethod
    def of_config(cls, config: Any, dtype: torch.dtype) -> "Skeleton":
        """Makes a model of a configuration, without memory for its weights. Raises `Misuse` if the architecture cannot
        be cut.
        """
        config = deepcopy(config)
        if dtype is torch.float64:  # for which torch has no grouped product of matrices
            config._experts_implementation = "eager"
        if getattr(config, "quantization_config", None) is not None:
            raise mistakes.does_not_fit(architecture=str(config.model_type), reason=mistakes.QUANTIZED)
        try:
            with torch.device("meta"):
                automatic = import_module("transformers").AutoModelForCausalLM
                model = automatic.from_config(deepcopy(config), dtype=dtype)
        except ValueError as error:
            raise mistakes.does_not_fit(
                architecture=str(config.model_type), reason=str(error).splitlines()[0]
            ) from error
        except Exception as error:  # a number or a name that the code of the architecture cannot use
            raise mistakes.does_not_fit(
                architecture=str(config.model_type), reason=mistakes.makes_no_model(error)
            ) from error
        model.tie_weights()
        skeleton = cls(model, config, is_given=False)
        skeleton.cut()
        return skeleton

    @property
    def containers(self) -> dict[str, torch.nn.Module]:
        """The model and the modules in it that have the transformer layers inside, without their list."""
        return {name: self.model.get_submodule(name) for name in self._containers if name != self.path}

    @property
    def names(self) -> dict[str, tuple[int, str]]:
        """The place of each parameter and saved buffer: its layer, and its name in that layer's model or block."""
        places = {}
        for name in self.model.state_dict(keep_vars=True):
            if name.startswith(f"{self.path}."):
                index, _, inside = name.removeprefix(f"{self.path}.").partition(".")
                places[name] = int(index) + 1, inside
            else:
                is_before = any(name.startswith(f"{owner}.") for owner in self.before)
                places[name] = (0 if is_before else self.count + 1), name
        return places

    @property
    def ties(self) -> list[list[tuple[int, str]]]:
        """The parameters that several layers share, by the places of `names`."""
        owners: dict[torch.nn.Parameter, list[tuple[int, str]]] = {}
        places = self.names
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            owners.setdefault(parameter, []).append(places[name])
        return [sorted(ends) for ends in owners.values() if len({layer for layer, _ in ends}) > 1]

    @property
    def tied_names(self) -> frozenset[str]:
        """The names of parameters that get their value from a tied parameter of an earlier layer."""
        later = {end for _, *ends in self.ties for end in ends}
        return frozenset(name for name, place in self.names.items() if place in later)

    def surroundings(self, present: Collection[str], visit: Visit) -> Any:
        """Returns a copy of the model with parameters only in the modules that are ``present``, its own if it is given.
        `Absent` objects replace other modules with parameters, and `StandIn` objects, which call ``visit``, its layers.
        """
        memo: dict[int, Any] = {}
        for name in self._owners:
            module = self.model.get_submodule(name)
            if name not in present:
                memo[id(module)] = Absent()
            elif self.is_given:
                memo[id(module)] = module
        stand_ins = (StandIn(block, index, visit) for index, block in enumerate(self._blocks))
        memo[id(self._blocks)] = torch.nn.ModuleList(stand_ins)
        model = deepcopy(self.model, memo)
        model.config.output_router_logits = False  # the layers report what routers choose themselves: see `Routing`
        return model

    def block(self, index: int) -> torch.nn.Module:
        """The module of a transformer layer, of a model that is given."""
        return self._blocks[index]

    def with_layer(self, index: int) -> Any:
        """Returns a copy of the model that has the parameters of one transformer layer alone, under their names."""
        model = self.surroundings((), _unused)
        layers = torch.nn.ModuleList()
        layers._modules[str(index)] = deepcopy(self._blocks[index])
        parent, _, attribute = self.path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layers)
        return model

    def _find_layers(self) -> tuple[str, torch.nn.ModuleList]:
        depth = getattr(self.config, "num_hidden_layers", None)
        lists = [
            (name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == depth
        ]
        outside = [pair for pair in lists if not any(pair[0].startswith(f"{name}.") for name, _ in lists)]
        if len(outside) != 1:
            raise mistakes.does_not_fit(
                architecture=self.architecture, reason=mistakes.no_list_of_layers(count=len(outside))
            )
        return outside[0]

    def cut(self) -> None:
        """Finds what runs before and after the layers, and the form of their results. Raises `Misuse` if the model is
        not a chain.
        """
        failure: Exception | None = None
        device = next(self.model.parameters()).device
        for as_result in (_tensor, _in_tuple):
            self.as_result = as_result
            try:
                mode = FakeTensorMode(allow_non_fake_inputs=True)  # which transformers takes for a compiler's shapes
                with mode:
                    tokens = torch.zeros((2, 3), dtype=torch.int64, device=device)
                by_tokens = self._traced(mode, input_ids=tokens)
                by_embeddings = self._traced(mode, inputs_embeds=by_tokens.hidden[0].detach())
            except Exception as error:  # of any kind: the code is that of the architecture
                failure = failure or error
                continue
            if by_tokens.forms != by_embeddings.forms:
                failure = _NotAChain(mistakes.LAYERS_SEE_TOKENS)
                break
            self.before, self.after = frozenset(by_tokens.before), frozenset(by_tokens.after)
            outer = [
                name for name, module in self.containers.items() if any(True for _ in module.parameters(recurse=False))
            ]
            if other := sorted({*outer, *self._owners} - self.before - self.after) or sorted(self.before & self.after):
                failure = _NotAChain(mistakes.module_has_no_side(name=other[0]))
                break
            self.dtype = by_tokens.hidden[0].dtype
            return
        assert failure is not None
        reason = str(failure) if isinstance(failure, _NotAChain) else mistakes.forward_fails(failure)
        raise mistakes.does_not_fit(architecture=self.architecture, reason=reason) from failure

    def _traced(self, mode: FakeTensorMode, **inputs: torch.Tensor) -> "_ChainTrace":
        trace = _ChainTrace(self.count, self.as_result)
        model = self.surroundings(self._owners, trace.visit)
        hooks = [
            model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: trace.called(name))
            for name in self._owners
        ]
        frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
        try:
            for parameter in frozen:  # what is computed with a weight shows by its graph
                parameter.requires_grad_(True)
            with mode, torch.enable_grad():
                result = model(**inputs, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in frozen:
                parameter.requires_grad_(False)
        if len(trace.hidden) != self.count:
            raise _NotAChain(mistakes.layers_are_skipped(reached=len(trace.hidden), count=self.count))
        logits = getattr(result, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or logits.shape[:2] != trace.hidden[0].shape[:2]:
            raise _NotAChain(mistakes.NO_LOGITS)
        return trace


class _NotAChain(Exception):
    """The model is not a chain of layers; the message says why."""


class _ChainTrace:
    """Record of a forward with `StandIn` objects: their ``hidden`` states, ``forms`` of their other arguments, and the
    names of modules with parameters that ran ``before`` the first and ``after`` the last one.
    """

    def __init__(self, count: int, as_result: Callable[[torch.Tensor], Any]) -> None:
        self.count, self.as_result = count, as_result
        self.hidden: list[torch.Tensor] = []
        self.forms: list[Any] = []
        self.before: list[str] = []
        self.after: list[str] = []

    def called(self, name: str) -> None:
        reached = len(self.hidden)
        if 0 < reached < self.count:
            raise _NotAChain(mistakes.runs_between_layers(name=name))
        (self.after if reached else self.before).append(name)

    def visit(self, index: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Returns new hidden states in place of layer ``index``. Raises `_NotAChain` unless it gets those that the
        layer before returned, and no other argument depends on weights.
        """
        hidden, others = apart(arguments, keywords)
        if index != len(self.hidden) or (self.hidden and hidden is not self.hidden[-1]):
            raise _NotAChain(mistakes.layer_gets_something_else(index=index))
        leaves, form = tree_flatten(others)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise _NotAChain(mistakes.layer_gets_a_value_of_weights(index=index))
        shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves]
        self.forms.append((str(form), shapes))
        self.hidden.append(torch.empty_like(hidden).requires_grad_())
        return self.as_result(self.hidden[-1])


def apart(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Splits the arguments of a layer into the hidden states, which are the first of them, and all others."""
    if arguments:
        return arguments[0], (arguments[1:], keywords)
    first = next(iter(keywords))
    return keywords[first], ((), {name: value for name, value in keywords.items() if name != first})


def _tensor(hidden: torch.Tensor) -> Any:
    return hidden


def _in_tuple(hidden: torch.Tensor) -> Any:
    return (hidden,)


def _unused(_index: int, _arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> Any:
    raise AssertionError("a layer that was replaced")


def _owners(model: torch.nn.Module, path: str, prefix: str = "") -> Iterator[str]:
    for name, module in model.named_children():
        full = f"{prefix}{name}"
        if path.startswith(f"{full}.") or (
            full != path and isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
        ):
            yield from _owners(module, path, f"{full}.")
        elif full != path and any(True for _ in module.parameters()):
            yield full


# A model that is handed over: what layers made of its modules would leave out is refused, with what to do.

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}

_LIBRARY = ("transformers", "transformers_modules")
"""Packages in which the forwards of models are, the second of code that comes with a model."""


def given(source: torch.nn.Module, dtype: torch.dtype | None) -> Skeleton:
    """Returns the skeleton of a model whose own modules become layers. Raises `Misuse` if these would not compute what
    the model does.
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
