"""Parameters that stages share: what a model says of them, and one object on each rank that holds several ends."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.arguments import rename
from chimera_runtime.blame import Calling
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.program import Group, Job
from chimera_runtime.shards import is_spread
from chimera_runtime.world import World

End = tuple[int, str]
"""A parameter by its stage and its name there."""

Modules = Mapping[int, torch.nn.Module]
"""The modules of stages, by their number."""

_FORM = '[[(0, "embedding.weight"), (num_stages - 1, "head.weight")]]'


@dataclass(frozen=True)
class Tie:
    """Parameters that the same stages share: one weight group, with one sum and one step.

    ``parameters`` has the ends of each parameter; its first end gives the initial value. ``stages`` are ascending.
    """

    stages: Group
    parameters: tuple[tuple[End, ...], ...]


def declared(tied: Callable[[int], Any] | None, job: Job, file: Path) -> tuple[Tie, ...]:
    """The ties of a model for the stages of a program, in the order of the program; ``file`` is where it stands.

    Raises
    ------
    Misuse
        If they are no ties, or the program was compiled for others.
    """
    said: Any = []
    if tied is not None:
        with Calling(f"tied({job.stages})", MISUSED):
            said = tied(job.stages)
    parameters = list(_read(said, job.stages, file))
    by_stages: dict[Group, list[tuple[End, ...]]] = defaultdict(list)
    for ends in parameters:
        by_stages[tuple(sorted({stage for stage, _ in ends}))].append(ends)
    if by_stages.keys() != {*job.ties}:
        raise Misuse(
            f"{file}: {_in_words(by_stages)}, and {job.name} was compiled for a model that {_in_words(job.ties)}: "
            f"compile it again with {_options(by_stages)}"
        )
    return tuple(Tie(stages, tuple(by_stages[stages])) for stages in job.ties)


def _read(said: Any, stages: int, file: Path) -> Iterator[tuple[End, ...]]:
    """The ends of each parameter, if each is one that there may be."""
    seen: set[End] = set()
    try:
        listed = [[(int(stage), str(name)) for stage, name in ends] for ends in said]
    except (TypeError, ValueError):
        raise Misuse(f"{file}: tied({stages}) returned {said!r:.80}: return lists of ends, as in {_FORM}") from None
    for ends in listed:
        outside = next((stage for stage, _ in ends if not 0 <= stage < stages), None)
        if outside is not None:
            raise Misuse(f"{file}: tied({stages}) names stage {outside}; there are the stages 0 to {stages - 1}")
        if len({stage for stage, _ in ends}) < 2:
            raise Misuse(f"{file}: tied({stages}): {ends} are not in two stages; tie parameters of one in build_stage")
        twice = next((end for number, end in enumerate(ends) if end in seen or end in ends[:number]), None)
        if twice is not None:
            raise Misuse(f"{file}: tied({stages}) names {twice} twice; list all ends of a parameter together, once")
        seen.update(ends)
        yield tuple(ends)


def _in_words(ties: Iterable[Group]) -> str:
    groups = [" and ".join(map(str, tie)) for tie in ties]
    return f"ties stages {', and '.join(groups)}" if groups else "ties no stages"


def _options(ties: Iterable[Group]) -> str:
    return " ".join(f"--tied {','.join(map(str, tie))}" for tie in sorted(ties)) or "no --tied"


def unite(world: World, built: Modules, ties: Sequence[Tie], file: Path) -> None:
    """Makes each tied parameter one object on this rank, with the value of its first end; every rank calls it.

    Raises
    ------
    Misuse
        If an end does not exist, the ends differ in shape, dtype or requires_grad, or stages share what is not tied.
    """
    refuse_undeclared(built, ties, file)
    for tie in ties:
        for ends in tie.parameters:
            _describe(world, built, ends, file)
    for tie in ties:
        if world.place.rank in world.ranks_of(*tie.stages):
            for ends in tie.parameters:
                _require_alike(world, ends, file)
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
    rename(first, *ends[0])
    for stage, name in ends:
        parameter = parameter_of(built[stage], name) if stage in built else None
        if parameter is not None and parameter is not first:
            replace(built[stage], parameter, first)


def _describe(world: World, built: Modules, ends: Sequence[End], file: Path) -> None:
    """Leaves in the store what this rank knows of the ends that it holds."""
    for stage, name in ends:
        if stage not in built:
            continue
        parameter = parameter_of(built[stage], name)
        if parameter is None:
            names = [known for known, _ in built[stage].named_parameters(remove_duplicate=False)]
            close = get_close_matches(name, names, n=1) or names[:1]
            advice = f"did you mean {close[0]}?" if close else "it has no parameters"
            raise Misuse(f"{file}: tied names {name!r} in stage {stage}, which has no such parameter ({advice})")
        if is_spread(parameter):
            raise Misuse(
                f"{file}: tied names {name} of stage {stage}, a DTensor; parameters that are tied cannot be spread"
            )
        kind, frozen = str(parameter.dtype).removeprefix("torch."), "" if parameter.requires_grad else ", frozen"
        world.store.set(f"tie/{stage}/{name}", f"{kind} of shape {tuple(parameter.shape)}{frozen}")


def _require_alike(world: World, ends: Sequence[End], file: Path) -> None:
    (first_stage, first_name), first = ends[0], _described(world, ends[0])
    for stage, name in ends[1:]:
        other = _described(world, (stage, name))
        if other != first:
            raise Misuse(
                f"{file}: tied names {first_name} of stage {first_stage}, which is {first}, and {name} of stage "
                f"{stage}, which is {other}; let them be alike"
            )


def _described(world: World, end: End) -> str:
    """Shape, dtype and requires_grad of an end, as the first rank that holds it describes it."""
    stage, name = end
    what = f"for what {name} of stage {stage} is like, which another stage shares"
    return world.learn(f"tie/{stage}/{name}", world.ranks_of(stage)[0], what, world.timeout).decode()


def _send_initial(world: World, built: Modules, tie: Tie, ends: Sequence[End]) -> None:
    """From the first rank that holds the first end to the ranks that hold others alone."""
    first, name = ends[0]
    holders = world.ranks_of(first)
    targets = [rank for rank in world.ranks_of(*tie.stages) if rank not in holders]
    what = f"for the initial value of {name} of stage {first}, which other stages share"
    if world.place.rank == holders[0]:
        for target in targets:
            world.send(_held(built, ends), target, what)
    elif world.place.rank in targets:
        parameter = _held(built, ends)
        room = torch.empty_like(parameter, device="cpu", memory_format=torch.contiguous_format)
        world.recv(room, holders[0], what)
        with torch.no_grad():
            parameter.copy_(room)


def by_group(built: Modules, ties: Sequence[Tie]) -> dict[Group, list[torch.nn.Parameter]]:
    """The parameters of stages by weight group: those of the ties, each once, then what each stage has of its own."""
    groups = {
        tie.stages: [_held(built, ends) for ends in tie.parameters]
        for tie in ties
        if any(stage in built for stage in tie.stages)
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


def shared(built: Modules) -> Iterator[tuple[End, End]]:
    """The parameters that several of some stages have as one object: two ends of each."""
    owners: dict[torch.nn.Parameter, End] = {}
    for stage, module in built.items():
        for name, parameter in module.named_parameters():
            owner = owners.setdefault(parameter, (stage, name))
            if owner[0] != stage:
                yield owner, (stage, name)


def refuse_undeclared(built: Modules, ties: Sequence[Tie], file: Path) -> None:
    """Passes if stages share nothing that is not tied, as far as that can be seen.

    It is seen of stages that are built in one process, and of modules that say so in ``_tied_weights_keys``.

    Raises
    ------
    Misuse
        With the line that declares the tie.
    """
    tied = {end for tie in ties for ends in tie.parameters for end in ends}
    for first, other in shared(built):
        if not any({first, other} <= {*ends} for tie in ties for ends in tie.parameters):
            raise Misuse(
                f"{file}: stages {first[0]} and {other[0]} share the parameter {other[1]}, and nothing says so: write "
                f"`def tied(num_stages): return [[{_end(first)}, {_end(other)}]]` and compile with "
                f"--tied {first[0]},{other[0]}; or let build_stage make new modules every time it is called"
            )
    for stage, module in built.items():
        for name, partner in _tied_elsewhere(module):
            if (stage, name) not in tied:
                raise Misuse(
                    f"{file}: {name} of stage {stage} is tied by _tied_weights_keys to {partner}, which is in another "
                    f"stage: write `def tied(num_stages): return [[(STAGE, NAME), {_end((stage, name))}]]` with the "
                    f"stage and the name of the other end, and compile with --tied STAGE,{stage}"
                )


def _end(end: End) -> str:
    return f'({end[0]}, "{end[1]}")'


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
