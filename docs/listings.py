"""Writes what reference pages list from the code: every code of a message, the options of every command.

    python docs/listings.py             # says which pages are out of date
    python docs/listings.py --update    # writes the lists as they are now

A list stands in a page between ``<!-- list: NAME -->`` and ``<!-- end of list -->``.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from chimera_ir import library
from chimera_ir.commands.common import GENERAL, SectionedCommand
from chimera_ir.commands.completion import exceptions
from chimera_ir.commands.group import group
from chimera_ir.diagnostics.model import Severity, meaning, messages

REFERENCE = Path(__file__).resolve().parent / "reference"
PAGES = tuple(REFERENCE / name for name in ("codes.md", "commands.md"))
LIST = re.compile(r"(?<=^<!-- list: )(\w+) -->\n.*?(?=^<!-- end of list -->$)", re.MULTILINE | re.DOTALL)
CHAPTERS = {
    "1": "the text of a scheme",
    "2": "names and values",
    "3": "schedules",
    "4": "programs",
    "5": "IR texts",
    "6": "what repeats",
    "7": "profiles and clusters",
    "8": "schedules of torch.distributed.pipelining",
}


def codes() -> Iterator[str]:
    """A table for each hundred of codes."""
    for digit, heading in CHAPTERS.items():
        yield f"\n## CH{digit}: {heading}\n\n|code|meaning|\n|---|---|\n"
        for code, message in messages().items():
            if code[2] == digit:
                warning = "A warning: " if message.severity is Severity.WARNING else ""
                yield f"|{code}|{warning}{sentence(message)}|\n"
    yield "\n"


def errors() -> Iterator[str]:
    """The errors of the Python interface, and those of ranks."""
    for package, heading in (("chimera_ir", "Python interface"), ("chimera_runtime", "Ranks")):
        yield f"\n### {heading}: `{package}.errors`\n\n|error|meaning|\n|---|---|\n"
        for name, error in exceptions().items():
            if error.__module__.startswith(f"{package}."):
                yield f"|`{name}`|{sentence(error)}|\n"
    yield "\n"


def sentence(described: type) -> str:
    """what a class is about, in a cell of a table."""
    return meaning(described).removesuffix(".").replace("|", "\\|")


def aliases() -> Iterator[str]:
    """The library schemes that have other names, with these."""
    yield "\n|scheme|other names|\n|---|---|\n"
    for scheme, names in library.aliases().items():
        yield f"|`{scheme}`|{', '.join(names)}|\n"
    yield "\nCapitals, and what stands between words, make no difference: `ZB-V` is `zb_v`.\n\n"


def options() -> Iterator[str]:
    """The options of each command by their sections, as its help has them."""
    for name, command in commands("chimera", group):
        common = {"--version", "--quiet"}
        others = {option.opts[-1] for option in visible(command)} - common
        sections = {heading: [n for n in names if n in others] for heading, names in command.sections.items()}
        rest = sorted(others.difference(*sections.values()))
        filled = {heading: names for heading, names in {**sections, GENERAL: rest}.items() if names}
        yield f"\n|`{name}`| |\n|---|---|\n" if filled else ""
        for heading, names in filled.items():
            yield f"|{heading}|{' '.join(f'`{option}`' for option in names)}|\n"
    yield "\n"


def visible(command: click.Command) -> list[click.Option]:
    """The options that a help shows."""
    return [option for option in command.params if isinstance(option, click.Option) and not option.hidden]


def commands(name: str, command: click.Command) -> Iterator[tuple[str, SectionedCommand]]:
    """The commands that take options, by how they are called."""
    if isinstance(command, SectionedCommand):
        yield name, command
    elif isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            subcommand = command.get_command(context, below)
            assert subcommand is not None
            yield from commands(f"{name} {below}", subcommand)


def listed(text: str) -> str:
    """A page with its lists as they are now."""
    lists = {"codes": codes, "errors": errors, "aliases": aliases, "options": options}
    return LIST.sub(lambda found: f"{found[1]} -->\n{''.join(lists[found[1]]())}", text)


def main() -> None:
    """The entry point; the exit status is 1 if a page is out of date and stays so."""
    stale = [path for path in PAGES if listed(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")]
    for path in stale:
        if "--update" in sys.argv[1:]:
            path.write_text(listed(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{path.name}: {'written' if '--update' in sys.argv[1:] else 'out of date'}")
    sys.exit(1 if stale and "--update" not in sys.argv[1:] else 0)


if __name__ == "__main__":
    main()
