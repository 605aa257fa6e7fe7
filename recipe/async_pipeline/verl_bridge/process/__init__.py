# SPDX-License-Identifier: Apache-2.0
"""Changes of the process that a module runs in: imports, signals, garbage collection."""
