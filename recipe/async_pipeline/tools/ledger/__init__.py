# SPDX-License-Identifier: Apache-2.0
"""Verify the ledger of a run: no prompt was lost, and none trained twice."""
