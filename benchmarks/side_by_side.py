"""Runs contenders in turns in the same processes under one torchrun."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from commands import torchrun

import chimera_ir

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Contender:
    """A system.

    ``kind`` and ``name`` are "generated" or "loop" and a library scheme, whose steps are made in the lane or after it;
    "pipeline" or "interface" and a library scheme, which gets mini-batches as torch's do, by `Pipeline` or
    `CompiledSchedule`; "torch" and the class of a schedule of one stage on each rank, "torch, listed" and that of one
    that takes a list of stages, "torch, v" and that of one with two stages on each rank, down and up again; or "alone"
    and the number of threads of the one process. ``workers`` is the parameter of a library scheme that gives the number
    of ranks. With "numbers" and a library scheme a step is an update of each of the ``numbers`` of micro-batches.
    """

    label: str
    kind: str
    name: str
    workers: str = "D"
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What is measured: contenders on the same task, ``rounds`` times in turns after one round that does not count.

    The task is the file ``model`` or, if that is None, stages that sleep ``forward`` seconds and twice that backward
    and exchange ``floats`` floats; ``rehearsed``: a generated program sleeps by ``--rehearse`` instead of by modules.
    ``halves``: the modules sleep ``forward`` seconds for each half of a backward, which can be taken one by one.
    With another ``backend`` than gloo every rank has the device that the backend is for, and contenders are no
    "generated" ones, which have communicators for gloo alone.
    """

    name: str
    stages: int
    micro_batches: int
    contenders: tuple[Contender, ...]
    rounds: int
    forward: float = 0.0
    floats: int = 64
    rehearsed: bool = True
    model: str | None = None
    micro_batch_size: int = 1
    halves: bool = False
    backend: str = "gloo"


@dataclass(frozen=True)
class Samples:
    """Of one contender, for each round: seconds of a step, and CPU seconds of the rank that used most."""

    seconds: tuple[float, ...]
    cpu: tuple[float, ...]


def run(comparisons: Sequence[Comparison]) -> list[dict[str, Samples]]:
    """Measures all comparisons of as many stages under one torchrun each, which begins with one that does not count."""
    found: dict[Comparison, dict[str, Samples]] = {}
    for ranks, backend in sorted({(each.stages, each.backend) for each in comparisons}):
        mine = [each for each in comparisons if (each.stages, each.backend) == (ranks, backend)]
        warm_up = replace(mine[0], rounds=min(2, mine[0].rounds))
        found |= zip(mine, _launch(ranks, [warm_up, *mine])[1:], strict=True)
    return [found[each] for each in comparisons]


def _launch(ranks: int, comparisons: Sequence[Comparison]) -> list[dict[str, Samples]]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        listed = [asdict(each) | {"contenders": _contenders(each, place)} for each in comparisons]
        plan, result = place / "plan.json", place / "result.json"
        backend = comparisons[0].backend
        plan.write_text(json.dumps({"result": str(result), "backend": backend, "comparisons": listed}))
        library = _compiled(place, "gpipe", ranks, ranks)
        words = (f"--nproc-per-node={ranks}", str(HERE / "ranks" / "race.py"), str(plan))
        torchrun(words, {"PYTHONPATH": str(library)})
        return [
            {label: Samples(*map(tuple, zip(*rounds, strict=True))) for label, rounds in each.items()}
            for each in json.loads(result.read_text())
        ]


def _contenders(comparison: Comparison, place: Path) -> list[tuple[str, str, str]]:
    """The contenders as the ranks take them: generated programs by their directories."""
    if any(each.numbers for each in comparison.contenders):
        return [(each.label, each.kind, _with_numbers(comparison, place, each)) for each in comparison.contenders]
    return [
        (
            each.label,
            each.kind,
            str(_compiled(place, each.name, comparison.stages, comparison.micro_batches, each.workers))
            if each.kind in ("generated", "loop", "pipeline", "interface")
            else each.name,
        )
        for each in comparison.contenders
    ]


def _compiled(place: Path, scheme: str, ranks: int, micro_batches: int, workers: str = "D") -> Path:
    """The directory of a library scheme."""
    out = place / f"{scheme}-{ranks}-{micro_batches}"
    if not out.exists():
        chimera_ir.compile(scheme, **{workers: ranks}, N=micro_batches).write(out)
    return out


def _with_numbers(comparison: Comparison, place: Path, contender: Contender) -> str:
    """The directory of a library scheme with a program for each number, and the numbers of the contender."""
    out = place / f"{contender.name}-{comparison.stages}-several"
    if not out.exists():
        numbers = sorted({number for each in comparison.contenders for number in each.numbers}, reverse=True)
        sizes = {contender.workers: comparison.stages}
        largest, *others = [chimera_ir.compile(contender.name, **sizes, N=number) for number in numbers]
        largest.write(out, others)
    return f"{out}:{','.join(map(str, contender.numbers))}"


def makespan(scheme: str, ranks: int, micro_batches: int, workers: str = "D") -> float:
    """How long an update of a library scheme takes at best, in units of F = I = W, B = 2 F; messages cost nothing."""
    return float(chimera_ir.compile(scheme, **{workers: ranks}, N=micro_batches).report.makespan)
