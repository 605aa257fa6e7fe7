# SPDX-License-Identifier: Apache-2.0
"""The result of one check of `async-pipeline doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def as_line(finding: Finding) -> str:
    """Return the line that the report prints for a finding."""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{finding.verdict:<5} {finding.subject:<16} {finding.detail}{remedy}"
