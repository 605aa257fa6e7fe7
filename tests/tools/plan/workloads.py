# SPDX-License-Identifier: Apache-2.0
"""Profiles and settings for tests: simple enough to compute by hand, or random."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from recipe.async_pipeline.config.placement import Placement, Pool
from recipe.async_pipeline.tools.plan.distribution import Lognormal
from recipe.async_pipeline.tools.plan.layout import knobs_of
from recipe.async_pipeline.tools.plan.profile import Answers, Batch, Decode, Profile, Stage, Stages, Sync
from recipe.async_pipeline.tools.plan.simulated.trainer import Setting


def profile(**changes: Any) -> Profile:
    """Four prompts x 2 responses of 10 tokens; a token takes 0.1 s at any load, training 0.5 s."""
    facts: dict[str, Any] = {
        "origin": "assumed",
        "note": "for tests",
        "batch": Batch(groups=4, answers=2),
        "answers": Answers(tokens=10.0),
        "decode": Decode(token_s=(0.1,), slots=64),
        "stages": Stages(update=Stage(fixed_s=0.5)),
        "devices_per_node": 1024,
    }
    return Profile(**facts | changes)


def two_pools(profile: Profile, train: int, generate: int) -> Placement:
    roles = tuple(role for role in profile.roles() if role != "generate")
    return Placement((Pool("train", roles, (train,)), Pool("generate", ("generate",), (generate,))))


def setting(
    of: Profile,
    strategy: str = "on_policy",
    *,
    train: int = 1,
    generate: int = 2,
    steps: int = 16,
    seed: int = 1,
    **knobs: Any,
) -> Setting:
    groups = of.batch.on(train + generate)
    return Setting(
        profile=of,
        placement=two_pools(of, train, generate),
        knobs=knobs_of(strategy, **knobs),
        groups=groups,
        steps=steps,
        seed=seed,
    )


def random_profile(seed: int) -> Profile:
    """Without a reference policy, whose place in the queue for training devices the reference model lacks."""
    chance = random.Random(seed)
    median = chance.uniform(20, 200)
    load_s, share = chance.uniform(0.0, 1.0), (0.2, 1.0)[seed % 2]
    return profile(
        batch=Batch(groups=chance.randint(4, 12), answers=chance.choice([1, 2, 4])),
        answers=Answers(
            tokens=Lognormal(median=median, sigma=chance.uniform(0.2, 1.0), cap=8 * median),
            prompt_share=chance.random(),
            prompt_tokens=chance.uniform(0, 100),
            turns=float(chance.choice([1, 1, 3])),
            observation_tokens=chance.uniform(0, 20),
            tool_s=Lognormal(median=0.5, sigma=0.5, cap=4.0),
            reward_s=chance.uniform(0.0, 2.0),
        ),
        decode=Decode(
            concurrency=(1, 8),
            token_s=(0.02, 0.02 + chance.uniform(0.0, 0.03)),
            prefill_token_s=chance.uniform(0, 1e-3),
            slots=chance.choice([4, 64]),
        ),
        stages=Stages(
            update=Stage(fixed_s=chance.uniform(0.5, 6.0), token_s=chance.uniform(0, 1e-3)),
            logp=Stage(fixed_s=chance.uniform(0.1, 2.0)),
            advantage=Stage(fixed_s=chance.uniform(0.0, 0.2)),
            gather=Stage(fixed_s=chance.uniform(0.0, 0.5)),
        ),
        sync=Sync(
            transfer_s=chance.uniform(0, 0.5),
            load_s=load_s,
            commit_s=load_s * share,
            stall_s=load_s * share * chance.random(),
        ),
    )


LONG_TAIL = profile(
    batch=Batch(groups_per_device=2.0, answers=8),
    answers=Answers(tokens=Lognormal(median=1000, sigma=1.0, cap=16_000), prompt_share=0.5),
    decode=Decode(concurrency=(1, 128), token_s=(0.01, 0.02), slots=512),
    stages=Stages(update=Stage(fixed_s=0.5, token_s=1e-3), logp=Stage(fixed_s=0.2, token_s=2e-4)),
    sync=Sync(transfer_s=0.1, load_s=0.2, stall_s=0.1, switch_s=2.0),
    devices_per_node=8,
)


TRAINING = msgspec.structs.replace(
    LONG_TAIL,
    answers=Answers(tokens=Lognormal(median=100, sigma=0.2, cap=200)),
    stages=Stages(update=Stage(token_s=0.011)),
    sync=Sync(),
)
"""Generation is about a tenth of a synchronous step."""
