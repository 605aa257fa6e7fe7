# SPDX-License-Identifier: Apache-2.0
"""Batches that verl's workers could not divide are refused before the start, with a size that works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.config.checks.batch_sizes import fit_batch_sizes
from recipe.async_pipeline.config.paths import nested
from recipe.async_pipeline.config.placement import Placement, Pool
from recipe.async_pipeline.errors import ConfigError
from tests.refusals import Refused, cases_of

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
LOGP, REF_LOGP = (f"{prefix}.log_prob_micro_batch_size_per_gpu" for prefix in (ROLLOUT, REF))
DYNAMIC = (f"{ACTOR}.use_dynamic_bsz", f"{ROLLOUT}.log_prob_use_dynamic_bsz")

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 16,
    "trainer.critic_warmup": 0,
    "actor_rollout_ref.model.use_remove_padding": True,
    f"{ROLLOUT}.n": 8,
    f"{ROLLOUT}.prompt_length": 8,
    f"{ROLLOUT}.response_length": 4,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": False,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 12,
    LOGP: 4,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 12,
    f"{ACTOR}.ppo_mini_batch_size": 16,
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 1,
    f"{ACTOR}.fsdp_config.fsdp_size": -1,
    MICRO: 4,
    f"{REF}.ulysses_sequence_parallel_size": 1,
    f"{REF}.fsdp_config.fsdp_size": -1,
    f"{REF}.log_prob_use_dynamic_bsz": False,
    REF_LOGP: 4,
    "critic.use_dynamic_bsz": False,
    "critic.ppo_micro_batch_size_per_gpu": 4,
    "critic.ppo_mini_batch_size": 16,
    "critic.fsdp.fsdp_size": -1,
}
SHARED = ("train", "logp", "ref_logp")
WITH_CRITIC = (*SHARED, "critic")


def check(
    changes: dict[str, Any] | None = None, *, devices: int = 1, roles: tuple[str, ...] = SHARED, **pools: int
) -> dict[str, tuple[int, str]]:
    """Check the defaults with changes. `pools` maps stages with separate pools to the devices of the pool."""
    shared = Pool("train", tuple(role for role in roles if role not in pools), (devices,))
    own = (Pool(role, (role,), (size,)) for role, size in pools.items())
    placement = Placement((shared, *own, Pool("generate", ("generate",), (1,))))
    return fit_batch_sizes(nested({**DEFAULTS, **(changes or {})}), placement)


def batch(prompts: int, responses: int, mini: int | None = None, micro: int = 1) -> dict[str, Any]:
    return {
        "data.train_batch_size": prompts,
        f"{ROLLOUT}.n": responses,
        f"{ACTOR}.ppo_mini_batch_size": mini or prompts,
        "critic.ppo_mini_batch_size": mini or prompts,
        MICRO: micro,
        LOGP: micro,
        REF_LOGP: micro,
    }


def test_the_defaults_fit() -> None:
    check()
    check(roles=WITH_CRITIC)
    check(devices=4, roles=WITH_CRITIC, logp=2, ref_logp=1, critic=8)


@pytest.mark.parametrize(
    ("changes", "options", "fitted"),
    [
        (batch(6, 5, micro=64), {}, {MICRO: 30, LOGP: 30, REF_LOGP: 30}),
        ({**batch(6, 5, micro=30), LOGP: 16}, {}, {LOGP: 15}),
        (batch(6, 5, micro=4), {"devices": 2}, {MICRO: 3, LOGP: 3, REF_LOGP: 3}),
        # Seven prompts are padded to eight.
        ({**batch(7, 1, mini=4, micro=4), LOGP: 7}, {}, {LOGP: 4}),
        (batch(8, 4, mini=4, micro=16), {"logp": 4}, {LOGP: 8}),
        # The steps of the warm-up are padded to the critic's mini-batches alone.
        (
            {**batch(6, 1, mini=4, micro=4), "critic.ppo_mini_batch_size": 6, "trainer.critic_warmup": 2},
            {"roles": WITH_CRITIC},
            {LOGP: 3, REF_LOGP: 3},
        ),
    ],
)
def test_micro_batches_that_do_not_divide_become_smaller(
    changes: dict[str, Any], options: dict[str, Any], fitted: dict[str, int]
) -> None:
    found = check(changes, **options)
    assert {path: value for path, (value, _) in found.items()} == fitted
    assert not check({**changes, **fitted}, **options)


def test_sizes_of_other_engines_share_rows() -> None:
    """Each has separate keys, in the section of its name."""
    engine = {f"{ACTOR}.strategy": "torchtitan", f"{ACTOR}.torchtitan.tensor_parallel_size": 4}
    assert not check({**batch(8, 1, mini=8), **engine}, devices=8)


def test_the_reason_names_the_samples() -> None:
    _, why = check({**batch(6, 5, micro=30), LOGP: 16})[LOGP]
    assert why.startswith(
        "16 does not divide the 30 samples of a batch on each rank of logp (data.train_batch"
    )


@cases_of("sizes")
def test_what_verl_could_not_divide_is_refused(case: Refused) -> None:
    """Names without a dot are arguments of `check`; `batch` has the arguments of the function."""
    changes = {path: value for path, value in case.changes.items() if "." in path}
    options = {name: value for name, value in case.changes.items() if "." not in name}
    sizes = batch(*options.pop("batch", ())) if "batch" in options else {}
    case.replay(lambda _: check(sizes | changes, **options))


def test_ranks_are_counted_instead_of_devices() -> None:
    """Four devices with sequences over two are two ranks, for which three samples each are enough."""
    ulysses = {
        f"{ACTOR}.ulysses_sequence_parallel_size": 2,
        f"{REF}.ulysses_sequence_parallel_size": 2,
        **dict.fromkeys(DYNAMIC, True),
    }
    check(batch(6, 1, micro=3) | ulysses, devices=4)
    with pytest.raises(ConfigError, match=r"a mini-batch .*, 5 samples, .* by the 2 data-parallel ranks"):
        check(batch(5, 1) | ulysses, devices=4)
    # verl's own check counts devices unless micro-batches are packed by tokens.
    fixed = ulysses | dict.fromkeys(DYNAMIC, False)
    with pytest.raises(ConfigError, match="by the 4 training devices, got 6 x 1 = 6; set .* to 8, or"):
        check(batch(6, 1, micro=3) | fixed, devices=4)


def test_sequences_over_several_devices_share_the_tokens() -> None:
    ulysses = {f"{section}.ulysses_sequence_parallel_size": 2 for section in (ACTOR, REF)}
    tokens = dict.fromkeys(
        (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"), 6
    )
    check(ulysses | tokens | dict.fromkeys(DYNAMIC, True), devices=2)


def test_hybrid_sharding_leaves_the_ranks() -> None:
    check({f"{ACTOR}.fsdp_config.fsdp_size": 2}, devices=4)
    check({f"{ACTOR}.fsdp_config.fsdp_size": 64}, devices=4)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 12), st.integers(1, 80), st.integers(1, 4))
def test_the_remedy_for_a_micro_batch_is_accepted(
    prompts: int, responses: int, mini: int, micro: int, devices: int
) -> None:
    changes = batch(prompts, responses, min(mini, prompts), micro)
    for _ in range(3):
        try:
            check(changes, devices=devices)
        except ConfigError as error:
            path, _, text = str(error).partition(" ")
            if "per_gpu" not in path:
                return
            assert changes[path] == micro
            changes[path] = int(text.rpartition(" ")[2])
    check(changes, devices=devices)


MEGATRON: dict[str, Any] = {f"{ACTOR}.strategy": "megatron", f"{REF}.strategy": "megatron"}


def sizes(parallel: Mapping[str, int], section: str = ACTOR) -> dict[str, Any]:
    """Return Megatron's sizes of a role: tensor_model: 2 for tensor_model_parallel_size=2."""
    return {f"{section}.megatron.{name}_parallel_size": size for name, size in parallel.items()}


