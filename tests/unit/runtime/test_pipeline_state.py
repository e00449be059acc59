"""What a rank holds of a pipeline: names, numbers, and a state that a pipeline elsewhere goes on from."""

from pathlib import Path

import pytest
import torch

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.ranks.world import World
from tests.unit.runtime.kept import B, N, mini_batch, pipeline


def test_it_says_what_it_holds(alone: World, one_worker: Path) -> None:
    with pipeline(one_worker) as pipe:
        assert (pipe.items, pipe.micro_batches, pipe.copies, pipe.copy) == (B * N, N, 1, 0)
        assert (pipe.job.stages, [*pipe.stages], pipe.needs) == (2, [0, 1], frozenset(range(N)))
        assert pipe.optimizers == {}
        assert pipe.names == {parameter: name for name, parameter in pipe.named_parameters()}
        assert {*map(id, pipe.parameters())} == {id(p) for stage in pipe.stages.values() for p in stage.parameters()}


def test_a_state_is_taken_by_another_pipeline_with_its_update(alone: World, one_worker: Path) -> None:
    """Its next step is the same one; its buffers are those of the replica that is asked for."""
    with pipeline(one_worker) as pipe, pipeline(one_worker, seed=9) as other:
        for update in range(2):
            pipe.step(mini_batch(update))
            for parameter in pipe.parameters():
                parameter.grad = None
        state = pipe.state_dict(replica=5)
        assert {name.split("/")[0] for name in state["replicas"]} == {"5"}
        other.load_state_dict(state, replica=5)
        assert other.updates == pipe.updates == 2
        mine, theirs = pipe.step(mini_batch(2)), other.step(mini_batch(2))
        assert mine is not None
        assert theirs is not None
        assert (theirs.update, theirs.loss) == (2, mine.loss)
        for stage, module in other.stages.items():
            for name, tensor in module.state_dict().items():
                assert torch.equal(tensor, pipe.stages[stage].state_dict()[name]), name
        with pytest.raises(BadCheckpoint, match=r"the state has no 0/stages.0.1.running_mean, which this rank holds"):
            other.load_state_dict(state)


def test_a_file_that_gives_two_stages_equal_weights_is_remarked_upon_once(
    alone: World, one_worker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the file of a model that ties its words has them twice."""
    with pipeline(one_worker) as pipe:
        assert pipe.remarks == ()
        pipe.export_weights(tmp_path / "m.pt")
        weights = torch.load(tmp_path / "m.pt", weights_only=True)
        weights["stages.1.0.weight"] = weights["stages.0.0.weight"]
        torch.save(weights, tmp_path / "m.pt")
        for _ in range(2):
            assert pipe.load_weights(tmp_path / "m.pt") == []
        (remark,) = pipe.remarks
        assert "0.weight of stage 0 and 0.weight of stage 1 begin with equal values" in remark
        assert capsys.readouterr().err == f"{remark}\n"


def test_nothing_is_read_of_a_pipeline_that_has_failed_or_is_closed(
    alone: World, one_worker: Path, tmp_path: Path
) -> None:
    pipe = pipeline(one_worker)
    calls = pipe.state_dict, lambda: pipe.export_weights(tmp_path / "m.pt"), lambda: pipe.load_weights("m.pt")
    with pytest.raises(ModelError):
        pipe.step(lambda _: 1 / 0)
    for call in calls:
        with pytest.raises(Misuse, match="make a new one, from the last checkpoint"):
            call()
    pipe.close()
    for call in calls:
        with pytest.raises(Misuse, match="the pipeline is closed"):
            call()
