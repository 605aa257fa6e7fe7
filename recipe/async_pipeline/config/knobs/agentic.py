# SPDX-License-Identifier: Apache-2.0
"""The knobs of episodes of agents; a section of `schema`."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal

from ...agents.environment import Isolation
from ...agents.episodes import EndPolicies
from ...agents.runners import is_function
from ...core.groups.bad_data import is_finite
from ...errors import ConfigError
from ..paths import OWN, select
from .fields import LONGEST_S, Bounds, Limit, Positive, Seconds, check_fields

AGENT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
VERLS_AGENT_LOOP, ENVIRONMENT_LOOP, AGENT_LOOP_OF_AGENTS = "single_turn_agent", "environment", "agent_session"
"""verl's default, and the agent loops of `AgenticConfig.environment` and `AgenticConfig.agent`."""
EXTERNAL = "external"
"""The agent of which programs outside of the run claim the tasks."""
MAX_UNIX_DIR = 80
"""Bytes; Linux allows 107 for the path of a Unix socket, of which the name of the file takes some."""
OF_BOTH = ("max_turns", "concurrency", "failure_reward", "turn_rewards")
"""Knobs that have an effect only with `environment` or `agent`."""
OF_ENVIRONMENTS = (
    "environment_kwargs",
    "max_turn_tokens",
    "isolation",
    "env_timeout_s",
)
"""Knobs that have an effect only with `environment`."""
OF_POLICY = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
"""Environment variables by which a command reaches the policy."""
OF_AGENTS = ("agent_env", "verify", "sandbox", "sandbox_hidden", "gateway")
"""Knobs that have an effect only with `agent`."""


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The HTTP server of each agent loop worker, through which agents reach the policy. It listens on a free
    port."""

    PATH: ClassVar[str] = f"{OWN}.agentic.gateway"
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        "host",
        "lease_s",
        "runners_dir",
        "unix_dir",
    )
    """Knobs that a resumed run may have with other values; see `fields`."""

    host: str = "127.0.0.1"
    """The address that it listens on. With another one than 127.0.0.1, such as 0.0.0.0 for all addresses of
    the host, agents on other hosts reach it too, and so does all else there: each request requires the key of
    an episode, but travels unencrypted (docs/security.md)."""
    max_chains: Positive | None = None
    """Conversations of one episode: an agent that edits, summarises or branches its history begins another
    one, and each is a row of training. Further ones are refused. Default: `max_turns`, because some agents
    begin one with each turn."""
    main_model: str | None = None
    """The `model` name of requests that belong to the main conversation, which is scored. Default: the one of
    the first request, and only conversations that have something in common with its messages
    (docs/agents.md)."""
    auxiliary: Literal["train", "drop"] = "train"
    """Whether other conversations, such as one that finds a title, are rows of training with the score of the
    main one (train), or are left out (drop)."""
    agent_may_reward: bool = False
    """Give the agent the control key of its session too, with which it sets its reward and ends its episode
    (docs/agents.md). What the agent runs, or what the policy makes it do, can then set the reward, unless
    `verify` gives it."""
    lease_s: Annotated[float, Bounds(least=1, most=LONGEST_S, remedy="60 is the default")] = 60.0
    """With agent=external: seconds after which a runner that has not renewed its lease counts as dead. Its
    episode ends as agent_failed."""
    runners_dir: str | None = None
    """With agent=external, which requires it: a folder in which each agent loop worker writes a file with its
    address and the key by which runners claim tasks."""
    unix_dir: str | None = None
    """A folder in which each agent loop worker also listens on a Unix socket, for agents in containers that
    have no network (docs/agents.md). Default: no Unix sockets."""

    def __post_init__(self) -> None:
        check_fields(self, self.PATH)
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            raise ConfigError(
                f"{self.PATH}.host must be an address of this host, such as 127.0.0.1 or 0.0.0.0, got "
                f"{self.host!r}; names are not resolved, because each host has its own"
            ) from None
        if self.unix_dir is not None and len(os.fsencode(os.path.abspath(self.unix_dir))) > MAX_UNIX_DIR:
            raise ConfigError(
                f"{self.PATH}.unix_dir must have at most {MAX_UNIX_DIR} bytes as an absolute path, got "
                f"{self.unix_dir!r}; name a shorter one, such as /tmp/agents"
            )


@dataclass(frozen=True, kw_only=True)
class AgenticConfig:
    """Episodes of agents with tools and several turns: their deadline, and what happens if one fails."""

    PATH: ClassVar[str] = f"{OWN}.agentic"
    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        "agent_env",
        "sandbox",
        "sandbox_hidden",
        "isolation",
        "concurrency",
        "env_timeout_s",
        "tool_timeout_s",
        "attempts",
        "episode_timeout_s",
        "ends",
    )
    """Knobs that a resumed run may have with other values; see `fields`."""

    environment: str | None = None
    """Play each response as an episode in this environment, with the agent loop `environment`: frozen_lake,
    an id of gymnasium, the URL of a server of OpenEnv, or `module:Class` of a custom one (docs/agents.md).
    Its rewards are the scores. Default: the agent loops that verl's keys and the data set name."""
    environment_kwargs: Mapping[str, Any] | None = None
    """Arguments of the environment, plain values. Default: no arguments."""
    agent: str | None = None
    """Have a program play each response, with the agent loop `agent_session`: `module:function`, a command,
    or external: programs outside of the run claim the tasks. It reaches the policy over HTTP, with the APIs
    of OpenAI and Anthropic (docs/agents.md). Default: the agent loops that verl's keys and the data set
    name."""
    agent_env: Mapping[str, Any] | None = None
    """Further environment variables of the command and of `verify`, which otherwise get few of the run's.
    Default: no variables."""
    verify: str | None = None
    """A command that runs after the agent, in its folder, and prints the reward: {"reward": 1.0} as its last
    line. Default: the reward that the agent gives, or else the reward function's."""
    sandbox: Literal["auto", "on", "offline", "off"] = "auto"
    """Whether the command and `verify` run where they see no other processes and no files of the run, and may
    write in their own folders only (docs/agents.md): where the kernel permits it (auto; `async-pipeline
    doctor` says so), else the run is refused (on), also without a network but the gateway (offline), or never
    (off)."""
    sandbox_hidden: tuple[str, ...] = ()
    """Further files and folders that they do not see in the sandbox, such as a data set's source."""
    gateway: GatewayConfig = GatewayConfig()
    max_turns: Positive = 16
    """Turns of the policy after which an episode in an environment or of an agent ends."""
    max_turn_tokens: Limit | None = None
    """Tokens that the policy may write in one turn in an environment; a longer turn is cut off. Default: what
    is left of data.max_response_length."""
    isolation: Isolation = "process"
    """Where environments run: each in a process (process; one that hangs or crashes is killed with all that
    it started, and replaced), in a thread (thread; one that hangs leaves its thread behind), or in the event
    loop of its agent loop worker (inline; no overhead, but one that blocks stops all episodes of the
    worker)."""
    concurrency: Limit = 64
    """Episodes that each agent loop worker plays in environments, and of agents, at the same time."""
    env_timeout_s: Seconds = 60.0
    """Seconds that one reset (with the start of its environment) or one step may take. An environment that
    exceeds them is ended, and its episode ends as env_failed."""
    turn_rewards: bool = False
    """Give each step's reward of an environment to the turn before it (at its last token) instead of their
    sum to the end of the response, so that a turn is credited only with what came after it; let agents have
    rewards by turn (docs/agents.md). Requires an adv_estimator that reads rewards by token, such as gae,
    grpo_process or reinforce_plus_plus; grpo adds them up. With an agent, it also requires
    gateway.max_chains=1."""
    failure_reward: float = 0.0
    """The score of an episode whose end has the policy score; see ends."""
    tool_timeout_s: Seconds | None = None
    """Seconds that a tool of verl's agent loop tool_agent may take for one call. The episode of a slower one
    ends as deadline. Default: no limit."""
    attempts: Positive = 2
    """How often an episode (one response with all its turns) is played if it fails. The prompt, its seed and
    the other responses of its group stay."""
    redundancy: Annotated[int, Bounds(least=0, remedy="0 begins none")] = 0
    """Further episodes that are begun for each group. The first rollout.n that finish are trained and the
    rest are ended, so that a slow or failed episode holds up nothing. This favours short episodes;
    async_pipeline/bias/*/redundant_* measures by how much."""
    episode_timeout_s: Seconds | None = None
    """Seconds that one attempt may take until its agent loop returns, so that a tool that hangs does not hold
    up its group until faults.wait_timeout_s ends the run. All attempts together must be shorter than
    faults.wait_timeout_s. Default: no limit."""
    ends: EndPolicies = EndPolicies()

    def __post_init__(self) -> None:
        if isinstance(self.environment, Mapping):
            inside = ", ".join(map(str, self.environment))
            raise ConfigError(
                f"{self.PATH}.environment must be the name of an environment, got a section with {inside}; "
                f"set its arguments as {self.PATH}.environment_kwargs.NAME"
            )
        check_fields(self, self.PATH)
        if not is_finite(self.failure_reward):
            raise ConfigError(
                f"{self.PATH}.failure_reward must be a finite number, got {self.failure_reward!r}; 0.0 is "
                "the default"
            )
        if (self.agent == EXTERNAL) != (self.gateway.runners_dir is not None):
            raise ConfigError(
                f"{self.PATH}.agent={EXTERNAL} and {self.gateway.PATH}.runners_dir require each other, got "
                f"agent={self.agent!r} and runners_dir={self.gateway.runners_dir!r}; set both"
            )
        if self.turn_rewards and self.agent is not None and self.gateway.max_chains != 1:
            raise ConfigError(
                f"{self.PATH}.turn_rewards requires {self.gateway.PATH}.max_chains=1 with an agent, because "
                "rewards of one conversation are no credit for the turns of another, got "
                f"{self.max_chains}; set it to 1"
            )
        self.variables()
        if self.redundancy and self.ends.env_failed == "score":
            raise ConfigError(
                f"{self.PATH}.redundancy={self.redundancy} requires {self.PATH}.ends.env_failed=again or "
                "drop, got score: episodes that fail at once would fill the groups; change one of them"
            )
        for names, needed in (
            (OF_ENVIRONMENTS, ("environment",)),
            (OF_AGENTS, ("agent",)),
            (OF_BOTH, ("environment", "agent")),
        ):
            if any(getattr(self, name) is not None for name in needed):
                continue
            for name in names:
                either = " or ".join(f"{self.PATH}.{one}" for one in needed)
                for given in _given(self, name):
                    raise ConfigError(f"{self.PATH}.{given} requires {either}; set it")
        self._check_agent()

    def _check_agent(self) -> None:
        """Raises ConfigError if a knob cannot have an effect with this agent, or without one."""
        if self.agent is None:
            if self.ends.chains != EndPolicies().chains:
                raise ConfigError(
                    f"{self.PATH}.ends.chains={self.ends.chains} requires {self.PATH}.agent, because only "
                    "agents over HTTP begin other conversations; remove it"
                )
            return
        if self.agent_env is not None and not self.has_commands:
            raise ConfigError(
                f"{self.PATH}.agent_env requires a command as the agent, or verify, got "
                f"agent={self.agent!r}; remove it"
            )
        if self.sandbox in ("on", "offline") and not self.has_commands:
            raise ConfigError(
                f"{self.PATH}.sandbox={self.sandbox} requires a command as the agent, or verify, got "
                f"agent={self.agent!r}, which runs elsewhere; make it a command, or remove the key"
            )
        # `verify` does not reach the policy, and may use another model.
        overridden = [name for name in OF_POLICY if name in (self.agent_env or {}) and self.verify is None]
        if overridden:
            raise ConfigError(
                f"{self.PATH}.agent_env.{overridden[0]} must not be set, because the run sets it for the "
                "agent; remove it"
            )
        if self.environment is None and self.ends.invalid != EndPolicies().invalid:
            raise ConfigError(
                f"{self.PATH}.ends.invalid={self.ends.invalid} requires {self.PATH}.environment, because an "
                "agent over HTTP takes no actions; remove it"
            )

    @property
    def max_chains(self) -> int:
        """Return how many conversations an episode of an agent may have."""
        return self.max_turns if self.gateway.max_chains is None else self.gateway.max_chains

    @property
    def has_commands(self) -> bool:
        """Return whether the run starts commands for agents."""
        return self.verify is not None or (
            self.agent is not None and self.agent != EXTERNAL and not is_function(self.agent)
        )

    def variables(self) -> dict[str, str]:
        """Return `agent_env` as text, with true and false as YAML and the command line have them.

        Raises ConfigError if one is neither a text nor a number, true or false.
        """
        found, texts = {}, {True: "true", False: "false"}
        for name, value in (self.agent_env or {}).items():
            if not isinstance(value, str | int | float):
                raise ConfigError(
                    f"{self.PATH}.agent_env.{name} must be a text, a number, true or false, got {value!r}; "
                    "correct it"
                )
            found[str(name)] = texts[value] if isinstance(value, bool) else str(value)
        return found

    def check_timeouts(self, wait_timeout_s: float) -> None:
        """Raises ConfigError unless all attempts at an episode end before `faults.wait_timeout_s`."""
        one_s = self.episode_timeout_s
        if one_s is not None and self.attempts * one_s >= wait_timeout_s:
            raise ConfigError(
                f"{self.PATH}.episode_timeout_s must be below {wait_timeout_s / self.attempts:g}, so that "
                f"{self.attempts} attempts end before faults.wait_timeout_s ({wait_timeout_s:g}), got "
                f"{one_s:g}; lower it, or raise faults.wait_timeout_s"
            )


