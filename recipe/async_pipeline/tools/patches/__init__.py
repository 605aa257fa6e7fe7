# SPDX-License-Identifier: Apache-2.0
"""Apply the series of patches to a verl tree. Reads and writes verl's files, imports none of them."""
