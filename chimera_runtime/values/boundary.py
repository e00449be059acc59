"""`Boundary` and `Traits`: the tensors that a stage hands on, and its behaviour, as found with one micro-batch."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter, signature
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from chimera_runtime.errors import stage as mistakes
from chimera_runtime.values.last_stage import alone
from chimera_runtime.values.nested import Constant, Form, Tensors, first_part, form_of, leaves, taken_apart
from chimera_runtime.values.shared_memory import versions_of_value

# Carries: what a stage leaves for the next slice of a micro-batch, such as keys and values of attention.
#
# A stage that looks back says so by its signature: ``forward(x, carry=None, start=0)`` returns its output and a carry.
# It gets the carry of the slice before, None for the first slice, and the position at which its slice starts. The carry
# of a stack of layers is a dict of the carries of its layers.

CARRY, START = "carry", "start"
"""Names of the parameters by which a forward takes the carry, and the position of the first item of its slice."""

OF_LAYERS = "_of_layers"
"""Name of the keyword argument in which a stack of layers gets carry and start, apart from those of a batch."""

_BY_NAME = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}


@dataclass(frozen=True)
class SliceArguments:
    """Arguments of slices that the forward of a stage takes: ``carry``, ``start``, both or neither.

    A forward that takes a carry also returns one. A stack of layers, ``by_layer``, passes the arguments on to them.
    """

    carry: bool = False
    start: bool = False
    by_layer: bool = False

    @property
    def any(self) -> bool:
        """Whether the forward takes any argument of slices."""
        return self.carry or self.start

    def without(self, keywords: Container[str]) -> "SliceArguments":
        """Returns these arguments without those names that the user's ``keywords`` have: such a name is the user's."""
        return replace(self, carry=self.carry and CARRY not in keywords, start=self.start and START not in keywords)

    def split_result(self, name: str, returned: Any) -> tuple[Any, Any]:
        """Returns the output and the carry in what a forward has returned; the carry is None if there is none.

        Raises `BadModel` if a forward that takes a carry returns anything but a pair.
        """
        if not self.carry:
            return returned, None
        if type(returned) is not tuple or len(returned) != 2:
            raise mistakes.carry_is_not_returned(name=name, kind=type(returned).__name__)
        return returned


NO_ARGUMENTS = SliceArguments()


def slice_arguments(module: torch.nn.Module) -> SliceArguments:
    """Returns which arguments of slices a module names in the signature of its forward."""
    inner = getattr(module, "_orig_mod", module)  # the module inside that of torch.compile
    named = getattr(inner, "slice_arguments", None)
    if isinstance(named, SliceArguments):
        return named
    try:
        parameters = list(signature(inner.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return NO_ARGUMENTS
    names = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    return SliceArguments(CARRY in names, START in names)


@dataclass(frozen=True)
class Carry:
    """Carry from a slice to the next: tensors without a graph, ``recorded`` if they require a gradient.

    ``position`` is where the next slice starts.
    """

    tensors: Tensors
    recorded: tuple[bool, ...]
    form: Form
    position: int

    @classmethod
    def of(cls, value: Any, position: int) -> "Carry":
        """Returns the carry that a forward has returned; ``position`` is that of the first item of the next slice."""
        tensors, form = taken_apart(value)
        return cls(tuple([t.detach() for t in tensors]), tuple([t.requires_grad for t in tensors]), form, position)

    def leaves(self) -> Tensors:
        """Returns the tensors as leaves of a new graph, without copying them."""
        return tuple([t.detach().requires_grad_(r) for t, r in zip(self.tensors, self.recorded, strict=True)])

    def arguments(self, takes: SliceArguments, tensors: Tensors) -> Mapping[str, Any]:
        """Returns the keyword arguments with which a forward reads this carry, with other ``tensors`` in it."""
        arguments: dict[str, Any] = {CARRY: self.form.filled(tensors)} if takes.carry else {}
        if takes.start:
            arguments[START] = self.position
        return {OF_LAYERS: arguments} if takes.by_layer and arguments else arguments

    @property
    def opaque(self) -> str | None:
        """The type of some part of the carry that is no tensor and no constant, and so may hide tensors; else None."""
        kinds = [type(e).__name__ for e in self.form.entries if e is not ... and not isinstance(e, Constant)]
        return kinds[0] if kinds else None

    def layout(self) -> tuple[Form, list[tuple[tuple[int, ...], torch.dtype]]]:
        """Returns what must be equal for the same slice of all micro-batches: structure, shapes and dtypes."""
        return self.form, [(tuple(t.shape), t.dtype) for t in self.tensors]


NO_CARRY = Carry((), (), form_of(None), 0)
"""The carry that the first slice of a micro-batch reads."""


def slice_length(argument: Any) -> int:
    """Returns the number of items of a slice: dimension 1 of the first tensor that has one; 0 if none has one."""
    tensors = (leaf for leaf in leaves(argument) if isinstance(leaf, torch.Tensor))
    return next((tensor.size(1) for tensor in tensors if tensor.dim() > 1), 0)


# Keyword arguments: a dict that goes with a micro-batch; each stage or layer takes the names in its signature.

Keywords = dict[str, Any]
"""Nested tensors by the names of the stages' parameters: with items along dimension 0, or anything under a `Whole`."""

