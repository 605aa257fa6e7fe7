# SPDX-License-Identifier: Apache-2.0
"""A module whose import sets a variable, as some of vLLM's do."""

import os

os.environ["SET_BY_AN_IMPORT"] = "1"
