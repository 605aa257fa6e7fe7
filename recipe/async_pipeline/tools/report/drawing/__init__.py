# SPDX-License-Identifier: Apache-2.0
"""How the pages of runs are drawn."""
