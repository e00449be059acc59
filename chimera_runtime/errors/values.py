"""Messages about values that pass between stages."""

from chimera_runtime.errors import BadModel


def memory_was_written(source: int, target: int, micros: int | tuple[int, ...]) -> BadModel:
    micro = micros[0] if isinstance(micros, tuple) else micros
    verb = "handed on" if source < target else "handed back"
    return BadModel(
        f"stage {source} {verb} memory for micro-batch {micro} that was written again before stage {target} had it; "
        "return a copy, as .clone() makes it, of what a later call writes"
    )
