"""A prediction as a terminal table: equation 1 term by term, the replay, the memory of the fullest worker."""

from collections.abc import Iterator
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chimera_ir.cost.numbers import decimal, seconds
from chimera_ir.plural import counted
from chimera_ir.predict.prediction import Prediction
from chimera_ir.profile.warnings import WARNING, shown

IN_FULL = 16
"""Up to how many workers or stages are listed one by one; of more, the least and the most are told."""

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def show(prediction: Prediction) -> RenderableType:
    """The prediction, ready to be printed on a console of any width."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("equation 1")
    table.add_column("predicted", style="bold", overflow="fold")
    for name, value in _rows(prediction):
        table.add_row(name, value)
    warned = (Text.assemble((WARNING, "yellow"), warning) for warning in shown(prediction.warnings))
    return Group(_heading(prediction), table, _verdict(prediction), *warned)


def size(value: float) -> str:
    """Bytes with four digits.

    Examples
    --------
    >>> size(9881943040)
    '9.203 GiB'
    """
    if not value:
        return "0"
    factor, unit = next((each for each in _SIZES if value >= each[0]), _SIZES[-1])
    return f"{value / factor:.4g} {unit}"


def _heading(prediction: Prediction) -> Text:
    setting = prediction.setting
    copies = counted(setting.copies, "copy")
    return Text.assemble((setting.cluster.name, "bold"), f": {copies}, micro-batches of {setting.micro_batch_size}")


def _rows(prediction: Prediction) -> Iterator[tuple[str, str]]:
    terms = prediction.equation
    yield "F_t, B_t", f"{seconds(terms.forward)}, {seconds(terms.backward)}"
    if terms.recomputing is not None:
        yield "B_t, recomputing", seconds(terms.recomputing)
    yield "Comm_p2p", seconds(terms.p2p)
    yield "C_f, C_b", f"{decimal(terms.forwards)}, {decimal(terms.backwards)}"
    yield "critical path", seconds(terms.compute)
    yield "Comm_allreduce, by stage", _each(terms.all_reduce)
    yield "free regions, by worker", _regions(prediction)
    yield "Comm_unoverlapped, by worker", _each(terms.unoverlapped)
    yield "T", f"{seconds(terms.seconds)}, {prediction.throughput:.4g} items/s"
    replayed = f"{seconds(prediction.replay.seconds)}, {prediction.replayed_throughput:.4g} items/s"
    yield "T by replay of the program", replayed
    if prediction.expected is not None:
        often = prediction.items / prediction.expected
        yield "T with the profile's noise", f"{seconds(prediction.expected)}, {often:.4g} items/s"
    fullest = max(prediction.memory, key=lambda each: each.total)
    yield "memory, fullest worker", f"{size(fullest.total)} of {size(prediction.available)}"
    yield from ((f"  {name}", size(count)) for name, count in asdict(fullest).items() if count)


def _each(values: tuple[float, ...]) -> str:
    if len(set(values)) == 1:
        return f"{seconds(values[0])} each" if len(values) > 1 else seconds(values[0])
    if len(values) <= IN_FULL:
        return " ".join(map(_joined, values))
    return f"{seconds(min(values))} to {seconds(max(values))}"


def _joined(value: float) -> str:
    """Without a blank, where several stand in a line."""
    return seconds(value).replace(" ", "")


def _regions(prediction: Prediction) -> str:
    found = prediction.equation.regions
    if len(found) > IN_FULL:
        times = [each.seconds for regions in found for each in regions]
        return f"{seconds(min(times, default=0.0))} to {seconds(max(times, default=0.0))}"
    told = (" ".join(f"s{each.stage}:{_joined(each.seconds)}" for each in regions) for regions in found)
    return "; ".join(told)


def _verdict(prediction: Prediction) -> Text:
    over = [worker for worker, each in enumerate(prediction.memory) if each.total > prediction.available]
    if not over:
        return Text("fits the memory of the cluster's workers")
    needed = max(each.total for each in prediction.memory)
    need = f"{counted(len(over), 'worker')} {'needs' if len(over) == 1 else 'need'}"
    said = f"does not fit: {need} up to {size(needed)}, and there are {size(prediction.available)}"
    return Text(said, "bold red")
