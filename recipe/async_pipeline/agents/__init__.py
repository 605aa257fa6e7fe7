# SPDX-License-Identifier: Apache-2.0
"""Episodes of agents: how they end, what happens then, and the environments that they act in.

    episodes          the ends of an episode, and the decision about each
    environment       the protocol of environments that speak text
    env_pool          a bounded pool of them, with deadlines
    env_hosts         where one runs: in the event loop, a thread, or a process that can be killed
    env_process       that process
    gym_environment   any environment of gymnasium
    frozen_lake       one of them, shown so that a small model can play it

Imports neither torch nor verl; gymnasium, an optional package, only when one of its environments is made.
"""
