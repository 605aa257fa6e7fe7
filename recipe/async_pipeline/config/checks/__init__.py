# SPDX-License-Identifier: Apache-2.0
"""Refuse what would fail later in a run: values, options together, sizes, programs and the machine."""
