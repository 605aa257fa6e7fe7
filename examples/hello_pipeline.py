# SPDX-License-Identifier: Apache-2.0
"""The pipeline without a model: the real stages, queue and strategies over work that only takes time.

    python examples/hello_pipeline.py

Needs Python alone, no installation. Each strategy trains the same 48 prompts in 12 steps, with the same
lengths of responses; time is virtual, so it takes no time. What a real run adds is the trainer below: verl's
workers compute there what this one only waits for.
"""

import asyncio
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipe.async_pipeline.core.flow import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.items import (
    Group,
    Prompt,
    PromptBatch,
    Publication,
    StepBatch,
    Trajectory,
)
from recipe.async_pipeline.core.lag.degradation import Caution
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.strategies import FullyAsync, NStepAhead, OneStepOff, OnPolicy

STEPS, BATCH = 12, 4
SECONDS = {"logp": 0.25, "ref_logp": 0.25, "update": 0.75, "gather": 0.125, "publish": 0.25}
WIDTH = 64  # columns of a lane


class HelloTrainer:
    """Does what the stages ask for, in virtual time. A real one calls verl's workers instead."""

    wait_timeout_s = 1000.0
    caution = Caution()
    resumed = None
    facts = {}

    def __init__(self, schedule):
        self.schedule = schedule
        self.lengths = random.Random(7)
        self.drawn = self.served = 0

    def roles(self):
        return "dataloader", "generate", "rollout", "logp", "ref_logp", "reward", "train", "param_update"

    def pools(self):
        return {"train": 1, "generate": 1}

    def pool_of(self, role):
        if role == "generate":
            return "generate"
        return "train" if role in ("logp", "ref_logp", "train", "param_update") else None

    async def draw_prompts(self, admission):
        """Draw as many prompts as the strategy admits; each response has its own length in seconds."""
        numbers = range(self.drawn, self.drawn + admission.prompts)
        self.drawn += admission.prompts
        prompts = tuple(
            Prompt(uid=f"prompt-{n}", step=n // BATCH + 1, payload=0.5 + self.lengths.expovariate(1.0))
            for n in numbers
        )
        return PromptBatch(step=admission.step, prompts=prompts, admitted_version=admission.version)

    async def generate_group(self, prompt, recall):
        """Generate; weights that arrive meanwhile continue the response."""
        first = self.served
        await asyncio.sleep(prompt.payload)
        response = Trajectory(key=prompt.uid, first_version=first, last_version=self.served, num_tokens=1)
        return Group(uid=prompt.uid, step=prompt.step, trajectories=(response,))

    def rejects(self, group):
        return None

    async def assemble(self, step, groups):
        return StepBatch(step=step, groups=tuple(groups))

    async def compute_log_probs(self, batch):
        return await self._work("logp", batch)

    async def compute_ref_log_probs(self, batch):
        return await self._work("ref_logp", batch)

    async def compute_advantages(self, batch):
        return batch

    async def update(self, batch):
        return await self._work("update", batch)

    async def finish_step(self, batch, facts):
        pass

    async def gather(self, version):
        return await self._work("gather", version)

    async def publish(self, version, snapshot):
        await self._work("publish", version)
        self.served = version
        return Publication(version=version, num_bytes=0, gather_s=SECONDS["gather"], replicas=1)

    async def validate(self, version):
        return None

    async def watch(self):
        pass

    async def _work(self, name, item):
        await asyncio.sleep(SECONDS[name])
        return item


def lane(records, role, seconds_per_column):
    """Return a line with a mark wherever a stage was running."""
    row, since = [" "] * WIDTH, None
    for record in records:
        if record.role != role or record.state is None:
            continue
        if record.state == "RUNNING" and since is None:
            since = record.t
        elif record.state != "RUNNING" and since is not None:
            first, last = (min(int(t / seconds_per_column), WIDTH - 1) for t in (since, record.t))
            row[first : last + 1] = "#" * (last + 1 - first)
            since = None
    return "".join(row)


def run(schedule, *, stages=()):
    """Run a schedule to its end; return the flow, its result and its virtual seconds.

    `stages`: custom ones, each with the two stages that it is inserted between.
    """
    flow = AsyncTrainingFlow(HelloTrainer(schedule))
    for name, after, before in stages:
        flow.insert(name, after=after, before=before)
    result = run_virtual(flow.run())
    return flow, result, flow.log.records[-1].t


def show(name, flow, result, seconds, compared_with):
    """Print what a strategy did; `compared_with`: the seconds of on-policy."""
    print(
        f"\n{name}: {seconds:.1f} s, {compared_with / seconds:.2f} times as fast as on-policy; "
        f"lag {result.lag_max} of at most {flow.max_lag}; "
        f"{result.groups_trained} of {result.groups_drawn} prompts trained"
    )
    for role in ("generate", "train", "param_update"):
        print(f"  {role:>12} |{lane(flow.log.records, role, compared_with / WIDTH)}|")


def main():
    print(f"{STEPS} steps of {BATCH} prompts. A response takes 0.5 s and more; a step trains for 1.25 s.")
    compared_with = None
    for strategy, max_lag in ((OnPolicy, 0), (OneStepOff, 1), (NStepAhead, 3), (FullyAsync, 3)):
        flow, result, seconds = run(strategy(batch=BATCH, last_step=STEPS, max_lag=max_lag))
        compared_with = compared_with or seconds
        show(strategy.__name__, flow, result, seconds, compared_with)


if __name__ == "__main__":
    main()
