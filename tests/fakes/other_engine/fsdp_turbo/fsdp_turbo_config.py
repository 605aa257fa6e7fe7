# SPDX-License-Identifier: Apache-2.0
"""The settings, of which none are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class FSDPTurboConfig:
    """The name that verl's engine asks for."""


def _dict_to_dataclass(kind: type, values: Any) -> SimpleNamespace:
    return SimpleNamespace(distributed=SimpleNamespace(fsdp_plan=SimpleNamespace(cpu_offload=False)))
