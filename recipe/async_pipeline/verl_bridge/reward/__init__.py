# SPDX-License-Identifier: Apache-2.0
"""Score responses: reward functions with limits, reward workers that restart."""
