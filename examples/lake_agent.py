# SPDX-License-Identifier: Apache-2.0
"""An agent that plays FrozenLake, in its own virtual environment: pip install openai gymnasium.

It imports nothing of this package, and any endpoint of OpenAI's chat API can play. As a command:

    agentic.agent='/path/to/venv/bin/python examples/lake_agent.py'
"""

import asyncio
import json
import os

from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from openai import AsyncOpenAI

ACTIONS = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
CLIENT = None


class Lake:
    def __init__(self, seed):
        self.board, self.row, self.column = generate_random_map(size=4, p=0.8, seed=seed), 0, 0

    def at(self, row, column):
        inside = 0 <= row < 4 and 0 <= column < 4
        return {"S": ".", "F": ".", "H": "O", "G": "G"}[self.board[row][column]] if inside else "#"

    def near(self):
        near = (self.at(self.row + down, self.column + right) for down, right in ACTIONS.values())
        return "".join(near) + ">"

    def shown(self):
        rows = ["".join(self.at(row, column) for column in range(4)) for row in range(4)]
        return "\n".join(["P" + rows[0][1:], *rows[1:], self.near()])

    def move(self, action):
        down, right = ACTIONS[action]
        if self.at(self.row + down, self.column + right) != "#":
            self.row, self.column = self.row + down, self.column + right
        return self.at(self.row, self.column)


async def play(task, policy):
    """Play one episode; return its reward."""
    global CLIENT
    CLIENT = CLIENT or AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key)
    client, lake = CLIENT.with_options(base_url=policy.base_url, api_key=policy.api_key), Lake(task["seed"])
    messages = [{"role": "user", "content": lake.shown()}]
    for _ in range(8):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        if text not in ACTIONS or (place := lake.move(text)) == "O":
            return 0.0
        if place == "G":
            return 1.0
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": lake.near()}]
    return 0.0


class Endpoint:
    base_url, api_key = os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY")


if __name__ == "__main__":
    with open(os.environ["ASYNC_PIPELINE_TASK"]) as file:
        print(json.dumps({"reward": asyncio.run(play(json.load(file), Endpoint))}))
