# SPDX-License-Identifier: Apache-2.0
"""Subcommands of `async-pipeline` for what is done before and after a run."""
