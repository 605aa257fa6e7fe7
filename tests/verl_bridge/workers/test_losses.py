# SPDX-License-Identifier: Apache-2.0
"""The off-policy losses and their gradients equal loops over tokens in plain Python floats."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.verl_bridge.workers.losses import TokenLosses, positive_scores, tis, topr

Row = list[float]
Matrix = list[Row]

few = settings(max_examples=40, deadline=None)


@dataclass
class Batch:
    """Responses, padded to the longest; some are empty."""

    log_prob: Matrix
    old: Matrix
    advantages: Matrix
    mask: list[list[bool]]
    weights: Matrix

    def tensors(self) -> dict[str, Any]:
        return {
            "log_prob": as_tensor(self.log_prob).requires_grad_(),
            "old_log_prob": as_tensor(self.old),
            "advantages": as_tensor(self.advantages),
            "mask": torch.tensor(self.mask),
        }

    def each_token(self) -> list[tuple[int, int]]:
        return [(i, t) for i, row in enumerate(self.mask) for t, there in enumerate(row) if there]

    def log_ratio(self, i: int, t: int) -> float:
        return self.log_prob[i][t] - self.old[i][t]


def as_tensor(rows: Matrix) -> Any:
    return torch.tensor(rows, dtype=torch.float64)


def make_batch(seed: int, *, sign: int = 0, drift: float = 1.0) -> Batch:
    """Return a random batch.

    `sign` is the sign of all advantages, or 0 for both signs. `drift` is the standard deviation of the log
    ratio between the policies.
    """
    draw = random.Random(seed)
    rows, width = draw.randint(1, 4), draw.randint(1, 6)

    def matrix(of: Callable[[], float]) -> Matrix:
        return [[of() for _ in range(width)] for _ in range(rows)]

    old = matrix(lambda: -draw.expovariate(1.0))
    of_any_sign = matrix(lambda: draw.choice((0.0, draw.gauss(0, 1))))
    advantages = [[sign * abs(a) if sign else a for a in row] for row in of_any_sign]
    lengths = [draw.randint(0, width) for _ in range(rows)]
    return Batch(
        log_prob=[[old[i][t] + draw.gauss(0, drift) for t in range(width)] for i in range(rows)],
        old=old,
        advantages=advantages,
        mask=[[t < length and draw.random() < 0.9 for t in range(width)] for length in lengths],
        weights=matrix(lambda: draw.uniform(0, 2)),
    )


seeds = st.integers(0, 2**32 - 1)
batches = st.builds(
    make_batch, seeds, sign=st.sampled_from((-1, 0, 1)), drift=st.sampled_from((0.0, 0.3, 3.0))
)


def check(
    batch: Batch, found: TokenLosses, log_prob: Any, weight_of: Callable[[int, int], float], behaviour: bool
) -> None:
    """Require the loss -w A log pi and the gradient -w A with w = `weight_of`, and 0 outside the mask."""
    tokens = set(batch.each_token())
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_prob)
    for i, row in enumerate(batch.mask):
        for t in range(len(row)):
            factor = 0.0
            if (i, t) in tokens:
                weight = weight_of(i, t)
                assert found.weight[i, t].item() == pytest.approx(weight, rel=1e-12)
                factor = -weight * batch.advantages[i][t] * (batch.weights[i][t] if behaviour else 1.0)
            expected = factor * batch.log_prob[i][t]
            assert found.loss[i, t].item() == pytest.approx(expected, rel=1e-12, abs=1e-300)
            assert gradient[i, t].item() == pytest.approx(factor, rel=1e-12, abs=1e-300)


# Truncated importance sampling.


@few
@given(batch=batches, bounds=st.sampled_from(((0.0, 1.0), (0.5, 2.0), (1.0, 1.0))), behaviour=st.booleans())
def test_tis_weights_are_the_clipped_ratio(
    batch: Batch, bounds: tuple[float, float], behaviour: bool
) -> None:
    tensors = batch.tensors()
    lower, upper = bounds
    found = tis(
        **tensors, lower=lower, upper=upper, behaviour_weight=as_tensor(batch.weights) if behaviour else None
    )

    def weight_of(i: int, t: int) -> float:
        return min(max(math.exp(batch.log_ratio(i, t)), lower), upper)

    check(batch, found, tensors["log_prob"], weight_of, behaviour)
    for i, t in batch.each_token():
        assert found.truncated[i, t].item() == (not lower <= math.exp(batch.log_ratio(i, t)) <= upper)


def test_a_token_beyond_the_bound_has_a_gradient() -> None:
    log_prob = as_tensor([[-0.1]]).requires_grad_()
    found = tis(log_prob, as_tensor([[-5.0]]), as_tensor([[2.0]]), torch.tensor([[True]]))
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_prob)
    assert gradient.item() == -2.0
    assert found.truncated.item()


# Tapered off-policy REINFORCE.


@few
@given(batch=batches, factors=st.sampled_from(((1.0, 1.0), (0.5, 2.0), (1.0, 0.0))), behaviour=st.booleans())
def test_topr_tapers_negative_tokens_only(
    batch: Batch, factors: tuple[float, float], behaviour: bool
) -> None:
    tensors = batch.tensors()
    up, down = factors
    found = topr(
        **tensors,
        positive_weight=up,
        negative_weight=down,
        behaviour_weight=as_tensor(batch.weights) if behaviour else None,
    )

    def weight_of(i: int, t: int) -> float:
        return up if batch.advantages[i][t] > 0 else down * min(math.exp(batch.log_ratio(i, t)), 1.0)

    check(batch, found, tensors["log_prob"], weight_of, behaviour)
    for i, t in batch.each_token():
        negative = batch.advantages[i][t] <= 0
        assert found.truncated[i, t].item() == (negative and math.exp(batch.log_ratio(i, t)) > 1)


@few
@given(batch=batches)
def test_topr_can_taper_by_the_ratio_of_the_response(batch: Batch) -> None:
    tensors = batch.tensors()
    found = topr(**tensors, ratio_level="sequence")

    def weight_of(i: int, t: int) -> float:
        whole = sum(batch.log_ratio(i, u) for j, u in batch.each_token() if j == i)
        return 1.0 if batch.advantages[i][t] > 0 else min(math.exp(whole), 1.0)

    check(batch, found, tensors["log_prob"], weight_of, behaviour=False)


@few
@given(batch=batches, draw=st.randoms(use_true_random=False))
def test_topr_can_split_by_score(batch: Batch, draw: random.Random) -> None:
    tensors = batch.tensors()
    scores = [[draw.choice((-1.0, 0.0, 1.0)) for _ in row] for row in batch.mask]
    found = topr(**tensors, positive=positive_scores(as_tensor(scores)))

    def weight_of(i: int, t: int) -> float:
        return 1.0 if sum(scores[i]) > 0 else min(math.exp(batch.log_ratio(i, t)), 1.0)

    check(batch, found, tensors["log_prob"], weight_of, behaviour=False)


def descend(positive: Any) -> float:
    """Return the log-prob of a token with A = -1 after 200 gradient steps from -0.5."""
    log_prob = torch.tensor([[-0.5]], dtype=torch.float64, requires_grad=True)
    start, down = log_prob.detach().clone(), torch.tensor([[-1.0]], dtype=torch.float64)
    for _ in range(200):
        found = topr(log_prob, start, down, torch.tensor([[True]]), positive=positive)
        (gradient,) = torch.autograd.grad(found.loss.sum(), log_prob)
        log_prob = (log_prob - 0.5 * gradient).detach().requires_grad_()
    return float(log_prob.item())


def test_only_the_split_by_advantage_bounds_the_fall_of_a_negative_token() -> None:
    """In the worse of two correct responses, the score is positive and the advantage negative."""
    assert descend(None) == pytest.approx(-0.5 - math.log(1 + 100), abs=0.5)
    assert descend(torch.tensor([[True]])) == pytest.approx(-0.5 - 100)


@pytest.mark.parametrize("sign", [-1, 1])
def test_topr_with_advantages_of_one_sign_is_a_tis_loss(sign: int) -> None:
    batch = make_batch(5, sign=sign)
    part = {-1: tis(**batch.tensors()), 1: tis(**batch.tensors(), lower=1.0, upper=1.0)}[sign]
    assert torch.equal(topr(**batch.tensors()).loss, part.loss)


# Both losses.

LOSSES = [tis, topr, lambda **tensors: topr(**tensors, ratio_level="sequence")]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("log_ratio", [-1e4, -800.0, 800.0, 1e4])
def test_an_extreme_ratio_gives_a_finite_loss_and_gradient(
    loss: Callable[..., TokenLosses], log_ratio: float
) -> None:
    old = min(0.0, -log_ratio)
    log_prob = torch.tensor([[old + log_ratio] * 2], requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0]])
    found = loss(
        log_prob=log_prob,
        old_log_prob=torch.tensor([[old] * 2]),
        advantages=advantages,
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_prob)
    assert found.loss.isfinite().all() and gradient.isfinite().all()
    assert gradient[0, 1].item() == (1.0 if log_ratio > 0 else 0.0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_values_in_the_padding_are_ignored(loss: Callable[..., TokenLosses], junk: float) -> None:
    """The mask contains an empty row and a padded row."""
    mask = torch.tensor([[True, False], [False, False]])
    filled = [torch.full((2, 2), junk, dtype=torch.float64) for _ in range(3)]
    for tensor, value in zip(filled, (-1.0, -2.0, -0.5), strict=True):
        tensor[0, 0] = value

    log_prob = filled[0].requires_grad_()
    found = loss(
        log_prob=log_prob,
        old_log_prob=filled[1],
        advantages=filled[2],
        mask=mask,
        behaviour_weight=torch.where(mask, 1.0, junk),
    )

    (gradient,) = torch.autograd.grad(found.loss.sum(), log_prob)
    assert found.loss.tolist() == [[-0.5, 0.0], [0.0, 0.0]]
    assert gradient.tolist() == [[0.5, 0.0], [0.0, 0.0]]
    assert found.weight.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert found.truncated.tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("loss", LOSSES)
def test_only_the_current_log_probs_have_a_gradient(loss: Callable[..., TokenLosses]) -> None:
    batch = make_batch(11)
    tensors = batch.tensors()
    others = [tensors[name].requires_grad_() for name in ("old_log_prob", "advantages")]
    weights = as_tensor(batch.weights).requires_grad_()
    total = loss(**tensors, behaviour_weight=weights).loss.sum()
    gradients = torch.autograd.grad(total, [tensors["log_prob"], *others, weights], allow_unused=True)
    assert gradients[0] is not None
    assert all(gradient is None for gradient in gradients[1:])


@few
@given(scores=st.lists(st.tuples(*[st.sampled_from((-1.0, 0.0, 2.0))] * 3), min_size=1, max_size=4))
def test_a_response_is_positive_if_its_score_is_above_zero(scores: Sequence[Sequence[float]]) -> None:
    found = positive_scores(as_tensor([list(row) for row in scores]))
    assert found.tolist() == [[sum(row) > 0] for row in scores]
