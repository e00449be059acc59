"""CH6xx: mistakes in the lanes of an asynchronous level, which repeat."""

from chimera_ir.diagnostics.model import Diagnostic


class NoTurn(Diagnostic, code="CH601"):
    """A lane that shows no full turn of the steady state."""

    title = "worker {worker} shows no turn of the steady state"
    label = "the lane is too short, or no operation comes again after {period:micro-batch}"
    help = "show more updates: enough to fill the pipeline, to go round three times, and to drain it"
    worker: int
    period: int


class BreaksTurn(Diagnostic, code="CH602"):
    """A lane whose operations do not repeat from turn to turn."""

    title = "the lane of worker {worker} does not repeat every {period:micro-batch}"
    label = "`{line}` stands where the turn has `{wanted}`"
    help = (
        "a turn in the middle of the lane, moved in time, must give all of it; where a micro-batch is beyond "
        "the first or the last, its lines are left out and the others stay as they are"
    )
    worker: int
    period: int
    line: str
    wanted: str


class StateDiffers(Diagnostic, code="CH603"):
    """A worker that falls further behind the other workers with every turn."""

    title = "the state does not repeat: worker {worker} does not go round once a turn"
    label = "here it waits for what comes a turn later every turn"
    help = "show more updates, or move `{line}` behind what it waits for"
    worker: int
    line: str
