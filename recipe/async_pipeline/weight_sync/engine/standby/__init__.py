# SPDX-License-Identifier: Apache-2.0
"""A second version on the engine's device, prepared while the engine generates."""
