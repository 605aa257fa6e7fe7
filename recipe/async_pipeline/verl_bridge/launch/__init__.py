# SPDX-License-Identifier: Apache-2.0
"""What runs before Ray starts: the command line, the configuration, the inputs, the cluster."""
