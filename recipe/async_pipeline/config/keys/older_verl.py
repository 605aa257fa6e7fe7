# SPDX-License-Identifier: Apache-2.0
"""Command lines that were written for other versions or trainers of verl: one literal table, `MOVED`.

A key of the table is rewritten before hydra composes the configuration, with a note. A key without which a
run means the same is left out, with the reason. Keys that only a fork of verl has are not here: hydra refuses
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..checks.refusals import Refusal
from ..checks.rollout_correction import IS_LEVELS, correcting_loss
from ..checks.teachers import DEFAULT, MODELS, teachers_of
from ..checks.verl_values import CONTENTS
from ..derived.adapters import MODEL, publishes_adapters
from ..paths import MODE, OWN, PATCH_FREE, select
from .overrides import Modernised

WHOLE = ("model", "optimizer", "extra")
"""What a checkpoint of verl must hold for an exact resume."""

OF_ALL_DEVICES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "critic.ppo_micro_batch_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size",
)
"""Deprecated micro-batches."""
PRECISIONS = {"float16": "fp16", "float32": "fp32"}
"""Values of FSDP's `dtype` other than the default, as `mixed_precision` has them."""
VERLS_ENGINES = ("nccl", "hccl", "nixl", "mooncake", "kimi_ckpt_engine")
"""verl's own transports of weights."""


MISSING = "???"
"""What hydra has for a key without a value."""


class Moved(NamedTuple):
    """What became of a key, or of a section with all keys below it."""

    now: str = ""
    """Its present path; empty if it is left out."""
    why: str = ""
    """Why it is left out, or what else the user should know."""
    keeps: bool = False
    """Whether the word remains, too."""
    convert: Callable[[str], str | None] = lambda value: value
    """Returns what a value becomes: None if the word remains, to be refused later; nothing if left out."""


def _gone(why: str) -> Moved:
    return Moved(why=why)


def _lag(versions: str) -> str | None:
    return str(int(versions) - 1) if versions.isdigit() and int(versions) else None


def _unset(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_unset(item) for item in value.values())
    return value is None


def _weights(applied: str) -> str | None:
    return {"true": "token", "false": "null", "sequence": "sequence"}.get(applied.lower())


def _without(*values: str) -> Callable[[str], str]:
    """Leave some values out; `verl_options.RULES` refuses the others."""
    return lambda value: "" if value.lower() in values else value


def _truncated_at(cap: str) -> str | None:
    try:
        return f"{{rollout_is:token,rollout_is_threshold:{cap}}}" if float(cap) > 0 else "{rollout_is:null}"
    except ValueError:
        return None


_CORRECTION = "algorithm.rollout_correction"
IS_LEVEL, IS_MODE, IS_VETO = (f"algorithm.rollout_is_{name}" for name in ("level", "mode", "veto_threshold"))
_RM, _NEW_RM = "reward_model", "reward.reward_model"
_OVERLONG, _LONGEST = "reward.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.max_resp_len"
_SERVED = _gone("an engine serves the reward model, with reward.reward_model.rollout")
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_GRADIENTS = _gone("gradients move with the parameters, as param_offload says")
_BUCKET = Moved(f"++{OWN}.weight_sync.gather_bucket_size_mb")
_ASYNCHRONOUS = (f"{MODE}=separate_async", f"{MODE}=colocate_async")
_PASSED_ON = re.compile(
    rf"(?:{_ROLLOUT}\.engine_kwargs\.\w+|(?:{_ACTOR}|critic)\.optim\.override_optimizer_config"
    r"|(?:actor_rollout_ref|critic)\.model\.override_config)\."
)
"""What verl passes on to other code, with any keys."""
SAMPLER = ("data.sampler.class_path", "data.sampler.class_name")
_INTERACTION = f"{_ROLLOUT}.multi_turn.interaction_config_path"
_MANAGER = f"{_ROLLOUT}.agent.agent_loop_manager_class"
_MESH = ("tensor", "pipeline", "expert")
_SAMPLER, _SEPARATE = "trainer.v1.sampler", "trainer.v1.separate_async"

