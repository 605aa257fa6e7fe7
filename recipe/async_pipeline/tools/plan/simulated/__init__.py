# SPDX-License-Identifier: Apache-2.0
"""A run in virtual time: its trainer, its engines and its responses."""
