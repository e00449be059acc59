"""The runtime that generated scripts call, and `Pipeline`, with which a training loop of the user's own runs them.

Its room `tools` has the parts that only train.py uses.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chimera_runtime.adapter.schedule import CompiledSchedule, stages_of
    from chimera_runtime.blame import ModelError
    from chimera_runtime.checkpoint.checkpoints import Checkpoints
    from chimera_runtime.data.loader import Loader
    from chimera_runtime.errors import BadCheckpoint, BadModel, CheckFailed, Misuse, PeerLost, RanksDiffer
    from chimera_runtime.model.model import Layers
    from chimera_runtime.pipeline import Pipeline
    from chimera_runtime.ranks.rendezvous import fresh_store
    from chimera_runtime.stage.stage_output import auxiliary_loss, report
    from chimera_runtime.update.stage_optimizer import StageStep
    from chimera_runtime.update.updates import Outcome
    from chimera_runtime.values.boundary import whole
    from chimera_runtime.values.losses import CountedLoss

__all__ = [
    "BadCheckpoint",
    "BadModel",
    "CheckFailed",
    "Checkpoints",
    "CompiledSchedule",
    "CountedLoss",
    "Layers",
    "Loader",
    "Misuse",
    "ModelError",
    "Outcome",
    "PeerLost",
    "Pipeline",
    "RanksDiffer",
    "StageStep",
    "auxiliary_loss",
    "fresh_store",
    "report",
    "stages_of",
    "whole",
]

_HOMES = {
    "BadCheckpoint": "errors",
    "BadModel": "errors",
    "CheckFailed": "errors",
    "Checkpoints": "checkpoint.checkpoints",
    "CompiledSchedule": "adapter.schedule",
    "CountedLoss": "values.losses",
    "Layers": "model.model",
    "Loader": "data.loader",
    "Misuse": "errors",
    "ModelError": "blame",
    "Outcome": "update.updates",
    "PeerLost": "errors",
    "Pipeline": "pipeline",
    "RanksDiffer": "errors",
    "StageStep": "update.stage_optimizer",
    "auxiliary_loss": "stage.stage_output",
    "fresh_store": "ranks.rendezvous",
    "report": "stage.stage_output",
    "stages_of": "adapter.schedule",
    "whole": "values.boundary",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: train.py opens its standard streams before torch is imported."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
