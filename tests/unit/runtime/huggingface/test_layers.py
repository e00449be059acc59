"""Models of transformers as layers compute what the library's own models do; what does not fit is refused."""

import os
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chimera_runtime import Misuse
from chimera_runtime.huggingface import TransformerLayers, layers, weights
from chimera_runtime.huggingface.skeleton import read_text
from tests.unit.runtime.huggingface.small import (
    CONFIGS,
    WORDS,
    configuration,
    loss_in_one_piece,
    parameters,
    stack,
    whole,
)

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: pip install -e '.[hf]'")


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels of which some are ignored, and a mask of the padding in front."""
    tokens = torch.randint(3, WORDS, (2, 8), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    return tokens, tokens.masked_fill(mask == 0, -100), mask


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("is_given", [True, False])
def test_layers_have_the_loss_and_the_gradients_of_the_model_in_one_piece(
    name: str, is_given: bool, tmp_path: Path
) -> None:
    """Of a model that is handed over, and of one that is read from a directory."""
    model = whole(configuration(name)).train()
    model.save_pretrained(tmp_path)
    cut = layers(deepcopy(model) if is_given else tmp_path, dtype=torch.float64, checkpoints=True)
    made = stack(cut).train()
    mine, theirs = parameters(cut, made), dict(model.named_parameters(remove_duplicate=False))
    assert mine.keys() == theirs.keys()
    # Masks, and none, and masks again: what layers share is made anew for each micro-batch.
    for seed, is_masked in enumerate((True, False, True)):
        tokens, labels, mask = batch(seed)
        keywords = {"attention_mask": mask} if is_masked else {}
        made.zero_grad()
        model.zero_grad()
        total, count = cut.loss(made(tokens, **keywords), labels)
        expected = loss_in_one_piece(model, tokens, labels, **keywords)
        (total / count).backward()
        expected.backward()
        assert (total / count).item() == pytest.approx(expected.item(), rel=1e-12)
        for parameter, other in theirs.items():
            torch.testing.assert_close(mine[parameter].grad, other.grad, rtol=0, atol=1e-12, msg=parameter)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_layer_reads_its_part_of_a_directory_and_the_whole_goes_back_bitwise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = whole(configuration(name), torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    opened: list[str] = []
    original = weights._safe_open
    monkeypatch.setattr(weights, "_safe_open", lambda file: opened.append(file.name) or original(file))
    cut = layers(tmp_path)
    cut.layers[-1]()
    assert len(opened) < len([*tmp_path.glob("*.safetensors")])
    read = parameters(cut, stack(cut))
    theirs = dict(model.named_parameters())
    assert all(torch.equal(read[parameter], value) for parameter, value in theirs.items())

    again = tmp_path / "again"
    again.mkdir()
    save_file(
        {parameter: read[parameter].detach() for parameter in theirs}, again / "model.safetensors", {"format": "pt"}
    )
    cut.describe(again)
    loaded = import_module("transformers").AutoModelForCausalLM.from_pretrained(again).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[parameter], value) for parameter, value in model.state_dict().items())


class Exporting:
    """Pipeline of one rank that exports a layer's weights with one of them changed."""

    copy = worker = 0

    def __init__(self, cut: TransformerLayers) -> None:
        self.read = parameters(cut, stack(cut))

    def export_weights(self, path: Path) -> None:
        with torch.no_grad():
            self.read["model.norm.weight"].fill_(2.0)
        save_file({name: value.detach() for name, value in self.read.items()}, path, {"format": "pt"})


BESIDE = {
    **{f"{name}.json": "{}" for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "processor_config")},
    "chat_template.jinja": "new",
    "additional_chat_templates/tool.jinja": "tool",
    "modeling_own.py": "VALUE = 1",
    "generation_config.json": '{"temperature": 0.3, "do_sample": true}',
    "preprocessor_config.json": "{}",
}
OLDER = ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_config.json")


def load_norm(directory: Path) -> list[float]:
    """What ``from_pretrained`` and `layers` read of a weight that an export has changed to 2."""
    theirs = import_module("transformers").AutoModelForCausalLM.from_pretrained(directory).model.norm.weight
    cut = layers(directory)
    return [theirs.mean().item(), parameters(cut, stack(cut))["model.norm.weight"].mean().item()]


