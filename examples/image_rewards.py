# SPDX-License-Identifier: Apache-2.0
"""Rewards of images: the size of a JPEG file, and a server that scores over HTTP.

    reward.custom_reward_function.path=examples/image_rewards.py reward.custom_reward_function.name=jpeg_size
    reward.custom_reward_function.path=examples/image_rewards.py reward.custom_reward_function.name=ask_server

The server imports nothing of this package; it may run on another machine, with other packages:

    python examples/image_rewards.py 127.0.0.1:8081
    export IMAGE_REWARD_URL=http://127.0.0.1:8081
"""

import io
import json
import os
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

URL, TIMEOUT_S = "IMAGE_REWARD_URL", 30
LARGEST_BYTES = 64 << 20


def jpeg_size(data_source, solution_image, ground_truth, extra_info=None):
    """Reward images that compress well: minus the kilobytes of a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(solution_image).transpose(1, 2, 0)).save(file, "JPEG", quality=95)
    return -len(file.getvalue()) / 1000


def ask_server(data_source, solution_image, ground_truth, extra_info=None):
    """Send the picture as a PNG file, and return what the server says about it."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(solution_image).transpose(1, 2, 0)).save(file, "PNG")
    headers = {"Content-Type": "image/png", "X-Ground-Truth": json.dumps(str(ground_truth))}
    request = urllib.request.Request(os.environ[URL], file.getvalue(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)


def judge(picture, ground_truth):
    """Replace this by your model. Here: the share of the light that has the first word's colour."""
    light = picture.reshape(-1, 3).sum(axis=0, dtype=np.float64)
    colour = ("red", "green", "blue").index(ground_truth.split(" ", 1)[0])
    return {"score": float(light[colour] / max(light.sum(), 1.0))}


class Judge(BaseHTTPRequestHandler):
    """Answers each POST of a PNG file with a score."""

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        if not 0 < length <= LARGEST_BYTES:
            self.send_error(413)
            return
        picture = np.asarray(Image.open(io.BytesIO(self.rfile.read(length))).convert("RGB"))
        answer = json.dumps(judge(picture, json.loads(self.headers["X-Ground-Truth"]))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        """Print no line for each request."""


if __name__ == "__main__":
    host, port = sys.argv[1].rsplit(":", 1)
    ThreadingHTTPServer((host, int(port)), Judge).serve_forever()
