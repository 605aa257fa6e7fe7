# SPDX-License-Identifier: Apache-2.0
"""What follows from a configuration that was accepted: sizes, bounds and the schedule."""
