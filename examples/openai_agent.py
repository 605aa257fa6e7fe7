# SPDX-License-Identifier: Apache-2.0
"""A program of OpenAI's client that plays FrozenLake once, and prints {"reward": ...} as its last line."""

import json
import os

from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from openai import OpenAI

MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
with open(os.environ["ASYNC_PIPELINE_TASK"]) as file:
    seed = json.load(file)["seed"]
lake = [row.translate(str.maketrans("SFH", "..O")) for row in generate_random_map(4, 0.8, seed)]


def at(row, column):
    return lake[row][column] if 0 <= row < 4 and 0 <= column < 4 else "#"


def near():
    return "".join(at(row + down, column + right) for down, right in MOVES.values()) + ">"


client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
row, column, said = 0, 0, None
messages = [{"role": "user", "content": "P" + "\n".join(lake)[1:] + "\n" + near()}]
while at(row, column) == "." and len(messages) < 16:
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    if said not in MOVES:
        break
    if at(row + MOVES[said][0], column + MOVES[said][1]) != "#":
        row, column = row + MOVES[said][0], column + MOVES[said][1]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": near()}]
print(json.dumps({"reward": float(at(row, column) == "G")}))