MOVED: Mapping[str, Moved] = {
    # Rewards: verl up to 0.8.
    "custom_reward_function": Moved("reward.custom_reward_function"),
    "custom_reward_function.reward_kwargs": Moved("++reward.custom_reward_function.reward_kwargs"),
    "sandbox_fusion": Moved("reward.sandbox_fusion"),
    f"{_RM}.sandbox_fusion": Moved("reward.sandbox_fusion"),
    f"{_RM}.reward_kwargs": Moved("++reward.reward_kwargs"),
    f"{_RM}.overlong_buffer": Moved(f"++{_OVERLONG}"),
    f"{_RM}.num_workers": Moved("reward.num_workers"),
    f"{_RM}.reward_manager": Moved("reward.reward_manager.name"),
    f"{_RM}.reward_loop_source": Moved("reward.reward_manager.source"),
    f"{_RM}.reward_loop_module_path": Moved("reward.reward_manager.module.path"),
    f"{_RM}.reward_loop_class_name": Moved("reward.reward_manager.name"),
    f"{_RM}.enable": Moved(f"{_NEW_RM}.enable"),
    f"{_RM}.enable_resource_pool": Moved(f"{_NEW_RM}.enable_resource_pool"),
    f"{_RM}.n_gpus_per_node": Moved(f"{_NEW_RM}.n_gpus_per_node"),
    f"{_RM}.nnodes": Moved(f"{_NEW_RM}.nnodes"),
    f"{_RM}.model.path": Moved(f"{_NEW_RM}.model_path"),
    f"{_RM}.model_path": Moved(f"{_NEW_RM}.model_path"),
    f"{_RM}.rollout": Moved(f"{_NEW_RM}.rollout"),
    f"{_RM}.use_reward_loop": _gone("reward workers compute all rewards"),
    f"{_RM}.launch_reward_fn_async": _gone("reward workers compute all rewards"),
    f"{_RM}.strategy": _SERVED,
    f"{_RM}.model.use_remove_padding": _SERVED,
    f"{_RM}.model.fsdp_config": _SERVED,
    f"{_RM}.model.trust_remote_code": _SERVED,
    f"{_RM}.model.external_lib": _SERVED,
    f"{_RM}.model.input_tokenizer": _SERVED,
    f"{_RM}.micro_batch_size": _SERVED,
    f"{_RM}.micro_batch_size_per_gpu": _SERVED,
    f"{_RM}.use_dynamic_bsz": _SERVED,
    f"{_RM}.forward_max_token_len_per_gpu": _SERVED,
    f"{_RM}.profiler": _gone("the profiler does not cover the reward model"),
    # Training.
    "critic.model.fsdp_config.grad_offload": _GRADIENTS,
    "critic.model.fsdp_config": Moved("critic.fsdp"),
    "critic.checkpoint.contents": Moved("critic.checkpoint.save_contents"),
    f"{_ACTOR}.checkpoint.contents": Moved(f"{_ACTOR}.checkpoint.save_contents"),
    f"{_ACTOR}.model_engine": Moved("model_engine"),
    f"{_ACTOR}.router_replay": Moved(f"{_ACTOR}.megatron.router_replay"),
    f"{_ACTOR}.policy_loss.tau_pos": Moved(f"{_ACTOR}.tau_pos"),
    f"{_ACTOR}.policy_loss.tau_neg": Moved(f"{_ACTOR}.tau_neg"),
    f"{_ACTOR}.grad_clip": Moved(f"{_ACTOR}.optim.clip_grad"),
    "critic.grad_clip": Moved("critic.optim.clip_grad"),
    f"{_ACTOR}.fsdp_config.strategy": Moved(
        f"{_ACTOR}.strategy", "the engine is chosen there, not by its section", keeps=True
    ),
    f"{_ACTOR}.fsdp_config.grad_offload": _GRADIENTS,
    f"{_ACTOR}.megatron.grad_offload": _GRADIENTS,
    "actor_rollout_ref.ref.megatron.grad_offload": _GRADIENTS,
    "critic.megatron.grad_offload": _GRADIENTS,
    f"{_ROLLOUT}.multi_turn.max_turns": Moved(f"{_ROLLOUT}.multi_turn.max_assistant_turns"),
    "trainer.val_generations_to_log_to_wandb": Moved("trainer.log_val_generations"),
    "trainer.remove_previous_ckpt_in_save": _gone("trainer.max_actor_ckpt_to_keep deletes older checkpoints"),
    "trainer.use_legacy_worker_impl": _gone("verl has one implementation of its workers"),
    "trainer.default_hdfs_dir": _gone("verl's V1 trainer copies no checkpoint"),
    # Truncated importance sampling: verl up to 0.6.
    "algorithm.rollout_is": Moved(f"{_CORRECTION}.rollout_is", convert=_weights),
    "algorithm.rollout_is_threshold": Moved(f"{_CORRECTION}.rollout_is_threshold"),
    "algorithm.rollout_is_threshold_lower": _gone("weights had a lower bound with rollout_is_mode=mask only"),
    IS_LEVEL: Moved(f"++{IS_LEVEL}", f"{_CORRECTION}.rollout_is has the level", convert=_without(*IS_LEVELS)),
    IS_MODE: Moved(f"++{IS_MODE}", "rollout_is truncates weights", convert=_without("truncate")),
    IS_VETO: Moved(f"++{IS_VETO}", "it vetoes nothing", convert=_without("null")),
    f"{_ACTOR}.tis_imp_ratio_cap": Moved(_CORRECTION, convert=_truncated_at),
    "data.continuous_token": _gone("tokens of a conversation are always continued, by the type of the model"),
    "algorithm.filter_groups.max_num_gen_batches": _gone("prompts are drawn until a step is full"),
    # Generation.
    f"{_ROLLOUT}.mode": Moved(
        f"{_ROLLOUT}.mode", "generation is always asynchronous", convert={"sync": "async"}.get
    ),
    f"{_ROLLOUT}.name": Moved(
        f"{_ROLLOUT}.name", "verl generates with engines only", convert={"hf": "vllm"}.get
    ),
    f"{_ROLLOUT}.load_format": Moved(
        f"{_ROLLOUT}.load_format",
        "verl's older loaders are gone",
        convert=dict.fromkeys(("dummy_dtensor", "dummy_hf", "dummy_megatron"), "dummy").get,
    ),
    "data.return_raw_chat": Moved("data.return_raw_chat", "empty means False", convert={"": "False"}.get),
    f"{_ROLLOUT}.n_agent": Moved(f"{_ROLLOUT}.n"),
    f"{_ROLLOUT}.update_weights_bucket_megabytes": _BUCKET,
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": _BUCKET,
    f"{_ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache": Moved(
        f"++{_ROLLOUT}.engine_kwargs.vllm.mm_processor_cache_gb", convert={"true": "0", "True": "0"}.get
    ),
    # verl's configuration lacks these, and `verl_options.RULES` has the remedies.
    **{key: Moved(f"++{key}") for key in (_INTERACTION, _MANAGER, *SAMPLER)},
    # Keys of scripts for fully_async_main that its configuration lacks; `entry_points` has what each becomes.
    **{
        key: Moved(f"++{key}")
        for key in (
            "rollout.total_epochs",
            "rollout.test_freq",
            "async_training.use_rollout_log_probs",
            "async_training.compute_prox_log_prob",
        )
    },
    # Asynchrony: verl's own trainers.
    f"{_SAMPLER}.max_off_policy_threshold": Moved(
        f"++{OWN}.staleness.max_lag", "a response of N versions has a lag of N - 1", convert=_lag
    ),
    f"{_SAMPLER}.max_off_policy_strategy": Moved(f"++{OWN}.staleness.straggler"),
    f"{_SEPARATE}.parameter_sync_step": _gone("it counts mini-batches of a step; each step publishes"),
    f"{_SEPARATE}.num_warmup_batches": _gone("the lag decides how far generation runs ahead"),
    f"{_SEPARATE}.hybrid_rollout": _gone("the replicas keep their devices"),
}

