# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline verify-gpu`: show within minutes what of this package works on a machine."""
