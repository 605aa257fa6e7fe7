# SPDX-License-Identifier: Apache-2.0
"""rLLM's keys. Its files are verl's config with a section `rllm`; verl's keys stay as they are.

Some values have a key in both. rLLM takes its own one if it was changed, and else verl's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from ...config.keys.foreign_keys import Document, Outcome, Rule, nothing, only, to, unsupported
from ...config.knobs.agentic import AgenticConfig
from ...config.paths import select
from .rules import Table, TranslatedFile, as_it_is, by_hand, one_of, translate, untruncated
from .verls_keys import SWITCH, VERLS, with_agent

_AGENTIC = f"+{AgenticConfig.PATH}"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CORRECTION, _VALIDATION = "algorithm.rollout_correction", f"{_ROLLOUT}.val_kwargs"
_ARGUMENT = by_hand("set agentic.environment_kwargs")
_GATEWAY = by_hand("see the gateway's keys below agentic in docs/configuration.md, if the agent needs one")
ENVIRONMENTS = {"frozenlake": "frozen_lake"}
"""rLLM's environments that this package has, by its own name of them."""
OWN_LOGGERS = ("ui",)
"""rLLM's trackers that verl does not have."""


class SharedValue(NamedTuple):
    """A value that has a key of rLLM and one of verl."""

    rllm: str
    verl: str
    default: Any = None
    """rLLM's default, as its `rllm/base.yaml` has it."""


SHARED = (
    SharedValue("rllm.algorithm.adv_estimator", "algorithm.adv_estimator", "grpo"),
    SharedValue("rllm.algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std_in_grpo", True),
    SharedValue("rllm.algorithm.rollout_correction.bypass_mode", f"{_CORRECTION}.bypass_mode", False),
    SharedValue("rllm.algorithm.rollout_correction.tis_mode", f"{_CORRECTION}.rollout_is"),
    SharedValue("rllm.algorithm.rollout_correction.tis_cap", f"{_CORRECTION}.rollout_is_threshold", 2.0),
    SharedValue("rllm.algorithm.kl_beta", f"{_ACTOR}.kl_loss_coef", 0.0),
    SharedValue("rllm.algorithm.loss_fn", f"{_ACTOR}.policy_loss.loss_mode"),
    SharedValue("rllm.algorithm.loss_agg_mode", f"{_ACTOR}.loss_agg_mode"),
    SharedValue("rllm.algorithm.warmup_steps", f"{_ACTOR}.optim.lr_warmup_steps", -1),
    SharedValue("rllm.algorithm.warmup_steps_ratio", f"{_ACTOR}.optim.lr_warmup_steps_ratio", 0.0),
    SharedValue("rllm.algorithm.eps_clip", f"{_ACTOR}.clip_ratio_low", 0.2),
    SharedValue("rllm.algorithm.eps_clip_high", f"{_ACTOR}.clip_ratio_high"),
    SharedValue("rllm.rollout.n", f"{_ROLLOUT}.n", 8),
    SharedValue("rllm.rollout.n_val", f"{_VALIDATION}.n", 1),
    SharedValue("rllm.rollout.train.temperature", f"{_ROLLOUT}.temperature", 1.0),
    SharedValue("rllm.rollout.train.top_p", f"{_ROLLOUT}.top_p", 1.0),
    SharedValue("rllm.rollout.train.top_k", f"{_ROLLOUT}.top_k"),
    SharedValue("rllm.rollout.val.temperature", f"{_VALIDATION}.temperature", 1.0),
    SharedValue("rllm.rollout.val.top_p", f"{_VALIDATION}.top_p", 1.0),
    SharedValue("rllm.rollout.val.top_k", f"{_VALIDATION}.top_k"),
    SharedValue("rllm.trainer.save_freq", "trainer.save_freq", 20),
    SharedValue("rllm.trainer.test_freq", "trainer.test_freq", 5),
    SharedValue("rllm.trainer.val_before_train", "trainer.val_before_train", False),
    SharedValue("rllm.trainer.val_only", "trainer.val_only", False),
    SharedValue("rllm.trainer.total_epochs", "trainer.total_epochs", 10),
    SharedValue("rllm.trainer.total_batches", "trainer.total_training_steps", -1),
    SharedValue("rllm.trainer.logger", "trainer.logger", ["console"]),
    SharedValue("rllm.trainer.project_name", "trainer.project_name", "rllm-training"),
    SharedValue("rllm.trainer.experiment_name", "trainer.experiment_name", "default"),
    SharedValue("rllm.data.train_batch_size", "data.train_batch_size", 64),
    SharedValue("rllm.data.val_batch_size", "data.val_batch_size", -1),
    SharedValue("rllm.data.max_prompt_length", "data.max_prompt_length", 2048),
    SharedValue("rllm.data.max_response_length", "data.max_response_length", 30720),
    SharedValue("rllm.data.seed", "data.seed", 0),
)


