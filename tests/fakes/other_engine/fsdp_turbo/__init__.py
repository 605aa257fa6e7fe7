# SPDX-License-Identifier: Apache-2.0
"""Stands for FSDP-Turbo, with FSDP2 inside, so that verl's engine for it runs.

Of such an engine, this package knows only what verl's engines have in common.
"""
