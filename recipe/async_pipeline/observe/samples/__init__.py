# SPDX-License-Identifier: Apache-2.0
"""What a run measures on its samples: their lag, their drift and their bias."""
