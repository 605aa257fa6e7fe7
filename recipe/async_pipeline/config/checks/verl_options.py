# SPDX-License-Identifier: Apache-2.0
"""Options of verl that the pipeline does not support, alone (`RULES`) or together with others."""

from __future__ import annotations

from typing import Any

from ..derived.adapters import MODEL, adapter_rank, publishes_adapters
from ..keys.older_verl import IS_LEVEL, IS_MODE, IS_VETO, OF_ALL_DEVICES, SAMPLER, UNREAD
from ..paths import MODE, OWN, PATCH_FREE
from .divisibility import OTHERS, SHARDED
from .refusals import (
    Refusal,
    Settings,
    any_of,
    must_be,
    must_be_off,
    must_be_on,
    must_be_one_of,
    must_be_positive,
    never,
    off,
    on,
    other_than,
    positive,
    share,
    whole,
    whole_or_none,
)
from .rollout_correction import UNUSABLE

MANAGER = "recipe.async_pipeline.verl_bridge.agent_loop.manager.PushAgentLoopManager"
STRATEGIES = ("fsdp", "fsdp2", "megatron", *OTHERS)
"""The training engines whose weights can be published."""
DTYPES = ("bfloat16", "float16", "float32")
OF_WHOLE_RESPONSES = (
    *("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg"),
    "reinforce_plus_plus_baseline",
)
"""verl's estimators of advantages that add up the rewards of the tokens of a response."""