KEPT = frozenset(path for path, moved in MOVED.items() if moved.now == f"++{path}")
"""Keys that verl no longer has, which remain for a check that has the remedy."""
UNREAD: tuple[Refusal, ...] = tuple(
    Refusal(
        path,
        _unset,
        "must be left out of a file",
        f"set {moved.now.lstrip('+')}, which verl reads in its place",
    )
    for path, moved in MOVED.items()
    if path.startswith(("custom_reward_function", "sandbox_fusion", _RM)) and moved.now
)
"""verl's configuration still has these keys; no code reads them. Rows for files, which nothing rewrites."""


def modernised(overrides: Iterable[str], has: Callable[[str], bool] = lambda path: False) -> Modernised:
    """Rewrite a command line for this verl.

    `has` says whether verl's configuration has a key, so that a `+` before it is left out.
    """
    words = [*_with_level(overrides)]
    given = {_key(word): word.partition("=")[2] for word in words}
    found, notes, problems = [], list[str](), list[str]()
    old: dict[str, str] = {}
    for word in words:
        key, (path, moved) = _key(word), _moved(_key(word))
        value = word.partition("=")[2]
        if moved is None or word.startswith("~"):
            word, why = _with_plus(word, key, has)
            found.append(word)
            notes += [why] if why else []
            continue
        now, becomes = f"{moved.now}{key.removeprefix(path)}" if moved.now else "", moved.convert(value)
        present = now.lstrip("+")
        rest = [word] if moved.keeps or becomes is None else []
        if not now or becomes == "":
            notes.append(f"ignored: {key}={value}, because {moved.why}")
        elif present in given.keys() - {key}:
            if not moved.keeps and becomes is not None and not _same(becomes, given[present]):
                problems.append(
                    f"{key} is an old name of {present}, which is set, too, got {value} and "
                    f"{given[present]}; keep one of them"
                )
                continue
            notes.append(f"ignored: {key}={value}, because {present} is set, too")
        elif becomes is not None and not _same(given[old.setdefault(present, key)], given[key]):
            problems.append(
                f"{key} and {old[present]} are old names of {present}, got {value} and "
                f"{given[old[present]]}; keep one of them"
            )
        elif becomes is not None:
            why = f": {moved.why}" if moved.why else ""
            if (present, becomes) != (key, value):
                notes.append(f"{key}={value} -> {present}={becomes}{why}")
            rest.append(f"{now}={becomes}")
        found += rest
    return Modernised(_trainer(found, notes), tuple(notes), tuple(problems))


