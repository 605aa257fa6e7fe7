# SPDX-License-Identifier: Apache-2.0
"""Which replica serves, prepares or refuses which version."""