def translate_rllm(document: Document, variables: Collection[str] = ()) -> TranslatedFile:
    """Translate a document. `variables`: paths that it refers to itself."""
    found = translate(document, TABLE, also=SWITCH, left_out=overruled(document), variables=variables)
    return with_agent(found)


def overruled(document: Document) -> dict[str, Outcome]:
    """Return what becomes of keys of which another one has the value, by their paths."""
    found = {}
    for shared in SHARED:
        rllms, verls = select(document, shared.rllm), select(document, shared.verl)
        if rllms is None or verls is None or rllms == verls:
            continue
        if rllms == shared.default:
            found[shared.rllm] = Outcome("nothing to do", text=f"a default: {shared.verl} has the value")
        else:
            found[shared.verl] = Outcome("nothing to do", text=f"{shared.rllm} replaces it, as in rLLM")
    if _is_asynchronous(document):
        text = "rllm.async_training.mini_batch_size is the size of a step, as in rLLM"
        sizes = ("data.train_batch_size", "rllm.data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size")
        found |= dict.fromkeys(sizes, Outcome("nothing to do", text=text))
    return found


def _is_asynchronous(document: Document) -> bool:
    return select(document, "rllm.async_training.enable") is True


# Rules.


def _unless_null(rule: Rule) -> Rule:
    """Use a rule for values that are set: null is the default of the backend."""
    return lambda value, document: (nothing("verl's default") if value is None else rule)(value, document)


def _if_asynchronous(rule: Rule) -> Rule:
    return lambda value, document: (
        rule if _is_asynchronous(document) else nothing("rllm.async_training is not enabled")
    )(value, document)


def _if_enabled(section: str, rule: Rule) -> Rule:
    """Use a rule for keys of a section that is enabled."""
    return lambda value, document: (
        rule if select(document, f"{section}.enable") else nothing(f"{section} is not enabled")
    )(value, document)


def _positive(path: str) -> Rule:
    """A number below 1 stands for none."""

    def rule(value: Any, document: Document) -> Outcome:
        if isinstance(value, int) and value > 0:
            return Outcome("set", {path: value})
        return Outcome("nothing to do", text="none is set")

    return rule


def _kl(value: Any, document: Document) -> Outcome:
    values = {f"{_ACTOR}.kl_loss_coef": value}
    if select(document, f"{_ACTOR}.use_kl_loss") is None:
        values[f"{_ACTOR}.use_kl_loss"] = value > 0
    return Outcome("set", values)


def _clip(value: Any, document: Document) -> Outcome:
    values = {f"{_ACTOR}.clip_ratio_low": value}
    high = select(document, "rllm.algorithm.eps_clip_high"), select(document, f"{_ACTOR}.clip_ratio_high")
    if high == (None, None):
        values[f"{_ACTOR}.clip_ratio_high"] = value
    return Outcome("set", values)


def _logger(value: Any, document: Document) -> Outcome:
    names = [value] if isinstance(value, str) else list(value or [])
    known = [name for name in names if name not in OWN_LOGGERS]
    text = "" if known == names else f"verl has no logger {', '.join(OWN_LOGGERS)}"
    return Outcome("set" if known == names else "differs", {"trainer.logger": known}, text)


def _max_tokens(value: Any, document: Document) -> Outcome:
    limits = [
        select(document, path) for path in ("data.max_response_length", "rllm.data.max_response_length")
    ]
    if value in limits:
        return Outcome("nothing to do", text="it is the length of a response")
    return Outcome("set", {f"{_AGENTIC}.max_turn_tokens": value}, "of one turn")


def _environment(value: Any, document: Document) -> Outcome:
    if value == "custom":
        return Outcome("by hand", text="name an environment, in agentic.environment, or an agent")
    name = ENVIRONMENTS.get(value, value)
    text = "" if value in ENVIRONMENTS else "an id of gymnasium or module:Class"
    return Outcome("set", {f"{_AGENTIC}.environment": name}, text)


