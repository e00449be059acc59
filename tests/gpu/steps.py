"""Steps: a command, what has to come of it, and what became of it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tests.gpu.commands import CommandEnd, CommandLine, run

Judge = Callable[[CommandEnd], str]
"""What is wrong with how a command ended; nothing if all is well."""


class Verdict(Enum):
    """What became of a step."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Trial:
    """A step: ``unfit`` says why this machine cannot run it, ``prepared`` is the command that made what it runs.

    If it is ``telling`` the report has what it said even when it passed.
    """

    name: str
    command: CommandLine
    judge: Judge
    prepared: str = ""
    unfit: str = ""
    telling: bool = False


@dataclass(frozen=True)
class Finding:
    """What became of a step: ``why`` it failed or was skipped, and everything that the command said."""

    trial: Trial
    verdict: Verdict
    why: str
    seconds: float
    said: str


def attempt(trial: Trial, limit: float) -> Finding:
    """Runs a step for at most ``limit`` seconds."""
    if trial.unfit:
        return Finding(trial, Verdict.SKIPPED, trial.unfit, 0.0, "")
    end = run(trial.command, limit)
    if end.status is None:
        why = f"hangs: ended after {limit:g} s"
    elif end.left:
        why = f"{end.left} processes were left and had to be ended"
    else:
        why = trial.judge(end)
    return Finding(trial, Verdict.FAILED if why else Verdict.PASSED, why, end.seconds, end.said)


def succeeds(needed: str) -> Judge:
    """Ends with 0 and says something that matches."""

    def judge(end: CommandEnd) -> str:
        if end.status:
            return f"ended with {end.status}"
        return "" if re.search(needed, end.said) else f"ended with 0 and said nothing like {needed!r}"

    return judge


def ends_with_one_message(needed: str) -> Judge:
    """Ends with another status than 0, and with one message of train.py's, which matches."""

    def judge(end: CommandEnd) -> str:
        messages = [line for line in end.said.splitlines() if line.startswith("train.py:")]
        if not end.status:
            return "ended with 0, though a rank had failed"
        if len(messages) != 1:
            return f"said {len(messages)} messages, not one"
        return "" if re.search(needed, messages[0]) else f"said nothing like {needed!r}: {messages[0]}"

    return judge
