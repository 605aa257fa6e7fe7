# SPDX-License-Identifier: Apache-2.0
"""The same pipeline, written a second time with simpy and without our scheduling, as a reference.

Engines advance step by step, one token per response, instead of in virtual time; batches are trained in
prompt order, on one pool for training and log-probs. Only the draws of the responses are shared.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from recipe.async_pipeline.tools.plan.simulated.draws import Draws, ResponseCost
from recipe.async_pipeline.tools.plan.simulated.trainer import Setting

Steps = Generator[Any, Any, Any]


class Engine:
    """Continuous batching, one step after another."""

    def __init__(self, env: simpy.Environment, setting: Setting) -> None:
        self.env, self.decode = env, setting.profile.decode
        self.running: list[list[Any]] = []
        """[tokens left, event]."""
        self.queue: list[tuple[float, list[Any]]] = []
        self.open = 0
        self.owed_s = 0.0
        """Seconds of reading and loading before the next step."""
        self.wake = env.event()
        env.process(self.loop())

    def ask(self, tokens: int, read_s: float) -> Any:
        done = self.env.event()
        self.queue.append((read_s, [tokens, done]))
        self.open += 1
        self.kick()
        return done

    def stall(self, seconds: float) -> None:
        self.owed_s += seconds
        self.kick()

    def kick(self) -> None:
        if not self.wake.triggered:
            self.wake.succeed()

    def loop(self) -> Steps:
        while True:
            while self.queue and len(self.running) < self.decode.slots:
                read_s, request = self.queue.pop(0)
                self.owed_s += read_s
                self.running.append(request)
            if self.owed_s > 0:
                owed, self.owed_s = self.owed_s, 0.0
                yield self.env.timeout(owed)
                continue
            if not self.running:
                self.wake = self.env.event()
                yield self.wake
                continue
            yield self.env.timeout(self.decode.step_s(len(self.running)))
            for request in self.running:
                request[0] -= 1
                if request[0] == 0:
                    self.open -= 1
                    request[1].succeed()
            self.running = [request for request in self.running if request[0] > 0]


class Pipeline:
    def __init__(self, setting: Setting) -> None:
        self.env = simpy.Environment()
        self.setting, self.profile = setting, setting.profile
        self.draws = Draws(setting.profile, setting.seed)
        self.engines = [Engine(self.env, setting) for _ in range(setting.replicas)]
        steps = setting.steps + 1
        self.finished = [self.env.event() for _ in range(steps)]
        self.served = [self.env.event() for _ in range(steps)]
        self.tokens = [0] * steps
        self.ends_s: list[float] = []

    def run(self) -> list[float]:
        """Return when each step ended."""
        for step in range(1, self.setting.steps + 1):
            self.env.process(self.batch(step))
        last = self.env.process(self.trainer())
        self.env.run(until=last)
        return self.ends_s

    def batch(self, step: int) -> Steps:
        yield self.served[max(0, step - 1 - self.setting.knobs.staleness.max_lag)]
        groups = self.setting.groups
        costs = [a for k in range(groups) for a in self.draws.group((step - 1) * groups + k).answers]
        self.tokens[step] = sum(cost.tokens for cost in costs)
        yield self.env.all_of([self.env.process(self.answer(cost)) for cost in costs])
        self.finished[step].succeed()

    def answer(self, cost: ResponseCost) -> Steps:
        engine = min(self.engines, key=lambda one: one.open)
        read_s = self.profile.decode.prefill_token_s
        for turn, tokens in enumerate(cost.turn_tokens):
            read = cost.prompt_tokens if turn == 0 else self.profile.answers.observation_tokens
            yield engine.ask(tokens, read * read_s)
            if turn < len(cost.tool_s):
                yield self.env.timeout(cost.tool_s[turn])
        yield self.env.timeout(cost.reward_s)

    def trainer(self) -> Steps:
        stages, devices = self.profile.stages, self.setting.devices_of("train")
        assert stages.logp is not None
        yield self.env.timeout(stages.gather.seconds(0, devices))
        self.env.process(self.publish(0))
        for step in range(1, self.setting.steps + 1):
            yield self.finished[step]
            tokens = self.tokens[step]
            for stage, on in ((stages.logp, devices), (stages.advantage, 0), (stages.update, devices)):
                yield self.env.timeout(stage.seconds(tokens, on))
            self.ends_s.append(self.env.now)
            yield self.env.timeout(stages.gather.seconds(0, devices))
            self.env.process(self.publish(step))

    def publish(self, version: int) -> Steps:
        if version:
            yield self.served[version - 1]
        sync = self.profile.sync
        commit_s = sync.load_s if sync.commit_s is None else sync.commit_s
        yield self.env.timeout(sync.transfer_s + sync.load_s - commit_s)
        # A short commit takes no turn.
        turns = [self.engines] if commit_s <= 0.25 else [[engine] for engine in self.engines]
        for engines in turns:
            yield self.env.timeout(commit_s - sync.stall_s)
            for engine in engines:
                engine.stall(sync.stall_s)
            yield self.env.timeout(sync.stall_s)
        self.served[version].succeed()
