# SPDX-License-Identifier: Apache-2.0
"""The trainer that verl runs, and the parts that it is composed of."""
