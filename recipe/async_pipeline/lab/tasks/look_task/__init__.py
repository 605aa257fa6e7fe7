# SPDX-License-Identifier: Apache-2.0
"""Pictures to look at: how many objects, of which colour and shape."""
