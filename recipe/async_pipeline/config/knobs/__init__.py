# SPDX-License-Identifier: Apache-2.0
"""The knobs that a user sets: their sections, types, bounds and defaults."""
