# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine on the CPU platform, and the shards of a Megatron model on any platform."""
