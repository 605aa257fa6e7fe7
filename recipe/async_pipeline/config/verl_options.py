# SPDX-License-Identifier: Apache-2.0
"""Options of verl that the pipeline does not support, alone (`RULES`) or together with others."""

from __future__ import annotations

from .adapters import MODEL, adapter_rank, publishes_adapters
from .paths import MODE, OWN, PATCH_FREE
from .refusals import Refusal, Settings, any_of, never, off, on, other_than, positive, whole, whole_or_none

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MANAGER = "recipe.async_pipeline.verl_bridge.agent_loop.manager.PushAgentLoopManager"
STRATEGIES = ("fsdp", "fsdp2", "megatron")
"""The training engines whose weights can be published."""
DTYPES = ("bfloat16", "float16", "float32")
OF_WHOLE_RESPONSES = (
    *("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg"),
    "reinforce_plus_plus_baseline",
)
"""verl's estimators of advantages that add up the rewards of the tokens of a response."""

RULES: tuple[Refusal, ...] = (
    Refusal(
        MODE,
        any_of("sync", PATCH_FREE),
        "must not be changed",
        "set async_strategy instead",
    ),
    Refusal(
        f"{ROLLOUT}.checkpoint_engine.backend",
        any_of("naive", "dual_buffer"),
        "must be dual_buffer",
        "leave it out",
    ),
    Refusal(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        any_of(2048),
        "must not be changed",
        f"set {OWN}.weight_sync.gather_bucket_size_mb instead",
    ),
    Refusal(
        f"{ROLLOUT}.agent.agent_loop_manager_class",
        any_of(None, MANAGER),
        "must not be changed",
        "leave it out: the pipeline needs run_group, which returns each group when it is complete, or "
        "recalls it, and transcripts, from which checkpoints get unfinished requests and versions of tokens; "
        "verl's and uni-agent's managers have neither; run the agent as "
        "trainer.v1.async_pipeline.agentic.agent",
    ),
    Refusal(f"{ROLLOUT}.n", positive, "must be >= 1", "it is the responses to each prompt"),
    Refusal("data.train_batch_size", positive, "must be >= 1", "it is the prompts of one step"),
    Refusal(
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        positive,
        "must be >= 1",
        "it is the prompts of one optimizer update",
    ),
    Refusal(
        f"{ROLLOUT}.max_num_seqs",
        positive,
        "must be >= 1",
        "it is the responses that a replica generates concurrently",
    ),
    Refusal(
        f"{ROLLOUT}.tensor_model_parallel_size",
        whole,
        "must be a whole number",
        "it is the devices of one replica",
    ),
    Refusal("critic.ppo_mini_batch_size", positive, "must be >= 1", "it is the prompts of one critic update"),
    Refusal(
        "trainer.critic_warmup", whole_or_none, "must be >= 0", "it is the steps that train only the critic"
    ),
    Refusal("actor_rollout_ref.model.lora_rank", whole_or_none, "must be >= 0", "0 trains all weights"),
    Refusal("actor_rollout_ref.model.lora.rank", whole_or_none, "must be >= 0", "0 trains all weights"),
    Refusal(
        "ray_kwargs.ray_init.num_gpus", whole_or_none, "must be >= 0", "it is the devices that Ray may use"
    ),
    Refusal("reward.num_workers", positive, "must be >= 1", "leave it out for verl's default"),
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
        f"{ROLLOUT}.name",
        any_of("vllm", "sglang", "diffusers"),
        "must be vllm, sglang, or diffusers for images",
        "other engines are not supported yet",
    ),
    Refusal(f"{ROLLOUT}.mode", lambda v: v == "async", "must be async", "remove the override"),
    Refusal(f"{ROLLOUT}.data_parallel_size", any_of(1), "must be 1", "use more replicas instead"),
    Refusal(
        f"{ROLLOUT}.pipeline_model_parallel_size",
        any_of(1),
        "must be 1",
        "use tensor parallelism or more replicas instead",
    ),
    Refusal(
        f"{ROLLOUT}.quantization",
        any_of(None, "fp8"),
        "must be null or fp8",
        "weights cannot be converted to other formats yet",
    ),
    Refusal(
        "actor_rollout_ref.actor.qat.enable",
        off,
        "must be False",
        "quantization-aware training is not supported yet",
    ),
    Refusal(
        "actor_rollout_ref.actor.fsdp_config.qat.enable",
        off,
        "must be False",
        "quantization-aware training is not supported yet",
    ),
    Refusal(
        f"{ROLLOUT}.qat.enable",
        off,
        "must be False",
        "quantization-aware training is not supported yet",
    ),
    Refusal(
        f"{MODEL}.mtp.enable",
        off,
        "must be False",
        "the drafter of multi-token prediction would not be updated",
    ),
    Refusal(
        f"{ROLLOUT}.mtp.enable",
        off,
        "must be False",
        "the drafter of multi-token prediction would not be updated",
    ),
    Refusal(
        f"{ROLLOUT}.enable_rollout_routing_replay",
        off,
        "must be False",
        "the routing of a response is not recorded for each of its tokens and versions yet",
    ),
    Refusal(
        f"{ROLLOUT}.moe_load_balance_metrics_interval",
        off,
        "must be 0",
        "the routing of responses is not recorded yet",
    ),
    Refusal(
        f"{ROLLOUT}.dtype",
        any_of(*DTYPES),
        f"must be one of {', '.join(DTYPES)}",
        "weights are published and served in it",
    ),
    Refusal(f"{ROLLOUT}.disaggregation.enabled", off, "must be False", "it is not supported yet"),
    Refusal(
        "actor_rollout_ref.actor.strategy",
        any_of(*STRATEGIES),
        f"must be one of {', '.join(STRATEGIES)}",
        "other training engines are not supported yet",
    ),
    Refusal("trainer.val_only", off, "must be False", "validate with stock verl instead"),
    Refusal("distillation.enabled", off, "must be False", "distillation is not supported yet"),
    Refusal(
        "skip.rollout_tq.enable",
        off,
        "must be False",
        "replaying stored rollouts is not supported yet",
    ),
)


