# SPDX-License-Identifier: Apache-2.0
"""Format reasons, stages and numbers for a reader, and assign their colours."""

from __future__ import annotations

import re

ENGINE_LINE = re.compile(r"\bengine: (vLLM \S+, model runner .+)$", re.MULTILINE)
"""A line that the server of a run prints; see `verl_bridge.rollout.vllm.facts`."""
ROLE_COLOURS = {
    "generate": "c-generate",
    "teacher": "c-teacher",
    "train": "c-train",
    "logp": "c-logp",
    "ref_logp": "c-ref",
    "values": "c-values",
    "critic": "c-critic",
    "reward": "c-reward",
    "rollout": "c-rollout",
    "param_update": "c-sync",
    "dataloader": "c-data",
}
"""Stage to the CSS class of its colour; a custom stage has `c-other`."""

_COMPUTE = {
    "generate": "generating responses",
    "teacher": "log-probs of the teacher",
    "train": "training (optimizer steps)",
    "logp": "log-probs of the old policy",
    "ref_logp": "log-probs of the reference",
    "values": "values of the critic",
    "critic": "training the critic",
}
_WAIT = {
    "generate": "waiting for responses (generate)",
    "teacher": "waiting for the teacher",
    "train": "waiting for the optimizer step (train)",
    "logp": "waiting for old log-probs (logp)",
    "ref_logp": "waiting for the reference (ref_logp)",
    "values": "waiting for values of the critic",
    "critic": "waiting for the critic's step",
    "reward": "waiting for advantages (reward)",
    "rollout": "waiting for a batch to be assembled (rollout)",
    "param_update": "waiting for a weight update (param_update)",
    "dataloader": "waiting for prompts (dataloader)",
    "environment": "responses open, all in agent loops, tools or rewards",
}
_OTHER = {
    "sync": "weight updates (gather, load)",
    "validation": "validation",
    "start_up": "start-up, until the first version was served",
    "none": "no stage computed: hand-over, or the end of the run",
}


def reason_in_words(reason: str) -> str:
    """Describe one of the reasons of an account."""
    kind, _, role = reason.partition("_")
    if kind == "compute":
        return _COMPUTE.get(role, f"computing in {role}")
    if kind == "wait":
        return _WAIT.get(role, f"waiting for {role}")
    if kind == "lease":
        return f"held by {role}, which waits for space in its output channel"
    return _OTHER.get(reason, reason.replace("_", " "))


def colour_of(reason: str) -> str:
    """Return the CSS classes of a reason: the colour of its stage, pale and striped for waiting."""
    kind, _, role = reason.partition("_")
    if kind == "compute":
        return ROLE_COLOURS.get(role, "c-other")
    if kind in ("wait", "lease"):
        return f"{ROLE_COLOURS.get(role, 'c-other')} idle"
    return {"sync": "c-sync", "validation": "c-validation"}.get(reason, "c-none idle")


def role_colour(role: str) -> str:
    """Return the CSS class of a stage's colour."""
    return ROLE_COLOURS.get(role, "c-other")


def seconds(value: float) -> str:
    """Format a duration with its unit, to about three digits."""
    size = abs(value)
    if size >= 7200:
        return f"{value / 3600:.1f} h"
    if size >= 180:
        return f"{value / 60:.{0 if size >= 600 else 1}f} min"
    if size >= 100:
        return f"{value:.0f} s"
    if size >= 0.1:
        return f"{value:.{1 if size >= 10 else 2}f}".rstrip("0").rstrip(".") + " s"
    return f"{value * 1000:.3g} ms" if value else "0 s"


def amount(value: float) -> str:
    """Format a number to about three digits."""
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    if abs(value) < 10:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:.1f}".rstrip("0").rstrip(".") if abs(value) < 100 else f"{value:,.0f}"


def number_of_bytes(value: float) -> str:
    """Format a number of bytes with its decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
