# SPDX-License-Identifier: Apache-2.0
"""verl's checkpoint engine and the service of each host that hold versions of the weights."""
