# SPDX-License-Identifier: Apache-2.0
"""ROLL's keys, of its RLVR and its agentic pipeline.

    agentic   rollout_batch_size episodes = groups x group_size; sequence_length for prompt and response
    RLVR      rollout_batch_size prompts, num_return_sequences_in_group responses to each

ROLL counts devices of its workers in device_mapping, and samples of an optimizer step as per-device batch x
accumulation x data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ...config.keys.foreign_keys import Document, Outcome, Rule, differs, nothing, only, to
from ...config.knobs.agentic import AgenticConfig
from ...config.paths import select
from ...errors import ConfigError
from .roll_run import MEGATRON, RUN, STRATEGY, by_engine
from .roll_workers import TEMPLATE, WORKERS
from .rules import (
    NODE_DEVICES,
    Table,
    TranslatedFile,
    by_hand,
    device_ids,
    devices,
    one_of,
    quotient,
    translate,
    untruncated,
    whole,
)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_AGENTIC = f"+{AgenticConfig.PATH}"
_TRAIN = "actor_train.strategy_args"
_ENGINE = "actor_infer.strategy_args.strategy_config"
_ENVS, _RLVR_GROUP = "train_env_manager", "num_return_sequences_in_group"
PROMPT_TOKENS = 512
"""verl's default of data.max_prompt_length, which an agentic file does not state."""
BATCH = 128
"""ROLL's default of rollout_batch_size."""
ROLLS_PROMPT_TOKENS = 1024
"""ROLL's default of prompt_length."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ENVIRONMENTS = {"frozen_lake": "frozen_lake"}
"""ROLL's types of environments that this package has, by its own name of them."""
ENGINES = {"vllm": "vllm", "sglang": "sglang"}
ESTIMATORS = {"grpo": "grpo", "reinforce": "reinforce_plus_plus", "gae": "gae"}
ALSO = {"+async_pipeline": True}
FSDP = {"deepspeed_train": "fsdp2", "fsdp2_train": "fsdp2"}
TENSOR_PARALLEL = f"{_ROLLOUT}.tensor_model_parallel_size"
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # verl's default is token-mean.
    "actor_train": {f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    # verl's default is 2.
    "actor_infer": {TENSOR_PARALLEL: 1},
}
"""ROLL's defaults that verl does not have, by their workers; the file's values replace them."""
LOG_PROBS = "log_prob_micro_batch_size_per_gpu"
DATA = "data.train_files and data.val_files: parquet with verl's columns"
ENVIRONMENT = f"{_AGENTIC}.environment: frozen_lake, an id of gymnasium, or module:Class"


def translate_roll(document: Document, variables: Collection[str] = ()) -> TranslatedFile:
    """Translate a document. `variables`: paths that it refers to itself."""
    found = translate(
        document, TABLE, also=ALSO, left_out=environments_left_out(document), variables=variables
    )
    missing = [] if "data.train_files" in found.overrides else [DATA]
    if is_agentic(document) and f"{_AGENTIC}.environment" not in found.overrides:
        missing.append(ENVIRONMENT)
    for worker, prefix in (("actor_train", _ROLLOUT), ("reference", _REF)):
        if worker in document and f"{prefix}.{LOG_PROBS}" not in found.overrides:
            missing.append(
                f"{prefix}.{LOG_PROBS}: samples of a forward pass, ROLL's {worker}.infer_batch_size"
            )
    defaults = {
        key: value
        for worker, values in DEFAULTS.items()
        if worker in document
        for key, value in values.items()
    }
    return replace(found, missing=(*missing, *found.missing), overrides={**defaults, **found.overrides})


