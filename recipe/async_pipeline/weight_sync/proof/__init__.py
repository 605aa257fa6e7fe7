# SPDX-License-Identifier: Apache-2.0
"""Whether an engine serves what was published: samples, maps of elements, checks of ranks."""
