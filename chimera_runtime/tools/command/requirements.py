"""What options of train.py require of the program. It is read without torch, as the options are."""

from argparse import Namespace

from chimera_runtime.errors import Misuse
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.communicators import chosen
from chimera_runtime.tools.command.options import KINDS


def require_fitting(options: Namespace, job: Job) -> None:
    """Passes if the program can do what the options ask for, as far as no model file and no rank is needed to know.

    Raises
    ------
    Misuse
        If it cannot.
    """
    if options.clip_norm is not None and job.period:
        raise Misuse(
            f"--clip-norm: {job.name} has no flush, and its stages make an update at different times: there is no norm "
            "of all its gradients; take a scheme with a flush, or clip in the step of the model file's optimizer, "
            "which sees one stage"
        )
    if options.shard_optimizer and job.period:
        raise Misuse(
            f"--shard-optimizer: {job.name} has no flush, and its stages step inside the schedule, which leaves no "
            "place to gather their weights; take a scheme with a flush, or leave the option out"
        )
    size = options.micro_batch_size
    if size % job.parts:
        raise Misuse(
            f"--micro-batch-size {size}: {job.name} cuts every micro-batch into {job.parts} halves; choose an even "
            "size, as in --micro-batch-size 2"
        )
    seconds = options.rehearse
    if seconds is not None and (lacking := [kind for kind in job.kinds if kind not in seconds]):
        known = dict.fromkeys(KINDS, 0.005) | seconds
        known["pair"] = seconds.get("pair", known["F"] + known["B"])
        example = ",".join(f"{kind}={known[kind]:g}" for kind in job.kinds)
        raise Misuse(f"--rehearse lacks {' and '.join(lacking)}: {job.name} has such operations; give {example}")
    chosen(job, options.backend, options.communicators)
