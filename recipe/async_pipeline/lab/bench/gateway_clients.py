# SPDX-License-Identifier: Apache-2.0
"""The agents of `bench gateway`, in a separate process: OpenAI's chat API over plain connections.

python -m recipe.async_pipeline.lab.bench.gateway_clients <
  {"port": 1, "keys": [...], "turns": 5, "size": 1000}
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


async def talk(port: int, key: str, turns: int, size: int) -> None:
    """Play one conversation. Raises RuntimeError if a request fails, and OSError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn} ".ljust(size, "x")})
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await _answer(reader)
        messages.append(answer["choices"][0]["message"])
    writer.close()


async def _answer(reader: asyncio.StreamReader) -> Any:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length:")[2].partition("\r\n")[0])
    body = await reader.readexactly(length)
    if " 200 " not in head.partition("\r\n")[0]:
        raise RuntimeError(body.decode(errors="replace")[:200])
    return json.loads(body)


async def main() -> int:
    """Play all conversations at once, and write the errors to stdout."""
    spec = json.load(sys.stdin)
    talks = [talk(spec["port"], key, spec["turns"], spec["size"]) for key in spec["keys"]]
    results = await asyncio.gather(*talks, return_exceptions=True)
    errors = [repr(one) for one in results if one is not None]
    sys.stdout.write(json.dumps({"errors": errors}))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
