# SPDX-License-Identifier: Apache-2.0
"""What to change in a run, in words, each with the number behind it and what it should bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from .advice_model import Advice, Facts, facts_of
from .report_data import RunData

WORTH_IT = 0.05
"""Predicted gains below this are within the spread of measurements, and not worth a sentence."""
FEW_STEPS = 5
"""Fewer say little."""


def _devices(number: int) -> str:
    return f"{number} device{'s' if number > 1 else ''}"


def move_devices(facts: Facts) -> Advice | None:
    """From the pool that can spare them to the one that the rest waits for."""
    model = facts.model
    options = [
        (model.gain(model.bound(devices={a: model.devices[a] - n, b: model.devices[b] + n})), n, a, b)
        for a in model.devices
        for b in model.devices
        for n in range(1, model.devices[a])
        if a != b
    ]
    best = max((gain for gain, *_ in options), default=0.0)
    if best < WORTH_IT:
        return None
    # Of those that are about as good, the smallest change.
    gain, n, a, b = min((o for o in options if o[0] >= best - 0.02), key=lambda o: (o[1], -o[0]))
    role, waited = facts.most_awaited
    finding = f"pool {b} worked {facts.busy(b):.0%} of the time and pool {a} {facts.busy(a):.0%}"
    if role in facts.found.pools[b].roles:
        finding = f"the trainer waited {waited:.0%} of the time for {role}"
    return Advice(
        rule="move_devices",
        finding=finding,
        change=f"move {_devices(n)} from pool {a} to pool {b}",
        gain=gain,
    )


def add_device(facts: Facts) -> Advice | None:
    """Where none can be spared."""
    model = facts.model
    if move_devices(facts) is not None:
        return None
    options = [(model.gain(model.bound(devices={pool: n + 1})), pool) for pool, n in model.devices.items()]
    gain, pool = max(options, default=(0.0, ""))
    if gain < WORTH_IT:
        return None
    return Advice(
        rule="add_device",
        finding=f"pool {pool} worked {facts.busy(pool):.0%} of the time, and no other pool can spare a "
        "device",
        change=f"give pool {pool} one more device than its {model.devices[pool]}",
        gain=gain,
    )


def raise_max_lag(facts: Facts) -> Advice | None:
    """When steps wait for their turn, not for devices."""
    model, now = facts.model, facts.model.max_lag
    best = model.gain(model.bound(loop=False))
    if best < WORTH_IT:
        return None
    wanted = next(
        lag
        for lag in range(now + 1, now + 65)
        if lag == now + 64 or model.gain(model.bound(max_lag=lag)) >= best - 0.02
    )
    return Advice(
        rule="raise_max_lag",
        finding=f"pools worked at most {facts.found.busiest:.0%} of the time, because only {now + 1} "
        f"{'batches' if now else 'batch'} may be under way",
        change=f"set max_lag to {wanted} instead of {now}"
        + (
            "; async_strategy=one_step_off" if wanted == 1 else f"; samples may then be {wanted} versions old"
        ),
        gain=model.gain(model.bound(max_lag=wanted)),
    )


def lower_max_lag(facts: Facts) -> Advice | None:
    """When devices are the limit with fewer batches under way as well."""
    model, now = facts.model, facts.model.max_lag
    pools = model.bound(loop=False)
    enough = next((lag for lag in range(now) if model.loop_s * (now + 1) / (lag + 1) <= 0.9 * pools), None)
    if enough is None or not model.loop_s or move_devices(facts) is not None:
        return None
    mean = fmean(facts.run.lag_mean.y) if facts.run.lag_mean else float(now)
    return Advice(
        rule="lower_max_lag",
        finding=f"samples were {mean:.1f} versions old on average, and the devices are the limit with "
        "fewer batches under way as well",
        change=f"set max_lag to {enough} instead of {now}: fresher samples at the same speed",
    )


def long_tail(facts: Facts) -> Advice | None:
    """When steps wait for their longest answer."""
    run = facts.run
    waited = facts.trainer.get("generate", 0.0)
    if run.strategy == "fully_async" or not run.tail_s or not run.answer_s or waited < 0.15:
        return None
    ratio = fmean(run.tail_s) / fmean(run.answer_s) if fmean(run.answer_s) else 0.0
    gain = facts.model.gain(facts.model.bound(loop=False)) if facts.model.max_lag else None
    if ratio < 2.0:
        return None
    return Advice(
        rule="long_tail",
        finding=f"the longest answer of a step took {ratio:.1f} times as long as a mean one, and the "
        f"trainer waited {waited:.0%} "
        "of the time for generate",
        change="async_strategy=fully_async trains on what is finished instead of waiting for it",
        gain=gain if gain is not None and gain >= WORTH_IT else None,
        at_most=True,
    )


def slow_environment(facts: Facts) -> Advice | None:
    """When generation's devices have nothing to generate, though answers are open."""
    idle = {pool: facts.share(pool, "wait_environment") for pool in facts.found.pools}
    pool, share = max(idle.items(), key=lambda item: item[1])
    if share < 0.15:
        return None
    return Advice(
        rule="slow_environment",
        finding=f"pool {pool} stood idle {share:.0%} of the time while all open answers were with agent "
        "loops, tools or reward functions",
        change="keep more answers open (a larger max_lag or batch), or make what they wait for faster "
        "(rollout.agent.num_workers, reward_concurrency, reward_batch)",
    )


