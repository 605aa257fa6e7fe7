# SPDX-License-Identifier: Apache-2.0
"""Keys of verl's configuration that nothing reads in a pipeline run: one literal table.

`patches/keys.tsv` has the verdict on every key of verl. A key whose loss would change what is trained is
refused by `verl_options` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

from ..paths import OWN, walk
from .older_verl import MOVED

_PROFILER = "the pipeline profiles no steps; trace.json of a run shows them all"
_OLDER = "only verl's older trainer reads it"
_OTHERS = "only verl's own asynchronous trainers read it"
_ENGINE = "only other engines read it"
_NO_TIMEOUT = "verl's workers use torch's default"
_CHAT = "the agent loop tokenizes each turn"
_CRITIC = "verl's critic reads +critic.ppo_infer_max_token_len_per_gpu"
_BFLOAT16 = "verl's torchtitan computes in bfloat16"
_DATA = "verl's data set returns the messages of a prompt"
_OWN_SAMPLING = "each request to the reward model has its own sampling parameters"


def _read(key: str) -> str:
    return f"{key} is read in its place"


WITHOUT_EFFECT: Mapping[str, str] = {
    **{path: moved.why for path, moved in MOVED.items() if not moved.now},
    "global_profiler": _PROFILER,
    "*.profiler": _PROFILER,
    "trainer.balance_batch": "verl's V1 trainer balances each batch",
    "trainer.del_local_ckpt_after_load": "a run may resume from its checkpoint more than once; "
    "trainer.max_actor_ckpt_to_keep deletes old ones",
    "trainer.esi_redundant_time": f"{_OLDER}; {OWN}.faults.notice_s gives a checkpoint time after SIGTERM",
    "trainer.ray_wait_register_center_timeout": f"{_OLDER}; {OWN}.faults.wait_timeout_s limits all waits",
    "data.truncation": f"{OWN}.bad_data.long_prompt says what becomes of a prompt that is too long; keep "
    "truncates it on the left",
    "data.tokenizer": "actor_rollout_ref.model.tokenizer_path is read",
    "data.trust_remote_code": _read("actor_rollout_ref.model.trust_remote_code"),
    "data.gen_batch_size": "the lag bounds what is generated ahead",
    "data.return_raw_input_ids": _DATA,
    "data.return_raw_chat": _DATA,
    "data.return_full_prompt": _DATA,
    "trainer.v1.sync": _OTHERS,
    "trainer.v1.colocate_async": f"{_OTHERS}; {OWN}.staleness.max_lag bounds what is generated ahead",
    "trainer.v1.sampler.sampler_kwargs": "the pipeline draws the prompts in order",
    "trainer.v1.sampler.sync_refill_failed_groups": "a failed group is always replaced",
    "algorithm.filter_groups.max_inflight_gen_batches": "the lag decides how far generation runs ahead",
    "skip.rollout": _OLDER,
    "skip.async_rollout": _OTHERS,
    "actor_rollout_ref.hybrid_engine": "training and generation always have separate devices",
    "actor_rollout_ref.nccl_timeout": _NO_TIMEOUT,
    "critic.nccl_timeout": _NO_TIMEOUT,
    "*.rollout_n": _read("actor_rollout_ref.rollout.n"),
    "*.torchtitan.wrap_policy.min_num_params": _ENGINE,
    "*.torchtitan.dtype": _BFLOAT16,
    "*.torchtitan.mixed_precision": _BFLOAT16,
    "*.torchtitan.strategy": _read("the strategy of the model"),
    "*.torchtitan.use_orig_params": _ENGINE,
    "*.megatron.dist_checkpointing_prefix": "verl's checkpoints have no prefix",
    "*.router_replay.*_file": "routes are neither written to files nor read from them",
    "*.model.tiled_mlp": "verl's V1 workers have no tiled MLP",
    "actor_rollout_ref.actor.use_torch_compile": _read("fsdp_config.use_torch_compile"),
    "actor_rollout_ref.ref.use_torch_compile": _read("fsdp_config.use_torch_compile"),
    "actor_rollout_ref.actor.use_fused_kernels": _read("actor_rollout_ref.model.use_fused_kernels"),
    "actor_rollout_ref.actor.use_remove_padding": _read("actor_rollout_ref.model.use_remove_padding"),
    "actor_rollout_ref.actor.use_prefix_grouper": _OLDER,
    "actor_rollout_ref.actor.calculate_sum_pi_squared": "no estimator that the V1 trainer has needs it",
    "critic.forward_*": _CRITIC,
    "critic.ppo_max_token_len_per_gpu": _CRITIC,
    "critic.ulysses_sequence_parallel_size": _read("critic.fsdp.ulysses_sequence_parallel_size"),
    "critic.*.entropy_*": "a critic predicts no distribution over tokens",
    "critic.model.mtp": "a critic predicts one value for each token",
    "actor_rollout_ref.ref.optim": "a reference policy is not trained",
    "actor_rollout_ref.rollout.agent.custom_async_server": "the servers of the pipeline generate",
    "actor_rollout_ref.rollout.engine_kwargs.trtllm": _ENGINE,
    "*.rollout.layered_summon": "weights are gathered tensor by tensor",
    "*.rollout.multi_stage_wake_up": "engines that have their own devices do not sleep",
    "*.optim.total_training_steps": "the trainer sets it to the steps of the run",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "its temperature decides: 0 is greedy",
    "actor_rollout_ref.rollout.over_sample_rate": f"{OWN}.agentic.redundancy is the knob for it",
    "actor_rollout_ref.rollout.multi_turn.enable": "the column agent_name of the data, or "
    "actor_rollout_ref.rollout.agent.default_agent_loop, chooses the agent loop",
    "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts": _read("actor_rollout_ref.rollout.n"),
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": _CHAT,
    "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template": _CHAT,
    "reward.reward_manager.module.name": "reward.reward_manager.name is the name in the module, too",
    "reward.reward_model.rollout.do_sample": _OWN_SAMPLING,
    "reward.reward_model.rollout.n": "a response is scored once",
    "reward.reward_model.rollout.seed": _OWN_SAMPLING,
}
"""By key or section, `*` for any part of a path: why it has no effect, and what has."""
FIELDS_WITHOUT_EFFECT: Mapping[str, str] = {
    "*.rollout.layer_name_map": _ENGINE,
    "*.rollout.repetition_penalty": "requests are sampled without one, as log-probs are computed",
    "*.rollout.sglang_engine_mode": "SGLang always serves requests",
    "*.actor.use_rollout_log_probs": f"{OWN}.training.old_logp decides",
}
"""The same for fields of verl's classes that its configuration does not have."""

