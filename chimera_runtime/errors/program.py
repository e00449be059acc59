"""Messages about the directory that `chimera compile` writes."""

from pathlib import Path

from chimera_runtime.errors import Misuse

_AGAIN = "compile again, or copy the whole directory again"


def script_is_missing(directory: Path, name: str) -> Misuse:
    return Misuse(f"{directory} has no {name}: {_AGAIN}")


def script_is_of_another_program(path: Path, facts: str) -> Misuse:
    return Misuse(f"{path} is of another program than {facts}: {_AGAIN}")


def interface_is_another(path: Path, number: int, interface: int) -> Misuse:
    return Misuse(
        f"{path} was written for interface {number} of chimera_runtime, and this is interface {interface}: compile "
        "again with the chimera_ir that this chimera_runtime came with"
    )


def no_output_directory(directory: Path) -> Misuse:
    return Misuse(f"{directory} is no output directory: `chimera compile SCHEME --out {directory}` writes one")


def facts_cannot_be_read(path: Path, why: str | None) -> Misuse:
    return Misuse(f"{path}: {why}: {_AGAIN}")


def facts_are_damaged(path: Path) -> Misuse:
    return Misuse(f"{path} is not as it was written: {_AGAIN}")
