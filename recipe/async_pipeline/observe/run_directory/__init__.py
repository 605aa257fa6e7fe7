# SPDX-License-Identifier: Apache-2.0
"""The files of a run directory."""
