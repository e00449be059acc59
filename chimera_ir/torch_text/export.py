"""Schedules for torch, proven as torch runs them."""

from collections.abc import Sequence

from chimera_ir.errors import NotInTorch
from chimera_ir.ir.levels import Schedule
from chimera_ir.torch_text.cells import Cell
from chimera_ir.torch_text.csv_reader import program_of
from chimera_ir.torch_text.csv_writer import rows_of_program, show, unfit
from chimera_ir.torch_text.torch_lowering import lowered
from chimera_ir.verify.verify import Checked, Verified, verify_lowered


def compute_order(checked: Checked) -> str:
    """The text of a schedule; the program that torch makes of it is proven.

    Raises `NotInTorch` if torch cannot run the schedule.
    """
    schedule = _fitting(checked, "torch-csv")
    _verify(checked, schedule, lowered(schedule))
    return show(schedule.lanes)


def with_messages(verified: Verified) -> str:
    """The text of a program with its own order of messages, proven as torch runs it.

    Raises `NotInTorch` if torch cannot run its schedule.
    """
    checked = verified.checked
    schedule, rows = _fitting(checked, "torch-csv-comms"), rows_of_program(verified.program)
    _verify(checked, schedule, rows)
    return show(rows)


def _fitting(checked: Checked, level: str) -> Schedule:
    reason = unfit(checked.level)
    if reason or not isinstance(checked.level, Schedule):
        raise NotInTorch("emit", f" {level}: torch cannot run {checked.level.header.title}: {reason}")
    return checked.level


def _verify(checked: Checked, schedule: Schedule, rows: Sequence[Sequence[Cell]]) -> None:
    """Applies all rules to the program that torch runs for rows with the messages of a schedule."""
    verify_lowered(program_of(schedule, rows), checked)
