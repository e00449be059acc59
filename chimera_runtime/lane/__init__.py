"""The lane of a worker: what a generated script calls."""

from chimera_runtime.lane.lane import Lane

__all__ = ["Lane"]
