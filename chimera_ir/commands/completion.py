"""Completes words in a shell: names of library schemes, parameters of the scheme on the command line, codes."""

from os.path import isfile

import click
from click.shell_completion import CompletionItem

from chimera_ir import library
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.errors import CompileError


def schemes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of library schemes that begin with ``incomplete``, each with its summary, and files if no name does."""
    names = [name for name in library.names() if name.startswith(incomplete)]
    return [
        CompletionItem(incomplete, type="file"),
        *(CompletionItem(name, help=library.summary(name)) for name in names),
    ]


def settings(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Parameters of the scheme on the command line, each with the value that it has now, as in ``D=4``."""
    from chimera_ir.elaborate.settings import evaluate_globals
    from chimera_ir.syntax.parser import parse

    positional = (context.params.get("scheme"), *context.args)  # an option that lacks its value leaves words in `args`
    name = next(filter(None, positional), "")
    given = (*(context.params.get("settings") or ()), *(context.params.get("assignments") or ()))
    firsts = {
        name: value.partition(",")[0].partition("..")[0] for name, _, value in (word.partition("=") for word in given)
    }
    chosen = {name: int(value) for name, value in firsts.items() if value.isdecimal()}
    if name not in library.names() and not isfile(name):
        return []
    try:
        scheme = parse(library.scheme_or_ir(name))
        values = evaluate_globals(scheme, chosen).parameters
    except (CompileError, Rejected):
        return []
    words = [f"{name}={value}" for name, value in values if name not in chosen]
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def codes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Codes of messages and names of errors that begin with ``incomplete``, each with its meaning."""
    from chimera_ir.diagnostics.model import meaning, messages

    known = messages() | exceptions()
    begun = (name for name in known if name.lower().startswith(incomplete.lower()))
    return [CompletionItem(name, help=meaning(known[name])) for name in begun]


def exceptions() -> dict[str, type[Exception]]:
    """The errors of the Python interface, then those of ranks, by the names of their classes."""
    from chimera_ir import errors
    from chimera_runtime import errors as of_ranks

    return {
        name: value
        for module in (errors, of_ranks)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module.__name__
    }