_IN_REWARD, _IN_LOSS = "algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss"
_CORRECTION = "algorithm.rollout_correction"
_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_POLICY_LOSS = f"{_ACTOR}.policy_loss"
_ESTIMATOR = "algorithm.adv_estimator"
_REWARD_MODEL = "reward.reward_model"


class Condition(NamedTuple):
    """Keys that have an effect only if one of others has a value."""

    names: tuple[str, ...]
    """As in `WITHOUT_EFFECT`."""
    needs: Mapping[str, tuple[object, ...]]
    """By other keys, the values with which these have an effect; any that is not false if there are none."""
    in_words: str = ""
    """What they have no effect without, if the values do not tell."""


CONDITIONS = (
    Condition(tuple(f"actor_rollout_ref.actor.kl_loss_{name}" for name in ("coef", "type")), {_IN_LOSS: ()}),
    Condition(("actor_rollout_ref.ref",), {_IN_LOSS: (), _IN_REWARD: ()}),
    Condition(("algorithm.kl_ctrl", "algorithm.kl_penalty"), {_IN_REWARD: ()}),
    Condition(("algorithm.filter_groups.metric",), {"algorithm.filter_groups.enable": ()}),
    Condition(("algorithm.gamma",), {_ESTIMATOR: ("gae", "reinforce_plus_plus")}),
    Condition(("algorithm.lam",), {_ESTIMATOR: ("gae",)}),
    # The others are not given it, or do not read it.
    Condition(("algorithm.norm_adv_by_std_in_grpo",), {_ESTIMATOR: ("grpo", "grpo_passk", "grpo_process")}),
    Condition((f"{_POLICY_LOSS}.dro_beta",), {f"{_POLICY_LOSS}.loss_mode": ("dro",)}),
    Condition((f"{_POLICY_LOSS}.clip_cov_*",), {f"{_POLICY_LOSS}.loss_mode": ("clip_cov",)}),
    Condition(
        (f"{_POLICY_LOSS}.kl_cov_ratio", f"{_POLICY_LOSS}.ppo_kl_coef"),
        {f"{_POLICY_LOSS}.loss_mode": ("kl_cov",)},
    ),
    Condition((f"{_ACTOR}.loss_scale_factor",), {f"{_ACTOR}.loss_agg_mode": ("seq-mean-token-sum-norm",)}),
    Condition((f"{_ACTOR}.tau_pos", f"{_ACTOR}.tau_neg"), {f"{_POLICY_LOSS}.loss_mode": ("sapo",)}),
    Condition(
        tuple(f"{_MODEL}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")),
        {f"{_MODEL}.lora_rank": ()},
        f"{_MODEL}.lora_rank above 0",
    ),
    Condition(("algorithm.pf_ppo",), {"algorithm.use_pf_ppo": ()}),
    Condition(("critic", "trainer.max_critic_ckpt_to_keep"), {"critic.enable": (), _ESTIMATOR: ("gae",)}),
    *(
        Condition(
            tuple(f"{model}.fsdp*.{name}" for name in ("use_orig_params", "wrap_policy.min_num_params")),
            {f"{model}.strategy": ("fsdp",)},
        )
        for model in (_ACTOR, "actor_rollout_ref.ref", "critic")
    ),
    Condition((_REWARD_MODEL,), {f"{_REWARD_MODEL}.enable": ()}),
    *(
        Condition((f"{_CORRECTION}.{name}_*",), {f"{_CORRECTION}.{name}": ()}, f"{_CORRECTION}.{name}")
        for name in ("rollout_is", "rollout_rs")
    ),
    Condition(
        (f"{_ACTOR}.clip_ratio",),
        {
            f"{_ACTOR}.clip_ratio_low": (None,),
            f"{_ACTOR}.clip_ratio_high": (None,),
            f"{_POLICY_LOSS}.loss_mode": ("dppo_tv", "dppo_kl"),
        },
        f"{_ACTOR}.clip_ratio_low=null or clip_ratio_high=null, which count and are 0.2 by default",
    ),
    *(
        Condition(
            (f"{section}.{name}_{size}",), {f"{section}.{switch}": wanted}, f"{section}.{switch}={value}"
        )
        for section, name, switch in (
            (_ACTOR, "ppo", "use_dynamic_bsz"),
            ("actor_rollout_ref.rollout", "log_prob", "log_prob_use_dynamic_bsz"),
            ("actor_rollout_ref.ref", "log_prob", "log_prob_use_dynamic_bsz"),
        )
        for size, wanted, value in (
            ("max_token_len_per_gpu", (), True),
            ("micro_batch_size_per_gpu", (False, None), False),
        )
    ),
    Condition(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        {"algorithm.kl_ctrl.type": ("adaptive",)},
    ),
    Condition(
        ("actor_rollout_ref.rollout.free_cache_engine",), {}, "a trainer on the devices of the engines"
    ),
    Condition(("data.filter_overlong_prompts_workers",), {"data.filter_overlong_prompts": ()}),
    *(
        Condition(
            (f"{model}.optim.num_cycles", f"{model}.optim.min_lr_ratio"),
            {f"{model}.optim.lr_scheduler_type": ("cosine", None)},
            f"{model}.optim.lr_scheduler_type=cosine",
        )
        for model in (_ACTOR, "critic")
    ),
)


