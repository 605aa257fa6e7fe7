# SPDX-License-Identifier: Apache-2.0
"""Whole jobs on the real stack: verl, Ray, FSDP2, vLLM, TransferQueue."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from recipe.async_pipeline.agents.episodes import FAILED_EPISODE
from recipe.async_pipeline.core.groups.bad_data import KINDS, UNUSABLE_PROMPT
from recipe.async_pipeline.lab.tasks.data import write_rows
from recipe.async_pipeline.lab.tasks.look_task.look import Look, look_rows
from tests.e2e.conftest import StartNodes
from tests.e2e.job import LOOK, ROOT, STRAGGLES_S, check_clean_end, check_events, run_job, smoke_command

pytestmark = pytest.mark.e2e
VALIDATED = "async_pipeline/validation/version"


@pytest.mark.nightly
@pytest.mark.parametrize("straggler", ["regenerate", "mask"])
def test_stragglers_delay_no_step(tied_task: Path, tmp_path: Path, straggler: str) -> None:
    """They are given up on the rollout servers and generated again, or trained without what is too old; every
    prompt has a fate.
    """
    agents = tmp_path / "agents.json"
    agents.write_text(json.dumps([{"name": "straggler", "_target_": "tests.e2e.parts.StragglerLoop"}]))
    job = run_job(
        smoke_command(
            "async_strategy=fully_async",
            "trainer.v1.async_pipeline.staleness.max_lag=1",
            f"trainer.v1.async_pipeline.staleness.straggler={straggler}",
            "trainer.total_training_steps=8",
            "actor_rollout_ref.rollout.agent.default_agent_loop=straggler",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
            f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
        ),
        tmp_path / "run",
        tied_task,
    )
    summary = check_clean_end(job, "fully_async", 1, 8)
    check_events(job)
    assert summary["groups_expired"] == 0
    assert (summary["groups_regenerated"] > 0) == (straggler == "regenerate")
    # The last step waits for the remaining stragglers.
    steps = [row["data"]["timing_s/step"] for row in job.metrics()]
    assert max(steps[1:-1]) < STRAGGLES_S
    if straggler == "mask":
        shares = [row["data"]["async_pipeline/lag/masked_token_share"] for row in job.metrics()]
        assert max(shares) > 0, "the other responses of a straggler's group are older than the bound"
    else:
        assert job.metrics()[-1]["data"]["async_pipeline/bias/dropped_share"] > 0


@pytest.mark.nightly
def test_a_reward_function_that_never_comes_back_costs_its_groups_only(
    tied_task: Path, tmp_path: Path
) -> None:
    """It is killed; validation, without generation for training, gives such answers the default."""
    own = "trainer.v1.async_pipeline"
    job = run_job(
        smoke_command(
            "async_strategy=fully_async",
            f"{own}.reward.timeout_s=2",
            f"{own}.reward.attempts=1",
            f"{own}.reward.concurrency=2",
            f"{own}.reward.failure=drop",
            f"{own}.validation=pause",
            f"reward.custom_reward_function.path={ROOT / 'tests' / 'e2e' / 'rewards.py'}",
            "reward.custom_reward_function.name=hogs",
            "data.val_max_samples=8",
            "trainer.test_freq=3",
            "trainer.total_training_steps=3",
            f"{own}.run_dir={tmp_path / 'run'}",
        ),
        tmp_path / "run",
        tied_task,
    )
    summary = check_clean_end(job, "fully_async", 3, 3)
    check_events(job)
    assert summary["groups_failed"] > 0
    assert [event["version"] for event in job.events() if event["event"] == "VALIDATED"] == [3]


@pytest.mark.nightly
def test_an_engine_of_another_package_publishes_whole_tensors(tied_task: Path, tmp_path: Path) -> None:
    """And its corrections are in the loss, as scripts for verl's older trainer ask."""
    correction = "algorithm.rollout_correction"
    command = smoke_command(
        "actor_rollout_ref.actor.strategy=fsdp_turbo",
        f"{correction}.bypass_mode=True",
        f"{correction}.rollout_is=token",
        f"{correction}.loss_type=reinforce",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
    )
    engine = ROOT / "tests" / "fakes" / "other_engine"
    job = run_job(command, tmp_path / "run", tied_task, prefix=["env", f"PYTHONPATH={engine}"])
    check_clean_end(job, "one_step_off", 1, 4)
    check_events(job)
    assert job.summary["explained_share"] == 1.0
    assert all("actor/rollout_corr/rollout_is_mean" in row["data"] for row in job.metrics())


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_qwen3_vl_is_trained_as_it_is_served(qwen3_vl_task: Path, tmp_path: Path, engine: str) -> None:
    job = run_job(
        smoke_command(
            *LOOK,
            f"actor_rollout_ref.rollout.name={engine}",
            "async_strategy=fully_async",
            "trainer.total_training_steps=6",
            f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
        ),
        tmp_path / "run",
        qwen3_vl_task,
    )
    check_clean_end(job, "fully_async", 3, 6)
    check_events(job)
    drift = [row["data"].get("async_pipeline/drift/max") for row in job.metrics()]
    assert max(one for one in drift if one is not None) < 1e-3


