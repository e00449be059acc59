"""Entry point of train.py: parses options, joins the ranks, runs the training loop, and ends with one message."""

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime import errors
from chimera_runtime.blame import Located, ModelError, UserCode, describe
from chimera_runtime.errors import FAILED, MISUSED, OUR_FAULT, Misuse, Unwritable
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.model.model import load as load_model
from chimera_runtime.program.compiled_program import CompiledProgram
from chimera_runtime.program.compiled_program import load as load_program
from chimera_runtime.ranks.rendezvous import find_store
from chimera_runtime.ranks.world import begin
from chimera_runtime.start.probe import memory_report
from chimera_runtime.tools.command.options import parse, require_fitting
from chimera_runtime.tools.fail.faults import BugReport, Faults, leave
from chimera_runtime.tools.loop.saving import Terminated
from chimera_runtime.tools.open.stdio import drop_unwritable, end_with_parent, release, reserve, write_error
from chimera_runtime.tools.run import Run

_EXPECTED = "CHIMERA_PROGRAM"
"""The variable in which `chimera run` passes on the digest of what it has compiled."""


def launch(train: Callable[[Run], None], directory: Path, program: str) -> None:
    """Runs this rank of the ``program``, a digest, to its end; any failure of any rank becomes one message and a non-
    zero status.
    """
    end_with_parent()
    # Modules of the user may have the names of files in the output directory.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != directory]

    # A mistake in the options is reported once the store is there, which decides on the rank that reports it.
    options, misuse = _options()
    try:
        store, rank, size = find_store(options.timeout)
    except Misuse as error:
        write_error(f"train.py: {misuse or error}")
        leave(MISUSED)
    faults = Faults(store, rank)
    if misuse is not None:
        faults.end(str(misuse), MISUSED)
    faults.watch_signals(size)

    # Everything else runs below `faults`, with a status for each kind of failure.
    try:
        bundle, reserved = None, list[Path | None]()
        if options.bundle is not None:
            reserved = [reserve("--bundle", options.bundle, store)] if os.environ.get("LOCAL_RANK", "0") == "0" else []
            faults.at_end.append(lambda _message: release(reserved))
            bundle = BugReport(options, directory, rank)
            faults.at_end.append(bundle.add)
            faults.hint = f"train.py: for a bug report there is {options.bundle}"
        compiled = load_program(directory)
        if compiled.job.program != program:
            raise mistakes.program_is_another(script=directory / "train.py")
        if program != os.environ.get(_EXPECTED, program):
            raise mistakes.program_was_replaced(directory=directory)
        _run(train, compiled, store, rank, size=size, options=options, faults=faults, bundle=bundle)
        release(reserved)
    except (Misuse, errors.BadModel, Unwritable, errors.BadCheckpoint) as error:
        faults.end(str(error), MISUSED)
    except Terminated as error:
        faults.end(str(error), error.status)
    except ModelError as error:
        faults.end(describe(error), error.status)
    except errors.PeerLost as error:
        faults.lost(error)
    except (errors.CheckFailed, errors.NotFinite) as error:
        faults.end(str(error), FAILED)
    except (RuntimeError, dist.DistError) as error:
        faults.fail(error)
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        report = "" if options.bundle is not None else "; to report it, start again with --bundle FILE"
        faults.end(f"rank {rank}: a fault of the generated program{report}\n{trace}", OUR_FAULT)
    drop_unwritable()


def _options() -> tuple[argparse.Namespace, Misuse | Unwritable | None]:
    try:
        return parse(sys.argv[1:]), None
    except (Misuse, Unwritable) as error:
        return argparse.Namespace(timeout=60.0), error


def _run(
    train: Callable[[Run], None],
    compiled: CompiledProgram,
    store: Store,
    rank: int,
    size: int,
    options: argparse.Namespace,
    faults: Faults,
    bundle: BugReport | None,
) -> None:
    job = compiled.job
    require_fitting(options, job)  # before the ranks connect
    if options.backend_module is not None:
        register_backend(options.backend, options.backend_module)
    arguments = options.layout, options.backend, options.timeout, options.device
    place, device = begin(job, store, rank, size, *arguments, end=lambda error: faults.end_alone(str(error), FAILED))
    facts = compiled.ranks[place.worker]
    offered = {"num_stages": job.stages, "steps": options.steps, "seed": options.seed, "args": options.args}
    noting = nullcontext() if bundle is None else bundle.noting(place)
    with Located(rank, place.worker, lambda: memory_report(device, facts)), noting:
        if options.hf:
            from chimera_runtime.huggingface.layers import model_file  # takes half a second

            model = model_file(options, options.split)
        else:
            model = load_model(options.model, offered, options.split)
        run = Run(options, compiled, store, place, device, replace(model, groups=job.named), faults)
        train(run)
    dist.destroy_process_group()
    run.close()


def register_backend(backend: str, module: Path) -> None:
    """Runs the file that registers a backend, for ``--backend-module``. Raises `Misuse` if it is missing or registers
    another one; `ModelError` if its code fails.
    """
    file = module.resolve()
    if not file.is_file():
        raise mistakes.directory_cannot_be_written(option="--backend-module", path=module, why=mistakes.NO_SUCH_FILE)
    spec = importlib.util.spec_from_file_location("chimera_backend", file)
    if spec is None or spec.loader is None:
        raise mistakes.directory_cannot_be_written(option="--backend-module", path=module, why=mistakes.NOT_PYTHON)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    with UserCode("importing the backend module", MISUSED):
        spec.loader.exec_module(loaded)
    if backend.lower() not in dist.Backend.backend_list:
        raise mistakes.backend_is_not_registered(backend=backend, module=module)
