"""What generated ranks run on, and `Pipeline`, which runs them in a training loop of one's own.

`tools` has what train.py adds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chimera_runtime.blame import ModelError
    from chimera_runtime.checkpoint.checkpoints import Checkpoints
    from chimera_runtime.data.loader import Loader
    from chimera_runtime.errors import BadCheckpoint, BadModel, Misuse, PeerLost, RanksDiffer
    from chimera_runtime.model.layers import Layers
    from chimera_runtime.pipeline import Pipeline
    from chimera_runtime.ranks.rendezvous import fresh_store
    from chimera_runtime.stage.auxiliary_losses import auxiliary_loss
    from chimera_runtime.update.outcome import Outcome
    from chimera_runtime.update.stage_optimizer import StageStep

__all__ = [
    "BadCheckpoint",
    "BadModel",
    "Checkpoints",
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
]

_HOMES = {
    "BadCheckpoint": "errors",
    "BadModel": "errors",
    "Checkpoints": "checkpoint.checkpoints",
    "Layers": "model.layers",
    "Loader": "data.loader",
    "Misuse": "errors",
    "ModelError": "blame",
    "Outcome": "update.outcome",
    "PeerLost": "errors",
    "Pipeline": "pipeline",
    "RanksDiffer": "errors",
    "StageStep": "update.stage_optimizer",
    "auxiliary_loss": "stage.auxiliary_losses",
    "fresh_store": "ranks.rendezvous",
}


def __getattr__(name: str) -> Any:
    """Imports torch when it is needed: train.py opens its standard streams before that."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
