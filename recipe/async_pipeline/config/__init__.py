# SPDX-License-Identifier: Apache-2.0
"""What the user says: the knobs, keys of other systems, and what they amount to. Pure: no verl, no Ray."""

from .schema import AsyncPipelineConfig
from .translation import Translation, is_enabled, resolve

__all__ = ["AsyncPipelineConfig", "Translation", "is_enabled", "resolve"]
