"""Loading a model file, and what its functions may return."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import ModelFile, bound, label, load, takes_names, with_names
from chimera_runtime.values.nested import ONE_TENSOR
from tests.unit.runtime.models import CPU
from tests.unit.runtime.models import model as made
from tests.unit.runtime.staged import tuple_of

FILE = """\
import torch
from torch import nn
from torch.distributed import device_mesh, fsdp, tensor
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", tensor.distribute_tensor(torch.ones(2), mesh(), [tensor.Replicate()]))


def mesh():
    return device_mesh.init_device_mesh("cpu", (1,))


def build_stage(stage, num_stages):
    return {expression}


loss = dataset = optimizer = print
"""


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of one, as wrappers ask for one when they are made."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_functions_that_a_file_may_have_take_what_they_need_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "def build_stage(s, n): ...\nloss = dataset = optimizer = print\n"
        "def validation(seed): return [seed]\n"
        "def on_step(pipe, outcome, steps): pipe.append((outcome, steps))\n"
        "def scheduler(optimizer, steps): ...\n"
    )
    file = load(tmp_path / "model.py", {"seed": 7, "steps": 3})
    calls: list[Any] = []
    file.stepped(calls, "an outcome")
    assert (file.held_out(), calls) == ([7], [("an outcome", 3)])
    assert (file.reference, file.tied, file.name) == (None, None, None)
    assert file.scheduler is not None


@pytest.mark.parametrize(
    ("takes", "is_read"),
    [
        ("", False),
        ("def loss(output, args): ...\n", False),
        ("def dataset(**args): ...\n", False),
        ("def dataset(args): ...\n", True),
        ("def build_stage(s, n, *, args): ...\n", True),
        ("def reference(args=()): ...\n", True),
    ],
)
def test_words_for_the_model_file_are_refused_unless_a_function_takes_them(
    tmp_path: Path, takes: str, is_read: bool
) -> None:
    (tmp_path / "model.py").write_text(f"def build_stage(s, n): ...\nloss = dataset = optimizer = print\n{takes}")
    assert load(tmp_path / "model.py", {"args": []})
    if is_read:
        assert load(tmp_path / "model.py", {"args": ["--wide"]})
        return
    with pytest.raises(Misuse, match="none of its functions takes args, so nothing reads what follows --"):
        load(tmp_path / "model.py", {"args": ["--wide"]})


def test_a_file_may_have_a_loss_for_each_stage_that_feeds_no_other(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "build_stage = dataset = optimizer = print\n"
        "loss = {'text': lambda output, target: (output, target), 'head': lambda output, target, args: args}\n"
    )
    of_file = load(file, {"args": ["--twice"]})
    assert of_file.of_sink("text").loss(1, 2) == (1, 2)
    assert of_file.of_sink("head").loss(1, 2) == ["--twice"]


def test_a_file_without_on_step_is_told_of_no_update_and_an_error_in_one_is_its_own(tmp_path: Path) -> None:
    made().stepped(None, None)
    (tmp_path / "model.py").write_text(
        "def build_stage(s, n): ...\nloss = dataset = optimizer = print\ndef on_step(pipe, outcome): 1 / 0\n"
    )
    with pytest.raises(ModelError, match=r"^on_step\(pipe, outcome\): .*model\.py:3 in on_step: ZeroDivisionError"):
        load(tmp_path / "model.py").stepped(None, None)


def model(folder: Path, expression: str) -> ModelFile:
    file = folder / "model.py"
    file.write_text(FILE.replace("{expression}", expression))
    return load(file)


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh())", "FSDPLinear"),
        ("nn.Sequential(fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh()))", "FSDPLinear"),
        ("fsdp.FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device('cpu'))", "FullyShardedDataParallel"),
        ("nn.parallel.DistributedDataParallel(nn.Linear(2, 2))", "DistributedDataParallel"),
        ("tensor.distribute_module(nn.Linear(2, 2), mesh())", "DTensor"),
        ("Scale()", "DTensor"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_stage_that_is_spread_over_ranks_is_refused_by_name(
    group: None, tmp_path: Path, expression: str, kind: str
) -> None:
    with pytest.raises(Misuse, match=f"stage 1 uses {kind}; FSDP, DDP and tensor parallelism cannot be used within"):
        model(tmp_path, expression).stage(1, 2, 0, torch.device("cpu"))


@pytest.mark.parametrize("expression", ["nn.Linear(2, 2)", "Checkpointed(2, 2)"])
def test_any_other_module_may_be_a_stage(tmp_path: Path, expression: str) -> None:
    assert model(tmp_path, expression).stage(0, 2, 0, torch.device("cpu")).training


COMPLETE = "build_stage = loss = dataset = optimizer = print\n"


def refused(path: Path) -> str:
    with pytest.raises(Misuse) as error:
        load(path)
    return str(error.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert refused(tmp_path / "m.py") == f"model file {tmp_path / 'm.py'}: No such file or directory"
    assert refused(tmp_path) == f"model file {tmp_path}: Is a directory"
    os.mkfifo(tmp_path / "pipe.py")
    assert refused(tmp_path / "pipe.py") == f"model file {tmp_path / 'pipe.py'}: it is no regular file"
    (tmp_path / "model.txt").write_text(COMPLETE)
    assert refused(tmp_path / "model.txt").endswith("not a Python file (its name must end in .py)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lacks the functions build_stage(stage: int, num_stages: int) -> torch.nn.Module, or in its place layers"),
        (COMPLETE + "loss = 5", "lacks the function loss(output, target) -> torch.Tensor"),
    ],
)
def test_functions_that_are_missing_are_named_with_their_form(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "m.py").write_text(text)
    assert words in refused(tmp_path / "m.py")


@pytest.mark.parametrize("text", ["import nowhere", "1 +", "raise SystemExit(0)"])
def test_a_file_that_cannot_be_run_is_an_error_of_the_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.py").write_text(text)
    with pytest.raises(ModelError, match="importing the model file"):
        load(tmp_path / "m.py")


def test_a_model_finds_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_model.py").write_text("def build_stage(*_): pass\n")
    (tmp_path / "m.py").write_text(COMPLETE + "from beside_the_model import build_stage\n")
    assert load(tmp_path / "m.py").build_stage.__module__ == "beside_the_model"
    del sys.modules["beside_the_model"]


def lazy(*_: int) -> nn.Module:
    return nn.LazyLinear(2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda *_: None, r"build_stage\(0, 2\) returned None, not a torch.nn.Module"),
        (lambda *_: nn.Linear, r"build_stage\(0, 2\) returned a type, not a torch.nn.Module"),
        (lazy, "stage 0 has lazy parameters; give every layer its sizes"),
    ],
)
def test_what_is_no_stage_is_refused(build: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        made(build).stage(0, 2, 0, CPU)


def test_errors_of_the_functions_are_the_models_and_say_what_was_called() -> None:
    def failing(*_: Any) -> Any:
        raise ValueError

    broken = made(failing, failing, failing, failing)
    for call, words in (
        (lambda: broken.stage(1, 2, 0, CPU), r"build_stage\(1, 2\)"),
        (lambda: broken.judge(None, None), "the loss"),
        (broken.items, r"dataset\(\)"),
        (lambda: broken.steps([nn.Parameter(torch.ones(1))]), r"optimizer\(parameters\)"),
    ):
        with pytest.raises(ModelError, match=words):
            call()


# Stages come to the device of their rank, whole; where they are from another one, that is said.

META = torch.device("meta")


class Scale(nn.Module):
    """A factor that is made on a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2, device=device))


