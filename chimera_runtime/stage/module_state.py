"""State of a module: its buffers, attributes and random generators, and the parameters that its forwards write.

All but the parameters is in containers: the ``__dict__`` of the module and of each submodule, and all dicts, lists and
sets inside them. The ``__dict__`` of any other object inside is a container, too, unless its class is of torch or
Python. Containers are compared and restored element by element, tensors by their values.

Of parameters there are seldom copies, as they take most of the memory: see `ParameterSnapshot`.
"""

import pickle
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import is_
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from chimera_runtime.errors import stage as mistakes
from chimera_runtime.stage.gradient_sums import bits
from chimera_runtime.values.mesh_tensors import is_spread, local, rest

_KINDS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_PLAIN = (bool, int, float, str)
_CLOSED = frozenset({"builtins", "torch", "numpy", "chimera_runtime", *sys.stdlib_module_names})
"""The packages whose objects, except modules, are compared as a whole: their attributes are no container."""

_ROOM = 2**26
"""Bytes of frozen parameters that may be copied even if few are trained."""

GeneratorState = tuple[Callable[[], Any], Callable[[Any], object], Any]
"""Functions that return and set the state of a random generator, and its state at one time."""


class TensorVersion(NamedTuple):
    """A tensor, one of its version numbers, and a copy of its values at that version."""

    tensor: torch.Tensor
    number: int
    copy: torch.Tensor


class ParameterVersion(NamedTuple):
    """A parameter at one time. There is a ``copy`` of its values, or a ``digest`` of their bits, or neither; ``memory``
    shows the memory of copied values, and is None if the parameter is spread over a mesh.
    """

    parameter: torch.nn.Parameter
    number: int
    memory: torch.Tensor | None = None
    copy: torch.Tensor | None = None
    digest: int | None = None

    @property
    def has_changed(self) -> bool:
        """Whether the parameter has other values now, or may have."""
        if self.copy is not None:
            return not equal(self.parameter, self.copy)
        return self.is_written if self.digest is None else _digest(self.parameter) != self.digest

    @property
    def is_written(self) -> bool:
        """Whether torch has counted a write since, or the parameter has other memory now."""
        is_elsewhere = self.memory is not None and self.memory.data_ptr() != self.parameter.data_ptr()
        return is_elsewhere or _version_of(self.parameter) != self.number

    def restore(self) -> None:
        """Gives the parameter its values and its memory again, without a write that autograd would count."""
        assert self.copy is not None
        if self.memory is None:
            local(self.parameter).copy_(self.copy)
            return
        self.parameter.data = self.memory
        self.memory.copy_(self.copy)


class Writes(NamedTuple):
    """Names of the parameters that forwards have changed since a snapshot.

    ``touched`` are those that were written, be it with the values that they had. ``changed`` have other values now;
    ``lost`` are the ones among them of which there is no copy. ``replaced`` are names for which a module has another
    parameter now, or none, or had none before.
    """

    touched: tuple[str, ...]
    changed: tuple[str, ...]
    lost: tuple[str, ...]
    replaced: tuple[str, ...]


class ParameterSnapshot:
    """The parameters of a module at one time, to find and undo what its forwards do to them.

    ``touched`` are the names of the parameters that forwards are known to write: only of these there are copies, and of
    the others version numbers. It is None as long as nothing is known. Then all trained parameters are copied, whose
    gradients will take as much memory, and of the frozen ones the smallest, up to the bytes of the trained ones. The
    rest is only watched, by digests of its bits.
    """

    def __init__(self, module: torch.nn.Module, touched: Collection[str] | None) -> None:
        self._tables = [(name, part._parameters, dict(part._parameters)) for name, part in module.named_modules()]
        named = dict(module.named_parameters())
        copied = _affordable(named.values()) if touched is None else {id(named[name]) for name in touched}
        self._versions = {name: _version_of_parameter(p, id(p) in copied, touched is None) for name, p in named.items()}

    def writes(self) -> Writes:
        """What forwards have written since the snapshot was taken; copies of other parameters are freed."""
        changed = {name: version for name, version in self._versions.items() if version.has_changed}
        touched = {name for name, version in self._versions.items() if version.is_written} | changed.keys()
        lost = tuple(name for name, version in changed.items() if version.copy is None)
        for name in self._versions.keys() - touched:
            self._versions[name] = self._versions[name]._replace(memory=None, copy=None, digest=None)
        replaced = [
            _name(place, key) if place else key
            for place, table, copy in self._tables
            for key in {**copy, **table}
            if table.get(key) is not copy.get(key) and not is_spread(copy.get(key))
        ]
        return Writes(tuple(n for n in self._versions if n in touched), (*changed,), lost, tuple(replaced))

    @torch.no_grad()
    def restore(self) -> None:
        """Gives modules their former parameters again, and parameters of which there are copies their former values."""
        for _, table, copy in self._tables:
            if not any(map(is_spread, copy.values())):
                _put(table, copy)
        for version in self._versions.values():
            if version.copy is not None and (version.is_written or version.has_changed):
                version.restore()


