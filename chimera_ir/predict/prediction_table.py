"""A prediction as a table for a terminal: the terms of equation 1, the replay, the memory of the fullest worker."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chimera_ir.cost.number_text import decimal, seconds
from chimera_ir.cost.table import IN_FULL
from chimera_ir.ir.text.printer import group_text
from chimera_ir.plural import counted
from chimera_ir.predict.prediction import Prediction

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def table(prediction: Prediction) -> RenderableType:
    """All terms of the prediction, for a console of any width."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("equation 1")
    table.add_column("predicted", style="bold", overflow="fold")
    for name, value in _rows(prediction):
        table.add_row(name, value)
    return Group(heading(prediction), table)


def size(value: float) -> str:
    """A number of bytes as text, with four digits and a fitting unit.

    Examples
    --------
    >>> size(9881943040)
    '9.203 GiB'
    """
    if not value:
        return "0"
    factor, unit = next(((factor, unit) for factor, unit in _SIZES if value >= factor), _SIZES[-1])
    return f"{value / factor:.4g} {unit}"


def heading(prediction: Prediction) -> Text:
    """The cluster, the copies of the pipelines and the size of a micro-batch."""
    setting = prediction.setting
    copies = counted(setting.copies, "copy")
    return Text.assemble((setting.cluster.name, "bold"), f": {copies}, micro-batches of {setting.micro_batch_size}")


def _rows(prediction: Prediction) -> Iterator[tuple[str, str]]:
    terms = prediction.equation
    yield "F_t, B_t", f"{seconds(terms.forward)}, {seconds(terms.backward)}"
    for term in terms.further:
        yield f"{term.kind}_t", seconds(term.seconds)
    yield "Comm_p2p", seconds(terms.p2p)
    further = {f"C_{term.kind.lower()}": term.count for term in terms.further}
    counts = {"C_f": terms.forwards, "C_b": terms.backwards, **further}
    yield ", ".join(counts), ", ".join(map(decimal, counts.values()))
    yield "critical path", seconds(terms.compute)
    yield "Comm_allreduce, by stage", _listed(terms.all_reduce)
    yield "free regions, by worker", _regions(prediction)
    yield "Comm_unoverlapped, by worker", _listed(terms.unoverlapped)
    yield "T", f"{seconds(terms.seconds)}, {prediction.throughput:.4g} items/s"
    replayed = f"{seconds(prediction.replay.seconds)}, {prediction.replayed_throughput:.4g} items/s"
    yield "T by replay of the program", replayed
    if prediction.expected is not None:
        throughput = prediction.items / prediction.expected
        yield "T with the profile's noise", f"{seconds(prediction.expected)}, {throughput:.4g} items/s"
    fullest = max(prediction.memory, key=lambda memory: memory.total)
    yield "memory, fullest worker", f"{size(fullest.total)} of {size(prediction.available)}"
    yield from ((f"  {name}", size(count)) for name, count in fullest.parts.items() if count)


def _listed(values: tuple[float, ...]) -> str:
    if len(set(values)) == 1:
        return f"{seconds(values[0])} each" if len(values) > 1 else seconds(values[0])
    if len(values) <= IN_FULL:
        return " ".join(map(_joined, values))
    return f"{seconds(min(values))} to {seconds(max(values))}"


def _joined(value: float) -> str:
    """Seconds without a blank, for lines with several values."""
    return seconds(value).replace(" ", "")


def _regions(prediction: Prediction) -> str:
    workers = prediction.equation.regions
    if len(workers) > IN_FULL:
        times = [region.seconds for regions in workers for region in regions]
        return f"{seconds(min(times, default=0.0))} to {seconds(max(times, default=0.0))}"
    return "; ".join(
        " ".join(f"{group_text(region.group)}:{_joined(region.seconds)}" for region in regions) for regions in workers
    )
