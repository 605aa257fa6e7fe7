# SPDX-License-Identifier: Apache-2.0
"""ROLL's keys of a run, of its losses and of the training strategy; a part of the table of `roll`."""

from __future__ import annotations

from typing import Any

from ...config.keys.foreign_keys import Document, Outcome, Rule, differs, nothing, only, to
from ...config.paths import select
from .roll_workers import TEMPLATE
from .rules import UNKNOWN, Table, by_hand, one_of

_ACTOR = "actor_rollout_ref.actor"
TRAIN_STRATEGY = "actor_train.strategy_args.strategy_name"
MEGATRON = "megatron_train"
_TRANSFORMER = f"{_ACTOR}.megatron.override_transformer_config"
_FSDP = "the trainer shards by FSDP2, whose ranks are all data-parallel"
PRECISION = {"param_dtype": ("bf16", "bfloat16"), "reduce_dtype": ("fp32", "float32")}
"""verl's defaults of mixed precision, as ROLL may spell them."""
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
TRACKERS = {name: ["console", name] for name in ("wandb", "tensorboard", "swanlab")} | {"stdout": ["console"]}
"""The loggers of verl for each value of `track_with`."""
LATER = "verl has no such limit: apply it in the reward function, or in a custom estimator"


_CLIPS = tuple(f"{_ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high"))
_NORMALISED = differs(
    "grpo normalises within a group, by algorithm.norm_adv_by_std_in_grpo, reinforce_plus_plus within a batch"
)


def _dual_clip(value: Any, document: Document) -> Outcome:
    """Return the bound of the loss of negative advantages: ROLL's is 1 + 2 x pg_clip."""
    if not value:
        return Outcome("differs", text=f"verl always bounds it, by {_ACTOR}.clip_ratio_c")
    clip = document.get("pg_clip")
    return Outcome("set", {f"{_ACTOR}.clip_ratio_c": round(1 + 2 * (0.2 if clip is None else clip), 9)})


def _clip(value: Any, document: Document) -> Outcome:
    if document.get("use_pg_clip_range"):
        return Outcome("nothing to do", text="pg_clip_low and pg_clip_high replace it")
    # verl's lower and upper bound have defaults, which win over clip_ratio.
    return Outcome("set", dict.fromkeys(_CLIPS, value))


def _clip_range(end: str) -> Rule:
    def rule(value: Any, document: Document) -> Outcome:
        if document.get("use_pg_clip_range"):
            return Outcome("set", {f"{_ACTOR}.clip_ratio_{end}": value})
        return Outcome("nothing to do", text="ROLL reads it only with use_pg_clip_range")

    return rule


def _of_critic(rule: Rule) -> Rule:
    """Use a rule for files with a critic."""
    return lambda value, document: (
        rule if document.get("adv_estimator", "gae") == "gae" else nothing("only a critic has it")
    )(value, document)


def _adaptive_kl(value: Any, document: Document) -> Outcome:
    if value is None:
        return Outcome("nothing to do", text="the coefficient is fixed")
    kl = "algorithm.kl_ctrl"
    return Outcome("set", {f"{kl}.type": "adaptive", f"{kl}.target_kl": value})


def by_engine(megatron: Rule, other: Rule) -> Rule:
    """Use one rule for files that train with Megatron, and the other one for the rest."""
    return lambda value, document: (megatron if trains_with_megatron(document) else other)(value, document)


def trains_with_megatron(document: Document) -> bool:
    """Return whether the file trains with Megatron."""
    return bool(select(document, TRAIN_STRATEGY) == MEGATRON)


def _resumed(value: Any, document: Document) -> Outcome:
    if isinstance(value, str):
        return Outcome("by hand", text="verl reads no checkpoint of ROLL; convert it to a model")
    return Outcome("set", {"trainer.resume_mode": "auto" if value else "disable"})


def _devices_of_a_node(value: Any, document: Document) -> Outcome:
    if select(document, "actor_train.device_mapping") is not None:
        return Outcome("nothing to do", text="the device_mapping of each worker says it")
    return Outcome("set", {"trainer.n_gpus_per_node": value})


def _schedule(path: str, *more: str) -> Rule:
    choices = SCHEDULES | {name: name for name in more}
    return one_of(choices, path, otherwise=f"set {path}: {', '.join(dict.fromkeys(choices.values()))}")


