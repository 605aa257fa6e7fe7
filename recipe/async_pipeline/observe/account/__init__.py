# SPDX-License-Identifier: Apache-2.0
"""Where the device-seconds of a run went."""
