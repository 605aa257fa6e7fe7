# SPDX-License-Identifier: Apache-2.0
"""The tokens of prompts and responses, and which version wrote each."""
