# SPDX-License-Identifier: Apache-2.0
"""The trainer that verl runs, and what it is composed of."""
