# SPDX-License-Identifier: Apache-2.0
"""Scoring of responses: reward functions with limits, and reward workers that restart."""
