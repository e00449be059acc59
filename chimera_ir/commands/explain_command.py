"""``chimera explain``: what a message means, a text that gets it, and how to mend it."""

import inspect
import re

import click

from chimera_ir.commands.common import SectionedCommand, WrongCommand, as_json, general, write, write_json
from chimera_ir.commands.completion import codes, exceptions
from chimera_ir.diagnostics.model import Diagnostic, Example, closest, example, meaning, messages, pattern
from chimera_ir.escapes import visible_lines

LINES = 24
"""The most lines of an example that are shown."""


@click.command(cls=SectionedCommand, sections={})
@click.argument("code", required=False, metavar="[CODE]", shell_complete=codes)
@as_json("Print it as JSON.")
@general
def explain_command(code: str | None, as_json: bool) -> None:
    """Explain a message by its code, as in CH301, or an error by its name, as in PeerLost.

    Shows what it means, a text that gets it, and how to mend it. CH3 lists the codes of a group. Without CODE: all
    codes and names, a line for each.
    """
    listed = _listed(code)
    if listed:
        rows = {name: meaning(described) for name, described in listed.items()}
        width = max(map(len, rows))
        lines = (f"{name:<{width}}  {text}\n" for name, text in rows.items())
        write_json(rows) if as_json else write("".join(lines))
        return
    described = _known(code or "")
    shown = example(described.code) if issubclass(described, Diagnostic) else None
    if as_json:
        write_json(_entries(described, shown))
    else:
        write("\n\n".join(_paragraphs(described, shown)) + "\n")


def _listed(code: str | None) -> dict[str, type]:
    if code is None:
        return {**messages(), **exceptions()}
    group = re.fullmatch(r"ch(\d{1,2})(?:xx)?", code.lower())
    return {name: described for name, described in messages().items() if group and name.startswith(f"CH{group[1]}")}


def _known(code: str) -> type:
    """The class of a message or error, from its code or name in any spelling: ``ch301``, ``301``, ``error[CH301]``."""
    known = messages() | exceptions()
    code = re.sub(r"^(?:error|warning)\[(\w+)\]:?$", r"\1", code)
    written = f"CH{code}" if re.fullmatch(r"\d{3}", code) else code
    by_lower = {name.lower(): described for name, described in known.items()}
    if written.lower() not in by_lower:
        guess = None if re.fullmatch(r"ch\d+", written.lower()) else closest(written, known)
        advice = f"did you mean {guess}?" if guess else "chimera explain lists all"
        raise WrongCommand(f"no message has the code '{code}' ({advice})")
    return by_lower[written.lower()]


def _entries(described: type, shown: Example | None) -> dict[str, object]:
    entries: dict[str, object] = {"name": described.__name__, "meaning": meaning(described)}
    if issubclass(described, Diagnostic):
        entries |= {"code": described.code, "severity": described.severity.value, "title": pattern(described.title)}
        entries |= {"help": pattern(described.help)}
    if shown:
        entries |= {"example": {"file": shown.name, "text": shown.text, "output": shown.output}}
    return entries


def _paragraphs(described: type, shown: Example | None) -> list[str]:
    if not issubclass(described, Diagnostic):
        return [
            f"{described.__module__}.{described.__name__}",
            inspect.cleandoc(described.__doc__ or "").replace("``", "`"),
        ]
    parts = [f"{described.severity.value} {described.code}", meaning(described)]
    if shown is None:
        return [*parts, f"It says: {pattern(described.title)}", f"To mend it: {pattern(described.help)}"]
    lines = shown.text.splitlines()
    rest = [f".. {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    return [
        *parts,
        f"For example, {shown.name}:\n\n{_indented(lines[:LINES] + rest)}",
        f"gets this message; its help says how to mend it:\n\n{_indented(shown.output.rstrip().splitlines())}",
    ]


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {visible_lines(line)}".rstrip() for line in lines)
