# SPDX-License-Identifier: Apache-2.0
"""Play one episode with a client library at its defaults, in the environment of client_libraries.txt.

    python client_libraries.py CASE

The address and the key are in the environment, as for every agent. Prints the agent's answer. Imports nothing
of this repository.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

QUESTION, SYSTEM = "What is 2 + 3?", "Use the tool."
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}


class Sum(BaseModel):
    """The answer."""

    value: int


def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: the first one
        y: the second one
    """
    return x + y


def openai_chat() -> Any:
    from openai import OpenAI

    tools: Any = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}}]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    client: Any = OpenAI()
    while True:
        answer = (
            client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        )
        if not answer.tool_calls:
            return answer.content
        messages.append(answer)
        for call in answer.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_chat_typed() -> Any:
    from openai import OpenAI

    messages: Any = [{"role": "user", "content": QUESTION}]
    client: Any = OpenAI()
    answer = client.chat.completions.parse(model="policy", messages=messages, response_format=Sum)
    return answer.choices[0].message.parsed.value


def openai_responses() -> Any:
    from openai import OpenAI

    tools: Any = [{"type": "function", "name": "add", "description": "Add.", "parameters": ADD}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    client: Any = OpenAI()
    while True:
        answer = client.responses.create(model="policy", instructions=SYSTEM, input=items, tools=tools)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        items += answer.output
        for call in calls:
            result = str(add(**json.loads(call.arguments)))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def anthropic_messages() -> Any:
    from anthropic import Anthropic

    tools: Any = [{"name": "add", "description": "Add.", "input_schema": ADD}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    client: Any = Anthropic()
    while True:
        answer = client.messages.create(
            model="policy", max_tokens=1000, system=SYSTEM, messages=messages, tools=tools
        )
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return answer.content[-1].text
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": str(add(**one.input))} for one in calls
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


def anthropic_tool_runner() -> Any:
    from anthropic import Anthropic, beta_tool

    runner: Any = Anthropic().beta.messages.tool_runner(
        model="policy",
        max_tokens=1000,
        system=SYSTEM,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[beta_tool(add)],
    )
    return runner.until_done().content[-1].text


def litellm() -> Any:
    from litellm import completion

    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}}]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    while True:
        answer = completion(model="openai/policy", messages=messages, tools=tools).choices[0].message
        if not answer.tool_calls:
            return answer.content
        messages.append(answer)
        for call in answer.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _langchain(**options: Any) -> Any:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="policy"), [add], system_prompt=SYSTEM, **options)
    return agent.invoke({"messages": [("user", QUESTION)]})


def langchain() -> Any:
    return _langchain()["messages"][-1].content


def langchain_typed() -> Any:
    return _langchain(response_format=Sum)["structured_response"].value


def langchain_structured() -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="policy").with_structured_output(Sum).invoke(QUESTION).value


def langgraph_typed() -> Any:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="policy"), [add], response_format=Sum)
    return agent.invoke({"messages": [("user", QUESTION)]})["structured_response"].value


def _pydantic_ai(**options: Any) -> Any:
    from pydantic_ai import Agent

    agent: Any = Agent("openai-chat:policy", system_prompt=SYSTEM, tools=[add], **options)
    return agent.run_sync(QUESTION).output


def pydantic_ai() -> Any:
    return _pydantic_ai()


def pydantic_ai_typed() -> Any:
    return _pydantic_ai(output_type=Sum).value


def pydantic_ai_native() -> Any:
    from pydantic_ai import NativeOutput

    return _pydantic_ai(output_type=NativeOutput(Sum)).value


def _openai_agents(**options: Any) -> Any:
    from agents import Agent, Runner, function_tool

    agent: Any = Agent(
        name="adder", model="policy", instructions=SYSTEM, tools=[function_tool(add)], **options
    )
    return Runner.run_sync(agent, QUESTION).final_output


def openai_agents() -> Any:
    return _openai_agents()


def openai_agents_typed() -> Any:
    return _openai_agents(output_type=Sum).value


def openai_agents_chat_typed() -> Any:
    from agents import set_default_openai_api

    set_default_openai_api("chat_completions")
    return _openai_agents(output_type=Sum).value


def _smolagents(kind: str) -> Any:
    import smolagents

    model = smolagents.OpenAIServerModel(
        "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    agent = getattr(smolagents, kind)(tools=[smolagents.tool(add)], model=model, verbosity_level=0)
    return agent.run(QUESTION)


def smolagents_tools() -> Any:
    return _smolagents("ToolCallingAgent")


def smolagents_code() -> Any:
    return _smolagents("CodeAgent")


CASES: dict[str, Callable[[], Any]] = {
    one.__name__: one
    for one in (
        *(openai_chat, openai_chat_typed, openai_responses, litellm),
        *(anthropic_messages, anthropic_tool_runner),
        *(langchain, langchain_typed, langchain_structured, langgraph_typed),
        *(pydantic_ai, pydantic_ai_typed, pydantic_ai_native),
        *(openai_agents, openai_agents_typed, openai_agents_chat_typed, smolagents_tools, smolagents_code),
    )
}

if __name__ == "__main__":
    sys.stdout.write(f"{CASES[sys.argv[1]]()}\n")