_NO_QAT = "quantization-aware training is not supported yet"
_NO_DRAFTER = "the drafter of multi-token prediction would not be updated"
_ESTIMATOR = "algorithm.adv_estimator"
_TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_EXPERTS = "actor_rollout_ref.rollout.expert_parallel_size"
_LAG = f"set {OWN}.staleness.max_lag"
_CORRECTION = "algorithm.rollout_correction"
_ORDER = (
    "leave it out: prompts are drawn in the order of the data, which data.shuffle and data.seed change; "
    "another order is one of the rows, or of a data set, data.custom_cls"
)
RULES: tuple[Refusal, ...] = (
    *UNREAD,
    *(
        must_be(path, None, remedy=f"leave it out, and set {path}_per_gpu, for one device")
        for path in OF_ALL_DEVICES
    ),
    must_be(
        IS_LEVEL,
        None,
        remedy=f"leave it out; today the levels are {_CORRECTION}.rollout_is=token or sequence, and a "
        f"geometric mean can only reject responses, by {_CORRECTION}.rollout_rs=seq_mean_k1",
    ),
    must_be(
        IS_MODE,
        None,
        remedy=f"leave it out; today tokens are masked by {_CORRECTION}.rollout_rs=token_k1, and responses "
        f"by seq_sum_k1, outside of {_CORRECTION}.rollout_rs_threshold='\"LOWER_UPPER\"'",
    ),
    must_be(
        IS_VETO,
        None,
        remedy=f"leave it out; today {_CORRECTION}.rollout_rs rejects tokens or responses, and no option of "
        "it is the old veto",
    ),
    must_be("trainer.v1.sampler.max_off_policy_threshold", 8, None, remedy=_LAG, where="in a file"),
    must_be(
        "trainer.v1.sampler.max_off_policy_strategy",
        "drop",
        None,
        remedy=f"set {OWN}.staleness.straggler",
        where="in a file",
    ),
    must_be(
        "trainer.v1.sampler.custom_sampler.path",
        None,
        remedy=_ORDER,
    ),
    *(must_be(path, None, remedy=_ORDER) for path in SAMPLER),
    Refusal(MODE, any_of("sync", PATCH_FREE), "must not be changed", "set async_strategy instead"),
    Refusal(
        "actor_rollout_ref.rollout.checkpoint_engine.backend",
        any_of("naive", "dual_buffer"),
        "must be dual_buffer",
        "leave it out",
    ),
    Refusal(
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
        any_of(2048),
        "must not be changed",
        f"set {OWN}.weight_sync.gather_bucket_size_mb instead",
    ),
    Refusal(
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
        any_of(None, MANAGER),
        "must not be changed",
        "leave it out: the pipeline needs run_group, which returns each group when it is complete, or "
        "recalls it, and transcripts, from which checkpoints get unfinished requests and versions of tokens; "
        "verl's and uni-agent's managers have neither; run the agent as "
        "trainer.v1.async_pipeline.agentic.agent",
    ),
    must_be_positive("actor_rollout_ref.rollout.n", "it is the responses to each prompt"),
    must_be_positive("data.train_batch_size", "it is the prompts of one step"),
    must_be_positive(
        "actor_rollout_ref.actor.ppo_mini_batch_size", "it is the prompts of one optimizer update"
    ),
    must_be_positive(
        "actor_rollout_ref.rollout.max_num_seqs", "it is the responses that a replica generates concurrently"
    ),
    *(
        Refusal(
            f"actor_rollout_ref.rollout.{key}", share, "must be > 0 and <= 1", "it is a share of the memory"
        )
        for key in (
            "gpu_memory_utilization",
            "standalone_gpu_memory_utilization",
            "engine_kwargs.vllm.gpu_memory_utilization",
            "engine_kwargs.sglang.mem_fraction_static",
        )
    ),
    Refusal(
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        whole,
        "must be a whole number",
        "it is the devices of one replica",
    ),
    must_be_positive("critic.ppo_mini_batch_size", "it is the prompts of one critic update"),
    Refusal(
        "trainer.critic_warmup", whole_or_none, "must be >= 0", "it is the steps that train only the critic"
    ),
    Refusal("actor_rollout_ref.model.lora_rank", whole_or_none, "must be >= 0", "0 trains all weights"),
    Refusal("actor_rollout_ref.model.lora.rank", whole_or_none, "must be >= 0", "0 trains all weights"),
    Refusal(
        "ray_kwargs.ray_init.num_gpus", whole_or_none, "must be >= 0", "it is the devices that Ray may use"
    ),
    must_be_positive("reward.num_workers", "leave it out for verl's default"),
    Refusal(
        "trainer.total_training_steps",
        lambda value: value is None or positive(value),
        "must be >= 1",
        "leave it out to train by epochs",
    ),
    Refusal(
        "trainer.use_v1",
        lambda value: value is True,
        "must be True",
        "the pipeline builds on verl's V1 trainer",
    ),
    Refusal(
        "actor_rollout_ref.rollout.name",
        any_of("vllm", "sglang", "diffusers"),
        "must be vllm, sglang, or diffusers for images",
        "other engines are not supported yet: choose one of these, and leave out the engine_kwargs of others",
    ),
    must_be("actor_rollout_ref.rollout.mode", "async", remedy="remove the override"),
    must_be(
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
        None,
        remedy="verl 0.9 has no interactions: leave it out, and write the turns of the user as "
        f"{OWN}.agentic.environment",
    ),
    must_be("actor_rollout_ref.rollout.data_parallel_size", 1, remedy="use more replicas instead"),
    Refusal(
        _EXPERTS,
        any_of(None, 1),
        f"must be 1 or equal {_TENSOR}, since the devices of a replica share each request",
        "set it to one of the two",
        when=lambda at: at[_EXPERTS] != at[_TENSOR],
    ),
    must_be(
        "actor_rollout_ref.rollout.pipeline_model_parallel_size",
        1,
        remedy="use tensor parallelism or more replicas instead",
    ),
    Refusal(
        "actor_rollout_ref.rollout.quantization",
        any_of(None, "fp8"),
        "must be null or fp8",
        "weights cannot be converted to other formats yet",
    ),
    must_be_off("actor_rollout_ref.actor.qat.enable", _NO_QAT),
    must_be_off("actor_rollout_ref.actor.fsdp_config.qat.enable", _NO_QAT),
    must_be_off("actor_rollout_ref.rollout.qat.enable", _NO_QAT),
    must_be_off("critic.fsdp.qat.enable", _NO_QAT),
    must_be_off("actor_rollout_ref.model.mtp.enable", _NO_DRAFTER),
    must_be_off("actor_rollout_ref.rollout.mtp.enable", _NO_DRAFTER)._replace(
        when=lambda at: not at["actor_rollout_ref.model.mtp.enable"]  # to which it refers
    ),
    must_be_off(
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
        "the routing of a response is not recorded for each of its tokens and versions yet",
    ),
    Refusal(
        "actor_rollout_ref.rollout.moe_load_balance_metrics_interval",
        off,
        "must be 0",
        "the routing of responses is not recorded yet",
    ),
    must_be_one_of("actor_rollout_ref.rollout.dtype", DTYPES, "weights are published and served in it"),
    must_be_off("actor_rollout_ref.rollout.disaggregation.enabled", "it is not supported yet"),
    must_be_one_of(
        "actor_rollout_ref.actor.strategy", STRATEGIES, "other training engines are not supported yet"
    ),
    must_be_off("trainer.val_only", "validate with stock verl instead"),
    must_be_off("skip.rollout_tq.enable", "replaying stored rollouts is not supported yet"),
    must_be_off(
        "actor_rollout_ref.actor.freeze_vision_tower", "leave it out: only verl's older workers freeze a part"
    ),
    *(
        must_be(f"{model}.grad_clip", 1.0, None, remedy=f"set {model}.optim.clip_grad, which verl 0.9 reads")
        for model in ("actor_rollout_ref.actor", "critic")
    ),
    must_be(
        "actor_rollout_ref.rollout.do_sample",
        True,
        remedy="verl 0.9 always samples: leave it out, or set actor_rollout_ref.rollout.temperature",
    ),
    must_be_off(
        "algorithm.use_pf_ppo",
        "leave it out: it draws the samples of a batch again, which verl's V1 trainer would not notice",
    ),
    must_be(
        "data.reward_fn_key",
        "data_source",
        remedy="leave it out, and name that column of the data data_source, which verl 0.9 gives to rewards",
    ),
)


