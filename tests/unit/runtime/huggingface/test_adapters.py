"""LoRA of peft on a model that is handed over: adapters train as in one process, and peft reads what is exported."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from chimera_runtime import Checkpoints, Misuse, Pipeline
from chimera_runtime.huggingface import layers
from chimera_runtime.ranks.world import World
from tests.unit.runtime.huggingface.small import WORDS, configuration, train_beside, whole

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="needs peft: pip install -e '.[peft]'"),
    pytest.mark.filterwarnings("ignore"),  # of peft and of what it imports
]

B, N = 2, 4
TOKENS = torch.randint(3, WORDS, (B * N, 8), generator=torch.Generator().manual_seed(0))
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "use_rslora": True},
    "modules to save": {"target_modules": "all-linear", "modules_to_save": ["embed_tokens", "lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}


def adapted(name: str) -> Any:
    torch.manual_seed(3)
    peft = import_module("peft")
    adapter = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **ADAPTERS[name])
    return peft.get_peft_model(whole(configuration("qwen3")).train(), adapter).double()


@pytest.mark.parametrize("name", ADAPTERS)
def test_only_adapters_train_and_peft_reads_them(alone: World, four_stages: Path, tmp_path: Path, name: str) -> None:
    theirs, model = adapted(name), adapted(name)
    cut = layers(model)
    with Pipeline(four_stages, cut, cut.loss, (TOKENS[:B], TOKENS[:B]), tied=cut.tied, name=cut.name) as pipe:
        train_beside(pipe, theirs, TOKENS, 2)
        assert "check: passed" in pipe.check((TOKENS, TOKENS))
        cut.export(pipe, tmp_path / "tuned")
    fresh = adapted(name).state_dict()
    trained = {key for key, value in model.state_dict().items() if not torch.equal(value, fresh[key])}
    assert trained == {key for key, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert {file.name for file in (tmp_path / "tuned").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base = whole(configuration("qwen3"))
    read = import_module("peft").PeftModel.from_pretrained(base, tmp_path / "tuned").double().eval()
    with torch.no_grad():
        outputs = [module(input_ids=TOKENS).logits for module in (read, model.eval(), read.merge_and_unload())]
    for output in outputs[1:]:
        torch.testing.assert_close(outputs[0], output, rtol=0, atol=1e-6)


def test_a_resumed_training_is_the_same(alone: World, four_stages: Path, tmp_path: Path) -> None:
    states = []
    for ends in ((1, 2), (2,)):
        for end in ends:
            model = adapted("dora")
            cut = layers(model)
            with Pipeline(four_stages, cut, cut.loss, (TOKENS[:B], TOKENS[:B]), tied=cut.tied, name=cut.name) as pipe:
                optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], 0.01)
                checkpoints = Checkpoints(tmp_path / str(len(ends)), pipe, optimizer)
                checkpoints.resume()
                while pipe.updates < end:
                    pipe.step((TOKENS, TOKENS))
                    optimizer.step()
                    optimizer.zero_grad()
                checkpoints.save()
                checkpoints.close()
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_other_adapters_are_refused() -> None:
    peft = import_module("peft")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    rows = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3])
    for adapter, words in ((prompt, "PROMPT_TUNING"), (rows, "LORA with trainable_token_indices")):
        with pytest.raises(Misuse, match=f"an adapter of peft is {words}, .*; use LoraConfig"):
            layers(peft.get_peft_model(whole(configuration("qwen3")), adapter))
