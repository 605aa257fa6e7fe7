# SPDX-License-Identifier: Apache-2.0
"""The user's configuration: knobs, keys of other systems and what they result in. Pure: no verl, no Ray."""

from .keys.translation import Translation, is_enabled, resolve
from .knobs.schema import AsyncPipelineConfig

__all__ = ["AsyncPipelineConfig", "Translation", "is_enabled", "resolve"]
