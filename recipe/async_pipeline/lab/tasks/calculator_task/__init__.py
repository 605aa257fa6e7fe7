# SPDX-License-Identifier: Apache-2.0
"""Sums with a calculator."""