def heavy_weights(facts: Facts) -> Advice | None:
    """When publications take devices from their work."""
    shares = {pool: facts.share(pool, "sync") for pool in facts.found.pools}
    pool, share = max(shares.items(), key=lambda item: item[1])
    if share < 0.05:
        return None
    half = facts.found.pools[pool].seconds["sync"] / 2
    gain = facts.model.gain(facts.model.bound(work={pool: facts.model.work[pool] - half}))
    return Advice(
        rule="heavy_weights",
        finding=f"weight updates took {share:.0%} of pool {pool}'s time",
        change="set sync_every=2, which publishes every other version"
        + (", or stage=device, which shortens the load" if pool != "train" else ""),
        gain=gain if gain >= WORTH_IT else None,
    )


def frequent_validation(facts: Facts) -> Advice | None:
    """When validation takes the rollout's devices."""
    shares = {pool: facts.share(pool, "validation") for pool in facts.found.pools}
    pool, share = max(shares.items(), key=lambda item: item[1])
    if share < 0.10:
        return None
    half = facts.found.pools[pool].seconds["validation"] / 2
    gain = facts.model.gain(facts.model.bound(work={pool: facts.model.work[pool] - half}))
    return Advice(
        rule="frequent_validation",
        finding=f"validation took {share:.0%} of pool {pool}'s time",
        change="double trainer.test_freq, or validate on fewer prompts",
        gain=gain if gain >= WORTH_IT else None,
    )


def pool_of_its_own(facts: Facts) -> Advice | None:
    """When forward passes keep the trainer from training."""
    home, model = facts.run.home, facts.model
    pool = home.get("train", "")
    options = []
    for role in ("ref_logp", "logp"):
        work = (
            facts.found.pools[pool].seconds.get(f"compute_{role}", 0.0)
            if home.get(role) == pool and pool
            else 0.0
        )
        if work:
            apart = max(model.bound(work={pool: model.work[pool] - work}), work)
            options.append((model.gain(apart), role, facts.share(pool, f"compute_{role}")))
    gain, role, share = max(options, default=(0.0, "", 0.0))
    if gain < WORTH_IT:
        return None
    return Advice(
        rule="pool_of_its_own",
        finding=f"{role} took {share:.0%} of the time of the devices that train, which are what the steps "
        "wait for",
        change=f"give {role} a pool of its own with one more device (trainer.v1.async_pipeline.pools)",
        gain=gain,
    )


def slow_reward(facts: Facts) -> Advice | None:
    """When the join is what the trainer waits for."""
    waited = facts.trainer.get("reward", 0.0)
    if waited < 0.10:
        return None
    return Advice(
        rule="slow_reward",
        finding=f"the trainer waited {waited:.0%} of the time for reward, which computes advantages on the "
        "host",
        change="give the trainer's host more CPU cores, or take smaller batches",
        gain=waited / (1 - waited) if waited < 1 else None,
        at_most=True,
    )


_REMEDIES = {
    "filtered": "prompts whose answers all score alike teach nothing; leave out those that are too easy or "
    "too hard",
    "expired": "stale=resume answers them again from what they have, and a larger max_lag lets them finish",
    "failed": "their answers could not be scored; see reward_timeout_s and reward_failure, and the run's log",
}


def not_trained(facts: Facts) -> Advice | None:
    """When what was generated was not trained on."""
    fates = facts.run.fates
    drawn, lost = sum(fates.values()), {fate: fates.get(fate, 0) for fate in _REMEDIES}
    share = sum(lost.values()) / drawn if drawn else 0.0
    if share < 0.10:
        return None
    fate = max(lost, key=lambda name: lost[name])
    pool = facts.run.home.get("generate", "")
    spent = (
        facts.found.pools[pool].seconds.get("compute_generate", 0.0) * share
        if pool in facts.found.pools
        else 0.0
    )
    return Advice(
        rule="not_trained",
        finding=f"{share:.0%} of the groups that were drawn were not trained ({lost[fate]} {fate}), about "
        f"{spent:,.0f} device-seconds of generation",
        change=_REMEDIES[fate],
    )


def far_off_policy(facts: Facts) -> Advice | None:
    """When importance weights leave little of a batch."""
    ess = facts.run.ess
    if ess is None or ess >= 0.8 or not facts.model.max_lag:
        return None
    return Advice(
        rule="far_off_policy",
        finding=f"importance weights left {ess:.0%} of a batch's samples effective",
        change=f"lower max_lag (now {facts.model.max_lag}) or the learning rate, or truncate the weights "
        "(algorithm.rollout_correction)",
    )


def long_start(facts: Facts) -> Advice | None:
    """When most of the run was coming up."""
    whole = facts.run.accounting
    if whole is None or (share := 1 - whole.steady_s / whole.wall_s) < 0.3:
        return None
    return Advice(
        rule="long_start",
        finding=f"{share:.0%} of the run was start-up, {whole.wall_s - whole.steady_s:,.0f} s before the "
        "first version was served",
        change="train more steps in one run: start-up is paid once",
    )


RULES: Sequence[Callable[[Facts], Advice | None]] = (
    move_devices,
    add_device,
    raise_max_lag,
    long_tail,
    pool_of_its_own,
    slow_environment,
    slow_reward,
    heavy_weights,
    frequent_validation,
    not_trained,
    far_off_policy,
    lower_max_lag,
    long_start,
)


def advise(run: RunData) -> list[Advice]:
    """What to change, the largest predicted gain first. Empty: nothing stands out, or the run says too
    little.
    """
    facts = facts_of(run)
    if facts is None or run.accounting is None or len(run.accounting.steps) < FEW_STEPS:
        return []
    found = [advice for rule in RULES if (advice := rule(facts)) is not None]
    return sorted(found, key=lambda advice: -(advice.gain or 0.0))
