# SPDX-License-Identifier: Apache-2.0
"""Subcommands of `async-pipeline` that measure and prove."""
