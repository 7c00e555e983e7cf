"""A client of the gateway: its models, two streams and the pods that served them, errors, retries.

    pip install openai
    python examples/client.py http://127.0.0.1:8080 --admin http://127.0.0.1:9090

Any OpenAI client works: the gateway is its base URL, and `model` names the adapter. A response does
not say which pod it is from; the router's admin port does, to those who can reach it (`--admin`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from urllib.request import urlopen

import openai

NUM_RETRIES = 5
"""The library itself repeats what got a 429, a 5xx or no connection, after the `Retry-After` that
429 and 503 come with. It does not repeat a stream that has begun."""


def main() -> None:
    """Show what a client sees."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gateway", help="for example http://127.0.0.1:8080")
    parser.add_argument("--admin", default="", help="the router's admin port, to see its decisions")
    arguments = parser.parse_args()
    client = openai.OpenAI(
        base_url=f"{arguments.gateway.rstrip('/')}/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "none"),  # the library wants one
        max_retries=NUM_RETRIES,
    )
    try:
        for model in list_models(client)[:2]:
            request_id = stream(client, model)
            if arguments.admin:
                print(f"  {decision(arguments.admin, request_id)}")
    except openai.APIError as error:  # of a request, of the connection, or inside a stream
        sys.exit(describe(error))
    show_error(client)


def list_models(client: openai.OpenAI) -> list[str]:
    """Print the models of all pods; return the adapters, or the base models if there are none."""
    models = client.models.list().data
    adapters = [model.id for model in models if getattr(model, "parent", None)]  # vLLM's field
    bases = [model.id for model in models if model.id not in adapters]
    print(f"base models: {', '.join(bases)}")
    print(f"adapters: {', '.join(adapters)}")
    return adapters or bases


def stream(client: openai.OpenAI, model: str) -> str:
    """Print a completion as it comes; return the request's id, which the router knows too."""
    with client.chat.completions.with_streaming_response.create(
        model=model,
        messages=[{"role": "user", "content": "Say hello."}],
        max_tokens=16,
        stream=True,
    ) as response:
        print(f"{model}, {response.retries_taken} retries: ", end="")
        for chunk in response.parse():
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
        print()
        return response.headers.get("x-request-id", "")


def decision(admin: str, request_id: str) -> str:
    """Return where the router sent a request, and why."""
    with urlopen(f"{admin}/debug/decisions?n=100") as page:
        decisions = json.load(page)["decisions"]
    for each in decisions:
        pick = each.get("pick", {})  # absent for a request that was refused
        if pick.get("request_id") == request_id:
            names = {pod["address"]: pod["name"] for pod in pick["candidates"]}
            address = pick["endpoints"][0]
            return f"served by {names.get(address, address)} ({pick['policy']}: {pick['reason']})"
    return "not among the last 100 decisions of this router"


def show_error(client: openai.OpenAI) -> None:
    """Print an error of the router, which has the shape of OpenAI's."""
    try:
        client.completions.create(model="no-such-adapter", prompt="Say hello.")
    except openai.NotFoundError as error:
        print(describe(error))


def describe(error: openai.APIError) -> str:
    """Return the parts of an error. `code` is one of a fixed set (docs/errors.md)."""
    return f"{error.message} (type {error.type}, code {error.code}, param {error.param})"


if __name__ == "__main__":
    main()
