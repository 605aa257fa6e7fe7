# SPDX-License-Identifier: Apache-2.0
"""Values that verl would refuse late: in a worker, at the first batch, or at the first update.

verl has these names in branches of functions, so that they are listed here; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .divisibility import ACTOR, SHARDED
from .refusals import (
    ALWAYS,
    Refusal,
    Settings,
    must_be_one_of,
    must_be_positive,
    never,
    number,
    number_above,
    number_from,
    positive,
    share,
    whole,
    whole_or_none,
)
from .rollout_correction import AGGREGATIONS

KL = ("kl", "k1", "k1+", "abs", "abs+", "mse", "k2", "low_var_kl", "low_var_kl+", "k3", "k3+")
"""With a plus, the gradient is that of k2."""
KL_CONTROLLERS = ("fixed", "adaptive")
DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16", 32, 16)
CONTENTS = ("model", "optimizer", "extra", "hf_model")
STORES = ("SimpleStorage", "Yuanrong", "MooncakeStore", "RayStore")
ATTENTIONS = (
    "eager",
    "sdpa",
    "packed_sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
"""Of transformers, which also loads a hub's (`ORGANISATION/KERNEL`), and of this package (`packed_sdpa`)."""
SCHEDULERS = ("constant", "cosine")
"""Of FSDP; Megatron reads `lr_decay_style`."""

