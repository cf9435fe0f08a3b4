"""Every chat template of a public package: masks on what the assistant generates, refusals by name."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import pytest
import xxhash
from support.chat_templates import CHANNELS, HERMES, MARKED, THOUGHTFUL, assistant, user
from support.template_battery import TALKS, battery, runs_of, templates
from support.tiny_targets import CHATML, tiny_tokenizer
from support.wording import refused

from dflash_lab.data.samples import MASK_RULES, content_hash
from dflash_lab.models import template
from dflash_lab.models.template import render, render_prompt

CLIENTS = Path(os.environ.get("DFLASH_CLIENTS", Path(sys.prefix) / "clients"))
PUBLIC = CLIENTS / "trl" / "chat_templates"
needs_templates = pytest.mark.skipif(
    not PUBLIC.is_dir(), reason="the public templates are not installed: make install-test"
)

# What templates refuse, and why that is right. No template is here because its turns cannot be told apart.
NO_SYSTEM = "System role not supported"
ALTERNATE = "Conversation roles must alternate"
NO_TOOLS = "does not show the tool calls"
TOOL_TALKS = ("tool", "tool between")
TWO_ROLES = "Only user and assistant roles are supported"
REFUSALS = {
    ("gemma", "three"): NO_SYSTEM,
    ("gemma", "tool between"): NO_SYSTEM,
    ("gemma", "tool"): ALTERNATE,
    **{(name, talk): ALTERNATE for name in ("cohere", "cohere2", "gemma3") for talk in TOOL_TALKS},
    **{
        (name, talk): NO_TOOLS
        for name in (
            *("deepseek_r1_distill", "idefics3", "lfm2", "llama3", "phi3", "phi3_5"),
            *("qwen2_5_vl", "smolvlm"),
        )
        for talk in TOOL_TALKS
    },
    **{("llava_next", talk): TWO_ROLES for talk in TOOL_TALKS},
}


@needs_templates
def test_no_public_template_puts_a_wrong_token_into_the_mask():
    found = battery(PUBLIC)
    assert len(templates(PUBLIC)) >= 72
    reasons = {key: [told for told in lines if told.startswith("ERR")] for key, lines in found.items()}
    faults = {key: lines for key, lines in found.items() if len(reasons[key]) < len(lines)}
    assert not faults
    for (name, talk), lines in reasons.items():
        expected = REFUSALS.get((name.removesuffix("_training"), talk))
        assert expected and all(expected in told for told in lines), f"{name}, {talk}: {lines}"


# Kinds that the package does not hold: no closing token, one at the end only, turns opened in text, an
# opening that every role shares, a prompt that is always there, headers inside a block, a clock.
KINDS = {
    "plain turns": "{% for m in messages %}{{ m['role'].upper() + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "one end": "{% for m in messages %}{{ '## ' + m['role'] + ':\\n' + m['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '## assistant:\\n' }}{% else %}{{ '<|eot|>' }}{% endif %}",
    "two ends": "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "no end": "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "instructions": "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + '<|eot|>' }}{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% endif %}{% endfor %}",
    "shared opening": "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "always a prompt": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if messages[-1]['role'] != 'assistant' %}<|im_start|>assistant\n{% endif %}",
    "header in a block": "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "<|im_start|>assistant\n{{ m['content'] }}<|im_end|>\n{% endgeneration %}{% else %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "clock": "{{ '<|system|>' + strftime_now('%d %b %Y') + '<|end|>' }}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}


def test_no_kind_of_template_puts_a_wrong_token_into_the_mask(tmp_path):
    for name, text in KINDS.items():
        (tmp_path / f"{name}.jinja").write_text(text)
    found = battery(tmp_path)
    left = {key: lines for key, lines in found.items() if not key[1].startswith("tool")}
    assert not left and len(templates(tmp_path)) == len(KINDS)


def test_ids_and_masks_are_those_of_the_version_that_samples_record():
    """Who changes what is masked or how fields are rendered raises MASK_RULES and sets the new digest."""
    digest = xxhash.xxh3_64()
    for text in (*KINDS.values(), THOUGHTFUL, MARKED, HERMES, CHANNELS):
        tokenizer = tiny_tokenizer(text)
        for talk in TALKS.values():
            try:
                found = render(tokenizer, talk, thinking=True)
            except template.TemplateFailure as error:
                digest.update(error.kind.encode())
            else:
                digest.update(content_hash(found.input_ids, found.loss_mask).encode())
    assert (MASK_RULES, digest.hexdigest()) == (2, "4909e0b0b847ac2e")


TURN = [user("Q"), assistant("A")]


def test_the_date_is_the_one_given_and_not_today():
    tokenizer = tiny_tokenizer(KINDS["clock"])
    told = {
        day: tokenizer.decode(render(tokenizer, TURN, date=day).input_ids)
        for day in ("2024-07-26", "1999-01-02")
    }
    assert "26 Jul 2024" in told["2024-07-26"] and "02 Jan 1999" in told["1999-01-02"]
    assert "01 Jan 2026" in tokenizer.decode(render_prompt(tokenizer, TURN[:1]))
    with refused(template.TemplateFailure):
        render(tokenizer, TURN, date="today")


@pytest.mark.parametrize(
    "printing",
    [
        "\n  {{ strftime_now('%Y') }}",
        "  {% if strftime_now is defined %}{{ strftime_now(format='%B') }}{% endif %}\n",
        "{% set form = '%d' ~ ' %b' %}{{ strftime_now(form) }}",
        "{{ strftime_now('%A\\n%-d %% of %m') }}",
        '{{ strftime_now("the day\'s no %j") }}',
    ],
)
def test_a_date_is_printed_as_transformers_prints_it(printing):
    """In any format, however the template comes to it, and with the white space around it."""
    tokenizer = tiny_tokenizer(printing + CHATML)
    today = datetime.date.today().isoformat()
    ids = tokenizer.apply_chat_template(TURN)["input_ids"]
    assert render(tokenizer, TURN, date=today).input_ids == ids


def test_an_answer_whose_opening_is_unknown_keeps_the_token_of_its_first_word():
    """A template that ends every text alike has no prompt; a word's token begins with a blank."""
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer("{{ messages | map(attribute='content') | join('  ') + '<|im_end|>' }}")
    tokenizer.add_tokens([AddedToken(" Hello", normalized=False, special=False)])
    found = render(tokenizer, [user("Q"), assistant("Hello you")])
    ((_, tokens),) = runs_of(found.input_ids, found.loss_mask)
    assert tokenizer.decode(tokens) == " Hello you<|im_end|>"