class Staying(nn.Linear):
    """A layer that stays where it is, as one that is spread over devices does."""

    def to(self, *_: object, **__: object) -> "Staying":
        return self


class Refusing(nn.Linear):
    """A layer that cannot be moved."""

    def to(self, *_: object, **__: object) -> "Refusing":
        raise RuntimeError("offloaded")


def on_another_gpu(*_: int) -> nn.Module:
    with FakeTensorMode():
        return nn.Sequential(nn.Linear(2, 2), Scale("cuda:1"))


def test_a_stage_comes_to_its_device_with_all_it_has() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    placed = made(lambda *_: module).stage(1, 2, 0, META)
    assert placed is module
    assert {tensor.device for tensor in (*placed.parameters(), *placed.buffers())} == {META}


@pytest.mark.parametrize(
    ("build", "device", "kind", "words"),
    [
        *(
            (
                on_another_gpu,
                device,
                Misuse,
                f"model.py: stage 1 has 1.factor on cuda:1, and its rank computes on {device}: build it on the CPU",
            )
            for device in ("cuda:0", "cpu")
        ),
        (
            lambda *_: Staying(2, 2),
            "meta",
            Misuse,
            "model.py: stage 1 has weight on cpu, also after module.to('meta'): a stage has to be one that moves as a",
        ),
        (lambda *_: Refusing(2, 2), "cpu", ModelError, "placing stage 1 on cpu"),
    ],
)
def test_a_stage_that_does_not_come_to_its_device_is_named(
    build: Any, device: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as error:
        made(build).stage(1, 2, 0, torch.device(device))
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "None"), (1.5, "a float"), (torch.ones(2), r"a tensor of shape \(2,\)"), (torch.ones(0), "a tensor of")],
)
def test_a_loss_is_a_tensor_of_one_number(value: Any, words: str) -> None:
    with pytest.raises(Misuse, match=f"loss returned {words}.*; return the mean over the micro-batch"):
        made(judge=lambda *_: value).judge(None, None)
    assert made(judge=lambda *_: torch.ones(1, 1)).judge(None, None).item() == 1


