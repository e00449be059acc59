"""``--hf`` on the command line: a model of transformers in place of a model file."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from chimera_ir.commands.common import WRONG_COMMAND
from tests.unit.runtime.huggingface.small import configuration
from tests.unit.test_run import Chimera, chimera, started

__all__ = ["chimera", "started"]

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: pip install -e '.[hf]'")


@pytest.fixture(name="model")
def saved_model(tmp_path: Path) -> Path:
    """The directory of a configuration whose words are tied."""
    configuration("llama").save_pretrained(tmp_path / "llama")
    (tmp_path / "text").write_bytes(bytes(range(40)) * 3)
    return tmp_path / "llama"


def test_the_ties_of_the_model_are_compiled(
    chimera: Chimera, started: list[list[str]], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    ended = chimera("run", "gpipe", "D=2", "N=2", "--hf", str(model), "--text", "text")
    assert ended.status == 7, ended
    assert [f"--hf={model}", "--text=text"] == [word for word in started[0] if word.startswith(("--hf", "--text"))]
    assert "the tie of stages 0 and 1" in ended.out
    chimera("run", "gpipe", "D=1", "N=2", "--hf", str(model), "--text", "text")
    assert len(started) == 2, "a single stage has no tie"


def test_an_architecture_that_does_not_fit_is_refused_before_anything_is_compiled(
    chimera: Chimera, started: list[list[str]], model: Path
) -> None:
    import transformers

    transformers.T5Config().save_pretrained(model)
    words = "--hf", str(model), "--text", str(model.parent / "text")
    chimera("run", "gpipe", *words).assert_refused(WRONG_COMMAND, "the architecture t5 cannot be cut into layers")
    assert started == []


def test_a_profile_has_every_layer(chimera: Chimera, model: Path) -> None:
    out = model.parent / "profile.toml"
    words = "profile", "layers", "--micro-batch-size", "2", "--rounds", "5", "--out", str(out)
    ended = chimera(*words, "--hf", str(model), "--length", "8")
    assert ended.status == 0, ended
    assert out.read_text().count("[[layer]]") == 4
    cluster = Path(__file__).resolve().parents[2] / "docs" / "examples" / "small.cluster.toml"
    asked = "--mini-batch", "8", "--workers", "2", "--scheme", "gpipe", "--scheme", "dapple"
    planned = chimera("plan", "--profile", str(out), "--cluster", str(cluster), *asked, "--hf", str(model))
    assert "--tied first,last" in planned.out, planned
    assert f"--hf {model} --text FILE" in planned.out
    chimera(*words, "--hf", str(model), "--count").assert_refused(WRONG_COMMAND, "look at values of their masks")
    chimera(*words).assert_refused(WRONG_COMMAND, "give either MODEL.py or --hf PATH_OR_NAME")
    chimera(*words, "--hf", str(model), "--length", "99").assert_refused(WRONG_COMMAND, "the model has 16 positions")
