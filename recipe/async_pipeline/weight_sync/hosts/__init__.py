# SPDX-License-Identifier: Apache-2.0
"""From host to host: who receives a version from whom, and what is kept."""