def _argument(name: str) -> Rule:
    def rule(value: Any, document: Document) -> Outcome:
        if select(document, "rllm.env.name") in ENVIRONMENTS:
            return Outcome("set", {f"{_AGENTIC}.environment_kwargs.{name}": value})
        return _ARGUMENT(value, document)

    return rule


_REJECTED = "algorithm.filter_groups draws prompts until a batch is full"
_OLDER = "a key of earlier versions of verl: see reward in verl's configuration"
_SERVICE = "a backend of rLLM that trains at a service: this package trains with verl"
_DISTILLATION = "distillation has a teacher, which this package does not have"

TABLE: Table = (
    ("rllm.backend", one_of({"verl": "verl"}, otherwise="this package trains with verl: set verl's keys")),
    ("rllm.agent.max_steps", to(f"{_AGENTIC}.max_turns")),
    (
        "rllm.agent.trajectory_timeout",
        lambda value, document: (
            nothing("no limit is set") if value is None else to(f"{_AGENTIC}.episode_timeout_s", as_=float)
        )(value, document),
    ),
    ("rllm.agent.name", by_hand("name an agent loop, in rollout.agent.default_agent_loop or in the rows")),
    ("rllm.agent.overlong_filter", only(False, "it is off", "see agentic.ends")),
    ("rllm.agent.*", by_hand("an argument of the agent: see docs/agents.md")),
    ("rllm.env.name", _environment),
    ("rllm.env.env_args.size", _argument("size")),
    ("rllm.env.env_args.p", _argument("frozen")),
    ("rllm.env.env_args.is_slippery", _argument("slippery")),
    ("rllm.env.env_args", nothing("no argument is set")),
    ("rllm.env.env_args.*", _ARGUMENT),
    ("rllm.gateway.*", _GATEWAY),
    ("rllm.workflow.n_parallel_tasks", to(f"{_AGENTIC}.concurrency")),
    ("rllm.workflow.use_workflow", only(False, "an agent plays the episodes", "see docs/agents.md")),
    ("rllm.workflow.name", by_hand("write the workflow as an agent: see docs/agents.md")),
    ("rllm.workflow.workflow_args.*", by_hand("an argument of the agent: see docs/agents.md")),
    ("rllm.workflow.retry_limit", by_hand("see faults.max_prompt_attempts")),
    ("rllm.workflow.raise_on_error", by_hand("see agentic.ends")),
    ("rllm.workflow.warm_queue_size", nothing("environments are started before they are needed")),
    ("rllm.rejection_sample.enable", to("algorithm.filter_groups.enable")),
    ("rllm.rejection_sample.*", nothing(_REJECTED)),
    ("rllm.stepwise_advantage.*", nothing("an episode is one response, of which every turn is trained")),
    ("rllm.mask_truncated_samples", only(False, "it is off", "see agentic.ends.cut_off")),
    ("rllm.filter_token_mismatch", nothing("the policy trains the tokens that the engine has made")),
    ("rllm.compact_filtering.enable", only(False, "it is off", "see agentic.ends")),
    ("rllm.compact_filtering.*", _if_enabled("rllm.compact_filtering", by_hand("see agentic.ends"))),
    (
        "rllm.disable_thinking",
        only(False, "as here", "set +data.apply_chat_template_kwargs.enable_thinking=False"),
    ),
    ("rllm.accumulate_reasoning", only(False, "as here", "the agent decides what its next turn reads")),
    ("rllm.distill.enable", only(False, "it is off", _DISTILLATION)),
    ("rllm.distill.*", _if_enabled("rllm.distill", unsupported(_DISTILLATION))),
    ("rllm.sdk.*", _GATEWAY),
    ("rllm.remote_runtime.*", by_hand("agents in containers reach the gateway: see docs/agents.md")),
    ("rllm.episode_logging.*", nothing("`async-pipeline episodes` prints episodes as text")),
    # Asynchronous training.
    (
        "rllm.async_training.enable",
        only(True, "as here", "rLLM waits for each step: set +async_strategy=on_policy for that"),
    ),
    (
        "rllm.async_training.mini_batch_size",
        _if_asynchronous(
            lambda value, document: Outcome(
                "set", {f"{_ACTOR}.ppo_mini_batch_size": value, "+async_training.require_batches": 1}
            )
        ),
    ),
    (
        "rllm.async_training.staleness_threshold",
        _if_asynchronous(to("+async_training.staleness_threshold")),
    ),
    (
        "rllm.async_training.trigger_parameter_sync_step",
        _if_asynchronous(to("+async_training.trigger_parameter_sync_step")),
    ),
    ("rllm.async_training.partial_rollout", _if_asynchronous(to("+async_training.partial_rollout"))),
    ("rllm.async_training.*", nothing("batches stay in the sample store")),
    ("async_training.staleness_threshold", as_it_is),
    ("async_training.trigger_parameter_sync_step", as_it_is),
    (
        "async_training.partial_rollout",
        lambda value, document: (
            nothing("rllm.async_training has it")
            if select(document, "rllm.async_training") is not None
            else as_it_is
        )(value, document),
    ),
    ("async_training.require_batches", as_it_is),
    ("async_training.required_samples", nothing("it is ppo_mini_batch_size x require_batches")),
    ("async_training.use_rollout_log_probs", by_hand("see training.old_logp in docs/pools.md")),
    ("async_training.compute_prox_log_prob", by_hand("see training.old_logp in docs/pools.md")),
    ("async_training.use_trainer_do_validate", nothing("the replicas validate")),
    ("async_training.checkpoint_engine.*", nothing("this package transfers the weights")),
    ("actor_rollout_ref.checkpoint_engine.*", nothing("this package transfers the weights")),
    ("actor_rollout_ref.checkpoint_engine", nothing("this package transfers the weights")),
    # The devices of engines that are apart.
    ("rollout.nnodes", to(f"{_ROLLOUT}.nnodes")),
    ("rollout.n_gpus_per_node", to(f"{_ROLLOUT}.n_gpus_per_node")),
    ("rollout.n", by_hand(f"set {_ROLLOUT}.n")),
    (
        "rollout.total_rollout_steps",
        by_hand("set trainer.total_training_steps: prompts divided by prompts of a step"),
    ),
    ("rollout.total_epochs", to("trainer.total_epochs")),
    ("rollout.test_freq", by_hand("set trainer.test_freq, in steps: times trigger_parameter_sync_step")),
    ("rollout.rejection_sample", to("algorithm.filter_groups.enable")),
    # Values that verl's configuration has, too.
    (
        "rllm.algorithm.adv_estimator",
        one_of(
            {name: name for name in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")},
            "algorithm.adv_estimator",
            otherwise="set algorithm.adv_estimator",
        ),
    ),
    ("rllm.algorithm.norm_adv_by_std_in_grpo", to("algorithm.norm_adv_by_std_in_grpo")),
    ("rllm.algorithm.use_rllm", nothing("rLLM ignores it")),
    (
        "rllm.algorithm.use_precomputed_advantage",
        only(False, "estimators compute advantages", "register an estimator in verl"),
    ),
    ("rllm.algorithm.loss_fn", _unless_null(to(f"{_ACTOR}.policy_loss.loss_mode"))),
    ("rllm.algorithm.loss_agg_mode", _unless_null(to(f"{_ACTOR}.loss_agg_mode"))),
    (
        "rllm.algorithm.lr_schedule",
        one_of(
            {"constant": "constant", "cosine": "cosine"},
            f"{_ACTOR}.optim.lr_scheduler_type",
            otherwise=f"set {_ACTOR}.optim.lr_scheduler_type, or lr_decay_style with Megatron",
        ),
    ),
    ("rllm.algorithm.warmup_steps", to(f"{_ACTOR}.optim.lr_warmup_steps")),
    ("rllm.algorithm.warmup_steps_ratio", to(f"{_ACTOR}.optim.lr_warmup_steps_ratio")),
    ("rllm.algorithm.kl_beta", _kl),
    ("rllm.algorithm.eps_clip", _clip),
    ("rllm.algorithm.eps_clip_high", _unless_null(to(f"{_ACTOR}.clip_ratio_high"))),
    (
        "rllm.algorithm.router_replay",
        only("disabled", "it is off", "see actor.megatron.router_replay and enable_rollout_routing_replay"),
    ),
    ("rllm.algorithm.rollout_correction.bypass_mode", _unless_null(to(f"{_CORRECTION}.bypass_mode"))),
    ("rllm.algorithm.rollout_correction.tis_mode", _unless_null(to(f"{_CORRECTION}.rollout_is"))),
    ("rllm.algorithm.rollout_correction.tis_cap", to(f"{_CORRECTION}.rollout_is_threshold")),
    ("rllm.rollout.n", to(f"{_ROLLOUT}.n")),
    ("rllm.rollout.n_val", to(f"{_VALIDATION}.n")),
    ("rllm.rollout.train.temperature", to(f"{_ROLLOUT}.temperature")),
    ("rllm.rollout.train.top_p", untruncated(f"{_ROLLOUT}.top_p", 1.0)),
    ("rllm.rollout.train.top_k", _unless_null(untruncated(f"{_ROLLOUT}.top_k", -1, 0))),
    ("rllm.rollout.train.max_tokens", _max_tokens),
    ("rllm.rollout.train.*", by_hand("the agent sets it in its requests")),
    ("rllm.rollout.val.temperature", to(f"{_VALIDATION}.temperature")),
    ("rllm.rollout.val.top_p", to(f"{_VALIDATION}.top_p")),
    ("rllm.rollout.val.top_k", _unless_null(to(f"{_VALIDATION}.top_k"))),
    ("rllm.rollout.val.max_tokens", nothing("data.max_response_length is the limit here, too")),
    ("rllm.rollout.val.*", by_hand("the agent sets it in its requests")),
    ("rllm.trainer.save_freq", to("trainer.save_freq")),
    ("rllm.trainer.test_freq", to("trainer.test_freq")),
    ("rllm.trainer.val_before_train", to("trainer.val_before_train")),
    ("rllm.trainer.val_only", to("trainer.val_only")),
    ("rllm.trainer.total_epochs", to("trainer.total_epochs")),
    ("rllm.trainer.total_batches", _positive("trainer.total_training_steps")),
    ("rllm.trainer.logger", _logger),
    ("rllm.trainer.project_name", to("trainer.project_name")),
    ("rllm.trainer.experiment_name", to("trainer.experiment_name")),
    ("rllm.data.train_batch_size", to("data.train_batch_size")),
    ("rllm.data.val_batch_size", _positive("data.val_batch_size")),
    ("rllm.data.max_prompt_length", to("data.max_prompt_length")),
    ("rllm.data.max_response_length", to("data.max_response_length")),
    ("rllm.data.seed", to("data.seed")),
    # Keys in verl's sections that are rLLM's.
    ("trainer.logger", _logger),
    ("trainer.log_episodes", nothing("`async-pipeline episodes` prints episodes as text")),
    ("trainer.episode_log_dir", nothing("`async-pipeline episodes` prints episodes as text")),
    ("actor_rollout_ref.rollout.agent.num_workers", _positive(f"{_ROLLOUT}.agent.num_workers")),
    ("data.train_dataset_name", by_hand("write the rows as parquet, and set data.train_files")),
    ("data.train_split", by_hand("write the rows as parquet, and set data.train_files")),
    ("data.val_dataset_name", by_hand("write the rows as parquet, and set data.val_files")),
    ("data.val_split", by_hand("write the rows as parquet, and set data.val_files")),
    (
        "model.name",
        lambda value, document: (
            nothing("actor_rollout_ref.model.path has it")
            if select(document, "actor_rollout_ref.model.path") is not None
            else to("actor_rollout_ref.model.path")
        )(value, document),
    ),
    ("reward_model.enable", only(False, "it is off", "set reward.reward_model")),
    ("reward_model.*", by_hand(_OLDER)),
    ("custom_reward_function.path", _unless_null(to("reward.custom_reward_function.path"))),
    ("custom_reward_function.name", to("reward.custom_reward_function.name")),
    ("ray_init.*", by_hand("set ray_kwargs.ray_init")),
    ("rllm.agent_name", by_hand("name an agent loop, in rollout.agent.default_agent_loop or in the rows")),
    ("verifiers.*", by_hand("write the environment as an agent: see docs/agents.md")),
    # rLLM's other backends, which train at a service.
    ("model.*", unsupported(_SERVICE)),
    ("optim.*", unsupported(_SERVICE)),
    ("training.*", unsupported(_SERVICE)),
    ("concurrency.*", unsupported(_SERVICE)),
    ("rollout_engine.*", unsupported(_SERVICE)),
    ("val_sampling.*", unsupported(_SERVICE)),
    ("tinker_*", unsupported(_SERVICE)),
    ("fireworks_*", unsupported(_SERVICE)),
    ("fuse_*", unsupported(_SERVICE)),
    ("agent.*", unsupported(_SERVICE)),
    ("env.*", unsupported(_SERVICE)),
    ("workflow.*", unsupported(_SERVICE)),
    *VERLS,
)