def is_below(path: str, name: str) -> bool:
    """Return whether a name, or a section, of a table is the one of a key."""
    return fnmatchcase(path, name) or fnmatchcase(path, f"{name}.*")


def why_without_effect(path: str) -> str | None:
    """Return why a key has no effect, or None if no table has it."""
    rows = chain(WITHOUT_EFFECT.items(), FIELDS_WITHOUT_EFFECT.items())
    return next((why for name, why in rows if is_below(path, name)), None)


def without_effect(raw: Mapping[str, Any], defaults: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each key without effect that has another value than in verl's `defaults`."""
    known = [dict(walk(tree)) for tree in defaults]
    for path, value in walk(raw):
        verls = [tree[path] for tree in known if path in tree]
        if isinstance(value, Mapping) or not verls or any(_same(value, one) for one in verls):
            continue
        if why := why_without_effect(path):
            yield f"{path} has no effect in a pipeline run: {why}; leave it out"


def unmet(paths: Iterable[str], value_at: Callable[[str], Any]) -> Iterator[str]:
    """Yield a line for each of `CONDITIONS` that is not met although its keys are among `paths`."""
    rest = [path for path in dict.fromkeys(paths) if why_without_effect(path) is None]
    for names, needs, in_words in CONDITIONS:
        if any(value_at(key) in wanted if wanted else value_at(key) for key, wanted in needs.items()):
            continue
        idle = [path for path in rest if path not in needs and any(is_below(path, name) for name in names)]
        if idle:
            pairs = [f"{key}={value}" for key, wanted in needs.items() for value in wanted or (True,)]
            without = in_words or " or ".join(pairs)
            yield f"{', '.join(idle)} {'have' if idle[1:] else 'has'} no effect without {without}"
        rest = [path for path in rest if path not in idle]


def profiling_off(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with which a profiler would start in the workers, although no step is profiled: off."""
    off = {"steps": None, "tool": None, "enable": False}
    return {
        path: off[path.rpartition(".")[2]]
        for path, value in walk(raw)
        if path.rpartition(".")[0].endswith("profiler") and path.rpartition(".")[2] in off
        # The tools of workers refer to the one of all.
        if value and "${" not in str(value)
    }


def _same(given: Any, default: Any) -> bool:
    """Compare values, interpolations without their spaces."""
    if isinstance(given, str) and isinstance(default, str):
        return "".join(given.split()) == "".join(default.split())
    return bool(given == default)
