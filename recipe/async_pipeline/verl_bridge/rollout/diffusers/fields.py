# SPDX-License-Identifier: Apache-2.0
"""What a server of images adds to an output besides tokens: arrays, cheaper to send than tensors."""

LATENTS = "latents"
"""Before the first SDE step, and after each: float32 (steps + 1, channels, height, width)."""
PICTURE = "picture"
"""uint8 (3, height, width)."""
CONDITIONS = "conditions"
"""Arrays by the names of the family: what the text encoders say about the prompt."""