def environments_left_out(document: Document) -> dict[str, Outcome]:
    """Return what becomes of the environments of a file that are not the one of the run, by their paths."""
    environments = select(document, "custom_envs")
    names = list(environments) if isinstance(environments, Mapping) else []
    tags = select(document, f"{_ENVS}.tags") or names
    of_the_run = next((tag for tag in tags if tag in names), None)
    more = Outcome("by hand", text=f"a run has one environment, here {of_the_run}; rows may have tasks")
    other = Outcome("nothing to do", text=f"not in {_ENVS}.tags: no episode of the training plays it")
    return {f"custom_envs.{name}": more if name in tags else other for name in names if name != of_the_run}


def is_agentic(document: Document) -> bool:
    """Return whether the file is of the agentic pipeline, which has environments.

    Without them, as in a file that completes another one: RLVR states the length of its prompts.
    """
    return any(key in document for key in (_ENVS, "custom_envs")) or not any(
        key in document for key in (_RLVR_GROUP, "prompt_length", "rewards")
    )


def responses_per_prompt(document: Document) -> int:
    """Return the size of a group."""
    of_rlvr = whole(document, _RLVR_GROUP, 1)
    return whole(document, f"{_ENVS}.group_size", of_rlvr) if is_agentic(document) else of_rlvr


def prompts_per_step(document: Document) -> int:
    """Return the groups of a step."""
    if not is_agentic(document):
        return whole(document, "rollout_batch_size", BATCH)
    size = responses_per_prompt(document)
    return quotient(
        {"rollout_batch_size": BATCH, **document}, "rollout_batch_size", size, f"{_ENVS}.group_size"
    )


def _batch(value: Any, document: Document) -> Outcome:
    prompts, size = prompts_per_step(document), responses_per_prompt(document)
    what = "episodes" if is_agentic(document) else "prompts"
    text = f"{value} {what}: {prompts} groups of {size}"
    if is_agentic(document) and select(document, f"{_ENVS}.group_size") is None:
        text += f"; {_ENVS}.group_size is not in the file, and group-relative advantages need more than 1"
    return Outcome("set", {"data.train_batch_size": prompts}, text)


def prompt_tokens(document: Document) -> int:
    """Return the longest prompt: the file's, or ROLL's default; for episodes verl's."""
    return whole(document, "prompt_length", PROMPT_TOKENS if is_agentic(document) else ROLLS_PROMPT_TOKENS)


def _sequence_length(value: Any, document: Document) -> Outcome:
    total, prompt = whole(document, "sequence_length"), prompt_tokens(document)
    if total <= prompt:
        raise ConfigError(
            f"sequence_length must be above {prompt}, the prompt's tokens, got {total}; raise it"
        )
    values = {"data.max_prompt_length": prompt, "data.max_response_length": total - prompt}
    if select(document, f"{_ENGINE}.max_model_len") is None:
        values[f"{_ROLLOUT}.max_model_len"] = total
    return Outcome("set", values, "prompt and response; an episode is one response")


def _response_length(value: Any, document: Document) -> Outcome:
    if document.get("sequence_length") is not None:
        return Outcome("nothing to do", text="ROLL ignores it if the file has sequence_length")
    return Outcome("set", {"data.max_response_length": value})


