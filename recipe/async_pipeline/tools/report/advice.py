# SPDX-License-Identifier: Apache-2.0
"""Advise on what to change in a run: one rule per function, each with its measurement and predicted gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from .advice_model import Advice, Facts, facts_of
from .figures.data import RunData

WORTH_IT = 0.05
"""Smallest predicted gain to report; smaller ones are within the spread of measurements."""
FEW_STEPS = 5
"""Least number of steps to base advice on."""


def _devices(number: int) -> str:
    return f"{number} device{'s' if number > 1 else ''}"


def move_devices(facts: Facts) -> Advice | None:
    """Move devices from a pool that can spare them to the pool that limits the step."""
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

    # Among options of about the same gain, take the smallest change.
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
    """Add a device to the pool that limits the step if no other pool can spare one."""
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
        change=f"increase pool {pool} from {_devices(model.devices[pool])} to {model.devices[pool] + 1}",
        gain=gain,
    )


def raise_max_lag(facts: Facts) -> Advice | None:
    """Raise max_lag if steps wait for earlier batches, not for devices."""
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
        f"{'batches' if now else 'batch'} may be in flight",
        change=f"set max_lag to {wanted} instead of {now}"
        + (
            "; async_strategy=one_step_off" if wanted == 1 else f"; samples may then be {wanted} versions old"
        ),
        gain=model.gain(model.bound(max_lag=wanted)),
    )


def lower_max_lag(facts: Facts) -> Advice | None:
    """Lower max_lag if devices stay the limit with fewer batches in flight."""
    model, now = facts.model, facts.model.max_lag
    pools = model.bound(loop=False)
    enough = next((lag for lag in range(now) if model.loop_s(lag) <= 0.9 * pools), None)
    if enough is None or not model.loop_s() or move_devices(facts) is not None:
        return None

    mean = fmean(facts.run.lag_mean.y) if facts.run.lag_mean else float(now)
    return Advice(
        rule="lower_max_lag",
        finding=f"samples were {mean:.1f} versions old on average, and the devices would stay the limit "
        "with fewer batches in flight",
        change=f"set max_lag to {enough} instead of {now}: fresher samples at the same speed",
    )


def long_tail(facts: Facts) -> Advice | None:
    """Change the strategy if steps wait for their longest response."""
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
        finding=f"the longest response of a step took {ratio:.1f} times as long as the mean response, and "
        f"the trainer waited {waited:.0%} of the time for generate",
        change="set async_strategy=fully_async, which trains on finished groups without waiting for others",
        gain=gain if gain is not None and gain >= WORTH_IT else None,
        at_most=True,
    )


def slow_environment(facts: Facts) -> Advice | None:
    """Keep more responses open if the rollout's devices are idle while agent loops or tools are busy."""
    pool, share = _largest_share(facts, "wait_environment")
    if share < 0.15:
        return None

    return Advice(
        rule="slow_environment",
        finding=f"pool {pool} was idle {share:.0%} of the time while all open responses were in agent "
        "loops, tools or reward functions",
        change="keep more responses open (a larger max_lag or batch), or speed up agent loops and rewards "
        "(rollout.agent.num_workers, reward.concurrency, reward.batch)",
    )


def heavy_weights(facts: Facts) -> Advice | None:
    """Update weights less often if updates take much of a pool's time."""
    pool, share = _largest_share(facts, "sync")
    if share < 0.05:
        return None

    return Advice(
        rule="heavy_weights",
        finding=f"weight updates took {share:.0%} of pool {pool}'s time",
        change="set weight_sync.every=2, which publishes every other version"
        + (", or weight_sync.load_staging=device, which shortens the load" if pool != "train" else ""),
        gain=_gain_of_half(facts, pool, "sync"),
    )


def frequent_validation(facts: Facts) -> Advice | None:
    """Validate less often if validation takes much of a pool's time."""
    pool, share = _largest_share(facts, "validation")
    if share < 0.10:
        return None

    return Advice(
        rule="frequent_validation",
        finding=f"validation took {share:.0%} of pool {pool}'s time",
        change="double trainer.test_freq, or validate on fewer prompts",
        gain=_gain_of_half(facts, pool, "validation"),
    )


