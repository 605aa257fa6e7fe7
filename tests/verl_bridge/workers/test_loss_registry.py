# SPDX-License-Identifier: Apache-2.0
"""Every `pg_variant` of verl's registry equals loops in plain Python floats, also in micro batches."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from recipe.async_pipeline.config.keys.foreign_keys import LOSS_CONFIG, LOSS_OF_VARIANT, OWN_LOSSES
from recipe.async_pipeline.errors import ConfigError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine

VARIANTS = tuple(LOSS_OF_VARIANT)
LOW, HIGH, DUAL, TAU = 0.1, 0.3, 1.4, 0.2
"""Clip range of ppo and cispo; constant of the dual clip; tau of kimi15."""
TIS = (0.2, 1.5)
WEIGHTS = (0.5, 2.0)
"""Weights of positive and negative tokens in topr."""
few = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def algos(load: Load, module: ModuleType) -> ModuleType:
    return load("verl.trainer.ppo.core_algos")


MakeConfig = Callable[..., Any]


@pytest.fixture(scope="module")
def make_config(load: Load, module: ModuleType) -> MakeConfig:
    """Return a factory of verl's actor config, with parameters that differ from all defaults."""
    actor_config = load("verl.workers.config").ActorConfig

    def make(info: Mapping[str, Any] | None = None, section: Any = None, **others: Any) -> Any:
        parameters = {
            "dro_beta": TAU,
            "tis_lower_bound": TIS[0],
            "tis_upper_bound": TIS[1],
            "topr_positive_weight": WEIGHTS[0],
            "topr_negative_weight": WEIGHTS[1],
        }
        clips = {"clip_ratio": 0.2, "clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": DUAL}
        return actor_config(
            strategy="fsdp2",
            rollout_n=1,
            use_dynamic_bsz=True,
            policy_loss=section if section is not None else module.OffPolicyLossConfig(**parameters),
            global_batch_info=dict(info or {}),
            **{**clips, **others},
        )

    return make


# The loss of a token and its gradient by log pi in plain floats, from log pi, log pi_old and A.


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


def ppo(now: float, old: float, a: float, *, c: float = DUAL) -> tuple[float, float]:
    ratio = math.exp(now - old)
    surrogate = min(ratio * a, clip(ratio, 1 - LOW, 1 + HIGH) * a)
    kept = surrogate == ratio * a
    if a < 0 and surrogate < c * a:
        return -c * a, 0.0
    return -surrogate, -ratio * a if kept else 0.0


def weighted_loss(weight: float, now: float, a: float) -> tuple[float, float]:
    return -weight * a * now, -weight * a


def topr(now: float, old: float, a: float) -> tuple[float, float]:
    return weighted_loss(WEIGHTS[0] if a > 0 else WEIGHTS[1] * min(math.exp(now - old), 1.0), now, a)


PER_TOKEN: Mapping[str, Callable[[float, float, float], tuple[float, float]]] = {
    "vanilla": lambda now, old, a: weighted_loss(1.0, now, a),
    "ppo": ppo,
    "tis": lambda now, old, a: weighted_loss(clip(math.exp(now - old), *TIS), now, a),
    "topr": topr,
    "cispo": lambda now, old, a: weighted_loss(clip(math.exp(now - old), 1 - LOW, 1 + HIGH), now, a),
    "kimi15": lambda now, old, a: (-a * now + TAU / 2 * (now - old) ** 2, -a + TAU * (now - old)),
}


@dataclasses.dataclass
class Batch:
    """Responses of very different lengths, padded to the longest; some are empty."""

    now: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor

    def rows(self, chosen: list[int]) -> Batch:
        """Return some rows, padded to their longest; gradients flow to the log-probs of this batch."""
        width = max(1, int(self.mask[chosen].sum(dim=-1).max()))
        return Batch(*(getattr(self, f.name)[chosen, :width] for f in dataclasses.fields(self)))

    def tokens(self) -> Iterator[tuple[int, int]]:
        yield from ((i, t) for i, t in self.mask.nonzero().tolist())


