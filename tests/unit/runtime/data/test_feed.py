"""Mini-batches in each of their forms, taken apart into the same micro-batches."""

from typing import Any, NamedTuple

import pytest
import torch

from chimera_runtime.blame import ModelError
from chimera_runtime.data.evaluation_batches import evaluation_batches
from chimera_runtime.data.feed import EvaluationDataFacts, Feed, digests, items_of
from chimera_runtime.data.item_order import Share
from chimera_runtime.data.micro_batch_source import Batches, CutBatch
from chimera_runtime.data.mini_batch import MiniBatch
from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.agreement import POSITION
from chimera_runtime.values.boundary import KeywordNames, whole
from tests.unit.runtime.thread_ranks import job

B, N = 2, 3
X = torch.arange(B * N * 4.0).reshape(B * N, 4)
Y = torch.arange(B * N)


class Words(NamedTuple):
    ids: torch.Tensor
    mask: torch.Tensor


def feed(**changed: Any) -> Feed:
    return Feed(job(micro_batches=N, **changed), B)


def pair(micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    return X[micro * B : (micro + 1) * B], Y[micro * B : (micro + 1) * B]


def three_forms(update: int) -> tuple[Feed, Feed, Feed]:
    whole, function, pairs = feed(), feed(), feed()
    whole.put(update, (X, Y))
    function.put(update, pair)
    pairs.put_micro_batches(update, [pair(m) for m in range(N)])
    return whole, function, pairs


def test_a_mini_batch_a_function_and_pairs_are_the_same() -> None:
    for source in three_forms(0):
        for micro in range(N):
            assert torch.equal(source.input(0, micro), X[micro * B : (micro + 1) * B])
            assert torch.equal(source.target(0, micro), Y[micro * B : (micro + 1) * B])


def test_every_tensor_of_a_structure_is_cut_and_the_rest_is_handed_on() -> None:
    source = feed()
    batch = {"words": Words(X, X > 3), "scale": 0.5, "temperature": torch.tensor(2.0)}
    source.put(0, (batch, [Y, {"weights": Y * 2}]))
    last = source.input(0, N - 1)
    assert type(last["words"]) is Words
    assert torch.equal(last["words"].ids, X[-B:])
    assert torch.equal(last["words"].mask, X[-B:] > 3)
    assert (last["scale"], last["temperature"]) == (0.5, torch.tensor(2.0))
    targets, weights = source.target(0, 0)
    assert torch.equal(weights["weights"], targets * 2)


def test_a_function_is_asked_once_for_each_of_the_micro_batches_that_are_used_alone() -> None:
    asked: list[int] = []

    def load(micro: int) -> tuple[Any, Any]:
        asked.append(micro)
        return pair(micro)

    source = feed()
    source.put(0, load)
    source.input(0, 2)
    source.target(0, 2)
    assert asked == [2]
    source.drop(0)
    source.put(1, load)
    source.input(1, 2)
    assert asked == [2, 2]


def test_parts_of_a_micro_batch_follow_one_another() -> None:
    source = feed(parts=2)
    source.put(0, (X, Y))
    assert [source.target(0, part).tolist() for part in range(2 * N)] == [[item] for item in range(2 * N)]


def test_micro_batches_are_counted_on_into_later_updates() -> None:
    source = feed()
    source.put(4, (X, Y))
    source.put(5, (X, Y + 100))
    assert source.target(4, N).tolist() == [100, 101]
    source.drop(4)
    assert source.target(5, 0).tolist() == [100, 101]


NAMES = ["a", "b", "c", "d", "e", "f"]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            (X[:-1], Y),
            r"dimension 0 of the input is 5, of shape \(5, 4\), and a step takes B\*N = 2\*3 = 6 on every rank",
        ),
        ((X, Y[:2]), r"dimension 0 of the target is 2, of shape \(2,\), and .* as large as the example$"),
        (
            ([X, X[:5]], Y),
            r"dimension 0 of the input\[1\] is 5, .*; what goes with all items .*, \{whole\(\"..\"\): ..\} with ",
        ),
        (
            (X, Y, {"mask": X[:2]}),
            r"0 of the keyword argument mask is 2, of shape \(2, 4\), and a step takes",
        ),
        (X, r"a batch is a Tensor, not a pair \(input, target\)"),
        (
            (X, Y, Y),
            r"a batch is a tuple, not a pair \(input, target\); keyword arguments of stages stand third, in a dict",
        ),
        ((X, Y, {1: X}), "a batch is a tuple, not a pair"),
        (
            (X, Y, {"names": NAMES}),
            r"a batch: the keyword argument names is a list of 6 entries, as many as .*whole\(\"names\"\)",
        ),
        ((X, object()), "a batch: the target is of type object, which cannot be cut into micro-batches: give"),
    ],
)
def test_a_mini_batch_of_another_form_or_size_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        feed().put(0, batch)


