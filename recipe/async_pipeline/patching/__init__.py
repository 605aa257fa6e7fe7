# SPDX-License-Identifier: Apache-2.0
"""Apply the series of patches to a tree of verl. Reads verl's files and imports nothing of it."""