@pytest.mark.nightly
def test_pictures_of_every_kind_cost_their_prompts_at_most(look_task: Path, tmp_path: Path) -> None:
    """Several sizes, none and two in a prompt are trained, by two ranks of which one may have none; what is
    broken, cut off, too long, too large or too much is not, and its fate says why.
    """
    own = "trainer.v1.async_pipeline"
    trained: dict[str, list[Any]] = {"tall": [(4, 2)], "wide": [(2, 6)], "two": [(4, 4), (2, 2)], "none": []}
    wrong: dict[str, tuple[list[Any], str]] = {
        "broken": (["no picture"], "UnidentifiedImageError"),
        "cut": (["cut"], "truncated"),
        "huge": (["huge"], "DecompressionBombError"),
        "long": (["long"], "absolute aspect ratio"),
        "many": ([(2, 2)] * 3, "rollout.limit_images is 2"),
        "tokens": ([(8, 8), (8, 8)], "exceeding rollout.prompt_length=24"),
    }
    rows = []
    for index in range(64):
        name = [*trained, *wrong][index % (len(trained) + len(wrong))]
        pictures = trained[name] if name in trained else wrong[name][0]
        shown = [Look("red", "box", (index % 4,), index, *one) for one in pictures if isinstance(one, tuple)]
        files = [one.png() for one in shown] or [odd_picture(one) for one in pictures]
        (row,) = look_rows([Look("red", "box", (index % 4,), index)], "train")
        question = "<image>" * len(files) + f"{index}?"
        row |= {
            "prompt": [{"role": "user", "content": question}],
            "images": [{"bytes": file, "path": None} for file in files],
            "reward_model": {"style": "rule", "ground_truth": "1 red box"},
        }
        rows.append(row)
    write_rows(rows, tmp_path / "train.parquet")

    job = run_job(
        smoke_command(
            *LOOK,
            "async_strategy=n_step_ahead",
            f"data.train_files={tmp_path / 'train.parquet'}",
            f"data.val_files={tmp_path / 'train.parquet'}",
            "data.max_prompt_length=24",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "+actor_rollout_ref.rollout.limit_images=2",
            f"{own}.faults.bad_data.nonfinite_logprobs=drop",
            "trainer.n_gpus_per_node=2",
            "ray_kwargs.ray_init.num_gpus=3",
            "trainer.test_freq=6",
            "trainer.total_training_steps=6",
            f"{own}.run_dir={tmp_path / 'run'}",
        ),
        tmp_path / "run",
        look_task,
    )
    summary = check_clean_end(job, "n_step_ahead", 3, 6, groups=4)
    check_events(job)
    found = summary["bad_data"]
    assert found["groups"].keys() == {UNUSABLE_PROMPT}
    whys = " ".join(one["why"] for one in found["quarantined"])
    assert [name for name, (_, why) in wrong.items() if why not in whys] == []
    assert found["prompts_quarantined"] == summary["groups_failed"] > len(wrong)
    assert VALIDATED in job.metrics()[-1]["data"]


