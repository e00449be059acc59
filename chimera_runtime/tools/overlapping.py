"""Training without a flush: the steps are inside the schedule, so all updates are one call."""

from chimera_runtime import assemble, probe
from chimera_runtime.errors import Misuse
from chimera_runtime.losses import Tally
from chimera_runtime.setting import Setting
from chimera_runtime.tools.progress import Overlapping
from chimera_runtime.tools.run import Run
from chimera_runtime.world import join_all


def train_overlapping(run: Run) -> None:
    """All updates of a run whose schedule lets them overlap.

    Raises
    ------
    Misuse
        If gradients are to be clipped.
    """
    options, model, compiled = run.options, run.model, run.compiled
    if options.clip_norm is not None:
        raise Misuse(
            f"--clip-norm: {compiled.job.name} has no flush, and its stages make an update at different times: there "
            "is no norm of all its gradients"
        )
    world = join_all(compiled.job, run.place, run.store, run.device, options.timeout)
    script, facts = compiled.script(world.place.worker), compiled.ranks[world.place.worker]
    built = assemble.modules(world, model, options.seed)
    assemble.agree_on_weights(world, built)
    findings = probe.find(world, model, run.batches, built, options.seed, run.measures)
    setting = Setting(world, script, facts, model, findings, options.seed, run.batches if run.loads else None)
    run.ready(setting, built)
    if not options.check_only:
        stages = assemble.assemble(setting, built, model.steps, run.stage_maker(setting))
        lane = run.lane(setting, stages)
        with run.progress() as progress:
            overlapping = Overlapping(progress, len(stages))
            for stage in stages.values():
                stage.on_step = overlapping.stepped
            progress.begin()
            setting.run(lane, options.steps)
            for _ in range(0 if stages else options.steps):
                progress.end(Tally())
    world.meet("for everybody to finish")
