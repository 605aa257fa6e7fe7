# SPDX-License-Identifier: Apache-2.0
"""The errors that this package raises on purpose: one root; each class is also a standard-library error.

Every message names the actor, the operation and the next step, on one line for each problem.
"""

from __future__ import annotations


class AsyncPipelineError(Exception):
    """Root of all errors of this package."""

    warnings: tuple[str, ...] = ()
    """Lines about other things that a user is shown after the error."""

    @property
    def report(self) -> str:
        """The lines that a user is shown."""
        return "\n".join((str(self), *self.warnings))


class ConfigError(AsyncPipelineError, ValueError):
    """A key is unknown, misplaced, contradictory or out of range; raised before Ray starts.

    The arguments are one line for each problem, the most fundamental first; several are numbered.
    """

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each problem."""
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        if len(self.args) < 2:
            return super().__str__()
        listed = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        return "\n".join([f"{len(listed)} problems:", *listed])


class PatchError(AsyncPipelineError, RuntimeError):
    """The verl tree cannot be fetched, patched or reverted as asked."""


class PatchedVerlRequired(PatchError):
    """The installed verl lacks our patches or our plugin."""


class ContractError(AsyncPipelineError, ValueError):
    """A verl tree, or the record of what this package uses of verl, cannot be read."""


class StageProtocolError(AsyncPipelineError, RuntimeError):
    """An event is illegal in the present state of a stage's state machine."""


class StrayCancellation(AsyncPipelineError, RuntimeError):
    """The code of a stage raised CancelledError although the run is not being stopped."""


class ChannelClosed(AsyncPipelineError, EOFError):
    """A send to a closed channel, or a receive from a closed channel that is empty."""


class LeaseError(AsyncPipelineError, RuntimeError):
    """A lease was released twice, released by a non-holder, or requested from an unknown pool."""


class WaitTimeout(AsyncPipelineError, TimeoutError):
    """A wait exceeded its deadline; the message names the waiter, the resource and its holders."""

    def __init__(self, message: str = "", abandoned: bool = False) -> None:
        """`abandoned`: what it waited for ignored its cancellation, and still runs."""
        super().__init__(message)
        self.abandoned = abandoned


class StalenessViolation(AsyncPipelineError, RuntimeError):
    """A trajectory older than max_lag reached the optimizer step."""


class RoutingError(AsyncPipelineError, RuntimeError):
    """A router would choose experts by itself although recorded routing is to be replayed."""


class ConservationError(AsyncPipelineError, RuntimeError):
    """A prompt was lost, or trained more than once."""


class WeightSyncError(AsyncPipelineError, RuntimeError):
    """A weight version could not be gathered, transferred or loaded."""


class StagingError(WeightSyncError):
    """A version could not be copied to the devices before its load; host memory still has it."""


class VersionNotServed(WeightSyncError):
    """A replica got a request of a group that was admitted with newer weights than it serves."""


class CorruptionError(WeightSyncError):
    """Weights in transit differ from what the trainer gathered: a checksum does not match."""


class ProofError(WeightSyncError):
    """The weights that a replica serves differ from what the trainer published."""


class EngineDeadError(AsyncPipelineError, RuntimeError):
    """A process of a rollout engine has ended. vLLM's error has the same name."""


class RolloutError(AsyncPipelineError, RuntimeError):
    """A group could not be generated or scored."""


class EnvironmentFailed(AsyncPipelineError, RuntimeError):
    """An environment of an episode raised, exceeded its time, died, or returned no step."""


class BadDataError(AsyncPipelineError, ValueError):
    """A row, or responses, are unfit for training, and the configuration does not allow dropping them."""


class RewardError(AsyncPipelineError, RuntimeError):
    """A reward function failed to return a score: it raised, timed out, died, or returned none."""


class WarmupFailed(AsyncPipelineError, RuntimeError):
    """The toy model did not reach the accuracy that RL needs as a starting point."""


class CheckpointError(AsyncPipelineError, ValueError):
    """A checkpoint is incomplete, damaged, or belongs to another run."""


class RunFilesError(AsyncPipelineError, ValueError):
    """The files of a run are missing or cannot be parsed."""


class AgentFailed(AsyncPipelineError, RuntimeError):
    """The agent of an episode raised, exited with an error, or made no request."""


class RequestRefused(AsyncPipelineError, ValueError):
    """A request of an agent cannot be answered; the agent is at fault, not the run."""

    def __init__(self, message: str, *, status: int = 400, end: str = "") -> None:
        """`status`: of HTTP. `end`: the limit of the episode that it exceeds, if it does."""
        super().__init__(message)
        self.status, self.end = status, end
