# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: the event file, the table of steps, the summary."""
