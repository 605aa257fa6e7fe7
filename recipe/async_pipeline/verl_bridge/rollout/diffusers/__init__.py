# SPDX-License-Identifier: Apache-2.0
"""Images as a rollout engine: this package's step engine on transformers of diffusers."""
