"""Chat templates of our own, each with a peculiarity of real ones, and tokenizers that have them."""

import re

from byte_tokenizers import byte_level

MARK = re.compile(r"<[|/]?\w+\|?>")
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n"
CHATML = HEAD + "{{ m.content }}<|im_end|>\n{% endfor %}" + ASK + "{% endif %}"
REASONS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}" + HEAD + "{% if m.role == 'assistant' %}{% set c = m.content %}"
    "{% set r = m.reasoning_content or '' %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
TRIMS = "{{ bos_token }}" + CHATML.replace("m.content", "m.content | trim")
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.last and m.reasoning_content %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MARKED = (
    HEAD + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + ASK + "{% endif %}"
)
LAST_END = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %} "
    "{{ m.content }}{% if loop.last %}{{ eos_token }}{% endif %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
GLM = (
    "<gmask>{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>\n{% endif %}"
    "{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DATED = "<|im_start|>system\nToday is {{ strftime_now('%Y') }}.<|im_end|>\n" + CHATML
BEHIND = CHATML.replace("{% endfor %}", "{% endfor %}{% if not add_generation_prompt %}{{ eos_token }}{% endif %}")
BETWEEN = CHATML.replace(
    "<|im_end|>", "{{ '' if loop.last and m.role == 'assistant' and add_generation_prompt else '<|im_end|>' }}"
)
ALWAYS_MARKS = (
    "<|turn|><|system|>Be kind.<|im_end|>{% for m in messages %}<|turn|><|{{ m.role }}|>{{ m.content }}"
    "{{ '<|stop|>' if m.role == 'assistant' }}<|im_end|>{% endfor %}<|turn|><|assistant|><|quiet|>"
)
OPEN = REASONS + ASK + "<think>\n{% endif %}"
CLOSED = REASONS + ASK + "{% endif %}"
FORGETS = CHATML.replace("{% endif %}", "<think>\n{% endif %}")

CALLS = (
    HEAD + "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}" + ASK + "{% endif %}"
)
TOOLS_BEFORE_LAST_USER = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == users[-1] %}[TOOLS] {{ tools[0].function.name }} [/TOOLS]{% endif %}"
    "[INST] {{ m.content }} [/INST]{% elif m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}[RESULT] {{ m.content }} [/RESULT]"
    "{% elif m.tool_calls %}[CALL] {{ m.tool_calls[0].function.name }}<|end|>{% else %} {{ m.content }}<|end|>"
    "{% endif %}{% endfor %}"
)
SYSTEM_BEFORE_LAST_USER = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }} {% endif %}{{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
    " {{ m.content }}<|end|>{% endif %}{% endfor %}"
)
CALLS_WITHOUT_END = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>"
    "{{ '\n' }}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}<|turn|>system\nYou may call a tool.<|end|>"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CONTINUES = (
    "{% for m in messages %}{% if not (loop.last and m.role == 'assistant' and add_generation_prompt) %}"
    "<|turn|>{{ m.role }}\n{{ '<think>\n' if loop.last and m.role == 'assistant' }}{{ m.content }}\n<|end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n<think>\n"
    "{{ messages[-1].content if messages[-1].role == 'assistant' }}{% endif %}"
)
ID_OF_OLDER_CALLS = CALLS.replace("</call>", "{{ '' if loop.last else ' id 7' }}</call>")

TEXT_BEHIND_RESULTS = (
    "{% for m in messages %}{% set before = messages[loop.index0 - 1] %}{% if m.role == 'assistant' %}"
    "{% if loop.first or before.role != 'tool' %}<|turn|>model\n{% endif %}{% if m.tool_calls %}"
    "<|call|>{{ m.tool_calls[0].function.name }}<|response|>{% set result = messages[loop.index0 + 1] %}"
    "{% if result %}{{ result.content }}<|result|>{{ m.content }}{% endif %}{% else %}{{ m.content }}<|end|>\n"
    "{% endif %}{% elif m.role != 'tool' %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<|turn|>model\n{% endif %}"
)
CALLS_WITHOUT_TEXT = (
    "{% set ns = namespace(final=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.final = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought = m.content if m.tool_calls else '' %}{% set thought = m.thinking or thought %}"
    "{% if thought and loop.index0 >= ns.final %}<|start|>assistant<|channel|>analysis<|message|>{{ thought }}<|end|>"
    "{% endif %}{% if m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}<|call|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
IDEFICS = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}{{ ':' if m.content[0].type == 'image' else ': ' }}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
LLAVA = (
    "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>\n{{ m.content[0].text + '' }}\n<</SYS>>\n\n"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content[0].text + '<|im_end|>' }}{% else %}[INST] "
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %} [/INST]{% endif %}"
    "{% endfor %}"
)
MARKED_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% for part in m.content %}"
    "{% generation %}{{ part.text + '<|im_end|>' }}{% endgeneration %}{% endfor %}\n{% else %}"
    "{{ m.content[0].text + '<|im_end|>' }}\n{% endif %}{% endfor %}" + ASK + "{% endif %}"
)
ASKS_IN_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}\n"
    "{% else %}{{ m.content[0].text + '<|im_end|>' }}\n{% endif %}{% endfor %}" + ASK + "{% endif %}"
)
IN_PARTS = {
    "idefics": (IDEFICS, ("system", "user", "assistant")),
    "llava": (LLAVA, ("system", "user", "assistant")),
    "marked": (MARKED_PARTS, ("system", "user", "assistant")),
    "asks": (ASKS_IN_PARTS, ("system", "user")),
}
"""Templates that take the texts of these roles as lists of parts alone."""

TEMPLATES = {
    "chatml": CHATML,
    "closed": CLOSED,
    "open": OPEN,
    "trims": TRIMS,
    "no_generation_prompt": CHATML.partition("{% if add")[0],
    "always_generation_prompt": CHATML.partition("{% if add")[0] + "<|im_start|>assistant{{ '\n' }}",
    "ordinary_end": ALTERNATES,
    "channels": CHANNELS,
    "marked": MARKED,
    "last_end": LAST_END,
    "glm": GLM,
    "dated": DATED,
    "end_behind": BEHIND,
    "forgets": FORGETS,
    "between": BETWEEN,
    "always_marks": ALWAYS_MARKS,
}


def chatting(template, **settings):
    """A tokenizer with a template, whose marks are its special tokens, but for those in the form of <turn>."""
    tokenizer = byte_level(300, start="<begin>", **settings)
    # A token that is added without being special is as ordinary as one of the vocabulary.
    tokenizer.add_tokens(sorted({"<turn>", "</turn>", "<think>", "</think>"}))
    marks = {mark for mark in MARK.findall(template) if mark.startswith("<|")} | {"<|user|>", "<|assistant|>"}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    tokenizer.chat_template = template
    return tokenizer


def messages_of(example):
    answer = {"role": "assistant", "content": example.outputs[0], **example.answer_fields}
    return [*(turn.as_message() for turn in example.messages), answer]


def in_parts(messages, roles=("system", "user", "assistant")):
    """Messages with the texts of some roles as lists of one part, as models that see images too have them."""
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]} if each["role"] in roles else each
        for each in messages
    ]
