# SPDX-License-Identifier: Apache-2.0
"""Batches of the trainer: from prompts to what a step trains."""
