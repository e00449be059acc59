"""The paper's networks: their sizes to the unit, what they compute beside torch's layers, what they train on."""

import ast
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.blame import ModelError, describe
from chimera_runtime.model.model import ModelFile, load
from tests.repeatable import part

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
Loader = Callable[..., ModelFile]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Loader:
    """A model file as train.py loads it, under some settings; the path of imports is as before afterwards."""

    def loaded(name: str, settings: str = "") -> ModelFile:
        monkeypatch.setenv("MODEL_SETTINGS", settings)
        monkeypatch.syspath_prepend(str(EXAMPLES))
        return load(EXAMPLES / f"{name}.py")

    return loaded


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def on_meta(model: ModelFile, stages: int) -> list[nn.Module]:
    with torch.device("meta"):
        return [model.build_stage(stage, stages) for stage in range(stages)]


def outer(name: str, vocabulary: int, positions: int, h: int) -> tuple[int, int]:
    """The parameters before and behind the layers, by the papers that the networks are from."""
    if name == "gpt2":
        return (vocabulary + positions) * h, 2 * h + vocabulary * h
    pooler, transform, projection, sentence = h * h + h, h * h + 3 * h, vocabulary * h + vocabulary, 2 * h + 2
    return (vocabulary + positions + 2) * h + 2 * h, pooler + transform + projection + sentence


FULL = [("bert48", 669_790_012, 48, (30522, 512, 1024)), ("gpt2", 1_389_327_360, 64, (50257, 1024, 1280))]


