# SPDX-License-Identifier: Apache-2.0
"""What `async-pipeline doctor` checks."""