def _with_level(words: Iterable[str]) -> Iterator[str]:
    """Yield a command line in which the value of `algorithm.rollout_is` has the level of the weights."""
    given = list(words)
    of_sequences = any(_key(word) == IS_LEVEL and word.endswith("=sequence") for word in given)
    for word in given:
        applied = _key(word) == "algorithm.rollout_is" and word.lower().endswith("=true")
        yield f"{word.partition('=')[0]}=sequence" if applied and of_sequences else word


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _same(one: str, other: str) -> bool:
    return one.strip("'\"").lower() == other.strip("'\"").lower()


def _moved(key: str) -> tuple[str, Moved | None]:
    """Return the row of a key, and the path that the row is for."""
    parts = key.split(".")
    for size in range(len(parts), 0, -1):
        path = ".".join(parts[:size])
        if path in MOVED:
            return path, MOVED[path]
    return key, None


def _with_plus(word: str, key: str, has: Callable[[str], bool]) -> tuple[str, str]:
    """Return a word with the `+` that its key needs, and why it changed."""
    if word.startswith("+") and not word.startswith("++") and has(key):
        return word[1:], f"{word.partition('=')[0]} -> {key}, which this verl has"
    if _PASSED_ON.match(word) and not has(key):
        # The user's own configuration may list it, with which `+` is an error.
        return f"++{word}", f"{key} -> ++{key}, an argument that verl's configuration does not list"
    return word, ""


def _trainer(words: list[str], notes: list[str]) -> list[str]:
    """Replace verl's own asynchronous trainer by the strategy that is nearest to it."""
    mode = next((word for word in words if word in _ASYNCHRONOUS), None)
    if mode is None:
        return words
    chosen = any(_key(word).endswith(("async_strategy", f"{OWN}.strategy")) for word in words)
    now = "the chosen strategy" if chosen else "async_strategy=fully_async"
    bounded = chosen or any(_key(word) == f"{OWN}.staleness.max_lag" for word in words)
    lag = "" if bounded else f"; {OWN}.staleness.max_lag is 3, where verl's default threshold permits 7"
    notes.append(f"{mode} -> {now}; training and generation get separate devices{lag}")
    rest = [word for word in words if word != mode]
    return rest if chosen else [*rest, "++async_strategy=fully_async"]


