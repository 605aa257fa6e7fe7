# SPDX-License-Identifier: Apache-2.0
"""Whole jobs with stages on separate devices: which overlap, and that it changes no result."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from recipe.async_pipeline.lab.gpu_kit.ladder import LOOP
from tests import FAKES
from tests.e2e.conftest import StartNodes
from tests.e2e.job import (
    Event,
    Job,
    check_clean_end,
    check_events,
    check_reference_returned,
    kill_reference,
    run_job,
    smoke_command,
)
from tests.e2e.weights import assert_same_weights

pytestmark = pytest.mark.e2e

LAYOUTS: Mapping[str, tuple[int, tuple[str, ...], Mapping[str, str]]] = {
    "shared": (2, ("+trainer.use_nodes_ratios=[0.5,0.5,0.5,0.5]",), {}),
    "apart": (
        4,
        ("+trainer.use_nodes_ratios=[0.25,0.25,0.25,0.25]",),
        {"logp": "logp", "ref_logp": "ref_logp"},
    ),
}
"""Devices, what says the layout, and the pool of each role that does not share the training devices."""
LR = "actor_rollout_ref.actor.optim.lr=6.0e-4"
COMPARED = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean")


def run_layout(
    name: str,
    strategy: str,
    steps: int,
    task: Path,
    folder: Path,
    *overrides: str,
    events: Sequence[Event] = (),
) -> Job:
    devices, layout, _ = LAYOUTS[name]
    folder.mkdir(exist_ok=True)
    return run_job(
        smoke_command(
            f"async_strategy={strategy}",
            *layout,
            # Of all devices, the rollout is given one; the layout shares them out again.
            f"trainer.n_gpus_per_node={devices - 1}",
            f"ray_kwargs.ray_init.num_gpus={devices}",
            "actor_rollout_ref.actor.use_kl_loss=true",
            f"trainer.total_training_steps={steps}",
            f"trainer.v1.async_pipeline.run_dir={folder / 'run'}",
            *overrides,
        ),
        folder / "run",
        task,
        events=events,
    )


def moments(job: Job) -> Iterator[tuple[float, set[str], set[str]]]:
    """Between two events: seconds, the roles that compute and the roles that hold a lease."""
    running: dict[tuple[str, int], str] = {}
    leases: set[tuple[str, int]] = set()
    last = 0.0
    for event in job.events():
        yield (
            event["t"] - last,
            {role for (role, _), state in running.items() if state == "RUNNING"},
            {role for role, _ in leases},
        )
        last = event["t"]
        lane = (event["role"], event.get("lane", 0))
        running[lane] = event.get("state", running.get(lane, ""))
        if event["event"] == "LEASE":
            leases.add(lane)
        elif event["event"] in ("RELEASE", "FINISH", "STOP", "FAIL"):
            leases.discard(lane)


def check_pools(job: Job, apart: Mapping[str, str]) -> None:
    """Never two leases on one pool."""
    for _, _, holders in moments(job):
        for pool in {"train", *apart.values()}:
            here = {
                role
                for role in ("logp", "ref_logp", "train", "param_update")
                if apart.get(role, "train") == pool
            }
            assert len(holders & here) <= 1, (pool, holders)


def test_on_separate_pools_any_two_compute_at_once(
    tied_task: Path, tmp_path: Path, nodes: StartNodes
) -> None:
    """The replica is on another node, so its weights are sent; the three pools of the first node read them
    in place.
    """
    steps = 10
    job = run_layout(
        "apart",
        "n_step_ahead",
        steps,
        tied_task,
        tmp_path,
        "trainer.v1.async_pipeline.training.ref_refresh_every=4",
        *nodes(tied_task, 3, 1).overrides,
    )
    check_clean_end(job, "n_step_ahead", 3, steps)
    check_events(job, "ref_logp")
    check_pools(job, LAYOUTS["apart"][2])
    seen = list(moments(job))
    for two in itertools.combinations(("logp", "ref_logp", "train", "generate"), 2):
        # All four at once too, as a rule; but that is for the lengths of their work to say.
        assert sum(s for s, computing, _ in seen if set(two) <= computing) > 0, two
    rows = [row["data"] for row in job.metrics() if "actor/pg_loss" in row["data"]]
    assert [row["async_pipeline/version/old_logp"] for row in rows] == [
        max(0, step - 2) for step in range(1, steps + 1)
    ]
    assert [row.get("async_pipeline/version/ref_logp") for row in rows] == [None] * 4 + [4] * 4 + [8] * 2
    # Right after a refresh, reference and policy are one.
    kls = [abs(row["actor/kl_loss"]) for row in rows]
    assert kls[0] < 1e-5 and kls[4] < 1e-5 and kls[8] < 1e-5
    assert kls[3] > 1e-4 and kls[7] > 1e-4


ADAPTERS = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.rollout.load_format=auto",
    "actor_rollout_ref.actor.optim.lr=3.0e-3",
)
"""Published without their base. A pool for logp gets them, the reference is the base."""


def make_adapters(task: Path, folder: Path) -> Path:
    """Save adapters that already change the policy: fresh ones differ from job to job."""
    base = AutoModelForCausalLM.from_pretrained(task / "model")
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if ".lora_" in name:
                values.copy_(torch.randn(values.shape, generator=chance) * 0.02)
    model.save_pretrained(str(folder))
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("trained", ["whole", "adapters"])
def test_the_layout_changes_no_result(tied_task: Path, tmp_path: Path, trained: str) -> None:
    """With seeded answers, and old log-probs of the trainer's own version wherever they are computed.

    Nor does the death of a refreshed reference, two versions after its own, which memory no longer holds.
    """
    steps, refresh = 8, 4
    more: tuple[str, ...] = (LR, f"trainer.v1.async_pipeline.training.ref_refresh_every={refresh}")
    if trained == "adapters":
        path = make_adapters(tied_task, tmp_path / "adapters")
        more = (*ADAPTERS, f"actor_rollout_ref.model.lora_adapter_path={path}")
    agents = tmp_path / "agents.json"
    agents.write_text(json.dumps([{"name": "seeded", "_target_": LOOP}]))
    seeded = (
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
        "trainer.v1.async_pipeline.training.old_logp=trainer",
        # Its weights hold the engine's log-probs, whose last bits depend on what else is in a batch.
        "algorithm.rollout_correction.rollout_is=null",
        *more,
    )
    losses, references = {}, []
    for name, (_, _, apart) in LAYOUTS.items():
        folder = tmp_path / name
        saves = ("trainer.save_freq=6", f"trainer.default_local_dir={folder / 'checkpoints'}")
        dies = trained == "whole" and name == "apart"
        kill = [Event(f" {refresh + 2}/{steps} ", kill_reference(folder / "run"))] if dies else []
        job = run_layout(name, "on_policy", steps, tied_task, folder, *seeded, *saves, events=kill)
        check_clean_end(job, "on_policy", 0, steps)
        check_events(job, "ref_logp")
        check_pools(job, apart)
        if dies:
            check_reference_returned(job)
        rows = [row["data"] for row in job.metrics() if "actor/pg_loss" in row["data"]]
        assert [row["async_pipeline/version/old_logp"] for row in rows] == list(range(steps))
        if trained == "whole":
            checkpoint = folder / "checkpoints" / "global_step_6"
            references.append(load_file(checkpoint / "reference" / "rank_0_of_1.safetensors"))
        assert max(abs(row["rollout_corr/kl"]) for row in rows) < 0.005
        losses[name] = [{metric: float(row[metric]) for metric in COMPARED} for row in rows]
    # The reference is not the trained policy, also where it is that model without its adapters.
    kls = [row["actor/kl_loss"] for row in losses["shared"]]
    assert kls[-1] > 1e-4
    assert (kls[0] > 1e-4) == (trained == "adapters")
    for step, (found, wanted) in enumerate(zip(losses["apart"], losses["shared"], strict=True), start=1):
        assert found == pytest.approx(wanted, abs=1e-5, rel=1e-5), step
    if references:
        assert_same_weights(*references)


@pytest.mark.nightly
def test_a_reward_model_scores_on_its_own_devices(tied_task: Path, tmp_path: Path) -> None:
    """A generative one, which the reward function asks for every answer while others are generated."""
    functions = FAKES / "reward_functions.py"
    model = "reward.reward_model"
    job = run_job(
        smoke_command(
            f"reward.custom_reward_function.path={functions}",
            "reward.custom_reward_function.name=judged",
            f"{model}.enable=true",
            f"{model}.enable_resource_pool=true",
            "ray_kwargs.ray_init.num_gpus=3",
            "trainer.total_training_steps=4",
            "trainer.test_freq=4",
            f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
        ),
        tmp_path / "run",
        tied_task,
    )
    summary = check_clean_end(job, "one_step_off", 1, 4)
    assert summary["reward_first"] >= 0.5
    judged = [
        value
        for row in job.metrics()
        for name, value in row["data"].items()
        if "judge_characters" in name and "mean" in name
    ]
    assert judged and min(judged) >= 1


@pytest.mark.nightly
def test_ppo_learns_with_its_own_critic(tied_task: Path, tmp_path: Path) -> None:
    """GAE, one batch ahead, the critic on its own devices and alone in the first step; scores once a
    batch is generated.
    """
    steps = 40
    pools = "{{{}}}".format(
        ",".join(f"{role}:{{roles:[{role}],devices:1}}" for role in ("train", "critic", "generate"))
    )
    job = run_job(
        smoke_command(
            "algorithm.adv_estimator=gae",
            "trainer.critic_warmup=2",
            "trainer.v1.async_pipeline.reward.while_generating=false",
            f"trainer.v1.async_pipeline.pools={pools}",
            "trainer.n_gpus_per_node=2",
            "ray_kwargs.ray_init.num_gpus=3",
            f"trainer.total_training_steps={steps}",
            f"trainer.v1.async_pipeline.run_dir={tmp_path / 'run'}",
        ),
        tmp_path / "run",
        tied_task,
    )
    summary = check_clean_end(job, "one_step_off", 1, steps)
    check_events(job, "values", "critic")
    assert sum(s for s, computing, _ in moments(job) if {"critic", "train"} <= computing) > 0
    rows = [row["data"] for row in job.metrics() if "critic/vf_loss" in row["data"]]
    assert len(rows) == steps
    assert ["actor/pg_loss" in row for row in rows[:3]] == [False, True, True]
    assert all(row["timing_s/reward"] > 0 for row in rows)
    assert min(row["critic/vf_loss"] for row in rows[:10]) < 0.6 * rows[0]["critic/vf_loss"]
    assert summary["reward_last"] > summary["reward_first"] + 0.1


@pytest.mark.nightly
def test_a_reference_takes_published_adapters(tied_task: Path, tmp_path: Path) -> None:
    """At first it is the base; right after a refresh, reference and policy are one. New workers get the
    refreshed one.
    """
    refresh = "trainer.v1.async_pipeline.training.ref_refresh_every=5"
    kill = Event(" 7/10 ", kill_reference(tmp_path / "run"))
    job = run_layout("apart", "one_step_off", 10, tied_task, tmp_path, refresh, *ADAPTERS, events=[kill])
    check_clean_end(job, "one_step_off", 1, 10)
    check_pools(job, LAYOUTS["apart"][2])
    check_reference_returned(job)
    rows = [row["data"] for row in job.metrics() if "actor/pg_loss" in row["data"]]
    assert [row.get("async_pipeline/version/ref_logp") for row in rows] == [None] * 5 + [5] * 5
    kls = [abs(row["actor/kl_loss"]) for row in rows]
    assert kls[0] < 1e-5 and kls[5] < 1e-5
    assert kls[4] > 1e-4 and kls[9] > 1e-4
