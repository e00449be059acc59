"""``chimera``: all commands under one name. Only the command that is called is imported, so none is slow to start."""

import gc
from importlib import import_module
from typing import NoReturn

import click

from chimera_ir import __version__
from chimera_ir.commands.common import SETTINGS, run
from chimera_ir.diagnostics.model import closest
from chimera_ir.garbage import uncollected

NAME = "chimera"

COMMANDS = {
    "compile": "Compile a scheme to PyTorch scripts, proven free of deadlock.",
    "run": "Compile a scheme and train a model with it on this machine.",
    "compare": "Show schemes side by side at one size.",
    "search": "Search for the best order of a scheme's operations.",
    "plan": "Rank every way to train a model on a cluster.",
    "profile": "Measure what a model and a cluster cost.",
    "trace": "Compare what ranks recorded with what was promised.",
    "view": "Open the picture of a compiled directory, or of a trace.",
    "new": "Write a model file, a training loop or a scheme to begin with.",
    "explain": "Explain a message by its code, as in CH301.",
}
"""Summaries of the commands, in the order of the help; the command ``x`` is ``x_command`` in ``x_command.py``."""


class _Commands(click.Group):
    """The commands, none of which is imported before it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        with uncollected():
            module = import_module(f"chimera_ir.commands.{cmd_name}_command")
            gc.freeze()
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names; a word that names none gets a suggestion."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            guess = closest(name, COMMANDS)
            advice = f"did you mean {guess}?" if guess else f"there are {', '.join(COMMANDS)}"
            ctx.fail(f"no such command '{name}' ({advice})")
        return super().resolve_command(ctx, args)


_COMPLETION = """
\b
Completion of commands, options and schemes, in the start-up file of your shell:
  bash  eval "$(_CHIMERA_COMPLETE=bash_source chimera)"
  zsh   eval "$(_CHIMERA_COMPLETE=zsh_source chimera)"
  fish  _CHIMERA_COMPLETE=fish_source chimera | source
"""


@click.command(cls=_Commands, context_settings=SETTINGS, epilog=_COMPLETION)
@click.version_option(__version__)
def group() -> None:
    """Compile schedules of pipeline-parallel training, plan them, run them, and compare what was recorded.

    Each command has its own --help.

    Exit status: 0; 1 something is wrong in a text or a file, 2 on the command line; 3 compiled, but too large for the
    cluster; 70 something is wrong in the program; 130 interrupted. That of run is torchrun's once it has started.
    """


def main(name: str = NAME) -> NoReturn:
    """Runs the command ``chimera``; ``name`` is how the user called it."""
    run(group, name)