@pytest.mark.parametrize("is_here", [True, False])
def test_an_export_replaces_what_was_there_and_brings_what_is_beside_weights(tmp_path: Path, is_here: bool) -> None:
    """Where the model comes from, and over the export of another one."""
    source, target = tmp_path / "source", tmp_path / "target"
    configured = configuration("qwen3")
    for directory in (source, target):
        whole(configured, torch.float32).save_pretrained(directory, max_shard_size="4KB")
        for name in OLDER:
            (directory / name).write_text("{}")
    (target / "chat_template.jinja").write_text("old")
    (target / "merges.txt").write_text("old")
    (target / "README.md").write_text("mine")
    for name, text in BESIDE.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    (source / "adapter_config.json").unlink()
    cut = layers(source)
    exported = source if is_here else target
    cut.export(Exporting(cut), exported)
    assert load_norm(exported) == [2.0, 2.0]
    kept = set() if is_here else {"README.md"}
    written = {str(file.relative_to(exported)) for file in exported.rglob("*") if file.is_file()}
    assert written == {*BESIDE, "config.json", "model.safetensors", *kept}
    assert all((exported / name).read_text() == text for name, text in BESIDE.items())


def test_new_weights_count_though_an_export_ended_before_older_ones_were_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(configuration("qwen3"), torch.float32).save_pretrained(tmp_path, max_shard_size="4KB")
    cut = layers(tmp_path)
    monkeypatch.setattr(weights, "_remove_older_weights", lambda _directory: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cut.export(Exporting(cut), tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert load_norm(tmp_path) == [2.0, 2.0]


def test_files_of_the_tokenizer_that_read_the_text_go_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    cut = replace(layers(configuration("qwen3")), tokenizer=tmp_path / "words")
    cut.export(Exporting(cut), tmp_path / "new")
    assert {file.name for file in (tmp_path / "new").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    }


def test_weights_that_the_architecture_lacks_are_named(tmp_path: Path) -> None:
    whole(configuration("mixtral"), torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    assert layers(tmp_path).remarks == []
    passed_over = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(load_file(file) | passed_over | {"value_head.weight": torch.zeros(2)}, file, {"format": "pt"})
    (remark,) = layers(tmp_path).remarks
    assert remark.startswith(f"{tmp_path}: MixtralForCausalLM has no value_head.weight, which the checkpoint has: they")


def test_initial_weights_are_drawn_as_the_architecture_draws_them() -> None:
    """GPT-2 begins with smaller projections to its shortcuts, and with biases of 0."""
    config = configuration("gpt2", n_embd=64, n_layer=8)
    torch.manual_seed(0)
    block = layers(config).layers[3]().block
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert not block.mlp.c_fc.bias.any()


def test_the_auxiliary_loss_is_only_added_where_the_configuration_asks_for_it() -> None:
    config = configuration("mixtral", output_router_logits=False)
    cut = layers(config)
    assert cut.routing is None
    assert isinstance(stack(cut)(batch()[0]), torch.Tensor)


def test_the_reference_is_the_model_in_one_piece() -> None:
    cut = layers(configuration("qwen3_moe"))
    made, reference = stack(cut), cut.reference()
    with torch.no_grad():
        for name, parameter in parameters(cut, made).items():
            reference.get_parameter(name).copy_(parameter)
    tokens, labels, mask = batch()
    mine, theirs = (cut.loss(module(tokens, attention_mask=mask), labels)[0] for module in (made, reference))
    torch.testing.assert_close(mine, theirs)


_SHARED = {"num_hidden_layers": 2, "hidden_size": 16, "vocab_size": WORDS, "num_kv_shared_layers": 0}
_QUANTIZED = {**CONFIGS["llama"][1], "quantization_config": {"quant_method": "fp8"}}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no causal model": ("T5Config", {}, "Unrecognized configuration class"),
    "values of weights for layers": (
        "Gemma3nTextConfig",
        _SHARED,
        "layer 0 gets, besides hidden states, a value that is computed with weights outside the layer",
    ),
    "quantized": ("LlamaConfig", _QUANTIZED, "its weights are quantized"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_architecture_that_does_not_fit_is_refused_with_the_reason(case: str) -> None:
    kind, arguments, reason = REFUSED[case]
    config = getattr(import_module("transformers"), kind)(**arguments)
    with pytest.raises(Misuse, match=f"the architecture {config.model_type} cannot be cut into layers: {reason}"):
        layers(config)


def spoiled(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Changes what Llama's forward gives a layer: ``change`` takes the layer's index, and its arguments."""
    from transformers.models.llama.modeling_llama import LlamaModel

    original = LlamaModel.forward

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(
                lambda _layer, inputs, by_name, index=index: change(self, index, inputs, by_name), with_kwargs=True
            )
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(LlamaModel, "forward", forward)


def test_a_model_that_computes_between_its_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, lambda _model, _index, inputs, by_name: ((inputs[0] * 2,), by_name))
    with pytest.raises(Misuse, match="layer 1 gets something else than the output of the layer before"):
        layers(configuration("llama"))


def test_a_model_that_gives_its_layers_values_of_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any, _index: int, inputs: Any, by_name: Any) -> Any:
        return inputs, by_name | {"words": model.embed_tokens.weight * 2}

    spoiled(monkeypatch, change)
    with pytest.raises(Misuse, match="layer 0 gets, besides hidden states, a value that is computed with weights"):
        layers(configuration("llama"))


def test_a_directory_that_lacks_weights_names_them(tmp_path: Path) -> None:
    whole(configuration("llama"), torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    cut = layers(tmp_path)
    cut.layers[1]()
    with pytest.raises(Misuse, match=r"have no model\.layers\.1\.mlp\.up_proj\.weight, which the configuration asks"):
        cut.layers[2]()
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": torch.zeros(3)}, file, {"format": "pt"})
    with pytest.raises(Misuse, match=r"up_proj\.weight has the shape \(3,\), and by the configuration \(24, 16\)"):
        layers(tmp_path).layers[2]()


def test_weights_of_which_no_part_can_be_read_are_refused(tmp_path: Path) -> None:
    configuration("llama").save_pretrained(tmp_path)
    assert layers(tmp_path).layers[1]().block.mlp.up_proj.weight.any(), "without weights they are random"
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(Misuse, match=r"pytorch_model\.bin and no safetensors"):
        layers(tmp_path)


def test_a_source_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"give a directory with config\.json, a configuration file, or the name"):
        layers(tmp_path)


_DEEP = b"[" * 100_000
_INDEX = "model.safetensors.index.json"


def _header(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        *(
            ("config.json", content, "config.json: ")
            for content in (_DEEP, b"", b"null", b"3", b"[]", b"\xff", b'{"model_type": "llama", "vocab_size": "x"}')
        ),
        ("config.json", b'{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 0}', "config.json: "),
        ("config.json", b'{"model_type": "llama", "hidden_act": "x"}', "its configuration makes no model"),
        ("config.json", b'{"model_type": "x", "auto_map": {"AutoConfig": "x.Y"}}', "config.json: .* custom code"),
        *((name, None, f"{name}: it is no regular file") for name in ("config.json", "model.safetensors")),
        *(
            ("model.safetensors", content, "model.safetensors: ")
            for content in (b"", b"\xff" * 99, (2**40).to_bytes(8, "little"), _header(_DEEP), _header(b"\xff"))
        ),
        *((_INDEX, content, f"{_INDEX}: it does not say") for content in (_DEEP, b"", b"[]", b'{"weight_map": []}')),
        *(
            (_INDEX, b'{"weight_map": {"lm_head.weight": "%s"}}' % file, r": .*(such file|null|not allowed|too long)")
            for file in (b"x", b"\\u0000", b"\\ud800", b"x" * 300)
        ),
    ],
)
def test_a_damaged_file_of_a_model_is_named(tmp_path: Path, name: str, content: bytes | None, named: str) -> None:
    whole(configuration("llama"), torch.float32).save_pretrained(tmp_path)
    if name == _INDEX:
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(Misuse, match=named):
        layers(tmp_path).layers[3]()


# A text becomes items of tokens or bytes; what cannot be trained on is refused.


def test_bytes_are_cut_into_items_and_the_last_are_held_out(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(23)))
    items = read_text(file, None, 4, 256)
    assert [item.tolist() for item, _ in items] == [[*range(n, n + 4)] for n in range(0, 20, 4)]
    assert all(torch.equal(item, labels) for item, labels in items)
    training, held_out = items.split()
    assert [len(training), held_out[0][0].tolist()] == [4, [16, 17, 18, 19]]


def test_a_tokenizer_reads_the_text_line_by_line(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "words")
    (tmp_path / "text").write_text("a b\nb c a\nb")
    assert [item.tolist() for item, _ in read_text(tmp_path / "text", tmp_path / "words", 3, 3)] == [
        [1, 2, 2],
        [0, 1, 2],
    ]
    with pytest.raises(
        Misuse, match=r"--text .*text: token 2 is outside the model's vocabulary of 2: give the tokenizer"
    ):
        read_text(tmp_path / "text", tmp_path / "words", 3, 2)
    with pytest.raises(Misuse, match="--tokenizer"):
        read_text(tmp_path / "text", tmp_path, 3, 3)


def test_a_text_that_is_missing_or_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"seven..")
    with pytest.raises(Misuse, match=r"it has 7 tokens, and the fewest are 8, two items \(--length 4\)"):
        read_text(tmp_path / "text", None, 4, 256)
    with pytest.raises(Misuse, match=r"--text /dev/zero: it is no regular file"):
        read_text(Path("/dev/zero"), None, 4, 256)
    with pytest.raises(Misuse, match=r"--text .*none: No such file"):
        read_text(tmp_path / "none", None, 4, 256)
