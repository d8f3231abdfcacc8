"""A stand-in for a language model: it answers known requests with prepared turns.

It has the shapes of the clients that agents use, so that a program is pointed at a real model by
changing one import. Each turn is code to run, or a function from the last observation to the final
answer; an answer can therefore only be right if the code was really run.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Union

Answer = Callable[[str], str]
Turn = Union[str, Answer]

#: What the model does for each request that it knows.
SCRIPTS: Dict[str, List[Turn]] = {
    "What is the 30th Fibonacci number? Compute it, don't guess.": [
        "a, b = 0, 1\nfor _ in range(30):\n    a, b = b, a + b\nprint(a)",
        lambda seen: f"The 30th Fibonacci number is {seen.strip()}.",
    ],
    "Which of the numbers up to 50 are prime, and what is their sum?": [
        # The first attempt is wrong: the model sees the traceback and corrects itself.
        "print(sum(primes))",
        "primes = [n for n in range(2, 51) if all(n % d for d in range(2, n))]\nprint(sum(primes))",
        lambda seen: f"Their sum is {seen.strip()}.",
    ],
    "Count to three, one step at a time.": [
        "n = 1; open('/root/steps', 'a').write('one\\n'); print(n)",
        "n += 1; open('/root/steps', 'a').write('two\\n'); print(n)",
        "n += 1; open('/root/steps', 'a').write('three\\n'); print(n)",
        lambda seen: f"I have counted to {seen.strip()}.",
    ],
    "Write the squares of 1 to 5 to a file, then add them up.": [
        "open('/workspace/squares', 'w').write(' '.join(str(n * n) for n in range(1, 6)))",
        "print(sum(map(int, open('/workspace/squares').read().split())))",
        lambda seen: f"The sum is {seen.strip()}.",
    ],
}


class Model:
    """The model in one conversation: the next turn depends on the request and what it has seen."""

    def next_turn(self, request: str, seen: List[str]) -> Turn:
        if request not in SCRIPTS:
            raise ValueError(f"there is no script for the request {request!r}")
        return SCRIPTS[request][len(seen)]


# The shape of Anthropic's client: `Anthropic().messages.create(…)`


class Anthropic:
    def __init__(self) -> None:
        self.messages = _Messages()


class _Messages(Model):
    def create(self, *, messages: List[Any], tools: List[Any], **_: Any) -> SimpleNamespace:
        request = messages[0]["content"]
        seen = [
            block["content"]
            for message in messages[1:]
            if message["role"] == "user"
            for block in message["content"]
            if block["type"] == "tool_result"
        ]
        turn = self.next_turn(request, seen)
        if callable(turn):
            text = SimpleNamespace(type="text", text=turn(seen[-1]))
            return SimpleNamespace(stop_reason="end_turn", content=[text])
        call = SimpleNamespace(
            type="tool_use",
            id=f"call_{len(seen)}",
            name=tools[0]["name"],
            input={"code": turn},
        )
        return SimpleNamespace(stop_reason="tool_use", content=[call])


# The shape of OpenAI's client: `OpenAI().chat.completions.create(…)`


class OpenAI:
    def __init__(self) -> None:
        self.chat = SimpleNamespace(completions=_Completions())


class _Completions(Model):
    def create(self, *, messages: List[Any], tools: List[Any], **_: Any) -> SimpleNamespace:
        seen = [message["content"] for message in messages if message["role"] == "tool"]
        turn = self.next_turn(messages[0]["content"], seen)
        content: Optional[str] = None
        calls: List[SimpleNamespace] = []
        if callable(turn):
            content = turn(seen[-1])
        else:
            function = SimpleNamespace(
                name=tools[0]["function"]["name"], arguments=json.dumps({"code": turn})
            )
            calls = [SimpleNamespace(id=f"call_{len(seen)}", function=function)]
        message = SimpleNamespace(content=content, tool_calls=calls)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


# A client of one's own: `next_action(messages)`


class ActionClient(Model):
    def next_action(self, messages: List[Any]) -> SimpleNamespace:
        seen = [message["content"] for message in messages if message["role"] == "tool"]
        turn = self.next_turn(messages[0]["content"], [str(item) for item in seen])
        if callable(turn):
            return SimpleNamespace(is_final=True, text=turn(seen[-1]["stdout"]), code="")
        return SimpleNamespace(is_final=False, text="", code=turn)


# Several attempts at one repair, of which not all are right


def generate_n_fixes(n: int) -> List[str]:
    """Returns n patches for the function `mean` of the example repository; two of five are right."""
    bodies = [
        "return sum(values)",
        "return sum(values) / len(values)",
        "return max(values)",
        "return sum(values) // 2",
        "return sum(v / len(values) for v in values)",
    ]
    return [_patch(bodies[i % len(bodies)]) for i in range(n)]


def _patch(body: str) -> str:
    return (
        "--- a/stats.py\n"
        "+++ b/stats.py\n"
        "@@ -1,2 +1,2 @@\n"
        " def mean(values):\n"
        "-    return sum(values) / 2\n"
        f"+    {body}\n"
    )