def _publishes_adapters(at: Settings) -> bool:
    return publishes_adapters(at.config)


ADAPTERS: tuple[Refusal, ...] = (
    Refusal(
        f"{MODEL}.lora.rank",
        never,
        f"must be 0 or {MODEL}.lora_rank=<{MODEL}.lora_rank> with fsdp and fsdp2, which read only the latter",
        f"set {MODEL}.lora_rank",
        when=lambda at: adapter_rank(at.config) != (at[f"{MODEL}.lora_rank"] or 0),
    ),
    Refusal(
        f"{MODEL}.lora_rank",
        positive,
        f"must be >= 1 with {MODEL}.lora_adapter_path, since all weights are trained otherwise",
        "set it to the rank of the adapter",
        when=lambda at: at[f"{MODEL}.lora_adapter_path"] is not None,
    ),
    Refusal(
        f"{ACTOR}.strategy",
        other_than("fsdp"),
        "must be fsdp2 for LoRA adapters that are not merged",
        f"set it, or {MODEL}.lora.merge=True",
        when=_publishes_adapters,
    ),
    Refusal(
        f"{ROLLOUT}.load_format",
        other_than(None, "dummy"),
        "must not be dummy for LoRA adapters, whose base is not published",
        f"set it to auto, or {MODEL}.lora.merge=True",
        when=_publishes_adapters,
    ),
)
WITH_CRITIC: tuple[Refusal, ...] = (
    Refusal(
        "critic.strategy",
        any_of(*STRATEGIES),
        f"must be one of {', '.join(STRATEGIES)}",
        "other training engines are not supported yet",
    ),
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
    Refusal("reward.reward_model.nnodes", positive, "must be >= 1", "set the devices of the reward model"),
    Refusal(
        "reward.reward_model.n_gpus_per_node",
        positive,
        "must be >= 1",
        "set the devices of the reward model",
    ),
    Refusal(
        "reward.reward_model.rollout.free_cache_engine",
        off,
        "must be False",
        "set it, since the model does not share its devices",
    ),
)
_WHILE_GENERATING = f"{OWN}.reward.while_generating"
REWARDS: tuple[Refusal, ...] = (
    Refusal(
        _WHILE_GENERATING,
        on,
        "must be True with algorithm.filter_groups",
        "set it, since groups are filtered by their rewards as they finish",
        when=lambda at: at["algorithm.filter_groups.enable"],
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
    Refusal(
        _WHILE_GENERATING,
        on,
        f"must be True with {OWN}.agentic.environment, because the rewards come from the environment",
        "set it",
        when=lambda at: at[f"{OWN}.agentic.environment"] is not None,
    ),
    Refusal(
        _WHILE_GENERATING,
        on,
        f"must be True with {OWN}.agentic.agent, because the agent may give the rewards",
        "set it",
        when=lambda at: at[f"{OWN}.agentic.agent"] is not None,
    ),
)
