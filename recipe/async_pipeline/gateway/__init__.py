# SPDX-License-Identifier: Apache-2.0
"""The gateway: any agent that speaks HTTP plays an episode, and what it samples is trained token for token.

    agent ──HTTP──► app ──► session ──► chains ──► policy (the engines)
                     │         │           └ which tokens are trained, and which version wrote each
                     │         └ keys, retries, deadlines, the end
                     └ dialects: OpenAI chat, OpenAI responses, Anthropic messages; tokens

    conversation      messages, and when two of them are the same
    chains            the conversations of a session as rows of tokens
    sessions          one episode's keys, requests, reward and end
    turns             requests to a session and their answers
    registry          which key opens which session
    claims            tasks that programs outside of the run claim, with leases
    task_routes       HTTP for them
    wire              what a dialect reads and writes
    dialects          one module for each
    app, server       HTTP in the event loop of an agent loop worker
    client            requests of tokens from Python, with the standard library only

Imports neither torch nor verl. starlette and uvicorn, optional packages, are imported by `app` and `server`.
"""
