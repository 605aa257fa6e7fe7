# SPDX-License-Identifier: Apache-2.0
"""What measures and proves: benchmarks, small tasks, runs under faults, the check of a machine with GPUs.
Imports the run's folders and `tools`; neither imports it.
"""
