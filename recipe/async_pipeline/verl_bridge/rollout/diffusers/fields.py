# SPDX-License-Identifier: Apache-2.0
"""What a request of an image says, what a server adds to its output, and the columns that training reads.

Latents and pictures are arrays in an output, which are cheaper to send than tensors.
"""

WANTED = "wanted"
"""Entry of a request: `IMAGE`, `CONDITIONS`, or both."""
IMAGE = "image"
LATENTS = "latents"
"""Before the first SDE step, and after each: float32 (steps + 1, channels, height, width)."""
PICTURE = "picture"
"""uint8 (3, height, width)."""
CONDITIONS = "conditions"
"""Tensors by the names of the family: what the text encoders say about the prompt, in their dtype."""

CONDITION = "condition_"
"""Prefix of the columns that hold conditions. They are large, so one response of a prompt has them; the
others have none of their rows.
"""
HOLDER = "conditions_in"
"""Column with the key of the response that has the conditions of this one."""
