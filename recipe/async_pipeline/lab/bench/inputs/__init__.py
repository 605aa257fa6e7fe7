# SPDX-License-Identifier: Apache-2.0
"""Arms, workloads and rewards of benchmarks."""
