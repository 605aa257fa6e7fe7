# SPDX-License-Identifier: Apache-2.0
"""Observability: the event file, the table of steps, the summary, the report and the trace of a run."""