def make_batch(seed: int, rows: int = 4, width: int = 5, sign: int = 0) -> Batch:
    draw = random.Random(seed)
    lengths = [draw.randint(0, width) for _ in range(rows)]

    def tensor(of: Callable[[], float]) -> torch.Tensor:
        return torch.tensor([[of() for _ in range(width)] for _ in range(rows)], dtype=torch.float64)

    old = tensor(lambda: -draw.expovariate(1.0))
    return Batch(
        now=(old + tensor(lambda: draw.gauss(0, 0.6))).requires_grad_(),
        old=old,
        advantages=tensor(lambda: draw.gauss(0, 1) if sign == 0 else sign * draw.expovariate(1.0)),
        mask=torch.tensor([[t < length for t in range(width)] for length in lengths]),
        weights=tensor(lambda: draw.uniform(0, 2)),
    )


def call(
    algos: ModuleType,
    variant: str,
    batch: Batch,
    config: Any,
    mode: str = "token-mean",
    weighted: bool = False,
) -> Any:
    return algos.get_policy_loss_fn(LOSS_OF_VARIANT[variant])(
        old_log_prob=batch.old,
        log_prob=batch.now,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=batch.weights if weighted else None,
    )


def gradient_of(loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.autograd.grad(loss, batch.now)[0]


def expected(variant: str, batch: Batch, weighted: bool) -> tuple[float, dict[tuple[int, int], float]]:
    """Return the mean over all tokens, and its gradient for each token."""
    count = max(1, int(batch.mask.sum()))
    loss, gradient = 0.0, {}
    for i, t in batch.tokens():
        values = (x[i, t].item() for x in (batch.now, batch.old, batch.advantages))
        one, slope = PER_TOKEN[variant](*values)
        weight = batch.weights[i, t].item() if weighted else 1.0
        loss += one * weight / count
        gradient[i, t] = slope * weight / count
    return loss, gradient


@pytest.mark.parametrize("variant", VARIANTS)
@few
@given(seed=seeds, sign=st.sampled_from((-1, 0, 1)), weighted=st.booleans())
def test_every_variant_equals_its_formula(
    algos: ModuleType, make_config: MakeConfig, variant: str, seed: int, sign: int, weighted: bool
) -> None:
    batch = make_batch(seed, sign=sign)
    loss, _ = call(algos, variant, batch, make_config(), weighted=weighted)
    found = gradient_of(loss, batch)
    mean, slopes = expected(variant, batch, weighted)
    assert loss.item() == pytest.approx(mean, rel=1e-10, abs=1e-14)
    for i in range(len(batch.mask)):
        for t in range(batch.mask.shape[1]):
            assert found[i, t].item() == pytest.approx(slopes.get((i, t), 0.0), rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("log_ratio", [-100.0, 100.0])
def test_an_extreme_ratio_gives_finite_values(
    algos: ModuleType, make_config: MakeConfig, variant: str, log_ratio: float
) -> None:
    batch = make_batch(1)
    now = (batch.old + log_ratio).detach().float().requires_grad_()
    batch = dataclasses.replace(batch, now=now, old=batch.old.float())
    loss, metrics = call(algos, variant, batch, make_config())
    assert loss.isfinite() and gradient_of(loss, batch).isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values())


# Losses that ROLL and AReaL have under other names.


def test_loss_names_differ_from_verls(algos: ModuleType, module: ModuleType) -> None:
    source = Path(str(algos.__file__)).read_text(encoding="utf-8")
    verls = set(re.findall(r'@register_policy_loss\("(\w+)"\)', source))
    assert {"vanilla", "gpg", "dro", "cispo"} <= verls
    assert not verls & set(OWN_LOSSES)
    assert set(OWN_LOSSES) <= set(algos.POLICY_LOSS_REGISTRY)
    assert set(LOSS_OF_VARIANT.values()) <= verls | set(OWN_LOSSES)
    assert f"{module.__name__}.{module.OffPolicyLossConfig.__name__}" == LOSS_CONFIG


WIDE = 1e9
"""A dual clip or threshold that no ratio reaches: verl bounds ratios to exp(20)."""


@few
@given(seed=seeds, kind=st.sampled_from(("whole", "truncated", "filtered")))
def test_verls_rollout_correction_is_decoupled_ppo(
    algos: ModuleType, make_config: MakeConfig, load: Load, seed: int, kind: str
) -> None:
    """`rollout_is=token` with `vanilla` separates behaviour, proximal and current policy (arXiv 2505.24298).

    The paper does not truncate the weight pi_prox / pi_behave; verl truncates it at the threshold. AReaL's
    code drops tokens above a cap instead, which is verl's threshold "lower_upper".
    """
    cap = 1.2
    threshold: Any = {"whole": WIDE, "truncated": cap, "filtered": f"1e-9_{cap}"}[kind]
    batch = make_batch(seed)
    behaviour = make_batch(seed + 1).now.detach() - make_batch(seed + 1).old + batch.old
    if not batch.mask.any():
        batch.mask[0, 0] = True  # verl cannot correct an empty batch
    weights, _ = load("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_weights(
        log_ratio=batch.old - behaviour,
        response_mask=batch.mask,
        rollout_is="token",
        rollout_is_threshold=threshold,
    )
    corrected = dataclasses.replace(batch, weights=weights)
    loss, _ = call(algos, "ppo", corrected, make_config(clip_ratio_c=WIDE), weighted=True)
    found = gradient_of(loss, batch)

    count, total = int(batch.mask.sum()), 0.0
    for i, t in batch.tokens():
        now, proximal, generated = (x[i, t].item() for x in (batch.now, batch.old, behaviour))
        a = batch.advantages[i, t].item()
        weight = math.exp(proximal - generated)
        if weight > cap:
            weight = {"whole": weight, "truncated": cap, "filtered": 0.0}[kind]
        one, slope = ppo(now, proximal, a, c=WIDE)
        total += weight * one / count
        assert found[i, t].item() == pytest.approx(weight * slope / count, rel=1e-10, abs=1e-14)
    assert loss.item() == pytest.approx(total, rel=1e-10, abs=1e-14)


# Micro batches and empty batches.


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("ranks", [1, 2])
@settings(max_examples=3, deadline=None)
@given(seed=seeds)
def test_uneven_micro_batches_add_up_to_the_batch(
    algos: ModuleType, make_config: MakeConfig, variant: str, mode: str, ranks: int, seed: int
) -> None:
    """Each is padded to its longest response; gradients are averaged over the ranks, as in verl's engines."""
    batch = make_batch(seed, rows=8, width=9)
    info = {
        "dp_size": ranks,
        "batch_num_tokens": int(batch.mask.sum()),
        "global_batch_size": len(batch.mask),
        "loss_scale_factor": None,
    }
    whole, _ = call(algos, variant, batch, make_config({**info, "dp_size": 1}), mode, weighted=True)
    parts = [[0], [1, 2, 3], [4, 5], [6], [7]]
    config = make_config(info)
    losses = [call(algos, variant, batch.rows(rows), config, mode, weighted=True)[0] for rows in parts]
    summed = sum(losses) / ranks
    assert summed.item() == pytest.approx(whole.item(), rel=1e-10, abs=1e-14)
    assert torch.allclose(gradient_of(summed, batch), gradient_of(whole, batch), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("known", [True, False])
def test_the_loss_of_an_empty_batch_is_zero(
    algos: ModuleType, make_config: MakeConfig, variant: str, mode: str, known: bool
) -> None:
    batch = make_batch(4)
    batch.mask[:] = False
    info = {"dp_size": 1, "batch_num_tokens": 0, "global_batch_size": 4, "loss_scale_factor": None}
    loss, metrics = call(algos, variant, batch, make_config(info if known else {}), mode, weighted=True)
    assert loss.item() == 0.0
    assert (gradient_of(loss, batch) == 0).all()
    assert all(math.isfinite(value) for value in metrics.values())


# Metrics.


def test_metrics_measure_how_far_off_policy_a_batch_is(algos: ModuleType, make_config: MakeConfig) -> None:
    log_ratio = torch.tensor([[0.0, math.log(2.0), -math.log(10.0), 9.9]], dtype=torch.float64)
    batch = Batch(
        now=(log_ratio - 1.0).requires_grad_(),
        old=torch.full((1, 4), -1.0, dtype=torch.float64),
        advantages=torch.tensor([[1.0, -1.0, -1.0, 1.0]], dtype=torch.float64),
        mask=torch.tensor([[True, True, True, False]]),
        weights=torch.ones(1, 4, dtype=torch.float64),
    )

    drift = pytest.approx((-math.log(2.0) + math.log(10.0)) / 3, rel=1e-6)
    assert call(algos, "vanilla", batch, make_config())[1] == {"actor/ppo_kl": drift}
    assert call(algos, "tis", batch, make_config())[1] == {
        "actor/ppo_kl": drift,
        "actor/pg_clipfrac": pytest.approx(2 / 3),
        "actor/tis_weight_mean": pytest.approx((1.0 + TIS[1] + TIS[0]) / 3),
    }
    assert call(algos, "topr", batch, make_config())[1] == {
        "actor/ppo_kl": drift,
        "actor/pg_clipfrac": pytest.approx(1 / 3),
        "actor/topr_weight_mean": pytest.approx((WEIGHTS[0] + WEIGHTS[1] * (1.0 + 0.1)) / 3),
        "actor/topr_positive_frac": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_metric_can_be_averaged(algos: ModuleType, make_config: MakeConfig, variant: str) -> None:
    _, metrics = call(algos, variant, make_batch(2), make_config())
    assert "actor/ppo_kl" in metrics
    assert all(isinstance(value, float) for value in metrics.values())
    assert not [name for name in metrics if "max" in name or "min" in name]


# Parameters.


def section_of(load: Load, **overrides: Any) -> Any:
    """Return verl's default section with other values, converted to a dataclass as a worker does."""
    actor = OmegaConf.load(
        Path(str(load("verl").__file__)).parent / "trainer" / "config" / "actor" / "actor.yaml"
    )
    section = OmegaConf.create({**actor.policy_loss, **overrides})
    return load("verl.utils.config").omega_conf_to_dataclass(section)


def test_the_loss_section_accepts_its_parameters(load: Load, module: ModuleType) -> None:
    section = section_of(load, _target_=LOSS_CONFIG, loss_mode="tis", tis_upper_bound=2.0, dro_beta=0.1)
    assert isinstance(section, module.OffPolicyLossConfig)
    assert (section.loss_mode, section.tis_lower_bound, section.tis_upper_bound) == ("tis", 0.0, 2.0)
    assert section.get("dro_beta") == 0.1


@pytest.mark.parametrize(
    "overrides",
    [
        {"tis_upper_bound": 2.0},  # not in verl's section
        {"_target_": LOSS_CONFIG, "tis_uper_bound": 2.0},
        {"_target_": LOSS_CONFIG, "tis_upper_bound": -1.0},
    ],
)
def test_an_unknown_or_invalid_parameter_is_an_error(
    load: Load, module: ModuleType, overrides: dict[str, Any]
) -> None:
    with pytest.raises(InstantiationException, match="tis_up"):
        section_of(load, **overrides)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tis_lower_bound", 1.5),
        ("tis_lower_bound", -0.1),
        ("tis_upper_bound", math.inf),
        ("tis_upper_bound", math.nan),
        ("topr_positive_weight", -1.0),
        ("topr_negative_weight", math.inf),
        ("topr_split", "reward"),
        ("topr_ratio_level", "batch"),
    ],
)
def test_parameters_are_checked(module: ModuleType, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"actor.policy_loss.*{name}.*default"):
        module.OffPolicyLossConfig(**{name: value})


def test_verls_section_uses_the_defaults(
    algos: ModuleType, module: ModuleType, make_config: MakeConfig, load: Load
) -> None:
    batch = make_batch(7)
    for section in (load("verl.workers.config").PolicyLossConfig(), {"loss_mode": "tis"}):
        loss, _ = call(algos, "tis", batch, make_config(section=section))
        default, _ = call(algos, "tis", batch, make_config(section=module.OffPolicyLossConfig()))
        assert loss.item() == default.item()
    with pytest.raises(TypeError, match="tis_uper_bound"):
        call(algos, "tis", batch, make_config(section={"tis_uper_bound": 2.0}))


# Scores.


def micro_batch(load: Load, batch: Batch, scores: list[float]) -> tuple[dict[str, Any], Any]:
    """Return the arguments of verl's loss function: the output of the model, and jagged columns."""
    lengths = [max(1, int(row.sum())) for row in batch.mask]
    prompt = 2

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def responses(tensor: torch.Tensor) -> torch.Tensor:
        return jagged([row[:length] for row, length in zip(tensor, lengths, strict=True)])

    # The log-prob of a token is at the position of the token before it.
    pad = torch.zeros(prompt, dtype=torch.float64)
    shifted = [torch.cat([pad[1:], row[:n], pad[:1]]) for row, n in zip(batch.now, lengths, strict=True)]

    last = torch.zeros_like(batch.old)
    for i, (length, score) in enumerate(zip(lengths, scores, strict=True)):
        last[i, length - 1] = score

    data = load("tensordict").TensorDict(
        {
            "prompts": jagged([torch.zeros(prompt, dtype=torch.long) for _ in lengths]),
            "responses": jagged([torch.zeros(length, dtype=torch.long) for length in lengths]),
            "response_mask": responses(batch.mask.long()),
            "old_log_probs": responses(batch.old),
            "advantages": responses(batch.advantages),
            "rm_scores": responses(last),
        },
        batch_size=len(lengths),
    )
    load("verl.utils.tensordict_utils").assign_non_tensor(
        data, dp_size=1, batch_num_tokens=int(batch.mask.sum()), global_batch_size=len(lengths)
    )
    return {"log_probs": jagged(shifted)}, data


@pytest.mark.parametrize("split", ["advantage", "score"])
def test_topr_can_split_by_score_or_advantage(
    module: ModuleType, load: Load, make_config: MakeConfig, split: str
) -> None:
    batch = make_batch(21)
    batch.mask[:, 0] = True
    scores = [1.0, -1.0, 0.0, 2.0]
    config = make_config(section=module.OffPolicyLossConfig(loss_mode="topr", topr_split=split))
    output, data = micro_batch(load, batch, scores)
    loss, metrics = module.ppo_loss_with_scores(config=config, model_output=output, data=data)

    count, expected_loss = int(batch.mask.sum()), 0.0
    for i, t in batch.tokens():
        now, old, a = (x[i, t].item() for x in (batch.now, batch.old, batch.advantages))
        positive = (a if split == "advantage" else scores[i]) > 0
        expected_loss += weighted_loss(1.0 if positive else min(math.exp(now - old), 1.0), now, a)[0] / count
    assert loss.item() == pytest.approx(expected_loss, rel=1e-10)
    assert "actor/topr_positive_frac" in metrics


def test_a_split_by_score_without_scores_is_an_error(
    algos: ModuleType, module: ModuleType, make_config: MakeConfig
) -> None:
    config = make_config(section=module.OffPolicyLossConfig(topr_split="score"))
    with pytest.raises(ConfigError, match="ppo_loss_with_scores"):
        call(algos, "topr", make_batch(0), config)


def test_scores_do_not_outlive_their_micro_batch(
    algos: ModuleType, module: ModuleType, load: Load, make_config: MakeConfig
) -> None:
    batch = make_batch(21)
    batch.mask[:, 0] = True
    config = make_config(section=module.OffPolicyLossConfig(loss_mode="topr", topr_split="score"))
    module.ppo_loss_with_scores(config, *micro_batch(load, batch, [1.0] * 4))
    with pytest.raises(ConfigError, match="ppo_loss_with_scores"):
        call(algos, "topr", make_batch(0), config)
