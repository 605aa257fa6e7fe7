# SPDX-License-Identifier: Apache-2.0
"""Versions of the policy, and how far a sample may lag behind them."""
