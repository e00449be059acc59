"""Weight groups: the stages whose weights are summed and stepped together."""

Group = tuple[int, ...]
"""A weight group: a stage by itself, or stages that share parameters, ascending."""


def group_text(group: Group) -> str:
    """Returns a weight group as in schedule.sir: ``s1``, or ``s0+s3``."""
    return "+".join(f"s{stage}" for stage in group)


def group_key(group: Group) -> int | Group:
    """Returns a weight group as users write it: the number of a stage, or a tuple of stages that share parameters."""
    return group[0] if len(group) == 1 else group


def group_name(group: Group) -> str:
    """Returns a weight group as in messages: ``stage 1``, or ``the tie of stages 0 and 3``."""
    *most, last = map(str, group)
    return f"the tie of stages {', '.join(most)} and {last}" if most else f"stage {last}"