def _largest_share(facts: Facts, reason: str) -> tuple[str, float]:
    """Return the pool that spends the largest share of its time for this reason, and the share."""
    shares = {pool: facts.share(pool, reason) for pool in facts.found.pools}
    return max(shares.items(), key=lambda item: item[1])


def _gain_of_half(facts: Facts, pool: str, reason: str) -> float | None:
    """Return what is gained if the pool spends half as much time for this reason; None if that is little."""
    half = facts.found.pools[pool].seconds[reason] / 2
    gain = facts.model.gain(facts.model.bound(work={pool: facts.model.work[pool] - half}))
    return gain if gain >= WORTH_IT else None


def separate_pool(facts: Facts) -> Advice | None:
    """Move log-probs to a separate pool if forward passes limit the pool that trains."""
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
        rule="pool_of_its_own",  # the name in --json
        finding=f"{role} took {share:.0%} of the time of the devices that train, and these devices limit "
        "the step time",
        change=f"move {role} to a separate pool with one more device (trainer.v1.async_pipeline.pools)",
        gain=gain,
    )


def slow_reward(facts: Facts) -> Advice | None:
    """Speed up the reward stage if the trainer waits for it."""
    waited = facts.trainer.get("reward", 0.0)
    if waited < 0.10:
        return None

    return Advice(
        rule="slow_reward",
        finding=f"the trainer waited {waited:.0%} of the time for reward, which computes advantages on the "
        "host",
        change="give the trainer's host more CPU cores, or use smaller batches",
        gain=waited / (1 - waited) if waited < 1 else None,
        at_most=True,
    )


_REMEDIES = {
    "filtered": "remove prompts that are too easy or too hard: equal scores within a group give no gradient",
    "expired": "set staleness.straggler=regenerate to continue expired groups, or raise staleness.max_lag",
    "failed": "fix the scoring of these groups; see reward.timeout_s, reward.failure and the log of the run",
}


def not_trained(facts: Facts) -> Advice | None:
    """Name the main reason for lost groups if many groups are not trained."""
    fates = facts.run.fates
    drawn, lost = sum(fates.values()), {fate: fates.get(fate, 0) for fate in _REMEDIES}
    share = sum(lost.values()) / drawn if drawn else 0.0
    if share < 0.10:
        return None

    fate = max(lost, key=lambda name: lost[name])
    pool = facts.run.home.get("generate", "")
    spent = 0.0
    if pool in facts.found.pools:
        spent = facts.found.pools[pool].seconds.get("compute_generate", 0.0) * share

    return Advice(
        rule="not_trained",
        finding=f"{share:.0%} of the drawn groups were not trained ({lost[fate]} {fate}), about "
        f"{spent:,.0f} device-seconds of generation",
        change=_REMEDIES[fate],
    )


def far_off_policy(facts: Facts) -> Advice | None:
    """Lower max_lag if importance weights reduce the effective sample size."""
    ess = facts.run.ess
    if ess is None or ess >= 0.8 or not facts.model.max_lag:
        return None
    return Advice(
        rule="far_off_policy",
        finding=f"importance weights reduced the effective sample size of a batch to {ess:.0%}",
        change=f"lower max_lag (now {facts.model.max_lag}) or the learning rate, or truncate the weights "
        "(algorithm.rollout_correction)",
    )


def long_start(facts: Facts) -> Advice | None:
    """Train longer if start-up took much of the run."""
    whole = facts.run.accounting
    if whole is None or (share := 1 - whole.steady_s / whole.wall_s) < 0.3:
        return None
    return Advice(
        rule="long_start",
        finding=f"{share:.0%} of the run was start-up, {whole.wall_s - whole.steady_s:,.0f} s before the "
        "first version was served",
        change="train more steps in one run, since start-up happens once",
    )


RULES: Sequence[Callable[[Facts], Advice | None]] = (
    move_devices,
    add_device,
    raise_max_lag,
    long_tail,
    separate_pool,
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
    """Return the advice for a run, largest predicted gain first; empty if no rule applies to its data."""
    facts = facts_of(run)
    if facts is None or run.accounting is None or len(run.accounting.steps) < FEW_STEPS:
        return []
    found = [advice for rule in RULES if (advice := rule(facts)) is not None]
    return sorted(found, key=lambda advice: -(advice.gain or 0.0))