def _precision(name: str) -> Rule:
    def rule(value: Any, document: Document) -> Outcome:
        if value in PRECISION[name]:
            return Outcome("nothing to do", text="verl's default")
        text = f"set {name} in {_ACTOR}.fsdp_config.mixed_precision, next to the other dtypes there"
        return Outcome("by hand", text=text)

    return rule


def _parallel_size(name: str) -> Rule:
    """Megatron's sizes have the same names in verl's config."""
    return by_engine(to(f"{_ACTOR}.megatron.{name}"), only(1, "no model parallelism", _FSDP))


def _of_fsdp2(rule: Rule) -> Rule:
    """Use a rule for files that train with FSDP2: other strategies have no such key."""
    return lambda value, document: (rule if select(document, TRAIN_STRATEGY) == "fsdp2_train" else _other)(
        value, document
    )


def _other(value: Any, document: Document) -> Outcome:
    """Say what becomes of a key of the training strategy that has no rule."""
    if trains_with_megatron(document):
        text = f"if it is a field of megatron-core's transformer config, set it in {_TRANSFORMER}"
        return Outcome("by hand", text=text)
    return UNKNOWN


def _of_deepspeed(rule: Rule) -> Rule:
    """Use a rule for files that train with DeepSpeed, whose own JSON is in the section."""
    return lambda value, document: (
        rule if select(document, TRAIN_STRATEGY) == "deepspeed_train" else _other
    )(value, document)


_BF16 = "FSDP2 computes in bfloat16 by default"
_OFFLOAD = by_hand(f"to keep it on the host, set param_offload or optimizer_offload in {_ACTOR}.fsdp_config")


def _recompute(value: Any, document: Document) -> Outcome:
    found = {f"{_TRANSFORMER}.recompute_granularity": value}
    if value == "full":  # Megatron requires both of them with it
        found |= {f"{_TRANSFORMER}.recompute_method": "uniform", f"{_TRANSFORMER}.recompute_num_layers": 1}
    return Outcome("set", found)


