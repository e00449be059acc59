"""The report of a run: one Markdown file, whole after every step."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.machine import Ground
from tests.gpu.steps import Finding, Verdict

LAST_LINES = 40


def write(path: Path, ground: Ground, facts: Sequence[tuple[str, str]], findings: Sequence[Finding]) -> None:
    """Replaces the report."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text(ground, facts, findings), encoding="utf-8")
    beside.replace(path)


def text(ground: Ground, facts: Sequence[tuple[str, str]], findings: Sequence[Finding]) -> str:
    """Where it ran, a line for each step, then what was said where that matters."""
    lines = ["# Report of `make gpu`", "", f"{_where(ground)} {counted(findings)}.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in facts]
    lines += ["", "| step | | seconds | |", "|---|---|--:|---|"]
    lines += [
        f"| {_cell(finding.trial.name)} | {finding.verdict.value} | {finding.seconds:.1f} | {_cell(finding.why)} |"
        for finding in findings
    ]
    for finding in findings:
        lines += _account(finding)
    return "\n".join(lines) + "\n"


def counted(findings: Sequence[Finding]) -> str:
    """How many steps ended how."""
    counts = Counter(finding.verdict for finding in findings)
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)


def _where(ground: Ground) -> str:
    if ground.pretended:
        return f"**No GPU: the CPU stands in for {ground.devices} devices**, {' '.join(ground.options)}."
    return f"{ground.devices} devices, {ground.ranks} ranks at a time, {' '.join(ground.options)}."


def _account(finding: Finding) -> list[str]:
    """The commands of a step, and the end of what it said if it failed; of a step that tells something all of it."""
    trial = finding.trial
    if finding.verdict is Verdict.SKIPPED:
        return []
    commands = [trial.prepared, trial.command.text] if trial.prepared else [trial.command.text]
    lines = ["", f"## {trial.name}: {finding.verdict.value}", "", *(f"    {command}" for command in commands)]
    said = finding.said.splitlines()
    if finding.verdict is Verdict.FAILED:
        lines += ["", finding.why, "", "```", *said[-LAST_LINES:], "```"]
    elif trial.telling:
        lines += ["", "```", *said, "```"]
    return lines


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", "<br>")
