# SPDX-License-Identifier: Apache-2.0
"""Training and log-prob workers: shards of their weights, losses."""
