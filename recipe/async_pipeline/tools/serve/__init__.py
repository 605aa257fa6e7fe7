# SPDX-License-Identifier: Apache-2.0
"""Pages of runs that are still going: `async-pipeline serve`. Reads files only, so no run waits for it."""
