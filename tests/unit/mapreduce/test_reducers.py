"""Tests means and sums of results, by hand and leaf by leaf, and the advice in errors."""

from __future__ import annotations

import functools
import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.thorough import examples
from torchweft.errors import ReduceError
from torchweft.mapreduce.reducers import mean_reducer, reduce, sum_reducer

Metrics = namedtuple("Metrics", "loss accuracy")

ONE, TWO, FOUR = (torch.tensor([value, 10 * value]) for value in (1.0, 2.0, 4.0))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("weights", [None, [1.0] * 5, [3.0] * 5, [1, 1, 1, 1, 1]])
def test_the_plain_mean_is_that_of_torch_to_the_last_bit(dtype: torch.dtype, weights: Any) -> None:
    results = [random(7, dtype=dtype) for _ in range(5)]
    reduced = mean_reducer(results, weights)
    assert reduced.dtype is dtype
    assert torch.equal(reduced, torch.stack(results).mean(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weighted_mean_in_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    # Their weighted sum overflows float16, and bfloat16 cannot tell 300 from 301.
    results = [torch.full((2,), 900.0, dtype=dtype), torch.full((2,), 300.0, dtype=dtype)]
    reduced = mean_reducer(results, [300.0, 301.0])
    exact = torch.tensor((results[0][0].item() * 300 + results[1][0].item() * 301) / 601)
    assert reduced.dtype is dtype
    assert torch.equal(reduced, exact.to(dtype).expand(2))


def test_gradients_are_weighted_too_at_any_order() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    reduced = mean_reducer([x[0] ** 3, x[1] ** 3, x[2] ** 3], [1.0, 1.0, 2.0])
    [first] = torch.autograd.grad(reduced, x, create_graph=True)
    torch.testing.assert_close(first.detach(), 3 * x.detach() ** 2 * torch.tensor([1, 1, 2]) / 4)
    [second] = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach() * torch.tensor([1, 1, 2]) / 4)


@pytest.mark.parametrize(
    ("results", "mean", "weighted", "total"),
    [
        ([(ONE, 3), (FOUR, 6)], ([2.5, 25], 4.5), ([3, 30], 5), ([5, 50], 9)),
        (
            [{"loss": ONE, "n": [1.0]}, {"loss": FOUR, "n": [4.0]}],
            {"loss": [2.5, 25], "n": [2.5]},
            {"loss": [3, 30], "n": [3.0]},
            {"loss": [5, 50], "n": [5.0]},
        ),
        (
            [Metrics(ONE, True), Metrics(FOUR, False)],
            Metrics([2.5, 25], 0.5),
            Metrics([3, 30], 1 / 3),
            Metrics([5, 50], 1),
        ),
        ([0.5, 2.0], 1.25, 1.5, 2.5),
        ([(), ()], (), (), ()),
    ],
    ids=["tuples", "dicts", "named tuples", "numbers", "nothing in it"],
)
def test_trees_are_reduced_leaf_by_leaf(results: Any, mean: Any, weighted: Any, total: Any) -> None:
    def plain(tree: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, Tensor.tolist, tree)

    assert plain(mean_reducer(results)) == mean
    assert plain(mean_reducer(results, [1.0, 2.0])) == weighted
    assert plain(sum_reducer(results)) == total
    assert type(mean_reducer(results)) is type(results[0]) or results[0] == 0.5


UNFIT = [
    ([], "cannot reduce 0 results: there must be one at least; were the tensors"),
    ([torch.zeros(2), torch.zeros(3)], r"2 results: they are of shapes \(2,\), \(3,\); return"),
    ([torch.zeros(2), torch.zeros(3)], r"join them by reducer=torch\.cat$"),
    ([torch.zeros(1, 2), torch.zeros(2)], r"they are of shapes \(1, 2\), \(2,\); return"),
    ([None, None, None], "3 results: some are of type NoneType; return tensors, numbers"),
    ([ONE, None], "some are of type NoneType; return tensors"),
    ([ONE, 1.0], "some are of type float; return tensors"),
    (["a", "b"], "some are of type str; return tensors"),
    ([{"a": ONE}, {"b": ONE}], "they differ in structure; return the same from every part"),
    ([(ONE, ONE), (ONE,)], "they differ in structure"),
    ([(), ONE], "they differ in structure"),
    ([ONE, (ONE,)], "some are of type tuple; return tensors"),
    ([{"a": ONE}, {"a": [ONE]}], r"those at \['a'\]: some are of type list; return tensors"),
    ([(ONE,), [ONE]], "they differ in structure"),
    ([{"a": [ONE, None]}, {"a": [ONE, None]}], r"those at \['a'\]\[1\]: some are of type None"),
    ([{"a": ONE}, {"a": TWO[:1]}], r"those at \['a'\]: they are of shapes \(2,\), \(1,\)"),
]


@pytest.mark.parametrize("reducer", [mean_reducer, sum_reducer])
@pytest.mark.parametrize(("results", "text"), UNFIT)
def test_results_that_do_not_fit_are_told(reducer: Any, results: Any, text: str) -> None:
    with pytest.raises(ReduceError, match=text) as caught:
        reduce(reducer, results, None)
    assert caught.value.reducer == reducer.__name__
    assert caught.value.results == len(results)
    with pytest.raises(ReduceError, match=text):
        reducer(results)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0]])
