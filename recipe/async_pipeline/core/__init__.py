# SPDX-License-Identifier: Apache-2.0
"""What decides: state machines, channels, leases, versions and the flow that wires them.

Pure asyncio. Nothing here knows verl, Ray, torch, a wall clock, a file or a socket, so that a test or
a simulation runs the very code of a real run, in virtual time.
"""
