"""A conversation whose answers are given anew, one after another: what a chat with the target would be.

An answer enters the next prompt as a chat would have it: as a message, thinking and content each in its
field, which the template shows in its own way. A call of a tool is kept token for token instead, as calls
have no common form: what the template puts between a call and the next answer (the tool's recorded result) is
taken from the recorded conversation and set behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from dflash_lab.target.template import (
    DATE,
    Message,
    answer_message,
    call_opening,
    render,
    render_after,
    render_prompt,
)


class Dialogue:
    """`messages` of a record, of which all answers are replaced: `prompt`, `answer`, `prompt`, ... until
    `prompt` returns None.

    Results of tools stay as they are recorded. Where the recorded assistant called tools and the new answer
    does not call the same ones, the results that follow answer no call, and the conversation ends there.
    Every method may raise `TemplateFailure`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping] = (),
        thinking: bool = False,
        date: str = DATE,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.tokenizer = tokenizer
        self.options: dict = {"tools": tools, "thinking": thinking, "date": date}
        self.stop_ids = stop_ids
        self.ids: list[int] = []  # the last prompt
        self.tokens: list[int] = []  # the last answer
        self.notes: list[str] = []
        self._ahead = _steps(messages)
        self._given: Message | None = None  # the recorded answer in the place of the next one
        self._history: list[Message] = []
        self._cut: list[bool] = []  # of each answer in the history, whether it met its limit
        self._asked: list[Message] = []  # the history that the last prompt shows
        self._mask: list[int] | None = None  # of the last prompt, once it is more than the template's text

    def prompt(self) -> list[int] | None:
        """Return the ids up to the next answer, None after the last."""
        if not self._ahead:
            return None
        before, self._given = self._ahead.pop(0)
        called = bool(self._history) and bool(self._history[-1].get("tool_calls"))
        self._history += before
        if called or self._mask is not None:
            closed = not self._cut[-1]
            between = render_after(self.tokenizer, self._history, closed=closed, **self.options)
            self._mask = [*self._prompt_mask(), *[1] * len(self.tokens), *[0] * len(between)]
            self.ids = [*self.ids, *self.tokens, *between]
        else:
            self.ids = render_prompt(self.tokenizer, self._history, **self.options)
        self._asked = list(self._history)
        return self.ids

    def answer(self, tokens: list[int]) -> None:
        """Take the answer to the last prompt: new ids, closing token included."""
        self.tokens = tokens
        closed = bool(tokens) and tokens[-1] in self.stop_ids
        text = str(self.tokenizer.decode(tokens[:-1] if closed else tokens))
        self._cut.append(not closed)
        calls = (self._given or {}).get("tool_calls") or []
        if calls and self._ahead and self._ahead[0][0][0]["role"] == "tool":
            opening = call_opening(self.tokenizer, calls[0], **self.options)
            if closed and all(opening + call["function"]["name"] in text for call in calls):
                self._history.append(self._given or {})
            else:
                self.notes.append("call not made")
                self._ahead.clear()
        elif self._ahead:
            self._history.append(answer_message(self.tokenizer, text, **self.options))

    def finished(self) -> tuple[list[int], list[int], bool]:
        """Return ids [L] and assistant mask [L] of the whole, and whether the last answer met its limit.

        The last answer and calls are masked by their own tokens, earlier answers where the template shows
        them at the prompt's start; a closing token that it puts behind one that was cut is not the target's.
        """
        mask = [*self._prompt_mask(), *[1] * len(self.tokens)]
        return [*self.ids, *self.tokens], mask, self._cut[-1]

    def _prompt_mask(self) -> list[int]:
        if self._mask is not None:
            return self._mask
        mask: list[int] = []
        if any(message["role"] == "assistant" for message in self._asked):
            earlier = render(self.tokenizer, self._asked, **self.options)
            shown = self.ids[: len(earlier.input_ids)] == earlier.input_ids
            mask = list(earlier.loss_mask) if shown else []
            for (_, end), cut in zip(earlier.turns if shown else (), self._cut, strict=False):
                if cut and self.ids[end - 1] in self.stop_ids:
                    mask[end - 1] = 0
        return [*mask, *[0] * (len(self.ids) - len(mask))]


def _steps(messages: Sequence[Message]) -> list[tuple[list[Message], Message | None]]:
    """Return what precedes each answer, with the recorded answer. Of answers in a row the first stands for
    all, or the last that calls a tool; a greeting before the first question is left out.
    """
    steps: list[tuple[list[Message], Message | None]] = []
    before: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            before.append(message)
        elif any(earlier["role"] in ("user", "tool") for earlier in before):
            steps.append((before, message))
            before = []
        elif steps and not before and message.get("tool_calls"):
            steps[-1] = (steps[-1][0], message)
    if any(earlier["role"] in ("user", "tool") for earlier in before):
        steps.append((before, None))
    return steps