STRATEGY: Table = (
    (
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size",
        _parallel_size("tensor_model_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size",
        _parallel_size("pipeline_model_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.virtual_pipeline_model_parallel_size",
        _parallel_size("virtual_pipeline_model_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.context_parallel_size",
        _parallel_size("context_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.expert_model_parallel_size",
        _parallel_size("expert_model_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.expert_tensor_parallel_size",
        _parallel_size("expert_tensor_parallel_size"),
    ),
    (
        "actor_train.strategy_args.strategy_config.sequence_parallel",
        by_engine(to(f"{_ACTOR}.megatron.sequence_parallel"), nothing(_FSDP)),
    ),
    (
        "actor_train.strategy_args.strategy_config.use_distributed_optimizer",
        by_engine(to(f"{_ACTOR}.megatron.use_distributed_optimizer"), nothing(_FSDP)),
    ),
    (
        "actor_train.strategy_args.strategy_config.recompute_granularity",
        by_engine(_recompute, nothing("gradient checkpointing recomputes whole layers")),
    ),
    ("actor_train.strategy_args.strategy_config.fsdp_size", _of_fsdp2(to(f"{_ACTOR}.fsdp_config.fsdp_size"))),
    (
        "actor_train.strategy_args.strategy_config.offload_policy",
        _of_fsdp2(to(f"{_ACTOR}.fsdp_config.offload_policy")),
    ),
    (
        "actor_train.strategy_args.strategy_config.reshard_after_forward",
        _of_fsdp2(to(f"{_ACTOR}.fsdp_config.reshard_after_forward")),
    ),
    ("actor_train.strategy_args.strategy_config.param_dtype", _of_fsdp2(_precision("param_dtype"))),
    ("actor_train.strategy_args.strategy_config.reduce_dtype", _of_fsdp2(_precision("reduce_dtype"))),
    (
        "actor_train.strategy_args.strategy_config.wrap_policy.*",
        _of_fsdp2(
            by_hand(f"set {_ACTOR}.fsdp_config.wrap_policy; by default the model's layers are wrapped")
        ),
    ),
    ("actor_train.strategy_args.strategy_config.zero_optimization.offload_*", _of_deepspeed(_OFFLOAD)),
    (
        "actor_train.strategy_args.strategy_config.zero_*",
        _of_deepspeed(nothing("FSDP2 shards weights, gradients and optimizer, as ZeRO 3")),
    ),
    (
        "actor_train.strategy_args.strategy_config.train_batch_size",
        _of_deepspeed(nothing("the batch sizes of the file say it")),
    ),
    (
        "actor_train.strategy_args.strategy_config.train_micro_batch_size*",
        _of_deepspeed(nothing("the batch sizes of the file say it")),
    ),
    (
        "actor_train.strategy_args.strategy_config.gradient_accumulation*",
        _of_deepspeed(nothing("the batch sizes of the file say it")),
    ),
    ("actor_train.strategy_args.strategy_config.bf16.*", _of_deepspeed(nothing(_BF16))),
    (
        "actor_train.strategy_args.strategy_config.fp16.enabled",
        _of_deepspeed(only(False, _BF16, "FSDP2 computes in bfloat16")),
    ),
    ("actor_train.strategy_args.strategy_config.fp16.*", _of_deepspeed(nothing(_BF16))),
    (
        "actor_train.strategy_args.strategy_config.gradient_clipping",
        _of_deepspeed(by_hand(f"set {_ACTOR}.optim.clip_grad")),
    ),
    (
        "actor_train.strategy_args.strategy_config.communication_data_type",
        _of_deepspeed(by_hand(f"set reduce_dtype in {_ACTOR}.fsdp_config.mixed_precision")),
    ),
    (
        "actor_train.strategy_args.strategy_config.steps_per_print",
        _of_deepspeed(nothing("every step is logged")),
    ),
    (
        "actor_train.strategy_args.strategy_config.wall_clock_breakdown",
        _of_deepspeed(nothing("trace.json of a run shows where time went")),
    ),
    ("actor_train.strategy_args.strategy_config.*", _other),
)
"""Rules of the training strategy; the last one is for keys that have no other."""
RUN: Table = (
    ("deepspeed_zero*", nothing("no worker of the file refers to it")),
    ("system_envs.*", by_hand("set these environment variables where the run starts")),
    ("num_gpus_per_node", _devices_of_a_node),
    ("resume_from_checkpoint", _resumed),
    ("track_with", one_of(TRACKERS, "trainer.logger", otherwise="set trainer.logger")),
    ("tracker_kwargs.*", by_hand("set trainer.project_name; loggers read the rest from the environment")),
    ("max_grad_norm", to(f"{_ACTOR}.optim.clip_grad", as_=float)),
    ("use_kl_loss", to(f"{_ACTOR}.use_kl_loss")),
    ("kl_loss_coef", to(f"{_ACTOR}.kl_loss_coef", as_=float)),
    ("add_token_level_kl", to("algorithm.use_kl_in_reward")),
    ("init_kl_coef", to("algorithm.kl_ctrl.kl_coef", as_=float, text="used with algorithm.use_kl_in_reward")),
    ("reward_clip", by_hand(LATER)),
    ("advantage_clip", by_hand(LATER)),
    ("reward_normalization.*", _NORMALISED),
    (
        "actor_train.training_args.lr_scheduler_type",
        by_engine(
            _schedule(f"{_ACTOR}.optim.lr_decay_style", "linear"),
            _schedule(f"{_ACTOR}.optim.lr_scheduler_type"),
        ),
    ),
    ("max_actions_per_traj", by_hand("it bounds an episode: see agentic.max_turns")),
    ("max_tokens_per_step", nothing("it is used where the file refers to it")),
    # Checkpoints and output.
    (
        "checkpoint_config.*",
        differs("checkpoints stay in trainer.default_local_dir: no copy is made elsewhere"),
    ),
    (
        "max_ckpt_to_keep",
        to("trainer.max_actor_ckpt_to_keep", as_=lambda value: value or None, text="0 keeps all"),
    ),
    ("rollout_dump_dir", to("trainer.rollout_data_dir")),
    ("render_save_dir", nothing("`async-pipeline episodes` prints episodes as text")),
    ("base_dir", nothing("a run writes into trainer.default_local_dir and its run directory")),
    ("profiler_*", by_hand("see global_profiler, and the trace of the run directory")),
    ("rollout_mock.*", differs("rollouts are not recorded for a replay")),
    # Machines.
    ("num_nodes", nothing("the device_mapping of each worker says it")),
    ("rpc_timeout", nothing("stages have deadlines: see deadlines in docs/configuration.md")),
    ("local_rank", nothing("Ray starts the workers")),
    ("is_offload_states", nothing("stages on one pool take turns: see docs/pools.md")),
    ("is_offload_optimizer_states_in_train_step", by_hand(f"see {_ACTOR}.fsdp_config.offload_policy")),
    ("offload_nccl", nothing("ROLL ignores it")),
    ("transfer_backend.*", nothing("weights are transferred by this package")),
    ("model_update_buffer_size_mb", to("+trainer.v1.async_pipeline.weight_sync.gather_bucket_size_mb")),
    ("model_download_type", by_hand("download the model, and set actor_rollout_ref.model.path")),
    ("model_name", nothing("a variable: its value is used where the file refers to it")),
    # Schedule.
    ("generate_opt_level", nothing("requests are always scheduled one by one")),
    ("max_running_requests", nothing("engines queue requests: see rollout.max_num_seqs")),
    ("router_args.*", nothing("this package's router knows the versions of the replicas")),
    (
        "use_additional_prompts",
        differs("see algorithm.filter_groups, which draws prompts for dropped groups"),
    ),
    (
        "is_use_additional_prompts",
        differs("see algorithm.filter_groups, which draws prompts for dropped groups"),
    ),
    ("max_additional_running_prompts", differs("see max_lag, the batches that are generated ahead")),
    ("user_defined_rollout_loop_cls", by_hand("write an agent loop")),
    ("batch_adjust_mode", nothing("a batch is whole groups")),
    ("minibatch_data_iter_num", to(f"{_ACTOR}.ppo_epochs")),
    ("exp_mode", only("train", "a run trains", "see trainer.val_only")),
    ("partial_gpu_mode", nothing("pools are sets of devices: see docs/pools.md")),
    # Losses and masks.
    ("loss_agg_mode", to(f"{_ACTOR}.loss_agg_mode")),
    ("value_clip", _of_critic(to("critic.cliprange_value"))),
    ("critic_warmup", to("trainer.critic_warmup")),
    ("dual_clip_loss", _dual_clip),
    ("pg_clip", _clip),
    ("use_pg_clip_range", nothing("it chooses pg_clip_low and pg_clip_high")),
    ("pg_clip_low", _clip_range("low")),
    ("pg_clip_high", _clip_range("high")),
    ("kl_penalty", to("algorithm.kl_penalty")),
    ("target_kl", _adaptive_kl),
    ("kl_horizon", to("algorithm.kl_ctrl.horizon", text="used with target_kl")),
    ("enable_reference", nothing("a KL term needs the reference, and nothing else")),
    ("enable_old_logprobs_recompute", by_hand("see training.old_logp in docs/pools.md")),
    ("force_disable_old_logprobs_recompute", by_hand("see training.old_logp in docs/pools.md")),
    ("train_infer_correction.*", by_hand("see algorithm.rollout_correction")),
    (
        "importance_sampling",
        one_of(
            {"token": "vanilla", "seq": "gspo"},
            f"{_ACTOR}.policy_loss.loss_mode",
            otherwise=f"set {_ACTOR}.policy_loss.loss_mode",
        ),
    ),
    ("use_policy_loss_type", only("PPO", "verl's loss", "set +pg_variant=vanilla")),
    ("use_topr_*", only(0, "it is off", "set +pg_variant=topr")),
    ("rl_loss_coef", only(1, "the loss has no factor", "scale the learning rate")),
    ("postive_loss_coef", only(0, "it is off", LATER)),
    ("norm_mean_type", _NORMALISED),
    ("norm_std_type", _NORMALISED),
    ("reward_norm", _NORMALISED),
    ("reward_shift", _NORMALISED),
    ("reward_scale", _NORMALISED),
    ("whiten_rewards", _NORMALISED),
    ("use_reward_*", _NORMALISED),
    ("add_len_reward", only(False, "it is off", "add it to the score")),
    ("max_len_mask", only(False, "it is off", f"responses that were cut off are trained; {LATER}")),
    ("error_max_len_*", only(False, "it is off", LATER)),
    ("difficulty_mask", only(False, "it is off", "algorithm.filter_groups drops groups of equal scores")),
    ("difficulty_*_threshold", nothing("only difficulty_mask reads it")),
    ("difficulty_loss_weight", only(False, "it is off", LATER)),
    ("length_loss_weight", only(False, "it is off", LATER)),
    ("dirty_data_mask", nothing("bad data is masked: see bad_data in docs/fault_tolerance.md")),
    ("use_token_reward", by_hand("see agentic.turn_rewards")),
    ("ratio_type", only("token", "ratios are by token", f"set {_ACTOR}.policy_loss.loss_mode")),
    ("skip_mock_system_prompt", nothing(TEMPLATE)),
    ("parse_tool_call_parameter_to_dict", nothing("an agent reads its own tool calls")),
    ("open_feedback_turn", by_hand("the environment decides what a turn reads")),
)
"""Rules of keys that depend on few others."""