def _mini_batch(value: Any, document: Document) -> Outcome:
    """Samples of an optimizer step, in prompts; with the per-device batch, which is the micro-batch."""
    arguments = "actor_train.training_args"
    per_device = whole(document, f"{arguments}.per_device_train_batch_size", 1)
    mapping = "actor_train.device_mapping"
    nodes, each = devices(select(document, mapping), mapping, _per_node(document))
    config = f"{_TRAIN}.strategy_config"
    model = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        model *= whole(document, f"{config}.{name}", 1)
    if nodes * each % model:
        raise ConfigError(
            f"actor_train.device_mapping must be a multiple of the model-parallel size {model}, got "
            f"{nodes * each} devices; correct the file"
        )
    samples = per_device * whole(document, f"{arguments}.gradient_accumulation_steps", 1)
    samples *= nodes * each // model
    wanted, step = max(1, samples // responses_per_prompt(document)), prompts_per_step(document)
    text = f"{samples} samples of an optimizer step are {wanted} groups, of the {step} of a step"
    return Outcome("set", {f"{_ACTOR}.ppo_mini_batch_size": min(wanted, step)}, text)


def _per_node(document: Document) -> int:
    return whole(document, "num_gpus_per_node", NODE_DEVICES)


def _devices_of(worker: str, prefix: str) -> Rule:
    path, others = f"{worker}.device_mapping", ("actor_train", "actor_infer")

    def rule(value: Any, document: Document) -> Outcome:
        nodes, each = devices(value, path, _per_node(document))
        overrides = {f"{prefix}.nnodes": nodes, f"{prefix}.n_gpus_per_node": each}
        other = next(f"{name}.device_mapping" for name in others if name != worker)
        mapping = select(document, other)
        shared = set(device_ids(value, path)) & set(device_ids(mapping, other) if mapping else ())
        if shared:
            text = f"{len(shared)} devices are also {other}; here engines have separate devices: lower one"
            return Outcome("differs", overrides, text)
        return Outcome("set", overrides)

    return rule


def _estimator(value: Any, document: Document) -> Outcome:
    if value not in ESTIMATORS:
        return Outcome("by hand", text=f"set algorithm.adv_estimator; known are {', '.join(ESTIMATORS)}")
    overrides = {"algorithm.adv_estimator": ESTIMATORS[value]}
    if value == "reinforce":
        return Outcome("differs", overrides, "verl's REINFORCE also whitens the returns of a batch")
    return Outcome("set", overrides)


def _tokens_of_a_call(value: Any, document: Document) -> Outcome:
    if is_agentic(document):
        return _turn_tokens(value, document)
    if value == document.get("response_length"):
        return Outcome("nothing to do", text="it is response_length")
    total = next((name for name in ("response_length", "sequence_length") if name in document), None)
    if total is None:
        return Outcome("set", {"data.max_response_length": value})
    return Outcome("differs", text=f"{total} sets data.max_response_length, the limit of a response here")


def _turn_tokens(value: Any, document: Document) -> Outcome:
    """Return the limit of a turn, the smaller of the engine's and the environment's."""
    path, left_out = "actor_infer.generating_args.max_new_tokens", environments_left_out(document)
    limits = [select(document, path)]
    for name, environment in (select(document, "custom_envs") or {}).items():
        if f"custom_envs.{name}" not in left_out and isinstance(environment, Mapping):
            limits.append(environment.get("max_tokens_per_step"))
    least = min((limit for limit in limits if isinstance(limit, int)), default=value)
    return Outcome("set", {f"{_AGENTIC}.max_turn_tokens": least}, "of one turn: the smaller limit")


def _environment(value: Any, document: Document) -> Outcome:
    if value in ENVIRONMENTS:
        return Outcome("set", {f"{_AGENTIC}.environment": ENVIRONMENTS[value]})
    text = f"write {value!r} as a TextEnvironment (docs/agents.md), and set agentic.environment"
    return Outcome("by hand", text=text)


def _of_environment(name: str) -> Rule:
    return lambda value, document: Outcome("set", {f"{_AGENTIC}.environment_kwargs.{name}": value})


def _sized(value: Any, document: Document) -> Outcome:
    return Outcome("set", {"data.train_batch_size": prompts_per_step(document)}, "by rollout_batch_size")


def _trained_sequences(value: Any, document: Document) -> Outcome:
    if is_agentic(document) and value == 1:
        return Outcome("nothing to do", text="an episode is one response of its group")
    if value == responses_per_prompt(document):
        return Outcome("nothing to do", text=f"it is {_RLVR_GROUP}")
    return Outcome("by hand", text=f"set {_ROLLOUT}.n")


def _engine(value: Any, document: Document) -> Outcome:
    if value == MEGATRON:
        return Outcome("set", {"model_engine": "megatron"}, "the reference follows the actor")
    if value in FSDP:
        return Outcome("set", dict.fromkeys((f"{_ACTOR}.strategy", f"{_REF}.strategy"), FSDP[value]))
    return Outcome("by hand", text="set actor_rollout_ref.actor.strategy=fsdp2, or model_engine=megatron")


_STEPS = "every step is logged"

TABLE: Table = (
    # The run.
    ("async_generation_ratio", to("+async_generation_ratio")),
    ("pg_variant", to("+pg_variant")),
    ("seed", to("data.seed")),
    ("exp_name", to("trainer.experiment_name")),
    ("output_dir", to("trainer.default_local_dir")),
    ("logging_dir", nothing("a run writes its logs and figures into trainer.v1.async_pipeline.run_dir")),
    ("rollout_batch_size", _batch),
    ("val_batch_size", to("data.val_batch_size")),
    ("sequence_length", _sequence_length),
    ("prompt_length", to("data.max_prompt_length")),
    ("response_length", _response_length),
    ("max_steps", to("trainer.total_training_steps")),
    ("save_steps", to("trainer.save_freq")),
    ("eval_steps", to("trainer.test_freq")),
    ("logging_steps", only(1, _STEPS, _STEPS)),
    ("pretrain", to("actor_rollout_ref.model.path")),
    ("reward_pretrain", nothing("no reward model is configured; see reward.reward_model otherwise")),
    # The algorithm.
    ("ppo_epochs", to(f"{_ACTOR}.ppo_epochs")),
    ("adv_estimator", _estimator),
    ("gamma", to("algorithm.gamma")),
    ("lambd", to("algorithm.lam")),
    ("entropy_loss_coef", to(f"{_ACTOR}.entropy_coeff")),
    (
        "whiten_advantages",
        differs("verl's estimators normalise within a group (grpo) or a batch (reinforce_plus_plus)"),
    ),
    ("is_num_return_sequences_expand", nothing("the responses of a group are single requests anyway")),
    ("num_return_sequences_in_group", to(f"{_ROLLOUT}.n")),
    # Training.
    (
        "actor_train.model_args.attn_implementation",
        one_of(
            {"fa2": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"},
            "+actor_rollout_ref.model.override_config.attn_implementation",
            otherwise="set actor_rollout_ref.model.override_config.attn_implementation",
        ),
    ),
    (
        "actor_train.model_args.disable_gradient_checkpointing",
        by_engine(
            nothing("recompute_granularity says what Megatron computes again"),
            to("actor_rollout_ref.model.enable_gradient_checkpointing", as_=lambda value: not value),
        ),
    ),
    (
        "actor_train.model_args.dtype",
        by_engine(
            one_of(DTYPES, f"{_ACTOR}.megatron.dtype", otherwise=f"set {_ACTOR}.megatron.dtype"),
            only(
                "bf16",
                "verl trains in bfloat16 with float32 parameters",
                "set actor.fsdp_config.mixed_precision",
            ),
        ),
    ),
    ("actor_train.training_args.learning_rate", to(f"{_ACTOR}.optim.lr", as_=float)),
    ("actor_train.training_args.weight_decay", to(f"{_ACTOR}.optim.weight_decay", as_=float)),
    ("actor_train.training_args.warmup_steps", to(f"{_ACTOR}.optim.lr_warmup_steps")),
    ("actor_train.training_args.per_device_train_batch_size", to(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")),
    ("actor_train.training_args.gradient_accumulation_steps", _mini_batch),
    ("actor_train.data_args.template", nothing(TEMPLATE)),
    (
        "actor_train.data_args.file_name",
        by_hand("write the rows as parquet with verl's columns, and set data.train_files and data.val_files"),
    ),
    ("actor_train.strategy_args.strategy_name", _engine),
    ("actor_train.device_mapping", _devices_of("actor_train", "trainer")),
    ("actor_train.infer_batch_size", to(f"{_ROLLOUT}.{LOG_PROBS}")),
    # Generation.
    ("actor_infer.model_args.disable_gradient_checkpointing", nothing("engines compute no gradients")),
    ("actor_infer.model_args.dtype", one_of(DTYPES, f"{_ROLLOUT}.dtype", otherwise=f"set {_ROLLOUT}.dtype")),
    ("actor_infer.generating_args.max_new_tokens", _tokens_of_a_call),
    ("actor_infer.generating_args.top_p", untruncated(f"{_ROLLOUT}.top_p", 1.0)),
    ("actor_infer.generating_args.top_k", untruncated(f"{_ROLLOUT}.top_k", -1, 0)),
    ("actor_infer.generating_args.temperature", to(f"{_ROLLOUT}.temperature")),
    (
        "actor_infer.generating_args.num_beams",
        only(1, "responses are sampled", "beams are not sampled, so policy gradients do not apply to them"),
    ),
    ("actor_infer.generating_args.num_return_sequences", _trained_sequences),
    (
        "actor_infer.strategy_args.strategy_name",
        one_of(ENGINES, f"{_ROLLOUT}.name", otherwise=f"set {_ROLLOUT}.name"),
    ),
    (
        "actor_infer.strategy_args.strategy_config.gpu_memory_utilization",
        to(f"{_ROLLOUT}.gpu_memory_utilization"),
    ),
    (
        "actor_infer.strategy_args.strategy_config.mem_fraction_static",
        to(f"{_ROLLOUT}.gpu_memory_utilization"),
    ),
    ("actor_infer.strategy_args.strategy_config.tensor_parallel_size", to(TENSOR_PARALLEL)),
    (
        "actor_infer.strategy_args.strategy_config.block_size",
        to(f"+{_ROLLOUT}.engine_kwargs.vllm.block_size"),
    ),
    ("actor_infer.strategy_args.strategy_config.load_format", to(f"{_ROLLOUT}.load_format")),
    ("actor_infer.device_mapping", _devices_of("actor_infer", _ROLLOUT)),
    ("actor_infer.infer_batch_size", nothing("engines batch by themselves")),
    ("reference.infer_batch_size", to(f"{_REF}.{LOG_PROBS}")),
    ("reference.*", by_hand("set actor_rollout_ref.ref and algorithm.use_kl_in_reward or actor.use_kl_loss")),
    # Environments.
    ("train_env_manager.group_size", to(f"{_ROLLOUT}.n")),
    ("train_env_manager.num_env_groups", _sized),
    ("train_env_manager.group_size_redundancy", to(f"{_AGENTIC}.redundancy")),
    ("train_env_manager.max_env_num_per_worker", to(f"{_AGENTIC}.concurrency")),
    (
        "train_env_manager.format_penalty",
        by_hand("the environment scores: see environment_kwargs.invalid_reward"),
    ),
    (
        "train_env_manager.*",
        by_hand("a run has one environment, of agentic.environment; rows may have tasks"),
    ),
    ("val_env_manager.*", by_hand("validation uses data.val_files and rollout.val_kwargs")),
    ("custom_envs.*.env_type", _environment),
    ("custom_envs.*.max_steps", to(f"{_AGENTIC}.max_turns")),
    ("custom_envs.*.max_tokens_per_step", _turn_tokens),
    ("custom_envs.*.env_config.is_slippery", _of_environment("slippery")),
    ("custom_envs.*.env_config.size", _of_environment("size")),
    ("custom_envs.*.env_config.p", _of_environment("frozen")),
    ("custom_envs.*.use_thread_lock", nothing("see agentic.isolation")),
    ("custom_envs.*.env_manager_cls", nothing("the agent loop `environment` plays the episodes")),
    ("custom_envs.*", by_hand("an argument of the environment: set agentic.environment_kwargs")),
    ("env_monitor.hung_timeout", to(f"{_AGENTIC}.episode_timeout_s", as_=float)),
    ("env_monitor.*", nothing("deadlines are enforced: see agentic.*_timeout_s")),
    *STRATEGY,
    *RUN,
    *WORKERS,
)