@pytest.mark.parametrize(("name", "table_4", "layers", "outside"), FULL)
def test_the_networks_have_the_parameters_of_table_4_in_equal_stages(
    network: Loader, name: str, table_4: int, layers: int, outside: tuple[int, int, int]
) -> None:
    """A layer is 12 h^2 + 13 h: the attention's four matrices, the perceptron's eight, their biases, two norms."""
    model, h = network(name), outside[2]
    before, behind = outer(name, *outside)
    for stages in part((d for d in range(1, layers + 1) if layers % d == 0), 3):
        expected = [layers // stages * (12 * h * h + 13 * h)] * stages
        expected[0] += before
        expected[-1] += behind
        found = [count(stage) for stage in on_meta(model, stages)]
        assert found == expected, stages
        assert sum(found) == table_4


@pytest.mark.parametrize("name", ["bert48", "gpt2"])
def test_the_parts_in_the_docstring_add_up(network: Loader, name: str) -> None:
    """Each line of its table ends with the parameters of a part; the first line of the file has the sum."""
    described = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or ""
    first, *lines = described.splitlines()
    parts = [int(count.replace(",", "")) for line in lines for count in re.findall(r"^    .* ([\d,]+)$", line)]
    assert len(parts) > 3
    assert f"{sum(parts):,} parameters" in first
    assert sum(parts) == sum(map(count, on_meta(network(name), 1)))


@pytest.mark.parametrize(
    ("name", "settings", "published", "tied"),
    [
        ("bert48", "layers=24", 336_226_108, 30522 * 1024),
        ("bert48", "layers=12,hidden=768,heads=12", 110_106_428, 30522 * 768),
        ("gpt2", "layers=12,hidden=768,heads=12", 124_439_808, 50257 * 768),
        ("gpt2", "layers=48,hidden=1600,heads=25", 1_557_611_200, 50257 * 1600),
    ],
)
def test_other_numbers_give_the_published_networks(
    network: Loader, name: str, settings: str, published: int, tied: int
) -> None:
    """BERT-large, BERT-base, GPT-2 and GPT-2 XL, whose projection is their table of words."""
    assert sum(map(count, on_meta(network(name, settings), 4))) == published + tied


@pytest.mark.parametrize("name", ["bert48", "gpt2"])
def test_stages_are_the_network_cut_up(network: Loader, name: str) -> None:
    """The weights of four stages, as those of one, give the same outputs."""
    model = network(name, "tiny,dtype=float64")
    inputs = torch.utils.data.default_collate([model.dataset()[i][0] for i in range(3)])
    stages = [model.build_stage(stage, 4).eval() for stage in range(4)]
    whole = model.build_stage(0, 1).eval()
    parts = [p for stage in stages for p in stage.parameters()]
    with torch.no_grad():
        for mine, part in zip(whole.parameters(), parts, strict=True):
            mine.copy_(part)
    state = inputs
    for stage in stages:
        state = stage(state)
    torch.testing.assert_close(state, whole(inputs), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("name", "norm_first"), [("bert48", False), ("gpt2", True)])
def test_a_layer_computes_what_torch_s_own_does(network: Loader, name: str, norm_first: bool) -> None:
    model = network(name, "tiny,dtype=float64")
    torch.manual_seed(0)
    stage = model.build_stage(1, 8)
    layer: Any = next(stage.children())
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    first, second = [part for part in layer.children() if isinstance(part, nn.LayerNorm)]
    activation = layer.perceptron.activation
    theirs = nn.TransformerEncoderLayer(
        32, 4, 128, 0.0, activation, first.eps, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    own = [
        *layer.attention.queries_keys_values.parameters(),
        *layer.attention.result.parameters(),
        *layer.perceptron.parameters(),
        *first.parameters(),
        *second.parameters(),
    ]
    with torch.no_grad():
        for mine, other in zip(own, theirs.parameters(), strict=True):
            other.copy_(mine)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    attended = torch.arange(9) < torch.tensor([[9], [6]])
    layer.eval()
    if norm_first:
        ahead = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
        torch.testing.assert_close(layer(x), theirs(x, ahead, is_causal=True))
    else:
        torch.testing.assert_close(layer((x, attended))[0], theirs(x, src_key_padding_mask=~attended))


def test_padding_reaches_no_word_and_the_mask_goes_along(network: Loader) -> None:
    model = network("bert48", "tiny,dtype=float64")
    inputs, _ = shortest(model)
    stages = [model.build_stage(stage, 2).eval() for stage in range(2)]
    batch = {key: value.unsqueeze(0) for key, value in inputs.items()}
    other = {**batch, "words": torch.where(batch["attended"], batch["words"], 77)}
    hidden, attended = stages[0](batch)
    assert torch.equal(attended, batch["attended"])
    assert (attended.dtype, hidden.requires_grad, attended.requires_grad) == (torch.bool, True, False)
    assert not torch.equal(batch["words"], other["words"])
    (words, follows), (others, follow) = stages[1]((hidden, attended)), stages[1](stages[0](other))
    torch.testing.assert_close(words[attended], others[attended])
    torch.testing.assert_close(follows, follow)


def shortest(model: ModelFile) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    data = model.dataset()
    found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = min(
        (data[i] for i in range(100)), key=lambda item: int(item[0]["attended"].sum())
    )
    return found


def test_bert_s_items_are_two_pieces_with_as_many_masked_words_each(network: Loader) -> None:
    """15 % of 128 are 19; [BEGIN] first [SEPARATOR] second [SEPARATOR], then padding that nobody looks at."""
    data = network("bert48", "vocabulary=2000,text=400000").dataset()
    kept = replaced = masked = random = short = 0
    for i in range(400):
        inputs, target = data[i]
        words, sentences, attended, hidden = *inputs.values(), target["words"]
        length = int(attended.sum())
        assert attended.tolist() == [True] * length + [False] * (128 - length)
        assert words[~attended].eq(0).all()
        first = int((sentences == 0)[:length].sum())
        assert words[[0, first - 1, length - 1]].tolist() == [2, 3, 3]
        assert sentences[first:length].eq(1).all()
        chosen = hidden != -100
        assert int(chosen.sum()) == 19
        assert not ((hidden[chosen] == 0) | (hidden[chosen] == 2) | (hidden[chosen] == 3)).any()
        masked += int((words[chosen] == 4).sum())
        kept += int((words[chosen] == hidden[chosen]).sum())
        replaced += int(((words[chosen] != 4) & (words[chosen] != hidden[chosen])).sum())
        random += int(target["random"])
        short += length < 128
    for found, share, of in ((masked, 0.8, 7600), (kept, 0.1, 7600), (replaced, 0.1, 7600), (random, 0.5, 400)):
        assert abs(found - share * of) < 5 * math.sqrt(share * (1 - share) * of), (found, share)
    assert 10 < short < 80


def test_the_second_piece_follows_the_first_unless_it_is_random(network: Loader) -> None:
    """With what was masked put back, the pieces are one span of the text, or two spans of different items."""
    data = network("bert48", "tiny").dataset()
    text = "".join(map(chr, data.text.tolist()))
    by_chance = 0
    for i in range(200):
        inputs, target = data[i]
        words = torch.where(target["words"] == -100, inputs["words"], target["words"])
        second = inputs["sentences"] == 1
        first = words[inputs["attended"] & ~second][1:-1]
        whole = "".join(map(chr, first.tolist())), "".join(map(chr, words[second][:-1].tolist()))
        follows = text[i * 29 :].startswith(whole[0] + whole[1])
        assert text[i * 29 :].startswith(whole[0])
        assert whole[1] in text
        assert follows or int(target["random"]) == 1
        by_chance += follows and int(target["random"]) == 1
    assert by_chance < 5, "a short piece may occur twice"


@pytest.mark.parametrize("name", ["bert48", "gpt2"])
def test_an_item_is_a_function_of_its_number(network: Loader, name: str) -> None:
    one, other = network(name, "tiny").dataset(), network(name, "tiny").dataset()
    assert len(one) == len(other) > 500
    for i in (0, 7, len(one) - 1):
        torch.manual_seed(i)
        torch.testing.assert_close(one[i], other[i], rtol=0, atol=0)


def test_gpt2_s_targets_are_the_next_words(network: Loader) -> None:
    data = network("gpt2", "small").dataset()
    (now, following), (later, _) = data[3], data[4]
    assert torch.equal(following, torch.cat([now[1:], later[:1]]))
    assert int(data.text.max()) == 4095
    assert data.text.eq(0).float().mean() < 0.2, "most words are among the frequent ones"


@pytest.mark.parametrize("name", ["bert48", "gpt2"])
def test_the_loss_of_a_batch_is_the_mean_over_its_micro_batches(network: Loader, name: str) -> None:
    model = network(name, "tiny,dtype=float64,dropout=0")
    stage, data = model.build_stage(0, 1), model.dataset()

    def of(items: range) -> torch.Tensor:
        inputs, target = torch.utils.data.default_collate([data[i] for i in items])
        return model.loss(stage(inputs), target)

    parts = torch.stack([of(range(i, i + 2)) for i in range(0, 12, 2)])
    torch.testing.assert_close(parts.mean(), of(range(12)), rtol=1e-13, atol=0)
    vocabulary, sentences = 128, 2 if name == "bert48" else 1
    assert parts.mean().item() == pytest.approx(math.log(vocabulary * sentences), rel=0.05), "nothing is known yet"


def test_stages_that_cannot_share_the_layers_are_refused(network: Loader) -> None:
    model = network("bert48")
    with pytest.raises(ModelError) as raised:
        model.stage(0, 5, 0, torch.device("cpu"))
    words = describe(raised.value)
    assert "in build_stage): ValueError: 5 stages cannot share 48 layers evenly" in words
    assert "D = 1, 2, 3, 4, 6, 8, 12, 16, 24, 48" in words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("tny", "there is no size tny; choose one of full, small, tiny"),
        ("tiny,width=3", "there is no setting width; choose one of layers, hidden, heads"),
        ("tiny,small", "there is no setting small"),
        ("layers=two", "layers=two is no whole number"),
        ("dropout=much", "dropout=much is no number"),
        ("layers=0", "layers=0 is too small"),
        ("heads=7", "7 heads cannot share hidden=1024 evenly"),
        ("length=600", "length=600 is more than positions=512"),
        ("dropout=1", "dropout=1.0 is not a probability below 1"),
        ("rate=0", "rate=0.0 is no learning rate"),
        ("dtype=int8", "dtype=int8 is none of float32, float64, bfloat16"),
    ],
)
def test_a_wrong_setting_is_told_by_a_line_that_names_the_place(network: Loader, settings: str, words: str) -> None:
    with pytest.raises(ModelError) as raised:
        network("bert48", settings)
    line, *_ = describe(raised.value).splitlines()
    assert f"bert48.py:{line_of('CHOSEN = settings(SIZES)')} in <module>): ValueError: MODEL_SETTINGS: {words}" in line


def line_of(text: str) -> int:
    return (EXAMPLES / "bert48.py").read_text().splitlines().index(text) + 1


@pytest.mark.parametrize("settings", ["length=6", "vocabulary=5", "text=100"])
def test_two_pieces_of_text_need_some_room(network: Loader, settings: str) -> None:
    with pytest.raises(ValueError, match=settings):
        network("bert48", f"tiny,{settings}").dataset()
