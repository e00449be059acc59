"""Requirements of the options of train.py on the program. The module is imported without torch, like the options."""

from argparse import Namespace

from chimera_runtime.errors import tools_command as mistakes
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.communicators import chosen
from chimera_runtime.tools.command.options import KINDS


def require_fitting(options: Namespace, job: Job) -> None:
    """Passes if the program can do what the options ask for, without a look at the model file or the other ranks.

    Raises `Misuse` if it cannot.
    """
    if options.clip_norm is not None and job.period:
        raise mistakes.clipping_needs_a_flush(job.name)
    if options.shard_optimizer and job.period:
        raise mistakes.sharding_needs_a_flush(job.name)
    size = options.micro_batch_size
    if size % job.parts:
        raise mistakes.micro_batch_is_not_divisible(size, job.name, job.parts)
    seconds = options.rehearse
    if seconds is not None and (lacking := [kind for kind in job.kinds if kind not in seconds]):
        durations = dict.fromkeys(KINDS, 0.005) | seconds
        durations["pair"] = seconds.get("pair", durations["F"] + durations["B"])
        raise mistakes.rehearsal_lacks_durations(lacking, job.name, {kind: durations[kind] for kind in job.kinds})
    chosen(job, options.backend, options.communicators)
