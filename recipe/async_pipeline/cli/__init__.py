# SPDX-License-Identifier: Apache-2.0
"""The command `async-pipeline`: one module per subcommand, named as it is typed."""
