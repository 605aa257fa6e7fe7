# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmarks that run inside verl."""
