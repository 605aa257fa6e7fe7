# SPDX-License-Identifier: Apache-2.0
"""Command lines of other versions of verl are rewritten with a note; what is left out has a reason."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.older_verl import MOVED, asks_for_pipeline, corrected, modernised
from recipe.async_pipeline.config.paths import OWN, nested
from recipe.async_pipeline.config.refusals import Settings, refuse
from recipe.async_pipeline.config.verl_options import RULES
from recipe.async_pipeline.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
SIZES = [f"{ROLLOUT}.{name}_size" for name in ("data_parallel", "tensor_model_parallel", "expert_parallel")]
BUCKET = f"++{OWN}.weight_sync.gather_bucket_size_mb=512"


@pytest.mark.parametrize(
    ("word", "becomes"),
    [
        ("custom_reward_function.path=a.py", ["reward.custom_reward_function.path=a.py"]),
        ("+custom_reward_function.reward_kwargs.a=1", ["++reward.custom_reward_function.reward_kwargs.a=1"]),
        ("reward_model.reward_manager=dapo", ["reward.reward_manager.name=dapo"]),
        ("+reward_model.reward_kwargs.max_resp_len=8", ["++reward.reward_kwargs.max_resp_len=8"]),
        ("reward_model.overlong_buffer.len=8", ["++reward.reward_kwargs.overlong_buffer_cfg.len=8"]),
        ("+algorithm.rollout_is=True", [f"{CORRECTION}.rollout_is=token"]),
        ("algorithm.rollout_is_threshold=2.0", [f"{CORRECTION}.rollout_is_threshold=2.0"]),
        (
            f"{ACTOR}.tis_imp_ratio_cap=2.0",
            [f"{CORRECTION}={{rollout_is:token,rollout_is_threshold:2.0}}"],
        ),
        (f"{ACTOR}.tis_imp_ratio_cap=-1", [f"{CORRECTION}={{rollout_is:null}}"]),
        ("reward_model.model.path=rm", ["reward.reward_model.model_path=rm"]),
        ("critic.model.fsdp_config.param_offload=True", ["critic.fsdp.param_offload=True"]),
        (f"{ACTOR}.checkpoint.contents=[model]", [f"{ACTOR}.checkpoint.save_contents=[model]"]),
        (
            f"{ACTOR}.fsdp_config.strategy=fsdp2",
            [f"{ACTOR}.fsdp_config.strategy=fsdp2", f"{ACTOR}.strategy=fsdp2"],
        ),
        (f"{ACTOR}.grad_clip=0.5", [f"{ACTOR}.optim.clip_grad=0.5"]),
        (f"{ACTOR}.router_replay.mode=R2", [f"{ACTOR}.megatron.router_replay.mode=R2"]),
        (f"+{ACTOR}.policy_loss.tau_pos=1.0", [f"{ACTOR}.tau_pos=1.0"]),
        (f"{ROLLOUT}.n_agent=5", [f"{ROLLOUT}.n=5"]),
        (f"{ROLLOUT}.mode=sync", [f"{ROLLOUT}.mode=async"]),
        (f"{ROLLOUT}.name=hf", [f"{ROLLOUT}.name=vllm"]),
        (f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=512", [BUCKET]),
        ("trainer.v1.sampler.max_off_policy_threshold=4", [f"++{OWN}.staleness.max_lag=3"]),
        ("trainer.v1.sampler.max_off_policy_strategy=wait", [f"++{OWN}.staleness.straggler=wait"]),
        ("trainer.v1.trainer_mode=separate_async", ["++async_strategy=fully_async"]),
        (f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs=1", [f"++{ROLLOUT}.engine_kwargs.vllm.max_logprobs=1"]),
    ],
)
def test_a_word_is_rewritten_with_a_note(word: str, becomes: list[str]) -> None:
    found, notes = modernised([word])
    assert found == becomes
    assert len(notes) == 1 and word.partition("=")[0].lstrip("+") in notes[0]


@pytest.mark.parametrize("path", [path for path, moved in MOVED.items() if not moved.now])
def test_a_key_that_is_left_out_is_named_with_the_reason(path: str) -> None:
    found, (note,) = modernised([f"{path}=True"])
    assert found == [] and note == f"ignored: {path}=True, because {MOVED[path].why}" and MOVED[path].why


def test_every_note_says_something() -> None:
    assert all(moved.now or moved.why for moved in MOVED.values())


@pytest.mark.parametrize(
    "word",
    [
        "data.train_batch_size=8",
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.engine_kwargs.vllm={{a:1}}",
        "trainer.v1.sampler.max_off_policy_threshold=null",
        f"{ACTOR}.strategy=fsdp2",
        "~data.seed",
    ],
)
def test_other_words_remain(word: str) -> None:
    assert modernised([word]) == ([word], ())


def test_a_key_that_this_verl_has_needs_no_plus() -> None:
    words = ["+data.seed=1", "++data.seed=1", "+data.other=1"]
    found, notes = modernised(words, lambda path: path == "data.seed")
    assert found == ["data.seed=1", "++data.seed=1", "+data.other=1"]
    assert notes == ("+data.seed -> data.seed, which this verl has",)


@pytest.mark.parametrize("value", ["dapo", "'dapo'", "DAPO"])
def test_an_old_key_with_the_value_of_the_present_one_is_left_out(value: str) -> None:
    found, (note,) = modernised(["reward_model.reward_manager=dapo", f"reward.reward_manager.name={value}"])
    assert found == [f"reward.reward_manager.name={value}"]
    assert note.startswith("ignored: reward_model.reward_manager=dapo, because reward.reward_manager.name is")


def test_an_old_key_that_contradicts_the_present_one_is_refused() -> None:
    words = ["custom_reward_function.path=a.py", "reward.custom_reward_function.path=b.py"]
    more = ["reward_model.reward_manager=dapo", "reward.reward_manager.name=naive"]
    with pytest.raises(ConfigError) as refused:
        modernised([*words, *more])
    first, second = refused.value.problems
    assert first.startswith(
        "custom_reward_function.path is an old name of reward.custom_reward_function.path"
    )
    assert first.endswith("got a.py and b.py; keep one of them") and "got dapo and naive" in second


def test_the_engine_of_a_section_gives_way_to_the_strategy() -> None:
    words = [f"{ACTOR}.fsdp_config.strategy=fsdp", f"{ACTOR}.strategy=fsdp2"]
    assert modernised(words)[0] == words


@pytest.mark.parametrize(
    ("level", "applied", "becomes"),
    [("sequence", "True", "sequence"), ("sequence", "False", "null"), ("token", "true", "token")],
)
def test_weights_of_an_older_verl_keep_their_level(level: str, applied: str, becomes: str) -> None:
    words = [f"+algorithm.rollout_is={applied}", f"+algorithm.rollout_is_level={level}"]
    found, notes = modernised([*words, "+algorithm.rollout_is_mode=truncate"])
    assert found == [f"{CORRECTION}.rollout_is={becomes}"]
    assert f"rollout_is_level={level}, because {CORRECTION}.rollout_is has the level" in notes[1]


@pytest.mark.parametrize("word", ["level=geometric", "mode=mask", "veto_threshold=1e-4"])
def test_a_correction_that_verl_no_longer_has_is_refused(word: str) -> None:
    (found,), notes = modernised([f"+algorithm.rollout_is_{word}"])
    assert found == f"++algorithm.rollout_is_{word}" and len(notes) == 1
    path, _, value = found.removeprefix("++").partition("=")
    with pytest.raises(ConfigError, match=f"^{path} must be None, got '{value}'; leave it out; today"):
        refuse([row for row in RULES if row.path == path], Settings(nested({path: value})))


def test_a_chosen_strategy_stays_with_a_trainer_of_verl() -> None:
    words = ["trainer.v1.trainer_mode=colocate_async", "+async_strategy=one_step_off"]
    found, (note,) = modernised(words)
    assert found == ["+async_strategy=one_step_off"] and "the chosen strategy" in note


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            {"actor_rollout_ref.model.lora_rank": 8, f"{ACTOR}.strategy": "fsdp"},
            {f"{ACTOR}.strategy": "fsdp2"},
        ),
        ({"actor_rollout_ref.model.lora_rank": 0, f"{ACTOR}.strategy": "fsdp"}, {}),
        (
            {"trainer.resume_mode": "auto", "trainer.resume_from_path": "x"},
            {"trainer.resume_from_path": None},
        ),
        ({"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "x"}, {}),
        (
            {f"{ACTOR}.fsdp_config.dtype": "float16", "critic.fsdp.dtype": "bfloat16"},
            {f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "fp16"},
        ),
        ({"critic.fsdp": {"dtype": "float32", "mixed_precision": {"param_dtype": "bf16"}}}, {}),
        (
            {f"{ROLLOUT}.checkpoint_engine.backend": "nccl"},
            {f"{ROLLOUT}.checkpoint_engine.backend": "dual_buffer"},
        ),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "naive"}, {}),
        *(
            (
                {"reward.reward_kwargs": kwargs, "data.max_response_length": 9},
                {"reward.reward_kwargs.max_resp_len": 9} if sets else {},
            )
            for kwargs, sets in (
                ({"overlong_buffer_cfg": {"enable": True}}, True),
                ({"overlong_buffer_cfg": {"enable": True}, "max_resp_len": 5}, False),
                ({"overlong_buffer_cfg": {"enable": False}}, False),
            )
        ),
        (
            {"actor_rollout_ref.model.lora_rank": 8, f"{ROLLOUT}.load_format": "dummy"},
            {f"{ROLLOUT}.load_format": "auto"},
        ),
        ({f"{ROLLOUT}.load_format": "dummy"}, {}),
        *(
            (
                dict(zip(SIZES, sizes, strict=True)) | {"trainer.n_gpus_per_node": 8},
                dict(zip(SIZES, becomes, strict=False)),
            )
            for sizes, becomes in (
                ((8, 1, 8), (1, 8)),
                ((2, 4, 1), (1,)),
                ((2, 8, 16), ()),
                ((1, 8, 8), ()),
            )
        ),
        *(
            (
                {CORRECTION: section, f"{ACTOR}.policy_loss.loss_mode": mode},
                {
                    f"{ACTOR}.policy_loss.loss_mode": "bypass_mode",
                    f"{ACTOR}.policy_loss.rollout_correction": section,
                }
                if corrects
                else {},
            )
            for section, mode, corrects in (
                ({"bypass_mode": True, "rollout_is": "token"}, "vanilla", True),
                ({"bypass_mode": True, "rollout_rs": "seq_max_k2"}, "vanilla", True),
                ({"bypass_mode": True, "loss_type": "reinforce"}, None, True),
                ({"bypass_mode": True}, "bypass_mode", True),
                ({"bypass_mode": True, "loss_type": "ppo_clip"}, "vanilla", False),
                ({"bypass_mode": True, "rollout_is": "token"}, "gspo", False),
                ({"bypass_mode": False, "rollout_is": "token"}, "vanilla", False),
            )
        ),
        (
            {f"{ACTOR}.checkpoint.save_contents": ["model", "hf_model"]},
            {f"{ACTOR}.checkpoint.save_contents": ["model", "hf_model", "optimizer", "extra"]},
        ),
        (
            {"reward.reward_model": {"enable": True, "rollout": {"tensor_model_parallel_size": 2}}},
            {
                "reward.reward_model.enable_resource_pool": True,
                "reward.reward_model.nnodes": 1,
                "reward.reward_model.n_gpus_per_node": 2,
                "reward.reward_model.rollout.free_cache_engine": False,
            },
        ),
        (
            {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4, f"{ACTOR}.ppo_micro_batch_size": 16},
            {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2, f"{ACTOR}.ppo_micro_batch_size": None},
        ),
        ({"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4, f"{ACTOR}.ppo_micro_batch_size": 12}, {}),
        (
            {
                "critic.strategy": "megatron",
                "algorithm.adv_estimator": "gae",
                f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
                "critic.megatron.tensor_model_parallel_size": 1,
            },
            {"critic.megatron.tensor_model_parallel_size": 2},
        ),
    ],
)
def test_what_a_run_needs_is_set_with_the_reason(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    found = corrected(nested(raw))
    assert {path: value for path, (value, _) in found.items()} == expected
    assert all(why for _, why in found.values())


def test_an_engine_that_is_not_named_is_vllm() -> None:
    """verl's default until its configuration left the name to the user."""
    assert corrected(nested({f"{ROLLOUT}.name": "???"}))[f"{ROLLOUT}.name"][0] == "vllm"


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["+async_pipeline=True"], True),
        (["trainer.v1.trainer_mode=async_pipeline"], True),
        (["+actor_rollout_ref.async_pipeline=true"], True),
        (["+async_pipeline=False"], False),
        (["data.seed=1"], False),
    ],
)
def test_only_a_command_line_with_the_switch_is_rewritten(words: list[str], asks: bool) -> None:
    assert asks_for_pipeline(words) is asks
