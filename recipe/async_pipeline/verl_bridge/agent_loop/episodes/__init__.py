# SPDX-License-Identifier: Apache-2.0
"""Episodes: their environments, attempts and ends."""
