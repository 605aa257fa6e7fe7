# SPDX-License-Identifier: Apache-2.0
"""Observability: the event file, the table of steps, and the summary of a run."""