ESTIMATORS: tuple[Refusal, ...] = (
    Refusal(
        _ESTIMATOR,
        other_than(*UNUSABLE),
        "must need neither greedy answers nor sum_pi_squared, which verl's V1 trainer does not compute",
        "use rloo, for example",
    ),
    Refusal(
        "algorithm.gdpo_reward_keys",
        on,
        "must name the rewards with adv_estimator=gdpo",
        "add +algorithm.gdpo_reward_keys=[...]",
        when=lambda at: at[_ESTIMATOR] == "gdpo",
    ),
)
"""Estimators that would fail at their first batch."""


def _weighs_tokens(at: Settings) -> Any:
    """Return whether the engine's log-probs enter the update or its metrics."""
    correction = "algorithm.rollout_correction"
    return at[f"{OWN}.staleness.max_lag"] or any(
        at[f"{correction}.{name}"] for name in ("bypass_mode", "rollout_is", "rollout_rs")
    )


_TRUNCATED = "together with a lag or a correction: the log-probs of engine and trainer may differ then"
SAMPLING: tuple[Refusal, ...] = (
    *(
        Refusal(
            f"actor_rollout_ref.rollout.{name}",
            any_of(*allowed),
            f"must be {allowed[0]} {_TRUNCATED}",
            "leave it out, or use +async_strategy=on_policy without a correction (rollout_is=null)",
            _weighs_tokens,
        )
        for name, *allowed in (
            *(("top_p", 1.0, None), ("top_k", -1, 0, None), ("min_p", 0.0, None)),
            ("logprobs_mode", "processed_logprobs"),
        )
    ),
    Refusal(
        "actor_rollout_ref.rollout.engine_kwargs.sglang.preferred_sampling_params",
        off,
        "must be null, since it changes what each request of training and validation asks for",
        "set temperature, top_p, top_k or min_p of actor_rollout_ref.rollout",
    ),
)
"""Sampling that cuts off the distribution, and log-probs of another one."""


