# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what a run saves, and the choice of the checkpoint that it resumes from. No verl, no Ray."""