class StateSnapshot(NamedTuple):
    """The state of a module at one time: copies of containers, versions of tensors, states of generators, by id.

    ``written`` are the ids of the containers, tensors and generators that the forward after the snapshot has changed.
    """

    containers: Mapping[int, tuple[Any, Any]] = MappingProxyType({})
    versions: Mapping[int, TensorVersion] = MappingProxyType({})
    generators: Mapping[int, GeneratorState] = MappingProxyType({})
    written: Set[int] = frozenset()


_NOTHING = StateSnapshot()


class ModuleState:
    """Takes snapshots of a module's state around its forwards, and restores them.

    Snapshots share the copy of a tensor until the tensor changes. An ordinary snapshot covers buffers, whose version
    counters show whether they were written, and containers in which something has changed before. A ``thorough``
    snapshot covers all containers and compares values, which is slower.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._versions: Mapping[int, TensorVersion] = {}
        self._changing: set[int] = set()
        self._containers: dict[int, tuple[str, Any]] = {}
        self._watched: list[Any] = []

    def find_containers(self) -> None:
        """Finds all containers of the module as it is now."""
        self._containers = {id(container): (name, container) for name, container in _containers_in(self._module)}
        self._watch()

    @property
    def tensors(self) -> Set[int]:
        """Ids of the tensors in the newest snapshot."""
        return self._versions.keys()

    def snapshot(self, thorough: bool = False) -> StateSnapshot:
        """Takes a snapshot: of the watched containers, or of all containers if ``thorough``."""
        if not self._containers:
            self.find_containers()
        containers = [container for _, container in self._containers.values()] if thorough else self._watched
        if not containers:
            return _NOTHING
        # A snapshot is shallow: copies of containers, a copy of each tensor that has changed, states of generators.
        copies: dict[int, tuple[Any, Any]] = {}
        versions: dict[int, TensorVersion] = {}
        generators: dict[int, GeneratorState] = {}
        for container in containers:
            copy = container.copy()
            copies[id(container)] = container, copy
            for element in _elements(copy) if copy else ():
                if isinstance(element, torch.Tensor):
                    if not isinstance(element, torch.nn.Parameter):
                        versions[id(element)] = self._version(element, thorough)
                elif (access := _access(element)) is not None:
                    generators[id(element)] = (*access, access[0]())
        self._versions = versions
        return StateSnapshot(copies, versions, generators)

    def with_changes(self, before: StateSnapshot, thorough: bool = False) -> StateSnapshot:
        """Returns the snapshot ``before`` a forward with ``written`` filled in; later snapshots watch containers that
        have changed.
        """
        written = self._changes(before, thorough)
        if not written:
            return before
        changing = {key for key, (_, copy) in before.containers.items() if key in written or _has(copy, written)}
        if not changing <= self._changing:
            self._changing |= changing
            self._watch()
        return before._replace(written=written)

    @contextmanager
    def as_of(self, former: StateSnapshot, thorough: bool = False) -> Iterator[list[str]]:
        """Context for the second run of a forward: the module has its ``former`` state, afterwards the present one.
        Yields a list, which names at the end everything that the second run has changed and the first had not.
        """
        strays: list[str] = []
        present = self.snapshot(thorough)
        # Replace what differs between then and now, and what the second run will write: tensors by clones of then.
        differing = self._differing(former, present.versions) | former.written
        clones: dict[int, torch.Tensor] = {}

        def earlier(element: Any) -> Any:
            key = id(element)
            if key not in differing or key not in former.versions:
                return element
            return clones.setdefault(key, former.versions[key].copy.clone())

        replaced = [
            (container, copy, container.copy())
            for key, (container, copy) in former.containers.items()
            if key in differing or _has(copy, differing)
        ]
        drawn = [(put, state, get()) for get, put, state in former.generators.values()]
        for container, copy, _ in replaced:
            _put(container, _mapped(copy, earlier))
        for put, state, _ in drawn:
            put(state)
        try:
            yield strays
        finally:
            for container, _, copy in replaced:
                _put(container, copy)
            for put, _, state in drawn:
                put(state)
        strays += self.names(present, self._changes(present, thorough))

    @torch.no_grad()
    def restore(self, former: StateSnapshot) -> None:
        """Gives the module the ``former`` state again; tensors keep their memory."""
        differing = self._changes(former, thorough=True)
        for container, copy in former.containers.values():
            if id(container) in differing:
                _put(container, copy)
        for key in differing & former.versions.keys():
            tensor, _, copy = former.versions[key]
            if tensor.shape == copy.shape:
                tensor.copy_(copy)
            else:
                tensor.data = copy.clone()
        for _, put, state in former.generators.values():
            put(state)

    def changed(self, before: StateSnapshot) -> list[str]:
        """Names of everything in a snapshot that has another value now, such as ``block.cache``."""
        return self.names(before, self._changes(before, thorough=True))

    def names(self, before: StateSnapshot, keys: Set[int]) -> list[str]:
        """Names of the containers, tensors and generators of a snapshot that have the ids ``keys``."""
        names: dict[str, None] = {}
        for key, (container, copy) in before.containers.items():
            place, _ = self._containers.get(key, ("", None))
            if key in keys:
                names |= dict.fromkeys(_different(place, copy, container))
            if _has(copy, keys):
                names |= dict.fromkeys(name for name, element in _named(place, copy) if id(element) in keys)
        return [*names]

    def _watch(self) -> None:
        buffers = {id(part._buffers) for part in self._module.modules() if part._buffers}
        watched = buffers | self._changing
        self._watched = [container for key, (_, container) in self._containers.items() if key in watched]

    def _version(self, tensor: torch.Tensor, thorough: bool) -> TensorVersion:
        number = _version_of(tensor)
        last = self._versions.get(id(tensor))
        if last is not None and last.tensor is tensor and last.number == number:
            if not thorough or equal(tensor, last.copy):  # a write through .data leaves the number as it is
                return last
        elif last is not None and last.tensor is tensor and thorough and equal(tensor, last.copy, unknown=False):
            return last._replace(number=number)
        return TensorVersion(tensor, number, tensor.detach().clone())

    def _changes(self, before: StateSnapshot, thorough: bool) -> set[int]:
        if not before.containers:
            return set()
        return self._differing(before, self.snapshot(thorough).versions)

    def _differing(self, before: StateSnapshot, versions: Mapping[int, TensorVersion]) -> set[int]:
        """Ids of everything in a snapshot that has another value now; ``versions`` has the tensors' versions of now."""
        differing = {key for key, (container, copy) in before.containers.items() if not _same(container, copy)}
        for key, version in before.versions.items():
            later = versions.get(key)
            if later is not None and later.copy is not version.copy:
                differing.add(key)
        for key, (get, _, state) in before.generators.items():
            if not _same_state(get(), state):
                differing.add(key)
        return differing