def test_whole_numbers_have_a_sum_but_no_mean(weights: Any) -> None:
    results = [torch.tensor([1]), torch.tensor([2])]
    assert sum_reducer(results).tolist() == [3]
    with pytest.raises(ReduceError, match=r"tensors of torch.int64 have no mean; return \.float"):
        mean_reducer(results, weights)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([1.0], "there are 1 weights; pass one for each result"),
        ([], "there are 0 weights"),
        ([0.0, 0.0], r"the weights are \[0.0, 0.0\]; pass lengths"),
        ([-1.0, 2.0], "the weights are"),
        ([float("nan"), 1.0], "the weights are"),
        ([1.0, float("nan")], "the weights are"),
        ([1.0, float("inf")], "the weights are"),
    ],
)
def test_weights_that_do_not_fit_are_told(weights: Any, text: str) -> None:
    with pytest.raises(ReduceError, match=text):
        mean_reducer([ONE, TWO], weights)


# Arguments of a reducer.


def by_keyword(results: list[Any], *, weights: Any = None) -> Any:
    return weights


def positional(results: list[Any], weights: Any = "none", /) -> Any:
    return weights


class Reducing:
    def __call__(self, results: list[Any], weights: Any = None) -> Any:
        return weights

    def method(self, results: list[Any], weights: Any) -> Any:
        return weights


@pytest.mark.parametrize(
    "reducer",
    [by_keyword, Reducing(), Reducing().method, functools.partial(by_keyword)],
)
def test_a_reducer_with_a_parameter_for_weights_gets_them(reducer: Any) -> None:
    assert reduce(reducer, [1, 2], (2.0, 3.0)) == [2.0, 3.0]
    assert reduce(reducer, [1, 2], None) == [1.0, 1.0]


# Failures.


def failing(results: list[Any]) -> Any:
    raise KeyError("loss")


@pytest.mark.parametrize(
    ("reducer", "results", "text", "cause"),
    [
        (
            failing,
            [ONE, TWO],
            r"reducer \S*\.failing cannot reduce 2 results: KeyError: 'loss'$",
            KeyError,
        ),
        (
            torch.stack,
            [ONE, TWO[:1]],
            r"they are of shapes \(2,\), \(1,\); .*torch\.cat",
            RuntimeError,
        ),
        (torch.stack, [{"a": 1}], "some are of type dict; return tensors", TypeError),
        (lambda: None, [ONE], "TypeError: .*positional argument", TypeError),
    ],
)
def test_a_failure_is_the_cause_of_an_error_that_names_the_reducer(
    reducer: Any, results: Any, text: str, cause: type[Exception]
) -> None:
    with pytest.raises(ReduceError, match=text) as caught:
        reduce(reducer, results, [1.0] * len(results))
    assert type(caught.value.__cause__) is cause
    assert caught.value.results == len(results)
    assert caught.value.reducer
    assert isinstance(caught.value, RuntimeError)


def test_an_interruption_is_no_failure() -> None:
    def interrupted(results: list[Any]) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reduce(interrupted, [ONE], None)


def test_the_error_travels_with_its_fields() -> None:
    with pytest.raises(ReduceError) as caught:
        mean_reducer([])
    arrived = pickle.loads(pickle.dumps(caught.value))
    assert vars(arrived) == vars(caught.value) == {"reducer": "mean_reducer", "results": 0}


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99))
def test_means_of_parts_of_any_length_are_those_of_all_samples(
    lengths: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(sum(lengths), 2, dtype=torch.float64, generator=generator)
    parts = [part.mean(0) for part in samples.split(lengths)]
    reduced = mean_reducer(parts, list(map(float, lengths)))
    torch.testing.assert_close(reduced, samples.mean(0), rtol=1e-13, atol=1e-14)
