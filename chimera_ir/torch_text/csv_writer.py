"""Writes a level as a schedule of torch.distributed.pipelining, and says how to start it there.

worker 0:        0F0,0F1,0B0,0B1                        compute order alone
  F m0 s0        0UNSHARD,0F0,0SEND_F0,0F1,..           with messages
  F m1 s0
  B m0 s0
  B m1 s0
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import assert_never

from chimera_ir.errors import NotInTorch
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import Compute, Pair, Recv, Send, singles
from chimera_ir.ir.streams import ScheduleStream
from chimera_ir.plural import counted, listed
from chimera_ir.torch_text.csv_reader import (
    REDUCE_GRAD,
    RESHARD,
    TRANSFERS,
    UNSHARD,
    Cell,
    MessageCell,
    WeightsCell,
    program_of,
)
from chimera_ir.torch_text.torch_lowering import lowered
from chimera_ir.verify.verify import Checked, Verified, verify_lowered

_LOOP = "PipelineScheduleMulti"
_ONE_EACH = "1F1B"
_VEE = "ZBVZeroBubble"


def unfit(level: Schedule | ScheduleStream) -> str:
    """The reason why torch cannot run a schedule, as a sentence; empty if it can."""
    header = level.header
    if header.steps_inside:
        return "it has no flush, so its weights have versions, and torch has one version of each weight"
    shared = next((s for s, workers in enumerate(header.holders) if len(workers) > 1), None)
    if shared is not None:
        return f"stage {shared} is on the workers {listed(header.holders[shared])}, and in torch a stage is on one rank"
    if header.halves:
        return "its pipes take half micro-batches, and torch's micro-batches are whole"
    if header.slices > 1:
        return "its micro-batches are cut into slices, and torch's are whole"
    if header.feeds:
        return "its stages are no chain, and in torch's schedules each stage feeds the next one"
    if not header.trains:
        return "it has no backwards, and a schedule of torch trains"
    if header.frozen:
        return f"stage {header.frozen[0]} is frozen, and in torch's schedules every stage has a backward"
    if header.recomputing:
        return (
            "its recomputations are operations, and torch has none: wrap the layers in torch.utils.checkpoint instead"
        )
    if header.moves:
        return "it moves activations to the host and back, and torch's schedules have no operations for that"
    if header.ties:
        return "stages share parameters, whose gradients torch does not sum"
    operations = singles(chain.from_iterable(level.lanes))
    several = next((operation for operation in operations if operation.size > 1), None)
    if several is not None:
        return f"its operations are of several micro-batches ({listed(several.micros)}), and torch's of one"
    if not all(level.lanes):
        return f"worker {level.lanes.index(())} has no stage, and in torch every rank has one"
    judged = [part.micros[0] for part in operations if part.kind.opens and not header.fed[part.stage]]
    if judged != sorted(judged):
        return "its last stage takes the micro-batches out of order, and torch finds their losses by place"
    return ""


def _with_upkeep(lane: Iterable[object]) -> Iterator[Cell]:
    """Yields the operations and messages of a lane in its order, with the actions of FSDP around them.

    A stage is unsharded while the rank uses it. Its gradients are summed after the last of them: without that action
    torch does not divide them by the number of micro-batches either.
    """
    lines = [line for line in lane if isinstance(line, Compute | Pair | Send | Recv)]
    parts = [part for line in lines if isinstance(line, Compute | Pair) for part in line.parts]
    firsts = {part.stage: part for part in reversed(parts)}
    lasts, last_sums = ({part.stage: part for part in parts if part.kind.sums >= sums} for sums in (False, True))
    ended: list[WeightsCell] = []
    for line in lines:
        # What an operation makes leaves before its stage is reduced.
        if isinstance(line, Send):
            yield _message_cell(line)
            continue
        yield from ended
        ended = []
        if isinstance(line, Recv):
            yield _message_cell(line)
            continue
        yield from (WeightsCell(UNSHARD, part.stage, part.origin) for part in line.parts if firsts[part.stage] is part)
        yield line
        for word, ends in ((REDUCE_GRAD, last_sums), (RESHARD, lasts)):
            ended += [WeightsCell(word, part.stage, part.origin) for part in line.parts if ends[part.stage] is part]
    yield from ended


def _message_cell(post: Send | Recv) -> MessageCell:
    kind, message = type(post), post.message
    word = next(word for word, (posted, value) in TRANSFERS.items() if posted is kind and value is message.value)
    return MessageCell(word, message.source if kind is Send else message.target, message.micros[0], post.origin)


def show(rows: Iterable[Iterable[Cell]]) -> str:
    """The text of a file, a row for each rank."""
    return "".join(",".join(map(cell_text, row)) + "\n" for row in rows)


def cell_text(cell: Cell) -> str:
    """The text of a cell, as in ``2F0`` or ``(0F7;7B3)OVERLAP_F_B``."""
    match cell:
        case Compute(kind, (micro,), stage):
            return f"{stage}{kind}{micro}"
        case Pair(forward, backward):
            return f"({cell_text(forward)};{cell_text(backward)})OVERLAP_F_B"
        case MessageCell() | WeightsCell():
            return str(cell)
        case Compute():
            raise ValueError("torch has operations of one micro-batch")
        case _:
            assert_never(cell)


def remarks(header: Header, *, comms: bool) -> tuple[str, str]:
    """Sentences that say how to start a file in torch and in torchtitan.

    torch 2.15 adds waits and other UNSHARDs to an order, by which receives move, and demands the waits of a file.
    """
    ranks, file = header.workers, f"{header.scheme}.csv"
    held = "; ".join(f"rank {rank}: {' '.join(map(str, held))}" for rank, held in enumerate(header.stages_of))
    form = ', format="compute_comms"' if comms else ""
    torch = (
        f"in torch: schedule = _PipelineScheduleRuntime(stages, n_microbatches={header.micro_batches}, loss_fn=loss);"
        f' schedule._load_csv("{file}"{form}), with the stages of each rank in ascending order ({held})'
    )
    newer = (
        "refuses it, as it wants waits for sends" if comms else "adds messages in another order, which is not proven"
    )
    torch += f"; torch 2.15 {newer}"
    name = _torchtitan_name(header)
    if comms:
        return torch, "torchtitan loads a compute order alone: --emit torch-csv"
    if not name:
        return torch, "torchtitan cannot place the stages so, neither in a loop nor in a V; torch alone runs this file"
    options = {
        "degree": ranks,
        "schedule": name,
        "schedule_csv": file,
        "layers_per_stage": "K",
    }
    words = " ".join(f"--parallelism.pipeline_parallel_{option} {value}" for option, value in options.items())
    micro_batches = counted(header.micro_batches, "micro-batch")
    size = f"(layers + 2) / K, rounded up, must be {header.stages}, and a local batch {micro_batches}"
    return torch, f"in torchtitan: {words}, where {size}"


def _torchtitan_name(header: Header) -> str:
    """The name of the torchtitan schedule that places the stages like this; empty if there is none."""
    (placement,) = {pipe.workers for pipe in header.pipes}
    ranks, stages = header.workers, range(header.stages)
    if placement == tuple(stages):
        return _ONE_EACH
    if placement == tuple(s % ranks for s in stages) and header.stages % ranks == 0:
        return _LOOP
    return _VEE if placement == (*range(ranks), *reversed(range(ranks))) else ""


# Schedules for torch, proven as torch runs them.


def compute_order(checked: Checked) -> str:
    """The text of a schedule, proven as torch runs it; raises `NotInTorch` if torch cannot run it."""
    schedule = _fitting(checked, "torch-csv")
    verify_lowered(program_of(schedule, lowered(schedule)), checked)
    return show(schedule.lanes)


def with_messages(verified: Verified) -> str:
    """The text of a program with its order of messages, proven as torch runs it; raises `NotInTorch` likewise."""
    schedule = _fitting(verified.checked, "torch-csv-comms")
    assert isinstance(verified.program, Program)
    rows = [[*_with_upkeep(lane)] for lane in verified.program.lanes]
    verify_lowered(program_of(schedule, rows), verified.checked)
    return show(rows)


def _fitting(checked: Checked, level: str) -> Schedule:
    reason = unfit(checked.level)
    if reason or not isinstance(checked.level, Schedule):
        raise NotInTorch("emit", f" {level}: torch cannot run {checked.level.header.title}: {reason}")
    return checked.level
