# SPDX-License-Identifier: Apache-2.0
"""What `async-pipeline explain` prints: the plan of a run, and the reference of the knobs."""
