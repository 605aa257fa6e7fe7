# SPDX-License-Identifier: Apache-2.0
"""What this package uses of verl, and whether a verl tree still has it. Parses both, imports neither."""
