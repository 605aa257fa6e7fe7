# SPDX-License-Identifier: Apache-2.0
"""Which configurations of verl a run accepts, and what it makes of them."""