NO_KEYWORDS: Keywords = {}
"""The keyword arguments of a stage that takes none; nothing may write them."""


class Whole(str):
    """Name of what is not cut by items: see `whole`. It equals the name without the declaration."""

    __slots__ = ()


def whole(name: str) -> str:
    """The name of a keyword argument that every micro-batch gets as it is, such as borders of packed documents.

    It stands in the example's keyword arguments, ``{whole("borders"): borders}``, or in those of a dataset's items. The
    value has no items along dimension 0, and may differ from step to step. Later batches may have the plain name.

    In an input by source, ``{whole("image"): patches, "text": words}``, it declares an entry whose rows are no items,
    such as patches, in each micro-batch that a function makes.
    """
    return Whole(name)


def cut(keywords: Keywords, part: Callable[[Any], Any]) -> Keywords:
    """Returns keyword arguments with a ``part`` of each, but of those that are whole."""
    return {name: value if isinstance(name, Whole) else part(value) for name, value in keywords.items()}


def cut_alone(keywords: Keywords) -> Keywords:
    """Returns the keyword arguments, or the entries of an input, that are cut by items."""
    return {name: value for name, value in keywords.items() if not isinstance(name, Whole)}


def borders_in(keywords: Keywords) -> str | None:
    """Returns the first of the keyword arguments that are cut with whole numbers that rise from 0, as borders do."""
    for name, value in cut_alone(keywords).items():
        for leaf in leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.dim() == 1 and len(leaf) > 2 and not leaf.is_meta:
                numbers = leaf.tolist() if leaf.dtype in _WHOLE_NUMBERS else [1]
                if numbers[0] == 0 < numbers[-1] and numbers == sorted(numbers):
                    return name
    return None


_WHOLE_NUMBERS = {torch.int16, torch.int32, torch.int64}


@dataclass(frozen=True)
class KeywordNames:
    """Names of keyword arguments: of the ``example``, ``needed`` by stages of this rank, declared as ``whole``."""

    example: frozenset[str]
    needed: frozenset[str]
    whole: frozenset[str] = frozenset()

    def declared(self, keywords: Keywords, what: str) -> Keywords:
        """Returns keyword arguments with a `Whole` for each name that the example has so.

        Raises `Misuse` if the example lacks a name in ``keywords``, or has it without the declaration, or if
        ``keywords`` lacks one that this rank needs. ``what`` names the keyword arguments in the error.
        """
        names = keywords.keys()
        if unknown := sorted(names - self.example):
            raise mistakes.keyword_is_not_in_the_example(what=what, name=unknown[0])
        if missing := sorted(self.needed - names):
            raise mistakes.keyword_is_missing(what=what, name=missing[0])
        if undeclared := [name for name in keywords if isinstance(name, Whole) and name not in self.whole]:
            raise mistakes.keyword_is_not_whole_in_the_example(what=what, name=undeclared[0])
        if not self.whole:
            return keywords
        return {Whole(name) if name in self.whole else name: value for name, value in keywords.items()}


def versions_in(keywords: Keywords, names: Iterable[str]) -> list[list[int]]:
    """The version counters of the tensors in each of the keyword arguments with some ``names``."""
    return [*map(versions_of_value, map(keywords.__getitem__, names))]