def test_a_stage_without_parameters_needs_no_optimizer() -> None:
    idle = made(optimizer=lambda _: None)
    idle.steps([]).step()
    with pytest.raises(Misuse, match=r"optimizer returned None, not a torch.optim.Optimizer"):
        idle.steps([nn.Parameter(torch.ones(1))])


def test_outputs_are_tensors_and_known_as_one_or_several() -> None:
    one = torch.ones(1)
    assert made().outputs(0, one) == (ONE_TENSOR, (one,))
    assert made().outputs(0, (one,)) == (tuple_of(1), (one,))
    form, tensors = made().outputs(0, {"x": one, "mask": None, "heads": 4})
    assert (tensors, form.filled([5])) == ((one,), {"x": 5, "mask": None, "heads": 4})


# What functions of a model file are given by name.


OFFERED = {"steps": 10, "seed": 3, "args": ["--wide"]}
PATH = Path("model.py")


def test_a_function_gets_by_name_what_it_asks_for_and_nothing_else() -> None:
    def plain(x: int) -> int:
        return x

    def asking(x: int, args: list[str], *, steps: int, depth: int = 2) -> tuple[Any, ...]:
        return x, args, steps, depth

    assert bound(plain, 1, OFFERED, PATH) is plain
    assert bound(asking, 1, OFFERED, PATH)(5) == (5, ["--wide"], 10, 2)
    assert bound(lambda steps, seed: (steps, seed), 2, OFFERED, PATH)("own", "words") == ("own", "words")
    assert bound(partial(torch.optim.SGD, lr=1.0), 1, OFFERED, PATH)([nn.Parameter(torch.ones(1))]).defaults["lr"] == 1


def test_what_there_is_not_is_refused_by_its_name() -> None:
    def asking(x: int, depth: int, seed: int) -> int:
        return x + depth + seed

    with pytest.raises(Misuse, match=r"model.py: asking takes depth, .* by name it may take steps, seed, args"):
        bound(asking, 1, OFFERED, PATH)


def test_an_optimizer_that_asks_for_names_gets_them_also_for_copies_with_the_same_attributes() -> None:
    def optimizer(named_parameters: Any) -> list[str]:
        return [name for name, _ in named_parameters]

    assert takes_names(optimizer)
    assert not takes_names(torch.optim.SGD)
    module = nn.Linear(3, 4)
    label({"mine": module.weight, "h.2.bias": module.bias})
    copies = [nn.Parameter(p.data) for p in module.parameters()]
    for copy, parameter in zip(copies, module.parameters(), strict=True):
        copy.__dict__.update(parameter.__dict__)
    assert with_names(optimizer)(copies) == ["mine", "h.2.bias"]
