# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmarks that run inside verl."""
