# SPDX-License-Identifier: Apache-2.0
"""The columns and groups of samples in TransferQueue, and how they travel."""
