# SPDX-License-Identifier: Apache-2.0
"""The command `async-pipeline`: the dispatcher in `main`, and one module per subcommand."""
