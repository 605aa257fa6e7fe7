# SPDX-License-Identifier: Apache-2.0
"""What the trainer tells: steps, samples, texts and pictures."""