def test_pairs_that_are_not_n_are_refused() -> None:
    with pytest.raises(Misuse, match="two has N = 3: a step takes so many pairs, not 2"):
        feed().put_micro_batches(0, [pair(0), pair(1)])


def test_a_micro_batch_of_another_size_is_refused_by_its_number() -> None:
    source = feed()
    source.put(0, lambda _micro: (X, Y))
    with pytest.raises(Misuse, match=r"micro-batch 1: dimension 0 of the input is 6, .*, and was B = 2 in the example"):
        source.input(0, 1)


def test_an_error_of_the_function_is_the_callers() -> None:
    source = feed()
    source.put(0, lambda micro: [][micro])
    with pytest.raises(ModelError, match="the function that was given to step"):
        source.input(0, 1)


def test_an_example_tells_the_size_of_a_micro_batch() -> None:
    assert items_of(({"x": X, "t": torch.tensor(1)}, Y)) == B * N
    with pytest.raises(Misuse, match=r"the example: dimension 0 of the target is 2, .*, and the input has 6"):
        items_of((X, Y[:2]))
    with pytest.raises(Misuse, match="has no tensor"):
        items_of(("x", 1))
    with pytest.raises(
        Misuse, match=r"of the keyword argument borders\['of'\]\[0\] is 2, .*, \{whole\(\"borders\"\): ..\} with"
    ):
        items_of((X, Y, {"borders": {"of": [Y[:2]]}}))
    assert items_of((X, Y, {whole("borders"): {"of": [Y[:2]]}})) == B * N
    assert items_of(({whole("image"): torch.ones(3 * B, 2), "text": X}, Y)) == B * N


def test_keyword_arguments_are_cut_as_the_rest() -> None:
    source = feed(parts=2)
    source.put(0, (X, Y, {"mask": X > 3, "more": [Y]}))
    keywords = source.keywords(0, 3)
    assert torch.equal(keywords["mask"], X[3:4] > 3)
    assert keywords["more"][0].tolist() == [3]
    source.put(0, (X, Y))
    assert source.keywords(0, 3) == {}


@pytest.mark.parametrize("rows", [1, B, B * N, B * N + 1])
@pytest.mark.parametrize("parts", [{"parts": 1}, {"parts": 2}, {"parts": 2, "slices": 2}])
def test_what_is_whole_is_never_cut(rows: int, parts: dict[str, int]) -> None:
    borders = {"at": torch.arange(rows), "of": (torch.ones(rows, 4), torch.tensor(2.0), ["a"] * rows)}
    source = feed(**parts)
    source.names = KeywordNames(frozenset({"mask", "borders"}), frozenset({"borders"}), frozenset({"borders"}))
    pairs = [(x, x, {"mask": x, "borders": borders}) for x in X.split(B)]
    declared = X, X, {"mask": X, whole("borders"): borders}
    for given in ((X, X, {"mask": X, "borders": borders}), declared, pairs.__getitem__):
        source.put(0, given)
        for micro in range(N * parts["parts"]):
            keywords = source.keywords(0, micro)
            assert keywords["borders"] is borders
            assert keywords["mask"].numel() == B * 4 // parts["parts"]
        assert source.facts(0)["data", 0, 2]


def test_a_declaration_that_the_example_lacks_is_refused() -> None:
    source = feed()
    source.names = KeywordNames(frozenset({"borders"}), frozenset({"borders"}))
    with pytest.raises(
        Misuse, match=r'a batch declares whole\("borders"\), and the example of the pipeline has borders w'
    ):
        source.put(0, (X, Y, {whole("borders"): Y}))


def test_what_rises_from_0_like_borders_gets_a_remark_once() -> None:
    rising, other = torch.tensor([0, 3, 3, 4, 7, 9]), torch.tensor([0, 3, 2, 4, 7, 9])
    for batch in (
        (X, Y),
        (X, rising),
        (X, Y, {"a": other, "b": rising.float(), "c": rising[:, None], "d": rising * 0}),
    ):
        assert feed().remarks_on(batch) == []
    assert feed().remarks_on((X, Y, {whole("borders"): rising})) == []
    assert feed().remarks_on(lambda _micro: (X, Y, {"borders": rising})) == []
    source = feed()
    (remark,) = source.remarks_on((X, Y, {"a": other, "borders": [rising]}))
    assert "the keyword argument borders of the first mini-batch has whole numbers that rise from 0" in remark
    assert '{whole("borders"): ..}' in remark
    assert source.remarks_on((X, Y, {"borders": rising})) == []


