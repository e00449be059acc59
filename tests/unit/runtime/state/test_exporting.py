"""One file with all weights: what others read of it, what is read of others, and what is refused."""

import os
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.world import World
from chimera_runtime.state import exporting
from tests.unit.runtime.kept import WIDTH, compiled, mini_batch, pipeline, stage

FIRST, FURTHER = "stages.0.0.weight", "stages.1.0.weight"


def transposed(number: int, stages: int) -> nn.Module:
    """Its weight lies in memory in another order, as that of a convolution with channels last does."""
    module = stage(number, stages)
    if number:
        module.get_submodule("0").weight = nn.Parameter(module.get_parameter("0.weight").detach().t())
    return module


@pytest.fixture
def pipe(alone: World, tmp_path: Path) -> Iterator[Pipeline]:
    """Its two stages share a weight, and have buffers of their own."""
    made = pipeline(compiled(tmp_path / "out", 2, 0, 1), tied=[[(0, "0.weight"), (1, "0.weight")]])
    made.step(mini_batch(0))
    yield made
    made.close()


def by_stage(tensors: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    start = f"stages.{number}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def test_a_state_dict_has_what_the_modules_have_in_plain_torch(pipe: Pipeline, tmp_path: Path) -> None:
    """What is tied under each of its names, in one memory."""
    pipe.export_weights(tmp_path / "model.pt")
    tensors = torch.load(tmp_path / "model.pt", weights_only=True)
    for number, module in pipe.stages.items():
        alone = stage(number, 2)
        alone.load_state_dict(by_stage(tensors, number))
        for name, tensor in module.state_dict().items():
            assert torch.equal(alone.state_dict()[name], tensor), name
    assert tensors[FIRST].data_ptr() == tensors[FURTHER].data_ptr()
    assert [path.name for path in tmp_path.glob("*model*")] == ["model.pt"]


def test_safetensors_have_what_is_tied_under_its_first_name_alone(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.export_weights(tmp_path / "model.pt")
    pipe.export_weights(str(tmp_path / "model.safetensors"))
    expected = torch.load(tmp_path / "model.pt", weights_only=True)
    del expected[FURTHER]
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_weight_in_any_order_of_memory_comes_back_as_it_was(
    alone: World, one_worker: Path, tmp_path: Path, name: str
) -> None:
    with pipeline(one_worker, transposed) as pipe, pipeline(one_worker, transposed, seed=9) as other:
        assert not pipe.stages[1].get_parameter("0.weight").is_contiguous()
        pipe.export_weights(tmp_path / name)
        assert other.load_weights(tmp_path / name) == []
        for mine, theirs in zip(other.parameters(), pipe.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_others_are_read_and_what_is_too_much_is_told(pipe: Pipeline, tmp_path: Path, legacy: bool) -> None:
    """Also those of torch.save of old, in another dtype, and without buffers."""
    held = dict(pipe.named_parameters())
    theirs: Any = OrderedDict((name, torch.full(p.shape, 0.5)) for name, p in held.items())
    theirs[FURTHER] = theirs[FIRST]
    theirs |= {"lm_head.weight": torch.ones(1), "extra": torch.ones(1)}
    torch.save(theirs, tmp_path / "theirs.bin", _use_new_zipfile_serialization=not legacy)
    assert zipfile.is_zipfile(tmp_path / "theirs.bin") != legacy
    assert pipe.load_weights(tmp_path / "theirs.bin") == ["extra", "lm_head.weight"]
    assert all(bool((p == 0.5).all()) and p.dtype == torch.float64 for p in held.values())


class Unsafe:
    """What is run when it is read."""

    def __reduce__(self) -> Any:
        return exec, ("raise AssertionError('it was run')",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": {FIRST: torch.ones(3)}}, "it is no state dict: one has tensors by their names, and nothing else"),
        ({FIRST: 1.0}, "it is no state dict: one has tensors by their names"),
        ({0: torch.ones(1)}, "it is no state dict: one has tensors by their names"),
        ([torch.ones(3)], "it is no state dict: one has tensors by their names"),
        ({FIRST: Unsafe()}, "it is no state dict that torch.load reads with weights_only=True"),
    ],
)
def test_what_is_no_state_dict_is_refused_and_nothing_of_it_is_run(
    pipe: Pipeline, tmp_path: Path, content: Any, words: str
) -> None:
    torch.save(content, tmp_path / "wrong.pt")
    with pytest.raises(BadCheckpoint) as refused:
        pipe.load_weights(tmp_path / "wrong.pt")
    assert str(refused.value).startswith(f"{tmp_path / 'wrong.pt'}: {words}")


@pytest.mark.full
@pytest.mark.parametrize("content", [b"", b"what", b"PK\x03\x04", b"\x80\x02}q\x00.", b"{" * 40, bytes(range(256))])
@pytest.mark.parametrize("name", ["wrong.pt", "wrong.safetensors"])
def test_bytes_that_are_no_such_file_are_one_message(pipe: Pipeline, tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadCheckpoint, match=rf"{name}: it (is no (state dict|file of safetensors)|has no parameter)"):
        pipe.load_weights(tmp_path / name)


@pytest.mark.parametrize("name", ["none.pt", "none.safetensors"])
def test_a_file_that_is_not_there_is_one_message(pipe: Pipeline, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadCheckpoint, match=f"{name}: No such file or directory"):
        pipe.load_weights(tmp_path / name)


@pytest.mark.parametrize("name", ["pipe.pt", "pipe.safetensors"])
def test_a_pipe_is_not_waited_for(pipe: Pipeline, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadCheckpoint, match=f"{name}: it is no regular file"):
        pipe.load_weights(tmp_path / name)


def test_where_no_file_can_be_written_is_known_beforehand(
    pipe: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, words in [
        (tmp_path, "it is no regular file"),
        (Path("/dev/null"), "it is no regular file"),
        (tmp_path / "none" / "model.pt", f"there is no directory {tmp_path / 'none'}"),
    ]:
        for call in (exporting.require_writable, pipe.export_weights):
            with pytest.raises(BadCheckpoint) as refused:
                call(path)
            assert str(refused.value) == f"{path} cannot be written: {words}"
    exporting.require_writable(tmp_path / "model.safetensors")

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(exporting, "import_module", missing)
    for call in (exporting.require_writable, pipe.export_weights):
        with pytest.raises(Misuse, match="pip install safetensors, or choose another suffix"):
            call(tmp_path / "model.safetensors")
    exporting.require_writable(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_disk_that_is_full_leaves_the_file_of_before(
    pipe: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*_: object, **__: object) -> None:
        if name == "model.pt":
            raise OSError(28, "No space left on device")
        raise safetensors.SafetensorError("No space left on device")

    pipe.export_weights(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(BadCheckpoint, match=f"{name} cannot be written: No space left on device"):
            pipe.export_weights(tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    assert [path.name for path in tmp_path.glob("*model*")] + [*tmp_path.glob(".*")] == [name]


class Sized(nn.Linear):
    """Has an extra state of any kind."""

    def __init__(self, kept: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_extra_state_is_in_the_file_as_torch_has_it_or_the_export_is_refused(
    alone: World, one_worker: Path, tmp_path: Path
) -> None:
    """A file of before stays; one that has no extra state is read."""

    def built(kept: Any) -> Pipeline:
        return pipeline(one_worker, lambda *_: Sized(kept).double())

    path = tmp_path / "model.pt"
    for kept in ({"scale": [1.5, "x"], "t": torch.ones(2)}, torch.arange(3)):
        with built(kept) as pipe, built(None) as other:
            pipe.export_weights(path)
            plain = Sized(None).double()
            plain.load_state_dict(by_stage(torch.load(path, weights_only=True), 1))
            assert str(plain.kept) == str(kept)
            assert other.load_weights(path) == []
            assert str(other.stages[0].kept) == str(kept)
    with built(torch.arange(3)) as pipe, built(None) as other:
        pipe.export_weights(tmp_path / "model.safetensors")
        other.load_weights(tmp_path / "model.safetensors")
        assert torch.equal(torch.arange(3), other.stages[1].kept)  # type: ignore[arg-type]
    before = path.read_bytes()
    with built(Path("x")) as pipe:
        with pytest.raises(
            BadCheckpoint, match=r"stages.0._extra_state, which the model has .* is a PosixPath, which tor"
        ):
            pipe.export_weights(path)
        with pytest.raises(
            BadCheckpoint, match=r"is a PosixPath, and safetensors has tensors alone: choose another suff"
        ):
            pipe.export_weights(tmp_path / "model.safetensors")
    with built(lambda: None) as pipe, pytest.raises(Misuse, match=r"stages.0._extra_state cannot be saved"):
        pipe.export_weights(path)
    assert path.read_bytes() == before
    tensors = {name: value for name, value in torch.load(path, weights_only=True).items() if "extra" not in name}
    torch.save(tensors, tmp_path / "without.pt")
    with built(7) as pipe:
        assert pipe.load_weights(tmp_path / "without.pt") == []
        assert pipe.stages[0].kept == 7