def require_unwritten(stage: int, keywords: Keywords, names: Sequence[str], before: list[list[int]]) -> None:
    """Raises `BadModel` if a forward has written one of the keyword arguments ``names``, which had the versions
    ``before``. Other stages take these as well: the change would reach those on this rank, but not on others.
    """
    for name, earlier, now in zip(names, before, versions_in(keywords, names), strict=True):
        if now != earlier:
            raise mistakes.keyword_was_written(stage=stage, name=name)


def require_unused(loss: Callable[..., Any], names: Collection[str]) -> None:
    """Raises `Misuse` if the loss has a parameter with the name of a keyword argument: only stages get these."""
    try:
        parameters = signature(loss).parameters
    except (TypeError, ValueError):
        return
    bound = getattr(loss, "keywords", {})  # the arguments of a functools.partial
    if name := next((name for name in [*parameters][2:] if name in names and name not in bound), None):
        raise mistakes.loss_takes_a_keyword(name=name)


def accepted(module: torch.nn.Module, names: Collection[str], before: "Boundary | None" = None) -> tuple[str, ...]:
    """Returns the names that the ``forward`` of a stage takes in addition to its input; all if it has ``**kwargs``."""
    feeds = [feed.keyword for feed in before.feeds] if before is not None and before.feeds else [""]
    return _accepted(module, [name for name in names if name not in feeds], feeds.count(""))


def _accepted(module: torch.nn.Module, names: Collection[str], positional: int) -> tuple[str, ...]:
    """Returns the names that a ``forward`` takes in addition to its ``positional`` first arguments."""
    if not names:
        return ()
    module = alone(module)
    if isinstance(module, Stack):
        layers = enumerate(module.values())
        taken_by_layers = {
            name for place, layer in layers for name in _accepted(layer, names, 1 if place else positional)
        }
        return tuple(name for name in names if name in taken_by_layers)
    forward = getattr(module, "_orig_mod", module).forward  # the module inside that of torch.compile
    parameters = list(signature(forward).parameters.values())
    for _ in range(positional):
        if parameters and parameters[0].kind in {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}:
            del parameters[0]
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(names)
    by_name = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    return tuple(name for name in names if name in by_name)


class Stack(torch.nn.ModuleDict):
    """A stage made of layers, under their index in the model; each layer gets the output of the layer before.

    If some layers have carries, the stage has one as well: a dict of these layers' carries, by index.
    """

    def __init__(self, layers: Mapping[str, torch.nn.Module]) -> None:
        super().__init__(layers)
        self._takes = {index: slice_arguments(layer) for index, layer in layers.items()}
        takes = self._takes.values()
        self.slice_arguments = SliceArguments(any(t.carry for t in takes), any(t.start for t in takes), by_layer=True)

    def forward(self, *values: Any, **keywords: Any) -> Any:
        """Runs the layers, each with the keyword arguments that it accepts, and with its own carry.

        Only a stage that several stages feed gets several ``values``, which the first layer takes.
        """
        of_slice = keywords.pop(OF_LAYERS, {})
        before, carries = of_slice.get(CARRY) or {}, {}
        for index, layer in self.items():
            takes = self._takes[index]
            named = {name: keywords[name] for name in _accepted(layer, keywords, len(values))}
            if takes.start and START in of_slice:
                named[START] = of_slice[START]
            if takes.carry and CARRY in of_slice:
                returned = layer(*values, **named, carry=before.get(index))
                value, carries[index] = takes.split_result(f"layer {index}", returned)
            else:
                value = layer(*values, **named)
            values = (value,)
        return (value, carries) if CARRY in of_slice else value


KIND = attrgetter("shape", "dtype", "requires_grad")
"""Shape, dtype, and whether a gradient is required, of a tensor."""


