# SPDX-License-Identifier: Apache-2.0
"""The user's configuration: knobs, keys of other systems and what they result in. Pure: no verl, no Ray."""

from .schema import AsyncPipelineConfig
from .translation import Translation, is_enabled, resolve

__all__ = ["AsyncPipelineConfig", "Translation", "is_enabled", "resolve"]
