# SPDX-License-Identifier: Apache-2.0
"""What is installed here of verl and of the engines. Reads their files and imports none of them."""
