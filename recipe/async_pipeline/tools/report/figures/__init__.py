# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run, read from its files."""