def _given(config: Any, name: str) -> Iterator[str]:
    """Yield `knob=value` for what a knob, or the knobs of a section, has that differs from the defaults."""
    value, default = getattr(config, name), getattr(type(config), name)
    if not is_dataclass(value):
        yield from [f"{name}={value!r}"] if value != default else []
        return
    for field in fields(value):
        yield from (f"{name}.{one}" for one in _given(value, field.name))


def agent_loop_for(own: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of verl's key for the agent loop that plays an environment or runs an agent.

    Empty without either. Rows with an `agent_name` choose for themselves.
    Raises ConfigError if the user's keys disagree.
    """
    loops = {"environment": ENVIRONMENT_LOOP, "agent": AGENT_LOOP_OF_AGENTS}
    named = {name: loop for name, loop in loops.items() if own.get(f"agentic.{name}") is not None}
    if not named:
        return {}
    chosen = select(raw, AGENT_LOOP)
    if chosen in named.values():
        return {AGENT_LOOP: chosen}
    if len(named) > 1:
        raise ConfigError(
            f"{AgenticConfig.PATH}.environment and .agent are both set, so {AGENT_LOOP} must be "
            f"{ENVIRONMENT_LOOP} or {AGENT_LOOP_OF_AGENTS}, got {chosen!r}; set it, or keep one of them"
        )
    ((name, loop),) = named.items()
    if chosen not in (None, VERLS_AGENT_LOOP):
        raise ConfigError(
            f"{AgenticConfig.PATH}.{name} requires the agent loop {loop}, but {AGENT_LOOP} is {chosen!r}; "
            "keep one of them"
        )
    return {AGENT_LOOP: loop}
