# SPDX-License-Identifier: Apache-2.0
"""Rollout replicas: which of them serve, routing of requests, restarts."""
