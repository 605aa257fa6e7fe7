# SPDX-License-Identifier: Apache-2.0
"""Options of verl that the pipeline does not support, alone (`RULES`) or together with others."""

from __future__ import annotations

from .adapters import MODEL, adapter_rank, publishes_adapters
from .paths import MODE, OWN, PATCH_FREE
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
    whole,
    whole_or_none,
)

MANAGER = "recipe.async_pipeline.verl_bridge.agent_loop.manager.PushAgentLoopManager"
STRATEGIES = ("fsdp", "fsdp2", "megatron")
"""The training engines whose weights can be published."""
DTYPES = ("bfloat16", "float16", "float32")
OF_WHOLE_RESPONSES = (
    *("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg"),
    "reinforce_plus_plus_baseline",
)
"""verl's estimators of advantages that add up the rewards of the tokens of a response."""

_NO_QAT = "quantization-aware training is not supported yet"
_NO_DRAFTER = "the drafter of multi-token prediction would not be updated"
RULES: tuple[Refusal, ...] = (
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
        "other engines are not supported yet",
    ),
    must_be("actor_rollout_ref.rollout.mode", "async", remedy="remove the override"),
    must_be("actor_rollout_ref.rollout.data_parallel_size", 1, remedy="use more replicas instead"),
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
    must_be_off("actor_rollout_ref.model.mtp.enable", _NO_DRAFTER),
    must_be_off("actor_rollout_ref.rollout.mtp.enable", _NO_DRAFTER),
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
    must_be_off("distillation.enabled", "distillation is not supported yet"),
    must_be_off("skip.rollout_tq.enable", "replaying stored rollouts is not supported yet"),
)


def _publishes_adapters(at: Settings) -> bool:
    return publishes_adapters(at.config)


ADAPTERS: tuple[Refusal, ...] = (
    Refusal(
        "actor_rollout_ref.model.lora.rank",
        never,
        f"must be 0 or {MODEL}.lora_rank=<{MODEL}.lora_rank> with fsdp and fsdp2, which read only the latter",
        f"set {MODEL}.lora_rank",
        when=lambda at: adapter_rank(at.config) != (at["actor_rollout_ref.model.lora_rank"] or 0),
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
        "must be fsdp2 for LoRA adapters that are not merged",
        f"set it, or {MODEL}.lora.merge=True",
        when=_publishes_adapters,
    ),
    Refusal(
        "actor_rollout_ref.rollout.load_format",
        other_than(None, "dummy"),
        "must not be dummy for LoRA adapters, whose base is not published",
        f"set it to auto, or {MODEL}.lora.merge=True",
        when=_publishes_adapters,
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
        "use gae or reinforce_plus_plus",
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
