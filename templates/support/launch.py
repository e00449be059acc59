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
from support.check import CheckFailed, check
from support.compute import Stage
from support.faults import FAILED, MISUSED, Faults, Misuse, where
from support.job import Job, RankScript
from support.memory import refuse_beyond
from support.model import Model, load
from support.options import parse
from support.progress import Overlapping, Progress
from support.recorded import recorded
from support.recorder import Recorder, prepare
from support.rehearsal import Rehearsal
from support.setting import Setting
from support.world import World, join, meet


def main(job: Job, scripts: Path) -> None:
    """Runs this rank to its end; every failure of any rank is one message and a non-zero status."""
    options, misuse = _options(job)
    try:
        store, rank, size = meet(options.timeout)
    except Misuse as error:
        print(f"train.py: {misuse or error}", file=sys.stderr)
        sys.exit(MISUSED)
    faults = Faults(store, rank)
    if misuse is not None:
        faults.end(f"train.py: {misuse}", MISUSED)
    faults.watch_signals()
    try:
        world = join(job, store, rank, size, options.layout, options.backend, options.timeout)
        _run(world, scripts, options, faults)
    except (Misuse, BadModel) as error:
        faults.end(f"train.py: {error}", MISUSED)
    except PeerLost as error:
        faults.end(f"train.py: {faults.root_of(str(error), error.peers)}", FAILED)
    except CheckFailed as error:
        faults.end(f"train.py: {error}", FAILED)
    except Exception as error:
        faults.end(_unexpected(error, options.model.resolve(), rank), FAILED)


def _options(job: Job) -> tuple[argparse.Namespace, Misuse | None]:
    try:
        return parse(sys.argv[1:], job.name), None
    except Misuse as error:
        return argparse.Namespace(timeout=60.0), error


def _unexpected(error: Exception, model: Path, rank: int) -> str:
    """An error of the model's own code in one line; one of ours in full."""
    frames = traceback.extract_tb(error.__traceback__)
    if any(Path(frame.filename) == model for frame in frames):
        return f"train.py: rank {rank}: {where(error, model)}"
    if isinstance(error, RuntimeError | dist.DistError):
        return f"train.py: rank {rank}: {type(error).__name__}: {str(error).splitlines()[0]}"
    return f"train.py: rank {rank}: a fault of the generated program\n{''.join(traceback.format_exception(error))}"


def _script(scripts: Path, worker: int) -> RankScript:
    """The module ``rank_<worker>.py`` beside train.py."""
    sys.path.insert(0, str(scripts))
    script: Any = importlib.import_module(f"rank_{worker}")
    return script  # type: ignore[no-any-return]


def _run(world: World, scripts: Path, options: argparse.Namespace, faults: Faults) -> None:
    script = _script(scripts, world.place.worker)
    model = load(options.model)
    batches = _batches(world, model, options)
    if options.rehearse and options.backend == "nccl":
        raise Misuse("--rehearse: sleeps on the CPU say nothing about a GPU; use --backend gloo")
    if options.metrics is not None and world.place.rank == 0:
        _writable(options.metrics)
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
            print(remark, flush=True)
    if options.check or options.check_only:
        check(setting, built)
        if options.check_only:
            _leave(world)
            return
        built = build.modules(world, model, options.seed)
    _train(setting, built, faults)
    _leave(world)


def _batches(world: World, model: Model, options: argparse.Namespace) -> Batches:
    with model.blamed():
        dataset = model.dataset()
    place, job, size = world.place, world.job, options.micro_batch_size
    if size % job.parts:
        raise Misuse(
            f"--micro-batch-size {size}: {job.name} cuts every micro-batch into {job.parts} halves; "
            "choose an even size, as in --micro-batch-size 2"
        )
    batches = Batches(dataset, size, job.micro_batches, job.parts, place.copies, place.copy, options.seed)
    batches.check()
    return batches


def _writable(path: Path) -> None:
    try:
        path.open("a").close()
    except OSError as error:
        raise Misuse(f"--metrics {path}: {error.strerror}") from error


def _train(setting: Setting, built: dict[int, Any], faults: Faults) -> None:
    options = setting.options
    if setting.world.device.type == "cpu":
        keep_memory()
    rehearsal = Rehearsal(options.rehearse["F"], options.rehearse["B"]) if options.rehearse else None
    stages = build.assemble(setting, built, setting.model.steps, rehearsal)
    progress = Progress(setting.world, options.steps, setting.share, rehearsal is not None)
    writes = options.metrics is not None and setting.world.place.rank == 0
    if writes:
        faults.on_interrupt = lambda: progress.write(options.metrics)
    run = _stream if setting.world.job.period else _updates
    with _traced(setting, stages, faults) as lane:
        run(setting, lane, stages, progress)
        progress.finish()
    if writes:
        progress.write(options.metrics)


@contextmanager
def _traced(setting: Setting, stages: dict[int, Stage], faults: Faults) -> Iterator[Lane]:
    """The lane, with ``--trace`` one that records; what was recorded is kept whatever happens inside."""
    if setting.options.trace is None:
        yield setting.lane(stages)
        return
    recorder = Recorder(setting, setting.options.trace)
    faults.on_end = recorder.abandon
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
