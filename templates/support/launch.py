"""From the command line to trained weights: the flow of every rank."""

import argparse
import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runtime import BadModel, Lane, PeerLost
from support import probe
from support import stages as build
from support.allocator import keep_memory
from support.batches import Batches
from support.blame import ModelError, describe
from support.check import check
from support.compare import CheckFailed
from support.compute import Stage
from support.faults import FAILED, MISUSED, OUR_FAULT, Faults, Misuse, leave
from support.job import Job, RankScript
from support.memory import refuse_beyond
from support.metrics import Metrics
from support.model import Model, load
from support.options import parse
from support.progress import Overlapping, Progress
from support.recorded import recorded
from support.recorder import Recorder, prepare
from support.rehearsal import Rehearsal
from support.setting import Setting
from support.streams import Unwritable, let_go, say, tell
from support.world import World, join, meet

_AGAIN = "compile again, or copy the whole directory again"


def main(job: Job, scripts: Path) -> None:
    """Runs this rank to its end; every failure of any rank is one message and a non-zero status."""
    options, misuse = _options(job)
    try:
        store, rank, size = meet(options.timeout)
    except Misuse as error:
        tell(f"train.py: {misuse or error}")
        leave(MISUSED)
    faults = Faults(store, rank)
    if misuse is not None:
        faults.end(f"train.py: {misuse}", MISUSED)
    faults.watch_signals()
    try:
        world = join(job, store, rank, size, options.layout, options.backend, options.timeout)
        _run(world, scripts, options, faults)
    except (Misuse, BadModel, Unwritable) as error:
        faults.end(f"train.py: {error}", MISUSED)
    except ModelError as error:
        faults.end(f"train.py: rank {rank}: {describe(error, _absolute(options.model))}", error.status)
    except PeerLost as error:
        faults.end(f"train.py: {faults.root_of(str(error), error.peers)}", FAILED)
    except CheckFailed as error:
        faults.end(f"train.py: {error}", FAILED)
    except (RuntimeError, dist.DistError) as error:
        faults.end(f"train.py: rank {rank}: {type(error).__name__}: {str(error).splitlines()[0]}", FAILED)
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        faults.end(f"train.py: rank {rank}: a fault of the generated program\n{trace}", OUR_FAULT)
    let_go()


def _options(job: Job) -> tuple[argparse.Namespace, Misuse | Unwritable | None]:
    try:
        return parse(sys.argv[1:], job.name), None
    except (Misuse, Unwritable) as error:
        return argparse.Namespace(timeout=60.0), error


def _absolute(path: Path) -> Path:
    """The path as frames of a traceback name it, if the working directory is still there."""
    try:
        return path.resolve()
    except OSError:
        return path


def _script(scripts: Path, worker: int, job: Job) -> RankScript:
    """The module ``rank_<worker>.py`` beside train.py.

    It is imported last, and written after all that is imported before it: if it is of this program, so are those.

    Raises
    ------
    Misuse
        If it is missing, or of another program.
    """
    sys.path.insert(0, str(scripts))
    name = f"rank_{worker}"
    try:
        script: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise Misuse(f"{scripts} has no {name}.py: {_AGAIN}") from error
    if job.program != script.PROGRAM:
        raise Misuse(f"{scripts / name}.py is of another program than train.py: {_AGAIN}")
    return script  # type: ignore[no-any-return]


def _run(world: World, scripts: Path, options: argparse.Namespace, faults: Faults) -> None:
    script = _script(scripts, world.place.worker, world.job)
    model = load(options.model)
    batches = _batches(world, model, options)
    if options.rehearse and options.backend == "nccl":
        raise Misuse("--rehearse: sleeps on the CPU say nothing about a GPU; use --backend gloo")
    metrics = None if options.metrics is None or world.place.rank else Metrics(options.metrics)
    if metrics is not None:
        faults.at_end.append(lambda _message: metrics.keep())
    if options.trace is not None:
        prepare(world, options.trace, scripts)
    built = build.modules(world, model, options.seed)
    build.agree_on_weights(world, built)
    findings = probe.find(world, model, batches, built, options.seed, options.memory_limit is not None)
    setting = Setting(world, script, options, model, batches, findings)
    remarks = build.remarks(world, findings)
    if options.memory_limit is not None:
        remarks.append(refuse_beyond(options.memory_limit, setting, built))
    if world.place.rank == 0:
        for remark in remarks:
            say(remark)
    if options.check or options.check_only:
        verdict = check(setting, built)
        if verdict is not None:
            say(verdict)
        if options.check_only:
            _leave(world)
            return
    progress = Progress(world, options.steps, setting.share, options.rehearse is not None, metrics)
    _train(setting, built, progress, faults)
    _leave(world)
    progress.close()


def _batches(world: World, model: Model, options: argparse.Namespace) -> Batches:
    place, job, size = world.place, world.job, options.micro_batch_size
    if size % job.parts:
        raise Misuse(
            f"--micro-batch-size {size}: {job.name} cuts every micro-batch into {job.parts} halves; "
            "choose an even size, as in --micro-batch-size 2"
        )
    batches = Batches(model.items(), size, job.micro_batches, job.parts, place.copies, place.copy, options.seed)
    batches.check()
    return batches


def _train(setting: Setting, built: dict[int, Any], progress: Progress, faults: Faults) -> None:
    options = setting.options
    if setting.world.device.type == "cpu":
        keep_memory()
    rehearsal = Rehearsal(options.rehearse["F"], options.rehearse["B"]) if options.rehearse else None
    stages = build.assemble(setting, built, setting.model.steps, rehearsal)
    run = _stream if setting.world.job.period else _updates
    with _traced(setting, stages, faults) as lane:
        run(setting, lane, stages, progress)
        progress.finish()


@contextmanager
def _traced(setting: Setting, stages: dict[int, Stage], faults: Faults) -> Iterator[Lane]:
    """The lane, with ``--trace`` one that records; what was recorded is kept whatever happens inside."""
    if setting.options.trace is None:
        yield setting.lane(stages)
        return
    recorder = Recorder(setting, setting.options.trace)
    faults.at_end.append(recorder.abandon)
    yield Lane(*recorded(setting.parts(stages), recorder, setting.world.job.period > 0))
    recorder.close()


def _updates(setting: Setting, lane: Lane, stages: dict[int, Stage], progress: Progress) -> None:
    """One update after the other."""
    for number in range(setting.options.steps):
        lane.begin(number)
        progress.begin()
        setting.script.update(lane)
        progress.end(sum(stage.take_loss(number) for stage in stages.values()))


def _stream(setting: Setting, lane: Lane, stages: dict[int, Stage], progress: Progress) -> None:
    """All updates in one go: they overlap."""
    updates, overlapping = setting.options.steps, Overlapping(progress, len(stages))
    for stage in stages.values():
        stage.on_step = overlapping.stepped
    progress.begin()
    setting.script.stream(lane, updates)
    for _ in range(0 if stages else updates):
        progress.end(0.0)


def _leave(world: World) -> None:
    """Ends together, so that no rank closes a connection that another still reads from."""
    world.meet("for everybody to finish")
    dist.destroy_process_group()
