"""Messages about optimizers and schedulers."""

from collections.abc import Iterable, Sequence

from chimera_runtime.errors import Misuse

PARAMETER_IS_NOT_OF_THE_PIPELINE = (
    "an optimizer steps a parameter that the pipeline does not have: make it of pipe.named_parameters()"
)
SHARDED_TAKES_NO_FURTHER_PARAMETERS = (
    "a sharded optimizer takes no further parameters: make one of all that are to be stepped"
)


def two_optimizers_step(parameter: str) -> Misuse:
    return Misuse(f"two optimizers step {parameter}: a checkpoint keeps the state of one by its name")


def state_dict_has_another_form(optimizer: str) -> Misuse:
    return Misuse(
        f"state_dict() of the optimizer {optimizer} has no state and param_groups of its parameters, as "
        "those of torch.optim have: it cannot be saved by their names; of_rank= keeps any object with a state_dict"
    )


def sharded_is_no_optimizer(name: str) -> Misuse:
    return Misuse(f"a {name} cannot be sharded: that takes a torch.optim.Optimizer")


def sharded_may_not_be_elementwise(name: str, elementwise: Iterable[str]) -> Misuse:
    return Misuse(
        f"a {name} may look at a parameter as a whole, and a shard is a part of one: sharded can be, of torch's "
        f"own, {', '.join(elementwise)}; others in a loop of your own, with elementwise=True if they treat every "
        "number by itself"
    )


def parameters_overlap(first: str, second: str) -> str:
    return (
        f"{first} and {second} overlap in memory, so their optimizer cannot be sharded: shards on several ranks "
        "would be the same numbers; give each memory of its own, as p.data = p.data.clone() does, or shard no optimizer"
    )


def parameters_are_spread_already(group: str) -> Misuse:
    return Misuse(
        f"{group} has DTensors: what spreads them over other ranks shards the state of the optimizer, "
        "too; make the optimizer of pipe.named_parameters()"
    )


# Why optimizers cannot go on with the state in a checkpoint: the complaint in the message of a BadCheckpoint.


def state_is_missing(parameter: str) -> str:
    return f"it has no optimizer state of {parameter}, which an optimizer steps here"


def optimizers_differ(parameter: str, saved: str, here: str) -> str:
    return (
        f"{parameter} was stepped by {saved} and is stepped by {here} here, which gives "
        f"their state another meaning: resume with {saved}; or read the weights alone, "
        "with torch.distributed.checkpoint.load into pipe.state_dict()"
    )


def schedulers_differ(parameter: str, saved: Sequence[str], here: Sequence[str]) -> str:
    return (
        f"the optimizer of {parameter} had {_schedulers(saved)}, and here it has {_schedulers(here)}: give schedulers= "
        "of the same classes, in the same order"
    )


def _schedulers(names: Sequence[str]) -> str:
    return f"the scheduler{'s' * (len(names) > 1)} {' and '.join(names)}" if names else "no scheduler"


def settings_differ(first: str, other: str, setting: str, of_first: str, of_other: str) -> str:
    return (
        f"{first} and {other} are in one group of the optimizer, and were saved with different settings ({setting}: "
        f"{of_first} and {of_other}): make the groups that there were"
    )


def optimizers_were_apart(first: str, other: str, entries: Sequence[str] = ()) -> str:
    """The saved states of two parameters of one optimizer differ, so that it cannot step both.

    They differ in ``entries`` of the optimizer's state, or in the states of their schedulers if there are none.
    """
    how = f"its {', '.join(entries)} differed" if entries else "their schedulers were at different points"
    return (
        f"one optimizer steps {first} and {other}, and when they were saved {how}: make the optimizers that there "
        "were, under the schedule that there was"
    )