@dataclass(frozen=True)
class Boundary:
    """Structure, shapes and dtypes of the value that a stage hands to the next one for every micro-batch.

    ``shapes``, ``dtypes``, ``recorded``, ``differentiable`` and ``owned_by_stage`` have an entry for each tensor in
    ``form``; ``shapes`` are those for one micro-batch.

    A tensor is ``recorded`` if it requires a gradient. It is ``differentiable`` if its gradient comes back: it requires
    one, and a later stage uses the tensor. It is ``owned_by_stage`` if the stage keeps its memory, such as that of a
    buffer: then a copy is handed on, because a later forward may write the memory.

    ``counted`` says that a message of gradients also has the loss count of each micro-batch, in float64. If slices have
    unequal lengths, or the micro-batches of a round differ, ``of_micros`` has the shapes of each slice, or of each
    micro-batch, and ``shapes`` are the largest.

    ``feeds`` are the values that a stage gets from several stages, or as a keyword argument: see `joined_boundary`.
    """

    form: Form
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    recorded: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    counted: bool = False
    owned_by_stage: tuple[bool, ...] = ()
    of_micros: tuple[tuple[tuple[int, ...], ...], ...] = ()
    feeds: "tuple[FeedingBoundary, ...]" = ()

    @classmethod
    def of(cls, form: Form, tensors: Tensors) -> "Boundary":
        """Describes the outputs of a micro-batch; every tensor that requires a gradient counts as differentiable."""
        recorded = tuple(t.requires_grad for t in tensors)
        return cls(form, tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors), recorded, recorded)

    def with_slices(self, others: "Sequence[Boundary]") -> "Boundary | None":
        """Merges this boundary, of slice 0, with those of the ``others``; None if they differ in more than shapes."""
        slices = (self, *others)
        if any(
            (b.form, b.dtypes, [*map(len, b.shapes)]) != (self.form, self.dtypes, [*map(len, self.shapes)])
            for b in others
        ):
            return None
        largest = tuple(max(shapes, key=math.prod) for shapes in zip(*(b.shapes for b in slices), strict=True))
        return replace(self, shapes=largest, of_micros=tuple(b.shapes for b in slices))

    def at(self, micro: int) -> "Boundary":
        """Returns the boundary for one micro-batch, with its own shapes if they differ."""
        return self._by_micro[micro % len(self._by_micro)] if self.of_micros else self

    @cached_property
    def _by_micro(self) -> "list[Boundary]":
        of_shapes = {shapes: replace(self, shapes=shapes, of_micros=()) for shapes in {*self.of_micros}}
        return [*map(of_shapes.__getitem__, self.of_micros)]

    @cached_property
    def kinds(self) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
        """The `KIND` of each tensor of one micro-batch; outputs of equal kinds have no `mismatch`."""
        return [*zip(self.shapes, self.dtypes, self.recorded, strict=True)]

    def shape(self, tensor: int, micros: int) -> tuple[int, ...]:
        """The shape of tensor number ``tensor`` in a message of ``micros`` micro-batches, joined along dimension 0."""
        rows = self.shapes[tensor]
        return rows if micros == 1 else (micros * rows[0], *rows[1:])

    def without(self, sources: Collection[int]) -> "Boundary":
        """Returns the boundary of a micro-batch that the feeding stages ``sources`` do not have."""
        feeds = [feed._replace(is_present=feed.source not in sources) for feed in self.feeds]
        return _joined(feeds, self.counted)

    @property
    def apart(self) -> "tuple[Boundary, ...]":
        """The boundaries that this one joins, in their order; itself if it joins none."""
        return tuple(feed.boundary for feed in self.feeds) or (self,)

    def gradient_places(self) -> "list[tuple[int, tuple[int, ...]]]":
        """Returns the stages that get gradients back, each with the places of its own in a message of all gradients.

        The places include that of the loss count, the last one, if there is one.
        """
        places, start = list[tuple[int, tuple[int, ...]]](), 0
        for feed in (feed for feed in self.feeds if feed.is_present):
            end = start + sum(feed.boundary.differentiable)
            if feed.backs:
                places.append((feed.source, (*range(start, end), *((-1,) if self.counted else ()))))
            start = end
        return places

    def buffers(self, device: torch.device, micros: int = 1) -> Tensors:
        """Allocates the buffers of one message of activations."""
        return tuple(
            torch.zeros(self.shape(i, micros), dtype=dtype, device=device) for i, dtype in enumerate(self.dtypes)
        )

    def gradient_buffers(self, device: torch.device, micros: int = 1) -> Tensors:
        """Allocates the buffers of one message of gradients: one for each differentiable tensor, and loss counts."""
        gradients = compress(self.buffers(device, micros), self.differentiable)
        counts = (torch.zeros(micros, dtype=torch.float64, device=device),) if self.counted else ()
        return (*gradients, *counts)

    def views(self, memory: Tensors, micros: int, first: int = 0) -> Tensors:
        """Returns views of larger buffers in the shapes of a message of activations, from micro-batch ``first`` on."""
        boundary = self.at(first)
        return tuple(first_part(tensor, boundary.shape(i, micros)) for i, tensor in enumerate(memory))

    def gradient_views(self, memory: Tensors, micros: int, first: int = 0) -> Tensors:
        """Returns views of buffers in the shapes of a message of gradients, as `views` does for activations."""
        boundary = self.at(first)
        shapes = compress([boundary.shape(i, micros) for i in range(len(self.shapes))], self.differentiable)
        counts = [(micros,)] if self.counted else []
        return tuple(map(first_part, memory, [*shapes, *counts]))

    def excess(self, outputs: Tensors, form: Form) -> str | None:
        """Returns why outputs of another size do not fit into buffers of this boundary; None if they fit."""
        if form != self.form:
            return f"{form}, and {self.form} for the example"
        for output, shape, dtype in zip(outputs, self.shapes, self.dtypes, strict=True):
            if output.numel() > math.prod(shape) or output.dtype != dtype:
                return f"a tensor {tuple(output.shape)} {output.dtype}, and {shape} {dtype} for the example"
        return None

    def of_items(self, items: int, whole: int) -> "Boundary | None":
        """Returns the boundary of a micro-batch of ``items`` items, computed from this one, for ``whole`` items.

        None if the rows of some tensor cannot be divided equally among the items.
        """
        if not all(shape and shape[0] % whole == 0 for shape in self.shapes):
            return None
        return replace(self, shapes=tuple((shape[0] // whole * items, *shape[1:]) for shape in self.shapes))

    def with_leaves(self, outputs: Tensors) -> Tensors:
        """Returns outputs in which a tensor without a graph, of which stages send gradients back, is a leaf: the
        gradients end there.
        """
        recorded = (*self.recorded, *(False for _ in outputs[len(self.recorded) :]))
        pairs = zip(outputs, recorded, strict=False)
        return tuple([t.detach().requires_grad_() if is_due and not t.requires_grad else t for t, is_due in pairs])

    def mismatch(self, outputs: Tensors, form: Form, micros: int) -> str | None:
        """Returns how outputs of ``micros`` micro-batches, in grad mode also their gradients, differ from this."""
        if len(outputs) != len(self.shapes):
            return f"{len(outputs)} tensor{'' if len(outputs) == 1 else 's'} instead of {len(self.shapes)}"
        for i, output in enumerate(outputs):
            shape = self.shape(i, micros)
            if output.shape != shape or output.dtype != self.dtypes[i]:
                now, before = f"{tuple(output.shape)} {output.dtype}", f"{shape} {self.dtypes[i]}"
                return f"tensor {i} is {now} and was {before} for the first micro-batch"
            if torch.is_grad_enabled() and output.requires_grad != self.recorded[i]:
                return f"tensor {i} requires a gradient for one micro-batch and none for another"
        return None if form == self.form else f"{form} and was {self.form} for the first micro-batch"


class FeedingBoundary(NamedTuple):
    """An argument of a stage from the stage ``source``, which has a backward if it ``backs``.

    It is the argument ``keyword``, or without a keyword the next positional one; None if it is not ``is_present``.
    """

    source: int
    keyword: str
    boundary: Boundary
    backs: bool
    is_present: bool = True


def joined_boundary(feeds: Sequence[FeedingBoundary], *, at_times: bool = False) -> Boundary | None:
    """Joins the boundaries before a stage to one with the tensors of all; None if no stage feeds it.

    The form is a tuple of what each stage hands on: `called` makes arguments of it. What one stage hands on, without a
    keyword, stays as it is, if it comes always and not ``at_times``.
    """
    if not feeds or (len(feeds) == 1 and not feeds[0].keyword and not at_times):
        return feeds[0].boundary if feeds else None
    return _joined(feeds, feeds[0].boundary.counted)


def _joined(feeds: Sequence[FeedingBoundary], counted: bool) -> Boundary:
    boundaries = [feed.boundary for feed in feeds if feed.is_present]

    def together(name: str) -> tuple[Any, ...]:
        return tuple(entry for boundary in boundaries for entry in getattr(boundary, name))

    def value_of(feed: FeedingBoundary) -> Any:
        return feed.boundary.form.filled([...] * len(feed.boundary.shapes)) if feed.is_present else None

    return Boundary(
        form_of(tuple(map(value_of, feeds))),
        shapes=together("shapes"),
        dtypes=together("dtypes"),
        recorded=together("recorded"),
        differentiable=together("differentiable"),
        counted=counted,
        of_micros=tuple(sum(shapes, ()) for shapes in zip(*(b.of_micros for b in boundaries), strict=True)),
        feeds=tuple(feeds),
    )


def called(forward: Callable[..., Any], before: Boundary | None) -> Callable[..., Any]:
    """Returns a function of the value that ``before`` describes, which calls ``forward`` with an argument for each feed
    if these are joined.
    """
    if before is None or not before.feeds:
        return forward
    keywords = [feed.keyword for feed in before.feeds]

    def call(values: Sequence[Any], **named: Any) -> Any:
        given = [*zip(keywords, values, strict=True)]
        by_name = {keyword: value for keyword, value in given if keyword}
        return forward(*[value for keyword, value in given if not keyword], **by_name, **named)

    return call


@dataclass(frozen=True)
class Traits:
    """Behaviour that a stage showed with the first micro-batch, at start. A text is empty if there was nothing to note.

    ``buffers`` are the buffers that the stage updates in its forward. ``alone`` is the reason why the stage cannot run
    several micro-batches in one call, ``whole`` the reason why the backward cannot be split into two halves.
    ``keywords`` are the keyword arguments that the stage takes; ``shared`` the ones that other stages take as well,
    ``uncut`` the ones that are whole. ``auxiliary`` are its auxiliary losses, ``reports`` its reports. ``seeds_all``
    says that it draws from the generators of Python or NumPy. ``in_place`` names arguments that the stage writes: then
    it gets copies of the user's inputs and keyword arguments. ``changed`` are the parameters whose values the forward
    changes; ``touched`` are those that it writes, be it with the values that they have. ``evaluates`` says that all of
    it is in evaluation mode.
    """

    buffers: tuple[str, ...]
    alone: str
    keywords: tuple[str, ...] = ()
    auxiliary: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    whole: str = ""
    seeds_all: bool = False
    in_place: str = ""
    shared: tuple[str, ...] = ()
    uncut: tuple[str, ...] = ()
    takes: SliceArguments = NO_ARGUMENTS
    changed: tuple[str, ...] = ()
    touched: tuple[str, ...] = ()
    evaluates: bool = False


def traits_of_slices(traits: Sequence[Traits]) -> Traits:
    """Merges the traits that a stage showed with each slice of a micro-batch into the traits of the stage."""
    return replace(
        traits[0],
        buffers=tuple(dict.fromkeys(name for of_slice in traits for name in of_slice.buffers)),
        alone=next((of_slice.alone for of_slice in traits if of_slice.alone), ""),
        auxiliary=tuple(sorted({name for of_slice in traits for name in of_slice.auxiliary})),
        reports=tuple(sorted({name for of_slice in traits for name in of_slice.reports})),
        whole=next((of_slice.whole for of_slice in traits if of_slice.whole), ""),
        seeds_all=any(of_slice.seeds_all for of_slice in traits),
        in_place=next((of_slice.in_place for of_slice in traits if of_slice.in_place), ""),
    )


def with_shared(traits: Sequence[Traits]) -> list[Traits]:
    """Returns the traits of all stages with ``shared`` filled in."""
    takers = Counter(name for of_stage in traits for name in of_stage.keywords)
    return [replace(t, shared=tuple(name for name in t.keywords if takers[name] > 1)) for t in traits]


def keyword_names(traits: Sequence[Traits], stages: Iterable[int]) -> KeywordNames:
    """Returns the names of the keyword arguments that any stage takes, and of those that the given ``stages`` take."""
    return KeywordNames(
        example=frozenset(name for of_stage in traits for name in of_stage.keywords),
        needed=frozenset(name for stage in stages for name in traits[stage].keywords),
        whole=frozenset(name for of_stage in traits for name in of_stage.uncut),
    )