def corrected(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return values that a run needs in place of ones that are common with other trainers, each with why."""
    return (
        _training(raw)
        | _precision(raw)
        | correcting_loss(raw)
        | _served(raw)
        | _reward_model(raw)
        | _further_teachers(raw)
        | _longest_response(raw)
        | _micro_batches(raw)
        | _sizes_of_critic(raw)
        | _sizes_of_experts(raw)
    )


def _training(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    if _publishes(raw) and select(raw, f"{_ACTOR}.strategy") == "fsdp":
        found[f"{_ACTOR}.strategy"] = "fsdp2", "FSDP1 cannot publish LoRA adapters that are not merged"
    for path in ("trainer.test_freq", "trainer.save_freq"):
        if select(raw, path) is False:
            found[path] = -1, "it is a number of steps, and False means never"
    manager = "reward.reward_manager.name"
    if select(raw, manager) == "prime":
        found[manager] = "naive", "verl 0.9 has no prime, and its reward workers score concurrently, too"
    mode = select(raw, "trainer.resume_mode")
    if mode in ("auto", "disable") and select(raw, "trainer.resume_from_path") is not None:
        found["trainer.resume_from_path"] = None, f"resume_mode={mode} does not read it"
    for model in (_ACTOR, "critic"):
        for name in ("save_contents", "load_contents"):
            parts = select(raw, f"{model}.checkpoint.{name}")
            # The check of others shows what was given.
            if not isinstance(parts, list) or not all(part in CONTENTS for part in parts):
                continue
            if missing := [part for part in WHOLE if part not in parts]:
                found[f"{model}.checkpoint.{name}"] = [*parts, *missing], "an exact resume needs all of it"
    return found


def _precision(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Give FSDP the precision of `dtype`, which verl's engine no longer reads."""
    found: dict[str, tuple[Any, str]] = {}
    for section in (f"{_ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"):
        dtype = select(raw, f"{section}.dtype")
        if dtype in PRECISIONS and select(raw, f"{section}.mixed_precision") is None:
            path = f"{section}.mixed_precision.param_dtype"
            found[path] = PRECISIONS[dtype], f"verl's engine reads it in place of dtype={dtype}"
    return found


def _publishes(raw: Mapping[str, Any]) -> bool:
    """Return whether adapters are published, of a configuration whose values were not checked."""
    ranks = [select(raw, f"{MODEL}.{key}") for key in ("lora_rank", "lora.rank")]
    return any(isinstance(rank, int) and rank > 0 for rank in ranks) and publishes_adapters(raw)


def _served(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = _copies_in_a_replica(raw)
    if select(raw, f"{_ROLLOUT}.name") == MISSING:
        found[f"{_ROLLOUT}.name"] = "vllm", "the default of older versions of verl; the present one has none"
    backend = f"{_ROLLOUT}.checkpoint_engine.backend"
    if select(raw, backend) in VERLS_ENGINES:
        found[backend] = "dual_buffer", "weights reach the replicas through host memory"
    load = f"{_ROLLOUT}.load_format"
    if _publishes(raw) and select(raw, load) == "dummy":
        found[load] = "auto", "the base of adapters is not published"
    return found


def _further_teachers(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Complete teachers that were added, whose sections have the defaults of a policy's engine."""
    found: dict[str, tuple[Any, str]] = {}
    for name in teachers_of(raw):
        section = f"{MODELS}.{name}.inference"
        if name != DEFAULT and select(raw, f"{section}.load_format") is None:
            found[f"{section}.load_format"] = "auto", "by default its weights would be random"
        for part in ("prompt", "response"):
            longest = select(raw, f"data.max_{part}_length")
            if name != DEFAULT and select(raw, f"{section}.{part}_length") is None:
                found[f"{section}.{part}_length"] = longest, f"it is data.max_{part}_length"
    return found


def _copies_in_a_replica(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Replace copies of a model within a replica: by replicas or, for experts that are divided over all of
    the copies, by tensor parallelism within a node.
    """
    sizes = {
        name: select(raw, f"{_ROLLOUT}.{name}_size")
        for name in ("data_parallel", "tensor_model_parallel", "expert_parallel")
    }
    copies, tensor, experts = sizes.values()
    if not all(isinstance(size, int) for size in sizes.values()) or copies <= 1:
        return {}
    alone = f"{_ROLLOUT}.data_parallel_size"
    if experts <= tensor:
        return {alone: (1, f"its {copies} copies are replicas")}
    nodes = [select(raw, f"{path}.n_gpus_per_node") for path in (_ROLLOUT, "trainer")]
    of_node = next((size for size in nodes if isinstance(size, int) and size > 0), 0)
    if experts != copies * tensor or experts > of_node:
        return {}
    why = f"experts are divided over {experts} devices, which share each request here"
    return {alone: (1, why), f"{_ROLLOUT}.tensor_model_parallel_size": (experts, why)}


def _reward_model(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Give separate devices to a reward model that shared the ones of the trainer."""
    pool = f"{_NEW_RM}.enable_resource_pool"
    devices = select(raw, f"{_NEW_RM}.rollout.tensor_model_parallel_size")
    if select(raw, f"{_NEW_RM}.enable") is not True or select(raw, pool) or not isinstance(devices, int):
        return {}
    why = "it scores while the trainer trains, on separate devices"
    found: dict[str, tuple[Any, str]] = {pool: (True, why)}
    found[f"{_NEW_RM}.rollout.free_cache_engine"] = False, why
    if not select(raw, f"{_NEW_RM}.nnodes"):
        found |= {f"{_NEW_RM}.nnodes": (1, why), f"{_NEW_RM}.n_gpus_per_node": (devices, why)}
    return found


def _longest_response(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Give DAPO's penalty of long responses the length that verl's entry point for DAPO gave it."""
    if not select(raw, f"{_OVERLONG}.enable"):
        return {}
    manager = "reward.reward_manager"
    if select(raw, f"{manager}.source") == "register" and select(raw, f"{manager}.name") != "dapo":
        return {f"{_OVERLONG}.enable": (False, f"only {manager}.name=dapo reads it")}
    if select(raw, _LONGEST) is not None:
        return {}
    return {_LONGEST: (select(raw, "data.max_response_length"), f"{_OVERLONG} is enabled")}


def _micro_batches(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Divide the deprecated micro-batches of all training devices, as verl did."""
    world = [select(raw, f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node")]
    if not all(isinstance(part, int) and part > 0 for part in world):
        return {}
    devices, found = world[0] * world[1], {}
    for path in OF_ALL_DEVICES:
        whole, each = select(raw, path), f"{path}_per_gpu"
        # The one of the critic is the whole number by default.
        is_open = select(raw, each) is None or "${" in str(select(raw, each))
        if isinstance(whole, int) and is_open and whole % devices == 0:
            found[each] = whole // devices, f"{path}={whole} over {devices} training devices"
            found[path] = None, f"{each} is in its place"
    return found


def _sizes_of_critic(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Give a critic of Megatron the sizes of the policy, whose devices it shares, in place of the default."""
    if select(raw, "critic.strategy") != "megatron" or not (
        select(raw, "critic.enable") or select(raw, "algorithm.adv_estimator") == "gae"
    ):
        return {}
    found = {}
    for name in _MESH:
        size = select(raw, f"{_ACTOR}.megatron.{name}_model_parallel_size")
        path = f"critic.megatron.{name}_model_parallel_size"
        if isinstance(size, int) and size > 1 and select(raw, path) == 1:
            found[path] = size, "models on the same devices share Megatron's process groups"
    return found


def _sizes_of_experts(raw: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Keep experts whole on a device, verl's older default, where the present one does not fit."""
    found: dict[str, tuple[Any, str]] = {}
    for section in (f"{_ACTOR}.megatron", "critic.megatron"):
        path = f"{section}.expert_tensor_parallel_size"
        sizes = [select(raw, f"{section}.{name}_model_parallel_size") for name in _MESH]
        sizes += [select(raw, f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node")]
        if select(raw, path) is not None or not all(isinstance(size, int) and size > 0 for size in sizes):
            continue
        tensor, groups, devices = sizes[0], math.prod(sizes[1:3]), math.prod(sizes[3:])
        if sizes[2] > 1 and devices % (tensor * groups) and devices % groups == 0:
            found[path] = 1, f"{tensor} x {groups} devices for experts do not divide {devices}"
    return found


def asks_for_pipeline(words: Iterable[str]) -> bool:
    """Return whether a command line switches the pipeline on."""
    on = {"async_pipeline=true", "actor_rollout_ref.async_pipeline=true", f"{MODE}={PATCH_FREE}"}
    return any(word.lstrip("+").lower() in on for word in words)
