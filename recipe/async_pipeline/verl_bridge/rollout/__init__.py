# SPDX-License-Identifier: Apache-2.0
"""Rollout replicas: who serves, who gets which request, and restarts."""