@pytest.mark.parametrize(
    ("parallel", "devices"),
    [
        ({}, 4),
        ({"tensor_model": 2}, 4),
        ({"tensor_model": 2, "pipeline_model": 2}, 4),
        ({"expert_model": 4}, 4),
        ({"tensor_model": 2, "expert_model": 4, "expert_tensor": 1}, 4),
        ({"tensor_model": 3}, 3),
    ],
)
def test_megatron_sizes_that_divide_the_devices(parallel: dict[str, int], devices: int) -> None:
    check({**MEGATRON, **sizes(parallel), **sizes(parallel, REF)}, devices=devices)


def test_a_mini_batch_divides_over_the_ranks_of_megatron_not_over_the_devices() -> None:
    """3 devices hold one model: one data-parallel rank, which any number of samples divides over."""
    one_rank = {**MEGATRON, **sizes({"tensor_model": 3}), **sizes({"tensor_model": 3}, REF)}
    check({**one_rank, f"{ROLLOUT}.n": 1, "data.train_batch_size": 16}, devices=3)
    with pytest.raises(ConfigError, match="3 devices of pool train"):
        check({f"{ROLLOUT}.n": 1, "data.train_batch_size": 16}, devices=3)


def test_only_context_parallelism_multiplies_the_tokens_of_a_rank() -> None:
    dynamic = {**MEGATRON, **dict.fromkeys(DYNAMIC, True), f"{ACTOR}.ppo_max_token_len_per_gpu": 6}
    with pytest.raises(ConfigError, match="ppo_max_token_len_per_gpu must be at least the longest sequence"):
        check({**dynamic, **sizes({"tensor_model": 2})}, devices=2)
    check({**dynamic, **sizes({"context": 2}), **sizes({"context": 2}, REF)}, devices=2)