def odd_picture(kind: str) -> bytes:
    """Return the file of a picture that cannot be shown to a model."""
    sizes = {"huge": (14_000, 14_000), "long": (3_000, 10)}
    file = io.BytesIO()
    Image.new("1", sizes.get(kind, (64, 64))).save(file, "PNG")
    whole = file.getvalue()
    return {"cut": whole[:50], "no picture": b"no picture"}.get(kind, whole)


@pytest.mark.nightly
def test_bad_data_of_every_kind_costs_its_groups_only(tied_task: Path, tmp_path: Path) -> None:
    """It is answered again, given up, and put down to who wrote it; the others train on."""
    own = "trainer.v1.async_pipeline"
    agents = tmp_path / "agents.json"
    agents.write_text(json.dumps([{"name": "flawed", "_target_": "tests.e2e.parts.FlawedLoop"}]))
    job = run_job(
        smoke_command(
            "async_strategy=fully_async",
            f"{own}.faults.bad_data.nonfinite_logprobs=drop",
            f"{own}.reward.failure=drop",
            "actor_rollout_ref.rollout.agent.default_agent_loop=flawed",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
            f"reward.custom_reward_function.path={ROOT / 'tests' / 'e2e' / 'rewards.py'}",
            "reward.custom_reward_function.name=nothing",
            "trainer.total_training_steps=6",
            f"{own}.run_dir={tmp_path / 'run'}",
        ),
        tmp_path / "run",
        tied_task,
    )
    summary = check_clean_end(job, "fully_async", 3, 6)
    check_events(job)
    found = summary["bad_data"]
    assert found["groups"].keys() == set(KINDS) - {FAILED_EPISODE, UNUSABLE_PROMPT}, "nothing fails here"
    assert found["prompts_quarantined"] == len(found["quarantined"]) == summary["groups_failed"]
    assert summary["groups_regenerated"] > 0
    assert all(writer.startswith("replica 0 with version ") for writer in found["writers"])
    rejected = [event for event in job.events() if event["event"] == "REJECTED"]
    assert {(event["key"], event["fate"]) for event in rejected} == {
        (one["uid"], "failed") for one in found["quarantined"]
    }
    last = job.metrics()[-1]["data"]
    assert last["async_pipeline/bad_data/quarantined"] > 0
    assert all(math.isfinite(row["data"]["actor/pg_loss"]) for row in job.metrics())
    assert "bad data, drop as faults.bad_data.empty_answer says, 1 group so far: group " in job.output


@pytest.mark.nightly
def test_n_step_ahead_on_two_nodes_with_a_reference_policy_untied_in_bf16(
    untied_task: Path, tmp_path: Path, nodes: StartNodes
) -> None:
    """Three batches ahead, all eight roles, two training ranks, and weights that are cast and sent on their
    way to a replica of two ranks on the other node.
    """
    job = run_job(
        smoke_command(
            "async_strategy=n_step_ahead",
            "trainer.v1.async_pipeline.staleness.max_lag=3",
            "trainer.total_training_steps=6",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=reward",
            "actor_rollout_ref.rollout.dtype=bfloat16",
            "trainer.v1.async_pipeline.weight_sync.delta=true",
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "trainer.val_before_train=true",
            "trainer.test_freq=4",
            *nodes(untied_task, 2, 2).overrides,
            f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
        ),
        tmp_path / "run",
        untied_task,
    )
    summary = check_clean_end(job, "n_step_ahead", 3, 6)
    check_events(job, "ref_logp")
    assert summary["lag_max"] == 3
    assert summary["groups_filtered"] > 0, "at the start, many sums are answered wrong eight times"
    metrics = [row["data"] for row in job.metrics()]
    assert any("actor/kl_loss" in row for row in metrics)
    validated = [row[VALIDATED] for row in metrics if VALIDATED in row]
    assert validated == [0, 4, 6]
