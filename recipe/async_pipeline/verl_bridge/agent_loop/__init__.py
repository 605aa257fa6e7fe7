# SPDX-License-Identifier: Apache-2.0
"""verl's agent loops: groups are pushed when they are finished, partial rollouts are kept."""
