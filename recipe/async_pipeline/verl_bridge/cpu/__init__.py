# SPDX-License-Identifier: Apache-2.0
"""The platform of a machine without accelerator."""
