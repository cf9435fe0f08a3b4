"""Chat templates of the kinds that public models have, and the parts of conversations."""

from __future__ import annotations

from support.tiny_targets import CHATML

# As thinking models have it: the opening of the thinking is part of the generation prompt only when thinking
# is off, and the thinking of a turn goes away once the user has answered.
THOUGHTFUL = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- set parts = m['content'].split('</think>') -%}"
    "{%- set thought = parts[0].split('<think>')[-1] if parts|length > 1 else '' -%}"
    "{%- set content = parts[-1].strip() -%}"
    "{{- '<|im_start|>' + m['role'] + '\n' -}}"
    "{%- if m['role'] == 'assistant' and loop.index0 > ns.last -%}"
    "{{- '<think>\n' + thought.strip() + '\n</think>\n\n' -}}"
    "{%- endif -%}"
    "{{- content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}"
)
MARKED = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}"
    "<|im_start|>assistant\n{% generation %}{{- m['content'] -}}{% endgeneration %}<|im_end|>\n"
    "{%- else -%}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
# Turns that end in plain text: nothing special closes them.
PLAIN = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
# A blank between the answer and its closing token, as Llama 2 has it.
SPACED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' <|im_end|>' }}"
    "{% else %}{{ '<|im_start|>[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
# Tool calls are shown after the content, as Hermes and Qwen have it.
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    + CHATML.replace(
        "message['content'] + '<|im_end|>' + '\n' }}",
        "(message['content'] or '') }}{% for call in message.tool_calls or [] %}"
        "{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}",
    )
)


# Channels, as gpt-oss has them: thinking has a field of its own, is shown in the last turn only, and a
# content that spells a channel is refused.
CHANNELS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% if '<|say|>' in m['content'] %}{{ raise_exception('channels belong into fields') }}{% endif %}"
    "{% if m['thinking'] and loop.last %}{{ '<|think|>' + m['thinking'] }}{% endif %}"
    "{{ '<|say|>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, **arguments):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
