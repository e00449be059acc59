"""Parameters that stages share: what a model says of them, and one object on each rank that holds several ends."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.model.model import Model
from chimera_runtime.program.job import Job
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.ranks.world import World
from chimera_runtime.values.shards import is_spread

End = tuple[int, str]
"""A parameter by its stage and its name there, which begins with the index of its layer where there are layers."""

Modules = Mapping[int, torch.nn.Module]
"""The modules of stages, by their number."""

_FORM = '[[(0, "embedding.weight"), ({last}, "head.weight")]]'


@dataclass(frozen=True)
class Tie:
    """Parameters that the same stages share: one weight group, with one sum and one step.

    ``parameters`` has the ends of each parameter; its first end gives the initial value. ``stages`` are ascending. A
    single one is that of layers that share parameters: then they are of its weight group.
    """

    stages: Group
    parameters: tuple[tuple[End, ...], ...]


def declared(model: Model, job: Job) -> tuple[Tie, ...]:
    """The ties of a model for the stages of a program, in the order of the program; then those within one stage.

    Raises
    ------
    Misuse
        If they are no ties, or the program was compiled for others.
    """
    said: Any = []
    if model.tied is not None:
        with UserCode(f"tied({job.stages})", MISUSED):
            said = model.tied(job.stages)
    by_stages: dict[Group, list[tuple[End, ...]]] = defaultdict(list)
    for ends in _read(said, job.stages, model):
        by_stages[tuple(sorted({stage for stage, _ in ends}))].append(ends)
    across = [stages for stages in by_stages if len(stages) > 1]
    if {*across} != {*job.ties}:
        raise Misuse(
            f"{model.file}: {_in_words(across)}, and {job.name} was compiled for a model that {_in_words(job.ties)}: "
            f"compile it again with {_options(across)}"
        )
    within = sorted(by_stages.keys() - {*across})
    return tuple(Tie(stages, tuple(by_stages[stages])) for stages in (*job.ties, *within))


def _read(said: Any, stages: int, model: Model) -> Iterator[tuple[End, ...]]:
    """The ends of each parameter, if each is one that there may be; of layers, by the stages that they are in."""
    layers, seen = model.layers, set[End]()
    kind, count = ("stage", stages) if layers is None else ("layer", len(layers.layers))
    called = f"{model.file}: tied({stages})"
    try:
        listed = [[(int(number), str(name)) for number, name in ends] for ends in said]
    except (TypeError, ValueError):
        form = _FORM.format(last="num_stages - 1" if layers is None else count - 1)
        raise Misuse(f"{called} returned {said!r:.80}: return lists of ends, as in {form}") from None
    for ends in listed:
        outside = next((number for number, _ in ends if not 0 <= number < count), None)
        if outside is not None:
            raise Misuse(f"{called} names {kind} {outside}; there are the {kind}s 0 to {count - 1}")
        if len({number for number, _ in ends}) < 2 and count > 1:
            where = "in build_stage" if layers is None else "where it is made"
            raise Misuse(f"{called}: {ends} are not in two {kind}s; tie parameters of one {where}")
        twice = next((end for number, end in enumerate(ends) if end in seen or end in ends[:number]), None)
        if twice is not None:
            raise Misuse(f"{called} names {twice} twice; list all ends of a parameter together, once")
        seen.update(ends)
        if layers is None:
            yield tuple(ends)
        else:
            yield tuple((layers.stage_of(layer, stages), f"{layer}.{name}") for layer, name in ends)


def _in_words(ties: Iterable[Group]) -> str:
    groups = [" and ".join(map(str, tie)) for tie in ties]
    return f"ties stages {', and '.join(groups)}" if groups else "ties no stages"


def _options(ties: Iterable[Group]) -> str:
    return " ".join(f"--tied {','.join(map(str, tie))}" for tie in sorted(ties)) or "no --tied"


def unite(world: World, built: Modules, ties: Sequence[Tie], model: Model) -> None:
    """Makes each tied parameter one object on this rank, with the value of its first end; every rank calls it.

    Raises
    ------
    Misuse
        If an end does not exist, the ends differ in shape, dtype or requires_grad, or what is not tied is shared.
    """
    refuse_undeclared(built, ties, model)
    for tie in ties:
        for ends in tie.parameters:
            _describe(world, built, ends, model)
    for tie in ties:
        if world.place.rank in world.ranks_of(*tie.stages):
            for ends in tie.parameters:
                _require_alike(world, ends, model)
                _unite(built, ends)
    for tie in ties:
        for ends in tie.parameters:
            _send_initial(world, built, tie, ends)


def parameter_of(module: torch.nn.Module, name: str) -> torch.nn.Parameter | None:
    """The parameter of a name, whichever of its names it is; None if there is none."""
    return dict(module.named_parameters(remove_duplicate=False)).get(name)


def replace(module: torch.nn.Module, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Puts a parameter in the place of another one, wherever the module has that."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new


def _unite(built: Modules, ends: Sequence[End]) -> None:
    first = _held(built, ends)
    for stage, name in ends:
        parameter = parameter_of(built[stage], name) if stage in built else None
        if parameter is not None and parameter is not first:
            replace(built[stage], parameter, first)


def _describe(world: World, built: Modules, ends: Sequence[End], model: Model) -> None:
    """Leaves in the store what this rank knows of the ends that it holds."""
    for stage, name in ends:
        if stage not in built:
            continue
        parameter = parameter_of(built[stage], name)
        if parameter is None:
            kind, number, inside = model.locate(stage, name)
            places = [model.locate(stage, known) for known, _ in built[stage].named_parameters(remove_duplicate=False)]
            names = [known for _, elsewhere, known in places if elsewhere == number]
            close = get_close_matches(inside, names, n=1) or names[:1]
            advice = f"did you mean {close[0]}?" if close else "it has no parameters"
            raise Misuse(
                f"{model.file}: tied names {inside!r} in {kind} {number}, which has no such parameter ({advice})"
            )
        if is_spread(parameter):
            raise Misuse(
                f"{model.file}: tied names {model.words((stage, name))}, a DTensor; parameters that are tied cannot be "
                "spread"
            )
        kind, frozen = str(parameter.dtype).removeprefix("torch."), "" if parameter.requires_grad else ", frozen"
        world.control_group.store.set(f"tie/{stage}/{name}", f"{kind} of shape {tuple(parameter.shape)}{frozen}")


def _require_alike(world: World, ends: Sequence[End], model: Model) -> None:
    first = _described(world, ends[0])
    for end in ends[1:]:
        other = _described(world, end)
        if other != first:
            raise Misuse(
                f"{model.file}: tied names {model.words(ends[0])}, which is {first}, and {model.words(end)}, which is "
                f"{other}; let them be alike"
            )


def _described(world: World, end: End) -> str:
    """Shape, dtype and requires_grad of an end, as the first rank that holds it describes it."""
    stage, name = end
    what = f"for what {name} of stage {stage} is like, which another stage shares"
    return world.control_group.wait_for_key(f"tie/{stage}/{name}", world.ranks_of(stage)[0], what).decode()


def _send_initial(world: World, built: Modules, tie: Tie, ends: Sequence[End]) -> None:
    """From the first rank that holds the first end to the ranks that hold others alone."""
    first, name = ends[0]
    holders = world.ranks_of(first)
    targets = [rank for rank in world.ranks_of(*tie.stages) if rank not in holders]
    what = f"for the initial value of {name} of stage {first}, which other stages share"
    if world.place.rank == holders[0]:
        for target in targets:
            world.control_group.send(_held(built, ends), target, what)
    elif world.place.rank in targets:
        parameter = _held(built, ends)
        room = torch.empty_like(parameter, device="cpu", memory_format=torch.contiguous_format)
        world.control_group.recv(room, holders[0], what)
        with torch.no_grad():
            parameter.copy_(room)


def by_group(built: Modules, ties: Sequence[Tie]) -> dict[Group, list[torch.nn.Parameter]]:
    """The parameters of stages by weight group: those of the ties, each once, then what each stage has of its own."""
    groups = {
        tie.stages: [_held(built, ends) for ends in tie.parameters]
        for tie in ties
        if len(tie.stages) > 1 and any(stage in built for stage in tie.stages)
    }
    apart = {parameter for parameters in groups.values() for parameter in parameters}
    return groups | {(s,): [p for p in module.parameters() if p not in apart] for s, module in built.items()}


def named(built: Modules, ties: Sequence[Tie]) -> dict[End, torch.nn.Parameter]:
    """The parameters of stages, each once; what is shared has the same name on all ranks, that of its first end."""
    first = {_held(built, ends): ends[0] for tie in ties for ends in tie.parameters if any(s in built for s, _ in ends)}
    return {first.get(p, (stage, name)): p for stage, module in built.items() for name, p in module.named_parameters()}


def _held(built: Modules, ends: Sequence[End]) -> torch.nn.Parameter:
    """A tied parameter by the first of its ends that is there."""
    stage, name = next(end for end in ends if end[0] in built)
    parameter = parameter_of(built[stage], name)
    assert parameter is not None
    return parameter


def shared(built: Modules, model: Model) -> Iterator[tuple[End, End]]:
    """The parameters that several of some stages, or layers, have as one object: two ends of each."""
    owners: dict[torch.nn.Parameter, End] = {}
    for stage, module in built.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            owner = owners.setdefault(parameter, (stage, name))
            if model.locate(*owner)[:2] != model.locate(stage, name)[:2]:
                yield owner, (stage, name)


def refuse_undeclared(built: Modules, ties: Sequence[Tie], model: Model) -> None:
    """Passes if stages share nothing that is not tied, as far as that can be seen; nor do the layers of a stage.

    It is seen of stages that are built in one process, and of modules that say so in ``_tied_weights_keys``.

    Raises
    ------
    Misuse
        With the line that declares the tie.
    """
    tied = {end for tie in ties for ends in tie.parameters for end in ends}
    for first, other in shared(built, model):
        if not any({first, other} <= {*ends} for tie in ties for ends in tie.parameters):
            (kind, number, _), (_, last, inside) = model.locate(*first), model.locate(*other)
            compile_again = f" and compile with --tied {first[0]},{other[0]}" if first[0] != other[0] else ""
            maker = "build_stage" if model.layers is None else "the functions of layers()"
            raise Misuse(
                f"{model.file}: {kind}s {number} and {last} share the parameter {inside}, and nothing says so: write "
                f"`def tied(num_stages): return [[{_end(model, first)}, {_end(model, other)}]]`{compile_again}; or let "
                f"{maker} make new modules every time"
            )
    for stage, module in built.items():
        for name, partner in _tied_elsewhere(module):
            if (stage, name) not in tied:
                kind, number, inside = model.locate(stage, name)
                raise Misuse(
                    f"{model.file}: {inside} of {kind} {number} is tied by _tied_weights_keys to {partner}, which is "
                    f"in another {kind}: write `def tied(num_stages): return [[({kind.upper()}, NAME), "
                    f"{_end(model, (stage, name))}]]` with the {kind} and the name of the other end, and compile with "
                    f"--tied STAGE,{stage}"
                )


def _end(model: Model, end: End) -> str:
    _, number, inside = model.locate(*end)
    return f'({number}, "{inside}")'


def _tied_elsewhere(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """The names of parameters that the module calls tied, and that are one with no other parameter of it."""
    names: dict[torch.nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    for prefix, part in module.named_modules():
        keys = getattr(part, "_tied_weights_keys", None)
        if not keys or not getattr(getattr(part, "config", None), "tie_word_embeddings", True):
            continue
        for name, parameter in part.named_parameters(remove_duplicate=False):
            key = next((key for key in keys if _matches(key, name)), None)
            if key is not None and len(names[parameter]) < 2:
                partner = keys[key] if isinstance(keys, Mapping) else "a parameter that it does not name"
                yield f"{prefix}.{name}" if prefix else name, partner


def _matches(key: str, name: str) -> bool:
    """Whether a key is a name, or a pattern of one."""
    try:
        return key == name or re.fullmatch(key, name) is not None
    except re.error:
        return False
