# SPDX-License-Identifier: Apache-2.0
"""Pages about runs: the report of one or two, their episodes, and the trace."""
