# SPDX-License-Identifier: Apache-2.0
"""Questions about words for a pretrained model, SmolLM2-135M-Instruct."""
