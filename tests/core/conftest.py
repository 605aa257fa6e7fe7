# SPDX-License-Identifier: Apache-2.0
"""Hypothesis for schedules: the same examples in every run, nothing left on disk, no clock."""

from hypothesis import settings

settings.register_profile("schedules", max_examples=60, deadline=None, database=None, derandomize=True)
settings.load_profile("schedules")
