# SPDX-License-Identifier: Apache-2.0
"""ROLL's keys of data, rewards, validation, engines and other pipelines; a part of the table of `roll`."""

from __future__ import annotations

from typing import Any

from ...config.keys.foreign_keys import Document, Outcome, differs, nothing, only, to, unsupported
from ...config.paths import select
from .rules import Table, by_hand

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MODEL, _VALIDATION = "actor_rollout_ref.model", f"{_ROLLOUT}.val_kwargs"
TEMPLATE = "the tokenizer's own chat template is used"
ROWS = "write the rows as parquet with verl's columns, and set data.train_files and data.val_files"
SCORE = "write the score as a function, and set reward.custom_reward_function.path"
ENGINE_OPTION = f"an option of the engine: set it in {_ROLLOUT}.engine_kwargs, if verl has no key for it"
FINE_TUNING = "supervised fine-tuning and preferences have no rollouts: use verl's own trainers"
DISTILLATION = "distillation has a teacher, which this package does not have: use verl's own trainers"
STEP_REWARDS = "estimators with rewards by step are not verl's: see agentic.turn_rewards"


def _temperature(value: Any, document: Document) -> Outcome:
    sampled = {f"{_VALIDATION}.do_sample": bool(value), f"{_VALIDATION}.temperature": value}
    return Outcome("set", sampled)


def _lora_targets(value: Any, document: Document) -> Outcome:
    """Return the adapted modules, which ROLL separates by commas."""
    several = isinstance(value, str) and "," in value
    names = [name.strip() for name in value.split(",")] if several else value
    return Outcome("set", {f"{_MODEL}.target_modules": names})


def _dynamic_batches(value: Any, document: Document) -> Outcome:
    worker = "actor_train.max_tokens_per_microbatch_in_train"
    if value and select(document, worker) is None:
        return Outcome(
            "by hand", {f"{_ACTOR}.use_dynamic_bsz": True}, f"set {_ACTOR}.ppo_max_token_len_per_gpu"
        )
    return Outcome("set", {f"{_ACTOR}.use_dynamic_bsz": value})


