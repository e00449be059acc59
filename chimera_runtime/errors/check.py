"""Messages of `--check`: what the ranks, or the stages, compute otherwise than they should."""

from collections.abc import Iterable, Sequence

from chimera_runtime.errors import CheckFailed, Misuse

_FAILED = "check: FAILED\n  "


def ranks_differ_from_one_process(verdict: str) -> CheckFailed:
    """``verdict`` has all figures, and begins with the word FAILED."""
    return CheckFailed(verdict)


def steps_are_not_updates(group: str, rank: int, steps: int, updates: int) -> CheckFailed:
    noun = "step" if steps == 1 else "steps"
    return CheckFailed(f"{_FAILED}{group} on rank {rank}: the optimizer has made {steps} {noun} in {updates} updates")


def begins_otherwise(stage: int, names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"stage {stage} begins with other values of {', '.join(names[:3])}{more} than modules that are made anew in "
        "one process: they were loaded or changed since, or build_stage gives others each time"
    )


def check_has_ended(message: str) -> Misuse:
    """Rank 0, where the one process runs, has raised an error with this message."""
    return Misuse(f"the check has ended on rank 0: {message}")


CHECK_TAKES_ONE_OF_TWO = "check takes either a batch or micro_batches, as step does"


def parameter_is_spread(stage: int, name: str) -> Misuse:
    return Misuse(
        f"{name} of stage {stage} is spread over a mesh, and a check holds the whole model on one rank: check the "
        "plain modules, in a pipeline of their own"
    )


def module_cannot_be_sent(stage: int, cause: str) -> Misuse:
    return Misuse(
        f"the module of stage {stage} cannot be copied to rank 0, which is to run all stages: {cause}; define its "
        "classes and functions at the top of a file, so that they can be pickled"
    )


def part_is_missing(stage: int, place: str) -> CheckFailed:
    return CheckFailed(
        f"{_FAILED}stage {stage} has a module {place} that build_stage does not make in one process: make all modules "
        "in build_stage"
    )


def parameter_is_another(stage: int, name: str) -> CheckFailed:
    return CheckFailed(
        f"{_FAILED}stage {stage}: {name} is on one side alone, or has another shape or dtype than build_stage gives it "
        "in one process: make parameters in build_stage, the same each time"
    )


# The user's own model, as `reference()` of the model file returns it.


def parameters_do_not_match(complaints: Iterable[str]) -> CheckFailed:
    return CheckFailed("\n  ".join(["check: FAILED", *(f"reference(): {line}" for line in complaints)]))


def losses_differ(reference: float, stages: float) -> CheckFailed:
    return CheckFailed(
        f"{_FAILED}reference(): the loss of an update is {reference:.9g} and that of the stages {stages:.9g}: a "
        "stage lacks something that has no parameters, or does it in another order"
    )


def gradients_differ(error: float, parameter: str, bound: float) -> CheckFailed:
    return CheckFailed(
        f"{_FAILED}reference(): gradients differ by {error:.2e} of the largest of their stage, most "
        f"those of {parameter}; {bound:.0e} is allowed"
    )


# Slices of sequences.


def slice_differs(stage: int, place: int | None, error: float) -> CheckFailed:
    """The outputs of a stage for slice ``place`` differ from those for the whole sequence; if it is None, the loss.

    ``error`` is the relative difference.
    """
    what = "the loss differs" if place is None else f"slice {place} of the outputs of stage {stage} differs"
    cause = (
        f"stage {stage} is not causal: a position depends on later ones"
        if place == 0
        else f"the carry of stage {stage} lacks something, or it does not count positions from start, or is not causal"
    )
    return CheckFailed(
        f"{_FAILED}slices: {what} by {error:.2e} from that of the whole sequence: {cause}; let "
        "positions depend on earlier ones alone, through their slice and the carry of the slices before"
    )


def carry_loses_gradients(stage: int, error: float) -> CheckFailed:
    return CheckFailed(
        f"{_FAILED}slices: outputs are those of whole sequences, and the gradients of stage {stage} differ by "
        f"{error:.2e} of the largest: return the carry with its graph, without detach() or no_grad()"
    )


# Complaints for `parameters_do_not_match`.


def parameters_are_missing(names: Sequence[str], stage: int, nearest: str | None) -> str:
    """The user's model lacks the parameters ``names`` of a stage; its name ``nearest`` is most like the first one."""
    hint = "" if nearest is None else f"; the nearest to the first is {nearest}"
    return f"it has no {', '.join(names)} of stage {stage}{hint}. name(stage, parameter) returns its names"


def parameters_are_on_no_stage(module: str | None, names: Sequence[str]) -> str:
    """No stage has the parameters ``names`` of the user's model.

    ``module`` is the name of the module whose parameters all of them are, None if there is no such module.
    """
    what = f"its {module} ({', '.join(names)})" if module is not None else f"its {', '.join(names)}"
    return f"no stage holds {what}: a layer that was left out, or another name in name(stage, parameter)"


def tie_is_not_declared(ends: Sequence[tuple[int, str]], name: str) -> str:
    return (
        f"{_ends(ends)} are one parameter, {name}, and train as so many: declare "
        f"tied(num_stages) -> [{[*ends]}], or give each a parameter of its own"
    )


def tie_is_not_in_the_model(ends: Sequence[tuple[int, str]], names: Iterable[str]) -> str:
    return (
        f"{_ends(ends)} are tied, and are different parameters in it, {' and '.join(names)}: let it share one, or take "
        "them out of tied(num_stages) and compile without --tied for them"
    )


def _ends(ends: Sequence[tuple[int, str]]) -> str:
    return " and ".join(f"{parameter} of stage {stage}" for stage, parameter in ends)


def parameters_are_unlike(name: str, reference: str, stages: str, parameter: str, stage: int) -> str:
    return f"its {name} is {reference}; {parameter} of stage {stage} is {stages}"
