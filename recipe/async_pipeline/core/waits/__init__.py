# SPDX-License-Identifier: Apache-2.0
"""Waits: their deadlines, their owners, and what runs while a stage waits."""
