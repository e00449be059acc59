"""What each worker of a schedule uses of a mini-batch, so that it loads nothing else."""

from collections import defaultdict

from chimera_runtime.data.loading import Uses
from chimera_runtime.program.job import Job
from chimera_runtime.program.rank_facts import RankFacts, spread

_INPUT, _TARGET, _KEYWORDS = range(3)


def uses(job: Job, facts: RankFacts, takes_keywords: bool, looks: bool) -> Uses:
    """By micro-batch, the parts of its triple that a worker uses in a step; there are none of those that it needs not.

    Parameters
    ----------
    takes_keywords
        Whether a stage of the worker takes keyword arguments: they are loaded for every micro-batch.
    looks
        Whether the worker looks at the first micro-batch for its shapes.
    """
    parts: defaultdict[int, set[int]] = defaultdict(set)
    for which, runs in ((_INPUT, facts.inputs), (_TARGET, facts.targets)):
        for micro in spread(runs):
            parts[micro % job.micro_batches].add(which)
    if takes_keywords:
        for micro in range(job.micro_batches):
            parts[micro].add(_KEYWORDS)
    if looks:
        parts[0] |= {_INPUT, _KEYWORDS}
    return {micro: frozenset(parts[micro]) for micro in sorted(parts)}