ADAPTERS: tuple[Refusal, ...] = (
    Refusal(
        "actor_rollout_ref.model.lora.rank",
        never,
        f"must be 0 or {MODEL}.lora_rank=<{MODEL}.lora_rank> with fsdp and fsdp2, which read only the latter",
        f"set {MODEL}.lora_rank",
        when=lambda at: (
            at["actor_rollout_ref.actor.strategy"] in SHARDED
            and adapter_rank(at.config) != (at["actor_rollout_ref.model.lora_rank"] or 0)
        ),
    ),
    Refusal(
        "actor_rollout_ref.model.lora_rank",
        positive,
        f"must be >= 1 with {MODEL}.lora_adapter_path, since all weights are trained otherwise",
        "set it to the rank of the adapter",
        when=lambda at: at["actor_rollout_ref.model.lora_adapter_path"] is not None,
    ),
    Refusal(
        "actor_rollout_ref.actor.strategy",
        other_than("fsdp"),
        "must be fsdp2 or megatron for LoRA adapters that are not merged",
        f"set it, or {MODEL}.lora.merge=True",
        when=lambda at: publishes_adapters(at.config),
    ),
    Refusal(
        "actor_rollout_ref.actor.strategy",
        other_than(*OTHERS),
        "must be fsdp2 or megatron with LoRA",
        "adapters of other engines are not supported yet",
        when=lambda at: adapter_rank(at.config),
    ),
    Refusal(
        "actor_rollout_ref.rollout.load_format",
        other_than(None, "dummy"),
        "must not be dummy for LoRA adapters, whose base is not published",
        f"set it to auto, or {MODEL}.lora.merge=True",
        when=lambda at: publishes_adapters(at.config),
    ),
)
WITH_CRITIC: tuple[Refusal, ...] = (
    must_be_one_of("critic.strategy", STRATEGIES, "other training engines are not supported yet"),
)
WITHOUT_CRITIC: tuple[Refusal, ...] = (
    Refusal(
        "trainer.critic_warmup",
        off,
        "must be 0 without a critic",
        "set algorithm.adv_estimator=gae to use one",
    ),
)
REWARD_MODEL: tuple[Refusal, ...] = (
    Refusal(
        "reward.reward_model.enable_resource_pool",
        on,
        "must be True",
        "set it with reward.reward_model.nnodes and reward.reward_model.n_gpus_per_node, since the model "
        "scores while the trainer trains",
    ),
    must_be_positive("reward.reward_model.nnodes", "set the devices of the reward model"),
    must_be_positive("reward.reward_model.n_gpus_per_node", "set the devices of the reward model"),
    must_be_off(
        "reward.reward_model.rollout.free_cache_engine", "set it, since the model does not share its devices"
    ),
)
_WHILE_GENERATING = f"{OWN}.reward.while_generating"
REWARDS: tuple[Refusal, ...] = (
    must_be_on(
        _WHILE_GENERATING,
        "set it, since groups are filtered by their rewards as they finish",
        "with algorithm.filter_groups",
        lambda at: at["algorithm.filter_groups.enable"],
    ),
    Refusal(
        f"{OWN}.reward.failure",
        other_than("drop"),
        "must not be drop with reward.while_generating=False",
        "use fail or score",
        when=lambda at: not at[_WHILE_GENERATING],
    ),
    Refusal(
        f"{OWN}.reward.timeout_s",
        any_of(None),
        "requires a custom reward function",
        "set reward.custom_reward_function.path",
        when=lambda at: not at["reward.custom_reward_function.path"],
    ),
    Refusal(
        "algorithm.adv_estimator",
        other_than(*OF_WHOLE_RESPONSES),
        f"must read rewards by token with {OWN}.agentic.turn_rewards, instead of their sum",
        "use gae, grpo_process or reinforce_plus_plus",
        when=lambda at: at[f"{OWN}.agentic.turn_rewards"],
    ),
    must_be_on(
        _WHILE_GENERATING,
        "set it",
        f"with {OWN}.agentic.environment, because the rewards come from the environment",
        lambda at: at[f"{OWN}.agentic.environment"] is not None,
    ),
    must_be_on(
        _WHILE_GENERATING,
        "set it",
        f"with {OWN}.agentic.agent, because the agent may give the rewards",
        lambda at: at[f"{OWN}.agentic.agent"] is not None,
    ),
)
