# SPDX-License-Identifier: Apache-2.0
"""Play an episode again if its agent loop fails or takes too long, without its group.

    begin() ─► agent loop ─► its response, and how the episode ended ─► scoring and storing
               │             └─ train, score, again or drop             errors end the run
               ├─ an error of the rollout client ends the run
               ├─ EnvironmentFailed: env_failed; another error: agent_failed
               └─ too long, or a turn or tool call of it: deadline

The ends and the decision about each are in `agents.episodes`. An agent loop that knows how its episode ended
puts it into `extra_fields`, under END; of others, each response is `done`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ....agents.episodes import FAILED_EPISODE, EpisodeRules
from ....core.groups.bad_data import Flaw
from ....core.waits.deadline import GRACE_S, within
from ....observe.run_directory.agent_output import FOLDER, FailedAttempt, name_of
from ....redaction import without_secrets
from .episode import Attempt, EpisodeLimits, episode_with

logger = logging.getLogger(__name__)
REASON_CHARACTERS = 500
"""Length of the reason that a failed episode is reported with."""


class Episodes:
    """Plays the episodes of a run."""

    def __init__(
        self,
        rules: EpisodeRules,
        timeout_s: float | None = None,
        failure_reward: float = 0.0,
    ) -> None:
        """See `EpisodeLimits`."""
        self.limits = EpisodeLimits(rules, timeout_s, failure_reward)

    async def play(
        self,
        begin: Callable[[int], Awaitable[None]],
        name: str,
        failed: Callable[[FailedAttempt], object] = lambda attempt: None,
    ) -> list[Flaw]:
        """Play an episode until an attempt is not to be repeated; `begin(number)` plays one.

        Returns the flaw of an episode that failed in its last attempt. Raises errors of the rollout, of
        scoring and of storing. `name` is for messages; `failed` gets each failed attempt.
        """
        number = 1
        while True:
            attempt = Attempt(number, self.limits)
            await self._play(attempt, begin)
            if attempt.action in ("train", "score"):
                return []

            reason = _one_line(attempt.why)
            # Also without output: the reason, such as what an external runner reports, is in no other file.
            output = "" if attempt.log is None else without_secrets(attempt.log.text())
            failed(FailedAttempt(name, number, attempt.end, reason, output))
            why = f"episode {name}, attempt {number}: {attempt.end}: {reason}"
            if attempt.action == "drop":
                return [Flaw(FAILED_EPISODE, f"{why}; see {FOLDER}/{name_of(name, number)}")]
            logger.warning("%s; it is repeated", why)
            number += 1

    async def _play(self, attempt: Attempt, begin: Callable[[int], Awaitable[None]]) -> None:
        attempt.begin()
        with episode_with(attempt=attempt):
            try:
                await within(
                    begin(attempt.number),
                    self.limits.timeout_s,
                    owner="an agent loop",
                    what="an episode to end (agentic.episode_timeout_s)",
                    excused_s=attempt.excused_s,
                    grace_s=GRACE_S,
                )
            # A tool that calls exit() must not end the process of all agent loops.
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the agent's code may raise anything
                attempt.failed(error)
                if attempt.end == "agent_failed":
                    logger.warning("an agent loop failed", exc_info=error)


def _one_line(text: str) -> str:
    return without_secrets(" ".join(text.split()))[:REASON_CHARACTERS]
