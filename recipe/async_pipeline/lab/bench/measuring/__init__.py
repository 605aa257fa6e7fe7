# SPDX-License-Identifier: Apache-2.0
"""What benchmarks measure on a job and its machine."""