WORKERS: Table = (
    ("hydra.*", nothing("hydra's own: verl's launcher has its folder and its log")),
    # Data.
    ("global_template", nothing(TEMPLATE)),
    ("tag_to_template.*", nothing(TEMPLATE)),
    ("actor_infer.data_args.template", nothing(TEMPLATE)),
    ("validation.data_args.template", nothing(TEMPLATE)),
    ("actor_train.data_args.preprocessing_num_workers", to("data.filter_overlong_prompts_workers")),
    ("actor_train.data_args.image_*", by_hand("scale the images where the rows are written")),
    ("actor_train.data_args.video_*", by_hand("scale the videos where the rows are written")),
    ("actor_train.data_args.audio_folder", by_hand(ROWS)),
    ("actor_train.data_args.custom_data_kwargs_func", by_hand("set data.custom_cls to a class of rows")),
    (
        "actor_train.data_args.domain_interleave_probs.*",
        by_hand("mix the domains where the rows are written"),
    ),
    ("actor_train.data_args.interleave_probs", by_hand("mix the files where the rows are written")),
    ("actor_train.data_args.*", by_hand(ROWS)),
    ("dataset_filter.*", by_hand("filter where the rows are written")),
    # Validation.
    ("validation.data_args.*", by_hand("set data.val_files to parquet with verl's columns")),
    ("validation.generating_args.temperature", _temperature),
    ("validation.generating_args.top_p", to(f"{_VALIDATION}.top_p")),
    ("validation.generating_args.top_k", to(f"{_VALIDATION}.top_k")),
    ("validation.generating_args.num_return_sequences", to(f"{_VALIDATION}.n")),
    ("validation.generating_args.num_beams", only(1, "responses are sampled", "beams are not searched")),
    ("validation.generating_args.max_new_tokens", differs("data.max_response_length is the limit here, too")),
    ("validation.generating_args.*", by_hand(f"see {_VALIDATION}")),
    ("validation.eval_steps", to("trainer.test_freq")),
    ("validation.*", by_hand(f"see data.val_files and {_VALIDATION}")),
    ("val_greedy", to(f"{_VALIDATION}.do_sample", as_=lambda value: not value)),
    ("val_n_sample", to(f"{_VALIDATION}.n")),
    ("val_prompt_length", differs("data.max_prompt_length is the limit here, too")),
    ("val_sequence_length", differs("data.max_prompt_length and data.max_response_length are the limits")),
    # Rewards.
    (
        "rewards.*.judge_*",
        by_hand("a judge is a reward model: set reward.reward_model, and ask it in a function"),
    ),
    ("rewards.*.query_filter_config.*", by_hand("see algorithm.filter_groups")),
    ("rewards.*", by_hand(SCORE)),
    ("reward.*", by_hand(SCORE)),
    ("reward_model.*", by_hand("set reward.reward_model")),
    ("reward_system_config.*", by_hand(SCORE)),
    # Training.
    (
        "actor_train.model_args.model_type",
        only(None, "a causal language model", "other heads than a language model's are not trained"),
    ),
    ("actor_train.model_args.flash_attn", by_hand(f"set {_MODEL}.override_config.attn_implementation")),
    ("actor_train.model_args.lora_rank", to(f"{_MODEL}.lora_rank")),
    ("actor_train.model_args.lora_alpha", to(f"{_MODEL}.lora_alpha")),
    ("actor_train.model_args.lora_target", _lora_targets),
    (
        "actor_train.model_args.ulysses_size",
        to(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
    ),
    (
        "actor_train.model_args.freeze_module_prefix",
        unsupported("every parameter is trained, except with LoRA or a frozen vision tower of verl"),
    ),
    ("actor_train.training_args.num_train_epochs", nothing("max_steps ends the run")),
    ("actor_train.training_args.warmup_ratio", to(f"{_ACTOR}.optim.lr_warmup_steps_ratio")),
    ("actor_train.use_dynamic_batching_in_train", _dynamic_batches),
    ("actor_train.max_tokens_per_microbatch_in_train", to(f"{_ACTOR}.ppo_max_token_len_per_gpu")),
    ("actor_train.use_dynamic_batching_in_infer", to(f"{_ROLLOUT}.log_prob_use_dynamic_bsz")),
    ("actor_train.max_tokens_per_microbatch_in_infer", to(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu")),
    ("actor_train.sequence_length_round_in_*", nothing("sequences are packed without padding")),
    ("actor_train.use_sequence_packing", to(f"{_MODEL}.use_remove_padding")),
    ("actor_train.sequence_packing_args.*", differs(f"see {_ACTOR}.use_dynamic_bsz")),
    ("actor_train.use_remove_padding", to(f"{_MODEL}.use_remove_padding")),
    ("actor_train.offload_nccl", nothing("ROLL ignores it")),
    ("actor_train.system_envs.*", by_hand("set these environment variables where the run starts")),
    ("actor_train.worker_cls", by_hand("a custom loss: register one in verl, and set actor.policy_loss")),
    ("actor_train.pg_variant", to("+pg_variant")),
    ("actor_train.router_replay.*", by_hand("see docs/weight_sync.md for replayed routers")),
    ("critic.*", by_hand("set the critic's keys, which are like the actor's")),
    # Engines.
    ("actor_infer.model_args.attn_implementation", nothing("engines have their own attention")),
    ("actor_infer.model_args.flash_attn", nothing("engines have their own attention")),
    ("actor_infer.model_args.lora_*", nothing("engines serve the trained adapter")),
    ("actor_infer.model_args.*", nothing("engines load the trained model")),
    ("actor_infer.num_gpus_per_worker", nothing("tensor_parallel_size says it")),
    ("actor_infer.offload_nccl", nothing("ROLL ignores it")),
    ("actor_infer.system_envs.*", by_hand("set these environment variables where the run starts")),
    ("actor_infer.max_concurrency", nothing("engines queue requests")),
    ("actor_infer.worker_cls", nothing("engines are verl's servers")),
    (
        "actor_infer.generating_args.stop_strings",
        by_hand("write an agent loop that sets the engine's stop strings"),
    ),
    ("actor_infer.generating_args.*", by_hand("write an agent loop that sets the engine's parameter")),
    ("actor_infer.strategy_args.strategy_config.max_model_len", to(f"{_ROLLOUT}.max_model_len")),
    ("actor_infer.strategy_args.strategy_config.enforce_eager", to(f"{_ROLLOUT}.enforce_eager")),
    ("actor_infer.strategy_args.strategy_config.max_num_seqs", to(f"{_ROLLOUT}.max_num_seqs")),
    (
        "actor_infer.strategy_args.strategy_config.max_num_batched_tokens",
        to(f"{_ROLLOUT}.max_num_batched_tokens"),
    ),
    (
        "actor_infer.strategy_args.strategy_config.enable_prefix_caching",
        to(f"{_ROLLOUT}.enable_prefix_caching"),
    ),
    (
        "actor_infer.strategy_args.strategy_config.sleep_level",
        nothing("engines do not sleep: they have devices"),
    ),
    ("actor_infer.strategy_args.strategy_config.*", by_hand(ENGINE_OPTION)),
    ("actor_infer.strategy_args.strategy_config", nothing("the engine's defaults")),
    # Estimators with rewards by step.
    ("step_reward_weight", by_hand(STEP_REWARDS)),
    ("episode_reward_weight", by_hand(STEP_REWARDS)),
    ("step_reward_gamma", by_hand(STEP_REWARDS)),
    # Other pipelines.
    ("sft_train.*", unsupported(FINE_TUNING)),
    ("prompt_key", unsupported(FINE_TUNING)),
    ("query_key", unsupported(FINE_TUNING)),
    ("response_key", unsupported(FINE_TUNING)),
    ("chosen_key", unsupported(FINE_TUNING)),
    ("rejected_key", unsupported(FINE_TUNING)),
    ("beta", unsupported(FINE_TUNING)),
    ("ipo", unsupported(FINE_TUNING)),
    ("label_smoothing", unsupported(FINE_TUNING)),
    ("student_train.*", unsupported(DISTILLATION)),
    ("student_infer.*", unsupported(DISTILLATION)),
    ("student.*", unsupported(DISTILLATION)),
    ("teacher.*", unsupported(DISTILLATION)),
    ("student_pretrain", unsupported(DISTILLATION)),
    ("teacher_pretrain", unsupported(DISTILLATION)),
    ("is_pure_opd", unsupported(DISTILLATION)),
    ("use_opd", unsupported(DISTILLATION)),
    ("pure_opd_pipeline_type", unsupported(DISTILLATION)),
    ("logits_*", unsupported(DISTILLATION)),
    ("kd_objective", unsupported(DISTILLATION)),
    ("distill_*", unsupported(DISTILLATION)),
    # Variables of the files that ROLL's agentic examples share.
    ("custom_env.*", nothing("environments to choose from: custom_envs has the ones in use")),
    ("gem_*", nothing("environments to choose from: custom_envs has the ones in use")),
    ("*_template", nothing("a variable: its value is used where the file refers to it")),
    ("*_pattern", nothing("a variable: its value is used where the file refers to it")),
    ("*_penalty", nothing("a variable: its value is used where the file refers to it")),
)
"""Rules of keys that depend on no others."""