class ModuleSnapshot:
    """Everything of a module at one time that its forwards may change; ``touched`` is as in `ParameterSnapshot`."""

    def __init__(self, module: torch.nn.Module, touched: Collection[str] | None = ()) -> None:
        self.parameters = ParameterSnapshot(module, touched)
        self._state = ModuleState(module)
        self._contents = self._state.snapshot(thorough=True)

    def restore(self) -> None:
        """Gives the module its former state again, and parameters of which there are copies."""
        self.parameters.restore()
        self._state.restore(self._contents)


@contextmanager
def unchanged(stage: int, module: torch.nn.Module, touched: Collection[str]) -> Iterator[None]:
    """Context of forwards of a stage, at whose end the module has its former state. Raises `BadModel` if a forward has
    written a parameter that no forward wrote at start: its values are lost.
    """
    snapshot = ModuleSnapshot(module, touched)
    yield
    lost = snapshot.parameters.writes().lost
    snapshot.restore()
    rest(module)
    if lost:
        raise mistakes.forward_begins_to_write(stage=stage, name=lost[0])


def _affordable(parameters: Collection[torch.nn.Parameter]) -> set[int]:
    """Ids of the parameters that are copied while nothing is known of them."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    room = max(_ROOM, sum(local(parameter).nbytes for parameter in trained))
    copied = {id(parameter) for parameter in trained}
    for frozen in sorted((p for p in parameters if not p.requires_grad), key=lambda p: local(p).nbytes):
        room -= local(frozen).nbytes
        if room < 0:
            break
        copied.add(id(frozen))
    return copied


def _version_of_parameter(parameter: torch.nn.Parameter, is_copied: bool, is_digested: bool) -> ParameterVersion:
    version = ParameterVersion(parameter, _version_of(parameter))
    if is_copied:
        memory = None if is_spread(parameter) else parameter.data
        return version._replace(memory=memory, copy=local(parameter).clone())
    return version._replace(digest=_digest(parameter)) if is_digested else version


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _digest(tensor: torch.Tensor) -> int | None:
    values = local(tensor)
    return None if values.is_meta or values.layout != torch.strided else bits(values)


def _containers_in(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields every container of a module once, with a prefix for the names of its elements."""
    reached: set[int] = set()
    stack: list[tuple[str, Any]] = [("", module)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, tuple):
            stack += [(name, element) for element in value]
            continue
        container = vars(value) if _is_open(value) else value
        if type(container) not in _KINDS or id(container) in reached:
            continue
        reached.add(id(container))
        yield name, container
        stack += [(inner, element) for inner, element in _named(name, container) if inner is not None]


