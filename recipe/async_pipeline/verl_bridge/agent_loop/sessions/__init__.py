# SPDX-License-Identifier: Apache-2.0
"""Agents that reach the policy over HTTP."""
