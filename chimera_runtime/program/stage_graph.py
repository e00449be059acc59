"""The graph of stages: which stages feed a stage, and which it feeds. Nothing else computes a neighbouring stage."""


def fed(stage: int, stages: int) -> tuple[int, ...]:
    """The stages that ``stage`` feeds, of ``stages`` in all, ascending. Stages are a chain: each feeds the next one."""
    return (stage + 1,) if stage < stages - 1 else ()


def feeding(stage: int, stages: int) -> tuple[int, ...]:
    """The stages that feed ``stage``, of ``stages`` in all, ascending."""
    return (stage - 1,) if 0 < stage < stages else ()
