# SPDX-License-Identifier: Apache-2.0
"""Every error this package raises on purpose: one root, each class also a stdlib error.

The message of each names the actor, what it was doing and the next step, on one line.
"""

from __future__ import annotations


class AsyncPipelineError(Exception):
    """Root of all errors of this package."""


class ConfigError(AsyncPipelineError, ValueError):
    """A key is unknown, misplaced, contradictory or out of range; raised before Ray starts."""


class PatchError(AsyncPipelineError, RuntimeError):
    """The verl tree cannot be fetched, patched or reverted as asked."""


class PatchedVerlRequired(PatchError):
    """The installed verl lacks our patches or our plugin."""


class StageProtocolError(AsyncPipelineError, RuntimeError):
    """An event that the state machine does not allow in its present state."""


class ChannelClosed(AsyncPipelineError, EOFError):
    """Sent to a closed channel, or received from a closed channel that is empty."""


class LeaseError(AsyncPipelineError, RuntimeError):
    """A lease was released twice, by a stranger, or asked of a pool that does not exist."""


class WaitTimeout(AsyncPipelineError, TimeoutError):
    """A wait passed its deadline; the message says who waited, for what, and who holds it."""


class StalenessViolation(AsyncPipelineError, RuntimeError):
    """A trajectory older than max_lag reached the optimizer step."""


class ConservationError(AsyncPipelineError, RuntimeError):
    """A prompt was lost, or trained twice."""


class WeightSyncError(AsyncPipelineError, RuntimeError):
    """A weight version could not be gathered, transferred or loaded."""


class CorruptionError(WeightSyncError):
    """Weights on their way are not what the trainer gathered: a checksum differs."""


class ProofError(WeightSyncError):
    """The weights that a replica serves are not the weights that the trainer published."""


class RolloutError(AsyncPipelineError, RuntimeError):
    """A group could not be generated or scored."""


class BadDataError(AsyncPipelineError, ValueError):
    """Answers that no step may train on, and that the config does not let the run go on without."""


class RewardError(AsyncPipelineError, RuntimeError):
    """A reward function brought no score: it raised, took too long, died, or returned none."""


class WarmupFailed(AsyncPipelineError, RuntimeError):
    """The small model did not reach the accuracy that RL needs to start from."""


class CheckpointError(AsyncPipelineError, ValueError):
    """A checkpoint is torn, or of another run."""


class RunFilesError(AsyncPipelineError, ValueError):
    """The files of a run are not there, or cannot be understood."""
