# SPDX-License-Identifier: Apache-2.0
"""The processes of agents and environments: their folders, limits and ends."""