def test_what_cannot_be_cut_may_come_by_micro_batch() -> None:
    def named(micro: int) -> Any:
        return *pair(micro), {"names": NAMES[micro * B : (micro + 1) * B]}

    by_number, parted = feed(), feed(parts=2)
    for source in (by_number, parted):
        source.put(0, named)
    assert by_number.keywords(0, 1) == {"names": ["c", "d"]}
    with pytest.raises(Misuse, match=r"micro-batch 1: .* is a list of 2 entries"):
        parted.keywords(0, 2)
    with pytest.raises(Misuse, match="the example: the input is of type object"):
        parted.put_example((object(), Y[:B]))
    with pytest.raises(Misuse, match=r"the example is a tuple, not a pair \(input, target\)"):
        feed().put_example((X, Y, Y))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["the input['x'][0]", "the target", "the keyword argument scale"])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_data_that_requires_a_gradient_is_refused_in_every_form(place: str, is_leaf: bool) -> None:
    """A rank uses a part of the micro-batches, so what an encoder outside of the pipeline got would be a part."""

    def trained(at: str, tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.double().requires_grad_(at == place)
        return leaf if is_leaf else leaf * 2

    def triple(x: torch.Tensor, y: torch.Tensor) -> Any:
        inputs, target, scale = (
            trained(name, t)
            for name, t in (("the input['x'][0]", x), ("the target", y), ("the keyword argument scale", y))
        )
        return {"x": [inputs]}, target, {"scale": scale}

    source, pairs = feed(), [triple(*pair(micro)) for micro in range(N)]
    forms: list[tuple[str, Any]] = [
        ("a batch", lambda: source.put(0, triple(X, Y))),
        ("the example", lambda: source.put_example(pairs[0])),
        ("micro-batch 0", lambda: source.put_micro_batches(0, pairs)),
        ("micro-batch 0", lambda: source.put(0, CutBatch(pairs, 1))),
        ("micro-batch 1", lambda: (source.put(0, lambda micro: pairs[micro]), source.input(0, 1))),
    ]
    for name, put in forms:
        with pytest.raises(Misuse) as raised:
            put()
        assert str(raised.value).startswith(f"{name}: {place} requires a gradient")
    with torch.no_grad():
        source.put(0, ({"x": [X * torch.ones(1, requires_grad=True)]}, Y, {"scale": Y}))


def test_a_smaller_micro_batch_of_a_list_is_refused_before_the_step_begins() -> None:
    *pairs, last = [pair(m) for m in range(N)]
    with pytest.raises(Misuse, match=r"micro-batch 2: dimension 0 of the input is 1, .* B = 2 in the example"):
        feed().put_micro_batches(0, [*pairs, (last[0][:1], last[1][:1])])
    feed().put_micro_batches(0, [*pairs, (None, None)])
    source, empty = feed(), torch.empty(0)
    source.put_micro_batches(0, [*pairs, ({"x": [empty, torch.empty(0, 3)]}, last[1])])
    assert source.target(0, N - 1) is last[1]
    with pytest.raises(Misuse, match=rf"micro-batch {N - 1}: dimension 0 of the input\['x'\]\[0\] is 0"):
        source.input(0, N - 1)
    with pytest.raises(Misuse, match=r"dimension 0 of the target is 1"):
        source.put_micro_batches(0, [*pairs, (empty, last[1][:1])])


def test_micro_batches_in_a_list_are_looked_at_before_the_step_begins() -> None:
    source = feed()
    source.names = KeywordNames(frozenset(), frozenset())
    source.put_micro_batches(0, [pair(0), None, (X[:B], Y[:B], {})])  # type: ignore[list-item]
    with pytest.raises(Misuse, match="micro-batch 1 has the keyword argument mask and the example of the pipeline has"):
        source.put_micro_batches(0, [pair(0), (*pair(1), {"mask": X[:B]}), pair(2)])


@pytest.mark.parametrize("given", [(X, Y, {"mask": X}), lambda micro: (*pair(micro), {"mask": X[:B]})])
def test_a_name_that_the_example_lacks_is_refused_in_every_form(given: Any) -> None:
    source = feed()
    source.names = KeywordNames(frozenset(), frozenset())

    def use() -> None:
        source.put(0, given)
        source.target(0, 0)

    with pytest.raises(Misuse, match="has the keyword argument mask and the example of the pipeline has none"):
        use()


class Numbered:
    """Item i is i, -i and a keyword argument of 2*i."""

    def __len__(self) -> int:
        return 4 * B * N

    def __getitem__(self, number: int) -> tuple[float, float, dict[str, float]]:
        return float(number), -float(number), {"twice": 2.0 * number}


@pytest.mark.parametrize("parts", [1, 2])
def test_batches_give_inputs_targets_and_keyword_arguments_of_the_update(parts: int) -> None:
    loaded, source = Batches(Numbered(), B, N, parts, 1, 0, 0), feed(parts=parts)
    source.put_example(loaded)
    source.put(3, loaded)
    for update in (0, 3):
        for micro in range(N * parts):
            inputs = source.input(update, micro)
            assert torch.equal(inputs, loaded.input(update, micro))
            assert torch.equal(source.target(update, micro), -inputs)
            assert torch.equal(source.keywords(update, micro)["twice"], 2 * inputs)


# What ranks compare.


def test_all_forms_of_a_mini_batch_have_the_same_facts_once_a_micro_batch_is_loaded() -> None:
    for update in range(N + 1):
        whole, function, pairs = three_forms(update)
        for micro in range(N):
            function.input(update, micro)
            pairs.target(update, micro)
        digests = [{key: number for key, (number, _) in of.facts(update).items()} for of in (whole, function, pairs)]
        assert digests[0].keys() == {("data", 0, 0), ("data", 0, 1)}
        assert digests[0] == digests[1] == digests[2]


def test_facts_are_those_of_the_moment_at_which_a_micro_batch_is_loaded() -> None:
    """A function may fill the same memory again for each micro-batch."""
    memory, source, expected = torch.empty(B, 4), feed(), feed()

    def load(micro: int) -> tuple[torch.Tensor, None]:
        return memory.copy_(X[micro * B : (micro + 1) * B]), None

    source.put(0, load)
    expected.put(0, (X, None))
    for micro in range(N):
        source.input(0, micro)
    assert source.facts(0)["data", 0, 0][0] == expected.facts(0)["data", 0, 0][0]


def test_facts_are_told_once_and_those_of_the_example_are_not_those_of_the_first_update() -> None:
    source = feed()
    source.put_example(pair(0))
    source.input(0, 0)
    source.put(0, lambda micro: pair(micro + 1))
    source.input(0, 0)
    other = feed()
    other.put(0, (X.roll(-B, 0), Y.roll(-B, 0)))
    assert source.facts(0)["data", 0, 0][0] == other.facts(0)["data", 0, 0][0]
    assert source.facts(0) == {}


# Data that a rank is given: facts that ranks with the same batches have the same.


INPUTS, TARGETS = torch.arange(12.0).reshape(6, 2), torch.arange(6)


def facts(*batches: Any) -> dict[Any, int]:
    given = EvaluationDataFacts(1)
    assert all(given.note(batch) is batch for batch in batches)
    return {key: number for key, (number, _) in given.facts().items()}


def loaded(item: int) -> MiniBatch:
    return MiniBatch(2, Share(1, 2, 1, 0), {}, (0, 0, 6, 0, item))


def test_parts_that_are_there_are_compared_and_none_is_nothing() -> None:
    assert [which for which, _ in digests((INPUTS, TARGETS, {"mask": INPUTS}))] == [0, 1, 2]
    assert [which for which, _ in digests((None, TARGETS, {}))] == [1]
    assert facts((INPUTS, TARGETS)).keys() == {("data", 1, 0), ("data", 1, 1)}
    assert facts((INPUTS, None), (INPUTS, TARGETS)).keys() == {("data", 1, 0)}, "of the targets only some are known"


def test_other_batches_and_another_order_have_other_facts() -> None:
    assert facts((INPUTS, TARGETS), (INPUTS + 1, TARGETS)) == facts((INPUTS, TARGETS), (INPUTS + 1, TARGETS))
    for other in (
        facts((INPUTS, TARGETS)),
        facts((INPUTS + 1, TARGETS), (INPUTS, TARGETS)),
        facts((INPUTS, TARGETS), (INPUTS + 2, TARGETS)),
    ):
        assert facts((INPUTS, TARGETS), (INPUTS + 1, TARGETS))["data", 1, 0] != other["data", 1, 0]


def test_mini_batches_of_a_loader_are_compared_by_their_positions() -> None:
    assert facts(loaded(0), loaded(2)).keys() == {POSITION}
    assert facts(loaded(0), loaded(2)) == facts(loaded(0), loaded(2)) != facts(loaded(0), loaded(4))


def test_functions_are_not_asked() -> None:
    assert facts(lambda _micro: 1 / 0) == facts(loaded(0), lambda _micro: 1 / 0) == facts() == {}


# Batches of an evaluation as rounds of micro-batches of any size.


@pytest.mark.parametrize(
    ("items", "sizes"),
    [
        (8, [(2, 2, 2, 2)]),
        (7, [(2, 2, 2, 1)]),
        (3, [(2, 1, 0, 0)]),
        (1, [(1, 0, 0, 0)]),
        (17, [(2, 2, 2, 2), (2, 2, 2, 2), (1, 0, 0, 0)]),
    ],
)
def test_the_last_micro_batches_of_a_batch_hold_what_is_left(items: int, sizes: list[tuple[int, ...]]) -> None:
    numbers = torch.arange(items)
    made = list(evaluation_batches(job(evaluated=4), 2, ({"x": numbers}, numbers)))
    assert [tuple(of.sizes) for of in made] == sizes
    seen = [of.load(micro) for of in made for micro, size in enumerate(of.sizes) if size]
    assert [n for inputs, *_ in seen for n in inputs["x"].tolist()] == numbers.tolist()
    assert [n for _, target, _ in seen for n in target.tolist()] == numbers.tolist()


def test_parts_of_micro_batches_are_counted_like_micro_batches() -> None:
    numbers = torch.arange(7)
    (made,) = evaluation_batches(job(evaluated=2, parts=2), 4, (numbers, numbers))
    assert [made.load(micro)[0].tolist() for micro in range(4)] == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_function_gives_whole_micro_batches_and_is_asked_for_one_at_a_time() -> None:
    asked: list[int] = []

    def load(micro: int) -> Any:
        asked.append(micro)
        return torch.arange(4) + 10 * micro, torch.zeros(4)

    (made,) = evaluation_batches(job(evaluated=2, parts=2), 4, load)
    assert made.sizes == (2, 2, 2, 2)
    assert made.load(3)[0].tolist() == [12, 13]
    assert asked == [1]
    (made,) = evaluation_batches(job(evaluated=2), 3, load)
    with pytest.raises(Misuse, match="micro-batch 1 of an evaluation: dimension 0 of its tensors is 4, and was 3"):
        made.load(1)

    def fail(_micro: int) -> Any:
        raise KeyError("gone")

    (made,) = evaluation_batches(job(evaluated=2), 3, fail)
    with pytest.raises(ModelError, match="the function that gives the micro-batches of an evaluation"):
        made.load(0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.zeros(3), "is a Tensor, not a pair"),
        ((torch.zeros(3), torch.zeros(4)), "dimension 0 of the target is 4, .*, and the input has 3"),
        ((1, 2), "has no tensor"),
        ((torch.zeros(0, 3), torch.zeros(0)), "has no item"),
    ],
)
def test_what_is_no_batch_is_refused(given: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        list(evaluation_batches(job(), 2, given))


def test_what_a_loader_gives_is_a_round_of_the_micro_batches_that_it_has() -> None:
    """7 items in micro-batches of 4, each cut in two, of which this rank uses the second; a round may have more."""
    second = torch.arange(4, 7), None, {"mask": torch.arange(4, 7) > 5}
    (made,) = evaluation_batches(job(evaluated=3, parts=2), 4, MiniBatch(7, Share(4, 2, 1, 0), {1: second}))
    assert made.sizes == (2, 2, 2, 1, 0, 0)
    assert [made.load(micro)[0].tolist() for micro in (2, 3)] == [[4, 5], [6]]
    assert made.load(3)[1] is None
    assert made.load(3)[2]["mask"].tolist() == [True]


def test_a_batch_of_one_micro_batch_is_not_cut_and_a_larger_one_has_to_be() -> None:
    names = ["a", "b", "c"]
    (made,) = evaluation_batches(job(), 2, (torch.zeros(2), None, {"names": names[:2]}))
    assert made.load(0)[2] == {"names": ["a", "b"]}
    with pytest.raises(Misuse, match=r"a batch of an evaluation: the keyword argument names is a list of 3"):
        list(evaluation_batches(job(), 2, (torch.zeros(3), None, {"names": names})))


def test_names_that_the_example_lacks_are_refused_in_every_form() -> None:
    known = KeywordNames(frozenset({"mask"}), frozenset({"mask"}))
    triple = torch.zeros(2), None, {"bias": torch.zeros(2)}
    for batch in (triple, lambda _micro: triple, MiniBatch(2, Share(2, 1, 1, 0), {0: triple})):
        with pytest.raises(Misuse, match="has the keyword argument bias and the example of the pipeline has none"):
            next(evaluation_batches(job(), 2, batch, known)).load(0)