def _named(name: str, container: Any) -> Iterator[tuple[str, Any]]:
    """Yields each element of a container as a pair (name, element), except the dict of a module's parameters."""
    if not isinstance(container, dict):
        yield from ((name, element) for element in container)
        return
    for key, element in [*container.items()]:
        if key != "_parameters":
            yield _name(name, key), element


def _name(name: str, key: Any) -> str:
    return name if key in ("_buffers", "_modules") else f"{name}.{key}" if name else str(key)


def _is_open(value: Any) -> bool:
    """Whether the ``__dict__`` of an object counts as a container, whose elements belong to the state of the module."""
    has_container = _may_be_open(type(value))  # type: ignore[arg-type]  # to mypy a class has no hash
    return has_container and type(getattr(value, "__dict__", None)) is dict


@lru_cache(maxsize=1024)
def _may_be_open(kind: type) -> bool:
    if issubclass(kind, torch.nn.Module | SimpleNamespace):
        return True
    return str(kind.__module__).split(".")[0] not in _CLOSED and not issubclass(kind, type)


def _elements(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _has(container: Any, keys: Set[int]) -> bool:
    return bool(container) and not keys.isdisjoint(map(id, _elements(container)))


def _same(container: Any, copy: Any) -> bool:
    if len(container) != len(copy):
        return False
    # Mostly nothing has changed: the same keys and elements in the same order, which needs no loop in Python. Most
    # containers are tables of hooks, with nothing in them.
    if not copy or (all(map(is_, _elements(container), _elements(copy))) and all(map(is_, container, copy))):
        return True
    if isinstance(container, dict):
        return all(key in copy and _same_element(element, copy[key]) for key, element in container.items())
    return bool(container == copy) if isinstance(container, set) else all(map(_same_element, container, copy))


def _same_element(element: Any, former: Any) -> bool:
    return element is former or (type(element) is type(former) and isinstance(element, _PLAIN) and element == former)


def _different(place: str, copy: Any, container: Any) -> Iterator[str]:
    if not isinstance(container, dict):
        yield place
        return
    absent = object()
    for key in {**copy, **container}:
        if not _same_element(copy.get(key, absent), container.get(key, absent)):
            yield _name(place, key)


def _mapped(copy: Any, change: Any) -> Any:
    if isinstance(copy, dict):
        return {key: change(element) for key, element in copy.items()}
    return [change(element) for element in copy]


def _put(container: Any, elements: Any) -> None:
    if not isinstance(container, dict):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(elements)
        return
    for key in container.keys() - elements.keys():
        del container[key]
    for key, element in elements.items():
        if key not in container or container[key] is not element:
            container[key] = element


def equal(tensor: torch.Tensor, copy: torch.Tensor, unknown: bool = True) -> bool:
    """Whether a tensor has the same values as its copy; ``unknown`` is returned if values cannot be read."""
    values, copied = local(tensor), local(copy)
    if values.is_meta or values.layout != torch.strided:
        return unknown
    if values.shape != copied.shape or values.dtype != copied.dtype:
        return False
    return torch.equal(values, copied) or bool(((values == copied) | ((values != values) & (copied != copied))).all())


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Returns two functions for a random generator, which get and set its state; None if the value is no generator."""
    if not _may_be_generator(type(value)):  # type: ignore[arg-type]  # to mypy a class has no hash
        return None
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if hasattr(value, "bit_generator"):
        return lambda: value.bit_generator.state, partial(setattr, value.bit_generator, "state")
    return partial(value.get_state, legacy=False), value.set_state


@lru_cache(maxsize=1024)
def _may_be_generator(kind: type) -> bool:
    """Whether objects of a class are random generators. Answers are kept, because this is asked very often."""
    if issubclass(kind, torch.Generator | random.Random):
        return True
    return str(kind.__module__).startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")


def _same_state(state: Any, former: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return torch.equal(state, former)
    return pickle.dumps(state) == pickle.dumps(former)
