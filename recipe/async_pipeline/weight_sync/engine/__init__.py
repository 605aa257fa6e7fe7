# SPDX-License-Identifier: Apache-2.0
"""What a version means to an engine: loads, copies, requests in flight."""