OF_MEGATRON: Mapping[str, Sequence[str]] = {
    "optimizer": ("adam", "sgd", "muon"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
}
"""Names below the section of a model's optimizer."""
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")

_ROLLOUT = "actor_rollout_ref.rollout"
_FSDP = (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
_DEFAULT = "leave it out for verl's default"


def _or_absent(allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or allowed(value)


def _given(allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is not None and allowed(value)


def _one_of(
    path: str, values: Sequence[Any], remedy: str, when: Callable[[Settings], Any] = ALWAYS
) -> Refusal:
    row = must_be_one_of(path, values, remedy)
    return row._replace(allowed=_or_absent(row.allowed), when=when)


def _attention(path: str) -> Refusal:
    row = _one_of(path, ATTENTIONS, "packed_sdpa needs no other package")
    return row._replace(allowed=lambda value: row.allowed(value) or "/" in str(value))


def _from_0_to_1(value: Any) -> bool:
    return number_from(0)(value) and (value is None or value <= 1)


def _is_above_0(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _are_betas(value: Any) -> bool:
    shares = _given(lambda beta: _from_0_to_1(beta) and beta < 1)
    return isinstance(value, Sequence) and len(value) == 2 and all(map(shares, value))


def _are_contents(value: Any) -> bool:
    return value is None or {*value} <= {*CONTENTS}


def _optimizer(model: str) -> Iterator[Refusal]:
    """Yield the rows of a model's optimizer."""
    section = f"{model}.optim"

    def fsdp(at: Settings) -> bool:
        return at[f"{model}.strategy"] in SHARDED

    def megatron(at: Settings) -> bool:
        return bool(at[f"{model}.strategy"] == "megatron")

    def wsd(at: Settings) -> bool:
        return megatron(at) and at[f"{section}.lr_decay_style"] == "WSD"

    for path, names, applies in (
        ("optim.lr_scheduler_type", SCHEDULERS, fsdp),
        ("optim.warmup_style", SCHEDULERS, fsdp),
        *((f"optim.{name}", names, megatron) for name, names in OF_MEGATRON.items()),
        ("optim.lr_wsd_decay_style", WSD_STYLES, wsd),
        ("megatron.dtype", ("bfloat16", "float16", "float32"), megatron),
    ):
        yield _one_of(f"{model}.{path}", names, "its engine has no others", applies)
    no_clipping = "at 0 nothing would be trained; inf does not clip"
    for name, allowed, rule, remedy, when in (
        ("lr", _given(number_from(0)), "a number >= 0", "e.g. 1e-6", ALWAYS),
        ("weight_decay", _given(number_from(0)), "a number >= 0", _DEFAULT, ALWAYS),
        ("lr_warmup_steps_ratio", _from_0_to_1, "a number from 0 to 1", _DEFAULT, ALWAYS),
        ("min_lr_ratio", _from_0_to_1, "a number from 0 to 1", _DEFAULT, ALWAYS),
        ("betas", _or_absent(_are_betas), "two numbers >= 0 and < 1", _DEFAULT, ALWAYS),
        ("lr_warmup_steps", whole, "a whole number with FSDP", "-1 takes lr_warmup_steps_ratio", fsdp),
        ("clip_grad", _is_above_0, "a number > 0 with FSDP", no_clipping, fsdp),
    ):
        yield Refusal(f"{section}.{name}", allowed, f"must be {rule}", remedy, when)


def _sampling(section: str, least: Callable[[Any], bool], rule: str) -> tuple[Refusal, ...]:
    return (
        Refusal(f"{section}.temperature", least, rule, "1 samples from the policy itself"),
        Refusal(
            f"{section}.top_p",
            share,
            "must be > 0 and <= 1",
            "1 samples from all tokens",
        ),
        Refusal(
            f"{section}.top_k",
            lambda value: value is None or (whole(value) and value >= -1),
            "must be a whole number >= -1",
            "-1 samples from all tokens",
        ),
    )


def _serves_fewer_tokens(at: Settings) -> bool:
    """Return whether vLLM would have less than a token for each of its concurrent responses."""
    tokens, slots = (at[f"{_ROLLOUT}.{name}"] for name in ("max_num_batched_tokens", "max_num_seqs"))
    return at[f"{_ROLLOUT}.name"] == "vllm" and whole(tokens) and whole(slots) and bool(tokens < slots)


def _is_no_penalty(at: Settings) -> bool:
    """Return whether DAPO's reward manager would refuse the length of its penalty, in a worker."""
    length, longest = at[f"{_OVERLONG}.len"], at["reward.reward_kwargs.max_resp_len"]
    longest = longest or at["data.max_response_length"]
    used = at[f"{_OVERLONG}.enable"] and at["reward.reward_manager.name"] == "dapo"
    return bool(used) and not (whole(length) and whole(longest) and 0 < length <= longest)


VALUES: tuple[Refusal, ...] = (
    Refusal(
        f"{_OVERLONG}.len",
        never,
        "must be from 1 to reward.reward_kwargs.max_resp_len, by default data.max_response_length",
        "lower it",
        when=_is_no_penalty,
    ),
    _one_of(f"{ACTOR}.kl_loss_type", KL, "low_var_kl is verl's default"),
    _one_of("algorithm.kl_penalty", KL, "kl is verl's default"),
    _one_of("algorithm.kl_ctrl.type", KL_CONTROLLERS, "fixed is verl's default"),
    *(
        _one_of(path, DTYPES, "fp32 is verl's default")
        for path in (
            f"{ACTOR}.fsdp_config.model_dtype",
            "actor_rollout_ref.ref.fsdp_config.model_dtype",
            "critic.fsdp.model_dtype",
        )
    ),
    *(
        _one_of(f"{section}.mixed_precision.{part}_dtype", DTYPES, "leave it out")
        for section in _FSDP
        for part in ("param", "reduce", "buffer")
    ),
    _one_of("critic.loss_agg_mode", AGGREGATIONS, "it is the policy's by default")._replace(
        when=lambda at: at["critic.loss_agg_mode"] != at[f"{ACTOR}.loss_agg_mode"]
    ),
    _one_of("transfer_queue.backend.storage_backend", STORES, "SimpleStorage is verl's default"),
    *(
        Refusal(
            f"{model}.checkpoint.save_contents", _are_contents, f"must be of {', '.join(CONTENTS)}", _DEFAULT
        )
        for model in (ACTOR, "critic")
    ),
    *(
        _attention(f"{model}.override_config.attn_implementation")
        for model in ("actor_rollout_ref.model", "critic.model")
    ),
    *_optimizer(ACTOR),
    *_optimizer("critic"),
    *_sampling(_ROLLOUT, _given(number_above(0)), "must be a number > 0, since log-probs are divided by it"),
    *_sampling(f"{_ROLLOUT}.val_kwargs", number_from(0), "must be a number >= 0"),
    must_be_positive("data.max_prompt_length", "it is the tokens of the longest prompt"),
    must_be_positive("data.max_response_length", "it is the tokens of the longest response"),
    must_be_positive(f"{_ROLLOUT}.val_kwargs.n", "it is the responses to each prompt of a validation"),
    must_be_positive(f"{_ROLLOUT}.agent.num_workers", "they run the agent loops"),
    must_be_positive(f"{ACTOR}.ppo_epochs", "it is the passes over each batch"),
    must_be_positive("trainer.total_epochs", "it is the passes over the data"),
    *(
        Refusal(path, whole, "must be a whole number", remedy)
        for path, remedy in (
            ("trainer.test_freq", "-1 validates at the start only"),
            ("data.train_max_samples", "-1 takes all rows"),
            ("data.val_max_samples", "-1 takes all rows"),
        )
    ),
    *(
        Refusal(path, _or_absent(positive), "must be >= 1, or null", remedy)
        for path, remedy in (
            ("data.gen_batch_size", "null draws data.train_batch_size prompts"),
            ("data.val_batch_size", "null takes all rows at once"),
            ("ray_kwargs.ray_init.num_cpus", "null takes the machine's"),
        )
    ),
    *(
        Refusal(f"{_ROLLOUT}.multi_turn.{name}", whole_or_none, "must be >= 0, or null", "null is no limit")
        for name in ("max_assistant_turns", "max_user_turns")
    ),
    must_be_positive(f"{_ROLLOUT}.multi_turn.max_parallel_calls", "it is the calls of a turn that are made"),
    must_be_positive(f"{_ROLLOUT}.multi_turn.max_tool_response_length", "it is characters"),
    Refusal(
        f"{_ROLLOUT}.max_num_batched_tokens",
        never,
        f"must be at least {_ROLLOUT}.max_num_seqs=<{_ROLLOUT}.max_num_seqs> with vllm",
        "raise it, or lower max_num_seqs",
        when=_serves_fewer_tokens,
    ),
    Refusal(
        f"{_ROLLOUT}.prometheus.port",
        lambda value: positive(value) and value < 1 << 16,
        "must be a port",
        _DEFAULT,
    ),
    Refusal("data.dataloader_num_workers", _given(whole_or_none), "must be >= 0", "0 reads in the trainer"),
    Refusal("data.seed", _or_absent(whole), "must be a whole number, or null", "null leaves it to verl"),
    Refusal("trainer.log_val_generations", _given(whole_or_none), "must be >= 0", "0 logs none"),
    *(
        Refusal(path, _given(number), "must be a number", _DEFAULT)
        for path in (f"{ACTOR}.entropy_coeff", f"{ACTOR}.kl_loss_coef", "algorithm.kl_ctrl.kl_coef")
    ),
    *(
        Refusal(f"algorithm.{name}", _given(_from_0_to_1), "must be a number from 0 to 1", _DEFAULT)
        for name in ("gamma", "lam")
    ),
    Refusal("critic.cliprange_value", _given(number_from(0)), "must be a number >= 0", _DEFAULT),
    *(
        Refusal(
            f"algorithm.kl_ctrl.{name}",
            _given(number_above(0)),
            "must be a number > 0 with kl_ctrl.type=adaptive",
            _DEFAULT,
            when=lambda at: at["algorithm.kl_ctrl.type"] == "adaptive",
        )
        for name in ("horizon", "target_kl")
    ),
    _one_of(
        f"{_ROLLOUT}.multi_turn.tool_response_truncate_side",
        ("left", "right", "middle"),
        "middle is verl's default",
    ),
)
