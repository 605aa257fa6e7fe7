# SPDX-License-Identifier: Apache-2.0
"""What each key of a command line means: whose it is, its name here, and whether it is misspelled."""
