# SPDX-License-Identifier: Apache-2.0
"""Transfers of a version from host to host, and what each host keeps."""
